"""User lines and named scopes of a program's instructions."""

import re
import sysconfig
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from jax.extend import core

from jaxpar.tools.program.hlo import Instruction, integers

_TABLE = re.compile(r"^(\w+)$")
_ROW = re.compile(r"^(\d+) (.*)$")
# JAX's wrappers around names of scopes, and its own names of called functions.
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
    """A line of source code.

    Attributes:
      file: the file's path.
      number: the line's number, from 1.
      function: the function around it; `"<module>"` outside of functions.

    Example:
      >>> print(Line("/home/me/model.py", 12, "attend"))
      model.py:12 in attend
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.short} in {self.function.rpartition('<locals>.')[2]}"

    @property
    def short(self) -> str:
        """Returns the file's name and the number."""
        return f"{Path(self.file).name}:{self.number}"

    @property
    def is_own(self) -> bool:
        """Returns whether it is the user's: not jaxpar, Python or installed (unless in `own`)."""
        if _is_within(self.file, _JAXPAR):
            return False
        return not _is_installed(self.file) or any(map(self.is_of, _OWN.get()))

    def is_of(self, package: str) -> bool:
        """Returns whether it is of this installed package."""
        names = tuple(package.casefold().replace("-", "_").split("."))
        return _module(self.file)[: len(names)] == names


_JAXPAR, _TOOLS = Path(__file__).parents[2], Path(__file__).parents[1]
MOST_FRAMES = 5  # of a chain in a text
_PACKAGES = {"site-packages", "dist-packages"}  # folders of installed packages
_CHECKS = {("beartype",), ("jaxtyping",), ("typeguard",)}
_OWN: ContextVar[tuple[str, ...]] = ContextVar("_OWN", default=())


@contextmanager
def counted_as_own(packages: Sequence[str]) -> Generator[None]:
    """Counts packages' lines as own inside the context."""
    before = _OWN.set(tuple(packages))
    try:
        yield
    finally:
        _OWN.reset(before)


@cache  # a program has few files, each looked up thousands of times
def _is_within(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)


@cache
def _is_installed(file: str) -> bool:
    return bool(_module(file)) or _is_pythons(file)


@cache
def _is_pythons(file: str) -> bool:
    library = sysconfig.get_paths()["stdlib"]
    return file.startswith("<") or (Path(file).is_relative_to(library) and not _module(file))


def _is_around(file: str) -> bool:
    """Returns whether a file wraps any function."""
    return _is_pythons(file) or _module(file)[:1] in _CHECKS


@cache
def _module(file: str) -> tuple[str, ...]:
    parts = Path(file).with_suffix("").parts if file else ()  # code without a file
    places = [n for n, part in enumerate(parts) if part in _PACKAGES]
    return tuple(part.casefold() for part in parts[places[-1] + 1 :]) if places else ()


class Sources:
    """The stack frames at a module text's start."""

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in text.splitlines()[1:]:
            if line.startswith(("%", "ENTRY")):
                break
            if match := _TABLE.match(line):
                rows = tables.setdefault(match[1], {})
            elif match := _ROW.match(line):
                rows[int(match[1])] = match[2]
        files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
        locations = tables.get("FileLocations", {})
        self._frames: dict[int, tuple[Line, int]] = {}
        for frame, row in tables.get("StackFrames", {}).items():
            location, parent = integers(row)
            file, function, number, *_ = integers(locations[location])
            line = Line(_unquoted(files[file]), number, _unquoted(functions[function]))
            # A parent is the frame's number plus one; 1 means none.
            self._frames[frame] = line, parent - 1
        self._numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
        for line, _ in self._frames.values():
            self._numbers[line.file, line.function].add(line.number)

    def of(self, i: Instruction) -> tuple[Line, ...]:
        lines: list[Line] = []
        frame = int(i.after("stack_frame_id=") or 0)
        while frame in self._frames:
            line, parent = self._frames[frame]
            lines.append(line)
            frame = parent if parent != frame else 0
        return tuple(lines)

    def chain(self, lines: Sequence[Line]) -> tuple[Line, ...]:
        # Long chains lose functions with one line in the program, such as wrappers.
        lines = [line for line in lines if not _is_around(line.file)]
        driver = (n for n, line in enumerate(lines) if _is_within(line.file, _TOOLS))
        lines = lines[: next(driver, len(lines))]
        lines = [line for line in lines if not _is_within(line.file, _JAXPAR)]
        # Calling a function of the same line, such as a lambda, adds a frame.
        lines = [next(group) for _, group in groupby(lines, key=lambda line: line.short)]
        place = next((n for n, line in enumerate(lines) if line.is_own), len(lines) - 1)
        inner, outer = lines[: place + 1], lines[place + 1 :]
        if len(inner) > MOST_FRAMES:
            kept = enumerate(inner)
            inner = [line for n, line in kept if n in (0, place) or self._tells(line)]
        return (*inner, *(line for line in outer if line.is_own and self._tells(line)))

    def _tells(self, line: Line) -> bool:
        return len(self._numbers[line.file, line.function]) > 1

    def packages(self) -> list[str]:
        modules = (_module(line.file) for line, _ in self._frames.values())
        return sorted({module[0] for module in modules if module})

    def has(self, package: str) -> bool:
        return any(line.is_of(package) for line, _ in self._frames.values())


def _unquoted(text: str) -> str:
    return text.strip().removeprefix('"').removesuffix('"')


def own_line(lines: Sequence[Line]) -> Line | None:
    """Returns the user's innermost line, else the innermost."""
    return next((line for line in lines if line.is_own), next(iter(lines), None))


def shown(chain: Sequence[Line]) -> tuple[Line, ...]:
    line = own_line(chain)
    if line is None or line in chain[:MOST_FRAMES]:
        return tuple(chain[:MOST_FRAMES])
    return *chain[: MOST_FRAMES - 1], line


def chain_text(chain: Sequence[Line], marked: Line | None) -> str:
    return " < ".join(str(line) if line == marked else line.short for line in chain)


def line_of(eqn: core.JaxprEqn) -> Line | None:
    traceback = getattr(eqn.source_info, "traceback", None)
    frames = () if traceback is None else traceback.frames
    line = own_line([Line(f.file_name, f.line_num, f.function_name) for f in frames])
    return line if line is not None and line.is_own else None


def scopes_of(op_name: str) -> tuple[str, ...]:
    # `jit(step)/transpose(jvp(mlp))/while/body/attention/dot_general` is in `mlp`, `attention`.
    scopes: list[str] = []
    for part in _parts(op_name)[:-1]:
        if _CALLED.match(part):
            continue
        while inner := _WRAPPED.match(part):
            part = inner[1]
        scopes += [name for name in part.split("/") if name and name not in _OF_JAX]
    return tuple(scopes)


def _parts(op_name: str) -> list[str]:
    parts, depth = [""], 0
    for letter in op_name:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def primitive_of(op_name: str) -> str:
    return _parts(op_name)[-1]


def phase_of(op_name: str) -> str:
    if "rematted_computation" in op_name:
        return "recomputation"
    return "backward" if "transpose(" in op_name else "forward"
