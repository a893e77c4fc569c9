"""Scheduled HLO text, of the TPU and of the GPU compiler, as computations and instructions."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

from jaxpar.schedule._groups import integers, replica_groups

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations|true_computation|"
    r"false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
)


@dataclass(frozen=True)
class Array:
    """An element type and a shape."""

    dtype: str  # as HLO writes it: bf16, f32, pred, ...
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What the array takes in memory, without padding."""
        return ceil(prod(self.shape) * _bits(self.dtype) / 8)


@dataclass
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    operand_text: str
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What the instruction results in, flat."""
        return arrays_of(self.type_text)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction refers to."""
        return tuple(re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(self.attributes))))

    @cached_property
    def cycles(self) -> int | None:
        """What the TPU compiler thinks that the instruction takes; None where it says nothing."""
        found = self.number("estimated_cycles")
        return None if found is None else int(found)

    @cached_property
    def op_name(self) -> str:
        """Where in the traced program the instruction comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def is_synchronous(self) -> bool:
        """Whether the GPU compiler made a start that its done follows at once."""
        return '"is_sync":true' in self.attributes

    def number(self, key: str) -> str | None:
        """The number under `key` of the instruction's configuration."""
        found = re.search(rf'"{key}":"?(-?[0-9]+)', self.attributes)
        return found.group(1) if found else None

    def names_of(self, key: str) -> list[int]:
        """The integers of an attribute such as `dimensions={0,1}`."""
        found = re.search(rf"\b{key}=\{{([0-9,]*)\}}", self.attributes)
        return [int(number) for number in found.group(1).split(",") if number] if found else []

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Source and target partitions of a permute."""
        found = re.search(r"source_target_pairs=\{([0-9,{}]*)\}", self.attributes)
        numbers = [int(n) for n in re.findall(r"[0-9]+", found.group(1))] if found else []
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))

    def groups(self, devices: int) -> list[list[int]]:
        """Partitions that take part together in a collective; all of them where none are named."""
        return replica_groups(self.attributes, devices)


@dataclass
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """What the computation results in."""
        marked = [i for i in self.instructions if i.is_root]
        return (marked or self.instructions)[-1]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return {int(i.operand_text): i for i in found}


@dataclass
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    _reached: dict[str, tuple[Instruction, ...]] = field(
        default_factory=dict[str, tuple[Instruction, ...]], repr=False
    )

    def reached(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """All instructions of the computations that `instruction` calls, nested ones too."""
        if instruction.name not in self._reached:
            found: list[Instruction] = []
            for name in instruction.called:
                for inner in self.computations[name].instructions:
                    found += [inner, *self.reached(inner)]
            self._reached[instruction.name] = tuple(found)
        return self._reached[instruction.name]


def parse(text: str) -> Module:
    """Parses the text of a scheduled module.

    Raises:
      ValueError: text without an entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if current is None:
            if found := _COMPUTATION.match(line):
                current = Computation(found.group(2))
                computations[current.name] = current
                entry = current if found.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current.instructions.append(_instruction(*found.groups()))
    if entry is None:
        raise ValueError("parse: the text has no ENTRY computation; pass compiled.as_text()")
    return Module(computations, entry, "is_scheduled=true" in text.partition("\n")[0])


def arrays_of(type_text: str) -> tuple[Array, ...]:
    """The arrays of a type, flat where it is a tuple."""
    found = _ARRAY.findall(type_text)
    return tuple(Array(dtype, tuple(integers(shape))) for dtype, shape in found)


def _instruction(root: str | None, name: str, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"parse: no opcode in the instruction %{name} = {rest[:200]}")
    start = opcode.end()
    stop = _closing(rest, start - 1)
    operands = rest[start:stop]
    return Instruction(
        name=name,
        opcode=opcode.group(1),
        type_text=rest[:end],
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        operand_text=operands,
        attributes=rest[stop + 1 :],
        is_root=root is not None,
    )


def _closing(text: str, start: int = 0) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return start + found.start()
    return len(text)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    found = re.search(r"[0-9]+", dtype)  # token and opaque have no size
    return int(found.group()) if found else 0
