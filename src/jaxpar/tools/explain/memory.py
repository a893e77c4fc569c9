"""The arrays in memory at a program's peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.program.costs import collective_in
from jaxpar.tools.program.hlo import Computation, Instruction
from jaxpar.tools.program.sources import Line, primitive_of
from jaxpar.tools.toolkit_api import readable

# Results that share their operands' memory.
_SAME = {
    *("bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier", "opt-barrier"),
    *("add-dependency", "domain", "async-update", "copy-done", "conditional"),
}


@readable
@dataclass(frozen=True)
class LiveArray:
    """An array that is in memory at a program's peak.

    Attributes:
      bytes: bytes on a device.
      array: dtype and local shape.
      what: the argument, or the operation that made the array.
      line: the innermost line outside of jaxpar and wrappers, possibly a framework's; or None.
      phase: `"argument"`, `"forward"`, `"backward"` or `"recomputation"`.

    Example:
      >>> LiveArray(64, "f32[16]", "params['w']", None, "argument").bytes
      64
    """

    bytes: int
    array: str
    what: str
    line: Line | None
    phase: str


def live_at_peak(exposures: Exposures) -> tuple[LiveArray, ...]:
    """Returns the arrays at the peak, the largest first.

    Their sum, from the order of instructions, matches the compiler's peak to about a fifth.
    """
    _, buffers = _peak(exposures.values.hlo.entry)
    arguments = exposures.values.hlo.entry.parameters.values()
    everything = {*buffers, *arguments}
    arrays = (_held(exposures, i) for i in everything if _size(i))
    return tuple(sorted(arrays, key=lambda held: (-held.bytes, held.what)))


def _held(exposures: Exposures, i: Instruction) -> LiveArray:
    text = str(max(i.results, key=lambda array: array.bytes))
    if i.opcode == "parameter":
        name = i.op_name.replace("\\'", "'") or f"argument {i.operand_text}"
        return LiveArray(_size(i), text, name, None, "argument")
    op_name, lines = exposures.origin(i)
    what = primitive_of(op_name) or i.name
    line = next(iter(exposures.sources.chain(lines)), None)
    return LiveArray(_size(i), text, what, line, exposures.phase(i.name, op_name))


def _size(i: Instruction) -> int:
    # The compiler's peak counts VMEM, too.
    return sum(array.bytes for array in i.results if not array.is_on_host)


def _peak(computation: Computation) -> tuple[int, set[Instruction]]:
    held: dict[Instruction, set[Instruction]] = {}  # the arrays of each result
    last: dict[Instruction, int] = {}
    for place, i in enumerate(computation.instructions):
        used = set[Instruction]().union(*(held.get(operand, set()) for operand in i.operands))
        for buffer in used:
            last[buffer] = place
        held[i] = used if _is_same(i) else {i} if i.opcode != "parameter" else set()
        if held[i] == {i}:
            last[i] = place
    for buffer in held.get(computation.root, set()):
        last[buffer] = len(computation.instructions)
    ends: dict[int, list[Instruction]] = {}
    for buffer, place in last.items():
        ends.setdefault(place, []).append(buffer)
    now, most = set[Instruction](), (0, set[Instruction]())
    size = 0
    for place, i in enumerate(computation.instructions):
        if i in last and held[i] == {i}:
            now.add(i)
            size += _size(i)
        inner, inside = max(map(_peak, _run(i)), key=lambda peak: peak[0], default=(0, set()))
        if size + inner > most[0]:
            most = size + inner, now | inside
        for buffer in ends.get(place, ()):
            now.discard(buffer)
            size -= _size(buffer)
    return most


def _is_same(i: Instruction) -> bool:
    if i.opcode in _SAME or (i.opcode.endswith("-done") and i.operands):
        return True
    roots = [i, *(computation.root for computation in i.called if i.opcode == "fusion")]
    return any(root.opcode == "dynamic-update-slice" for root in roots)


def _run(i: Instruction) -> Iterable[Computation]:
    if i.opcode == "while":
        return (i.called_as("body"),)
    if i.opcode in ("conditional", "call") and collective_in(i) is None:
        return i.called
    return ()
