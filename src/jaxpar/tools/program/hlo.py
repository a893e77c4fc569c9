"""Parses scheduled HLO of the TPU and GPU compilers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_END = re.compile(r"\}(, execution_thread=.*)?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_WORD = re.compile(r"[\w.\-,]*")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations|true_computation|"
    r"false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_LISTED = re.compile(r"replica_groups=\{(\{[0-9,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_MESH_IOTA = re.compile(r"\[([0-9,]+)\](?:T\(([0-9,]+))?")
_AXIS = re.compile(r"'([^']*)'(?::\(([0-9]+)\)([0-9]+))?")


@dataclass(frozen=True)
class Array:
    dtype: str  # in HLO: bf16, f32, pred, ...
    shape: tuple[int, ...]
    memory: int = 0  # HLO's number: 0 is HBM, 1 is VMEM

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bytes(self) -> int:
        """Returns the bytes in memory, without padding."""
        return ceil(prod(self.shape) * _bits(self.dtype) / 8)

    @property
    def is_on_host(self) -> bool:
        return self.memory == 5

    @property
    def width(self) -> float:
        return self.bytes / max(prod(self.shape), 1)


@dataclass(eq=False)
class Instruction:
    name: str
    opcode: str
    type_text: str = ""
    operand_text: str = ""
    attributes: str = ""
    is_root: bool = False
    operands: tuple["Instruction", ...] = field(default=(), repr=False)
    called: tuple["Computation", ...] = field(default=(), repr=False)

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        texts = _ARRAY.findall(self.type_text)
        return tuple(
            Array(dtype, tuple(integers(shape)), int(memory or 0)) for dtype, shape, memory in texts
        )

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """Returns the arrays, of a start only those that it makes."""
        if not self.opcode.endswith(("-start", "call-update")) or self.opcode == "all-reduce-start":
            return self.arrays
        # Operands, results and contexts; or of a copy the result first.
        count = sum(
            len(operand.arrays) for operand in self.operands if operand.opcode != "call-start"
        )
        made = self.arrays[:count] if self.opcode == "copy-start" else self.arrays[count:]
        return tuple(array for array in made if array.shape)

    @cached_property
    def inside(self) -> tuple["Instruction", ...]:
        outer = (i for computation in self.called for i in computation.instructions)
        return tuple(inner for i in outer for inner in (i, *i.inside))

    def called_as(self, role: str) -> "Computation":
        name = self.after(f"{role}=%")
        return next(computation for computation in self.called if computation.name == name)

    @cached_property
    def cycles(self) -> int | None:
        cycles = self.number("estimated_cycles")
        return None if cycles is None else int(cycles)

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @cached_property
    def target(self) -> str:
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def is_synchronous(self) -> bool:
        # The GPU compiler put the done right behind this start.
        return '"is_sync":true' in self.attributes

    def after(self, key: str) -> str:
        _, _, rest = self.attributes.partition(key)
        word = _WORD.match(rest)
        return word.group().rstrip(",") if word else ""

    def number(self, key: str) -> str | None:
        match = re.search(rf'"{key}":"?(-?[0-9]+)', self.attributes)
        return match.group(1) if match else None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        match = re.search(r"source_target_pairs=\{([0-9,{}]*)\}", self.attributes)
        numbers = integers(match.group(1)) if match else []
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))

    @property
    def groups(self) -> list[list[int]]:
        return replica_groups(self.attributes)


@dataclass(eq=False)
class Computation:
    """Instructions in the order that they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])

    @property
    def root(self) -> Instruction:
        marked = [i for i in self.instructions if i.is_root]
        return (marked or self.instructions)[-1]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return {int(i.operand_text): i for i in parameters}


@dataclass(frozen=True)
class Hlo:
    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    partitions: int  # devices that run the program


