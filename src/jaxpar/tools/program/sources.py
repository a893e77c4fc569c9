"""Which lines of the user's, and which named scopes, the instructions of a program come from."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jax.extend import core

from jaxpar.tools.program.hlo import Instruction, integers

_TABLE = re.compile(r"^(\w+)$")
_ROW = re.compile(r"^(\d+) (.*)$")
# What JAX puts around the names of scopes, and what it calls what it calls.
_WRAPPED = re.compile(r"^(?:\w+)\((.*)\)$")
_OF_JAX = {
    *("body", "branch", "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call"),
    *(
        "custom_vjp_call",
        "eval_jaxpr",
        "pjit",
        "remat",
        "rematted_computation",
        "scan",
        "shard_map",
        "while",
    ),
}
_CALLED = re.compile(r"^(jit|pjit|branch_\d+_fun)\b")


@dataclass(frozen=True)
class Line:
    """A line of source, in a function.

    Attributes:
      file: its path, as Python has it.
      number: from 1.
      function: the name of what it is a line of; `"<module>"` outside of functions.

    Example:
      >>> print(Line("/home/me/model.py", 12, "attend"))
      model.py:12 in attend
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} in {self.function.rpartition('.')[2]}"

    @property
    def is_own(self) -> bool:
        """Whether it is of the user's own files: neither installed nor of jaxpar."""
        return not Path(self.file).is_relative_to(_JAXPAR) and not _is_installed(self.file)


_JAXPAR = Path(__file__).parents[2]


@cache
def _is_installed(file: str) -> bool:
    folders = {sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")}
    return file.startswith("<") or any(Path(file).is_relative_to(folder) for folder in folders)


class Sources:
    """The tables of stack frames that a module's text begins with."""

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in text.splitlines()[1:]:
            if line.startswith(("%", "ENTRY")):
                break
            if found := _TABLE.match(line):
                rows = tables.setdefault(found[1], {})
            elif found := _ROW.match(line):
                rows[int(found[1])] = found[2]
        files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
        locations = tables.get("FileLocations", {})
        self._frames: dict[int, tuple[Line, int]] = {}
        for frame, row in tables.get("StackFrames", {}).items():
            location, parent = integers(row)
            file, function, number, *_ = integers(locations[location])
            line = Line(_unquoted(files[file]), number, _unquoted(functions[function]))
            # Parents are counted from 1 where frames are, with 1 for none: one more than the frame.
            self._frames[frame] = line, parent - 1

    def of(self, i: Instruction) -> tuple[Line, ...]:
        """The lines that an instruction comes from, the innermost first; none if it has none."""
        found: list[Line] = []
        frame = int(i.after("stack_frame_id=") or 0)
        while frame in self._frames:
            line, parent = self._frames[frame]
            found.append(line)
            frame = parent if parent != frame else 0
        return tuple(found)


def _unquoted(text: str) -> str:
    return text.strip().removeprefix('"').removesuffix('"')


def own_line(lines: Sequence[Line]) -> Line | None:
    """Of the lines of an instruction the innermost of the user's own, else the innermost."""
    return next((line for line in lines if line.is_own), next(iter(lines), None))


def line_of(eqn: core.JaxprEqn) -> Line | None:
    """The user's own line that an equation of a traced program comes from, if there is one."""
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = () if traceback is None else traceback.frames
    found = own_line([Line(f.file_name, f.line_num, f.function_name) for f in frames])
    return found if found is not None and found.is_own else None


def scopes_of(op_name: str) -> tuple[str, ...]:
    """The names that `jax.named_scope` and modules gave, in the name of an operation.

    `jit(step)/transpose(jvp(mlp))/while/body/attention/dot_general` is in `mlp` and `attention`.
    """
    found: list[str] = []
    for part in _parts(op_name)[:-1]:
        if _CALLED.match(part):
            continue
        while inner := _WRAPPED.match(part):
            part = inner[1]
        found += [name for name in part.split("/") if name and name not in _OF_JAX]
    return tuple(found)


def _parts(op_name: str) -> list[str]:
    """Splits at the slashes outside of parentheses."""
    parts, depth = [""], 0
    for letter in op_name:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def primitive_of(op_name: str) -> str:
    """The primitive that an operation of the traced program is."""
    return _parts(op_name)[-1]


def phase_of(op_name: str) -> str:
    """Whether an operation is of the forward pass, of the backward, or one done again for it."""
    if "rematted_computation" in op_name:
        return "recomputation"
    return "backward" if "transpose(" in op_name else "forward"
