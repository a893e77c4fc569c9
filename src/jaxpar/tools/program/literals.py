"""The text of a compiled program, with its tables of integers."""

import re
from typing import Any

import numpy as np

from jaxpar.tools.program.protobuf import fields_of, numbers_of

MOST = 1 << 16  # numbers of a table that is written out
_LEFT_OUT = re.compile(
    r"%([\w.\-]+) = (?:([su])(8|16|32|64)|pred)\[([0-9,]+)\](?:\{([0-9,]*)[^}]*\})?"
    r" constant\((\{\.\.\.\})\)"
)
# Fields of XLA's protobufs of modules, computations and instructions, and a literal's shape.
_COMPUTATION, _INSTRUCTION, _NAME, _LITERAL, _SHAPE = 3, 2, 1, 8, 1


def text_of(compiled: Any) -> str:
    """Returns `compiled.as_text()` with tables of integers, which it leaves out.

    The branches that a loop takes may depend on them.
    """
    text = compiled.as_text() or ""
    wanted = {match[1] for match in _LEFT_OUT.finditer(text)}
    literals = dict[str, dict[int, Any]]()
    for module in compiled.runtime_executable().hlo_modules() if wanted else ():
        proto = module.as_serialized_hlo_module_proto()
        for instruction in _inside(_inside([proto], _COMPUTATION), _INSTRUCTION):
            fields = dict(fields_of(instruction))
            if (name := fields[_NAME].decode()) in wanted and _LITERAL in fields:
                literals[name] = dict(fields_of(fields[_LITERAL]))
    return _LEFT_OUT.sub(lambda match: _written(match, literals.get(match[1], {})), text)


def _inside(messages: Any, field: int) -> Any:
    return (value for message in messages for key, value in fields_of(message) if key == field)


def _written(match: re.Match[str], literal: dict[int, Any]) -> str:
    packed = [value for key, value in literal.items() if key != _SHAPE]
    is_signed, bits = match[2] == "s", int(match[3] or 1)
    shape = [int(size) for size in match[4].split(",")]
    if len(packed) != 1 or np.prod(shape) > MOST:
        return match[0]
    if bits in (8, 16):  # bytes
        numbers = np.frombuffer(packed[0], f"<{'i' if is_signed else 'u'}{bits // 8}")
    else:
        numbers = np.array([*numbers_of(packed[0])], np.uint64)
        numbers = numbers.astype(np.int64) if is_signed else numbers
    # The major dimension comes first. The layout names the minor first.
    order = [int(dim) for dim in (match[5] or "").split(",") if dim][::-1] or range(len(shape))
    stored = numbers.reshape([shape[dim] for dim in order])
    table = str(stored.transpose(np.argsort(order)).tolist())
    return match[0].replace("{...}", table.replace("[", "{").replace("]", "}"))