def parse(text: str) -> Hlo:
    """Parses a scheduled module's text.

    Raises:
      ValueError: no entry, an unknown line, no result, or an undefined operand. A lost line would
        make a step look too short.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in _lines(text):
        if current is None:
            if match := _COMPUTATION.match(line):
                current = Computation(match.group(2))
                computations[current.name] = current
                entry = current if match.group(1) else entry
        elif _END.fullmatch(line):
            current = None
        elif match := _INSTRUCTION.match(line):
            current.instructions.append(_instruction(*match.groups()))
        elif line.strip():
            raise ValueError(f"parse: {line[:200]!r} is no instruction; pass compiled.as_text()")
    if entry is None:
        raise ValueError("parse: the text has no ENTRY computation; pass compiled.as_text()")
    if current is not None:
        raise ValueError(
            f"parse: the computation %{current.name} does not end; pass compiled.as_text()"
        )
    for computation in computations.values():
        _join(computation, computations)
    header = text.partition("\n")[0]
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Hlo(
        computations, entry, "is_scheduled=true" in header, int(partitions[1]) if partitions else 1
    )


def _lines(text: str) -> Iterator[str]:
    # In the text, an instruction's attributes may have line breaks.
    waiting = ""
    for line in text.splitlines():
        if not waiting and not _INSTRUCTION.match(line):
            yield line
            continue
        waiting = f"{waiting}\n{line}" if waiting else line
        outside = _QUOTED.sub("", waiting)  # a kernel's texts may have any braces
        if '"' not in outside and outside.count("{") == outside.count("}"):
            yield waiting
            waiting = ""
    if waiting:
        raise ValueError(
            f"parse: the instruction {waiting[:200]!r} does not end; pass compiled.as_text()"
        )


def _instruction(root: str | None, name: str, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(
            f"parse: no opcode in the instruction %{name} = {rest[:200]}; pass compiled.as_text()"
        )
    start = opcode.end()
    stop = _closing(rest, start - 1)
    return Instruction(
        name=name,
        # Work on another core is `call-start` or `custom-call-start`, depending on libtpu.
        opcode=re.sub("^custom-(?=call-)", "", opcode.group(1)),
        type_text=rest[:end],
        operand_text=rest[start:stop],
        attributes=rest[stop + 1 :],
        is_root=root is not None,
    )


def _closing(text: str, start: int = 0) -> int:
    depth = 0
    for bracket in re.finditer(r"[()]", text[start:]):
        depth += 1 if bracket.group() == "(" else -1
        if depth == 0:
            return start + bracket.start()
    return len(text)


def _join(computation: Computation, computations: dict[str, Computation]) -> None:
    by_name = {i.name: i for i in computation.instructions}
    if sum(i.is_root for i in computation.instructions) != 1:
        raise ValueError(
            f"parse: the computation %{computation.name} has no ROOT; pass compiled.as_text()"
        )
    for i in computation.instructions:
        names = _NAME.findall(i.operand_text)
        if lost := [name for name in names if name not in by_name]:
            raise ValueError(
                f"parse: %{i.name} uses %{lost[0]}, which is not defined; pass compiled.as_text()"
            )
        i.operands = tuple(by_name[name] for name in names)
        called = _NAME.findall(" ".join(_CALLED.findall(i.attributes)))
        if lost := [name for name in called if name not in computations]:
            raise ValueError(
                f"parse: %{i.name} calls %{lost[0]}, which is not defined; pass compiled.as_text()"
            )
        i.called = tuple(computations[name] for name in called)
        if i.opcode == "call-update":  # it brings the operands of what its start calls
            i.called = i.operands[0].called


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    match = re.search(r"[0-9]+", dtype)  # token and opaque have no size
    return int(match.group()) if match else 0


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", text)]


def replica_groups(attributes: str) -> list[list[int]]:
    """Returns the partitions of each group of a collective; empty if it names none.

    The forms are lists, `{{0,1},{2,3}}`; an iota, `[2,2]<=[2,2]T(1,0)`; and mesh axes,
    `mesh['dp'=2,'tp'=2] {'tp'}`, perhaps with an order, `mesh['dp'=2,'tp'=2], device_ids=(0,2,1,3)
    {'tp'}`. An axis may be used in part: `{'tp':(2)4}` is 4 parts behind 2 more major ones.
    """
    if match := _LISTED.search(attributes):
        return [integers(group) for group in re.findall(r"\{([0-9,]+)\}", match.group(1))]
    if match := _IOTA.search(attributes):
        shape, sizes, order = match.groups()
        return _iota(sizes, order).reshape(integers(shape)).tolist()
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    return []


def _iota(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(prod(integers(sizes))).reshape(integers(sizes))
    return ids.transpose(integers(order)) if order else ids


def _mesh_groups(axes: str, device_ids: str | None, names: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=([0-9]+)", axes)}
    if device_ids is None:
        ids = np.arange(prod(sizes.values()))
    elif match := _MESH_IOTA.match(device_ids):
        ids = _iota(*match.groups())
    else:
        ids = np.array(integers(device_ids))
    # Each axis in three parts, more major, used and more minor: usually 1, all and 1.
    shape = [part for size in sizes.values() for part in (1, size, 1)]
    along: list[int] = []
    for name, before, size in _AXIS.findall(names):
        at = 3 * list(sizes).index(name)
        if size:
            shape[at : at + 3] = int(before), int(size), sizes[name] // (int(before) * int(size))
        along.append(at + 1)
    others = [part for part in range(len(shape)) if part not in along]
    grid = ids.reshape(shape).transpose(others + along)
    return grid.reshape(-1, prod(shape[part] for part in along)).tolist()
