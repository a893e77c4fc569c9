"""Follows values through tuples, fusions, loops and branches."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from jaxpar.tools.program.costs import collective_in
from jaxpar.tools.program.hlo import Computation, Hlo, Instruction

_FUSIONS = ("fusion", "fusion-start", "call")
_ENTERED = (*_FUSIONS, "while", "conditional", "async-start", "call-start")
_BY_OPERAND = {  # collectives of several arrays: results in the order of operands
    *("all-gather", "all-reduce", "reduce-scatter", "all-reduce-start", "all-reduce-done"),
}
# Work on another core: a start, an update and a done pass on each result.
_ELSEWHERE = {
    f"{kind}-{part}" for kind in ("async", "call") for part in ("start", "update", "done")
}

# These change the place, dtype or shape of numbers, not their values.
_MOVES = {
    *("all-gather", "all-to-all", "collective-permute", "ragged-all-to-all"),
    *("bitcast", "bitcast-convert", "broadcast", "concatenate", "convert", "copy", "domain"),
    *("dynamic-slice", "dynamic-update-slice", "opt-barrier", "optimization-barrier", "pad"),
    *("add-dependency", "reshape", "reverse", "slice", "transpose", "while", "parameter"),
    *("get-tuple-element", "tuple", "call", "conditional", "fusion", "async", "call-update"),
}
_MARKS = {"AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast", "Sharding"}
_SUMS = {"all-reduce", "reduce-scatter"}
# These map parts of a sum to parts of a sum, so the all-reduce can follow them.
_LINEAR = {"add", "subtract", "multiply", "divide", "negate", "select", "reduce"}
_PRODUCTS = {"dot", "convolution", "ragged-dot", "gather", "scatter", "custom-call"}
_ACROSS = {"reduce", "reduce-window", "sort", "rng-bit-generator", "iota", "constant"}


class Value(NamedTuple):
    instruction: Instruction
    element: int | None = None

    @property
    def kind(self) -> str:
        """Returns the opcode without start, update or done."""
        opcode = self.instruction.opcode
        for ending in ("-start", "-update", "-done"):
            opcode = opcode.removesuffix(ending)
        return "copy" if self.instruction.target in _MARKS else opcode

    @property
    def moves(self) -> bool:
        """Returns whether it only moves or reforms numbers."""
        return self.kind in _MOVES

    @property
    def sums(self) -> bool:
        return self.kind in _SUMS

    @property
    def multiplies(self) -> bool:
        """Returns whether it is product, gather or scatter."""
        return self.kind in _PRODUCTS

    @property
    def is_linear(self) -> bool:
        # It maps parts of a sum to parts of a sum.
        return self.moves or self.kind in _LINEAR

    @property
    def is_elementwise(self) -> bool:
        return not self.multiplies and self.kind not in _ACROSS

    @property
    def is_scalar(self) -> bool:
        arrays = self.instruction.arrays
        return self.element is None and all(not array.shape for array in arrays)


class Values:
    def __init__(self, hlo: Hlo) -> None:
        self.hlo = hlo
        self.callers: dict[Computation, list[Instruction]] = defaultdict(list)
        # For a start on another core, the instruction with its operands.
        self.updates: dict[Instruction, Instruction] = {}
        self.instructions: dict[str, Instruction] = {}
        for computation in hlo.computations.values():
            for i in computation.instructions:
                self.instructions[i.name] = i
                if i.opcode in _ENTERED:
                    for called in i.called:
                        self.callers[called].append(i)
                if i.opcode == "call-update" and i.operands:
                    self.updates[i.operands[0]] = i
        self.home = {
            parameter: computation
            for computation in hlo.computations.values()
            for parameter in computation.parameters.values()
        }

    def value(self, i: Instruction, element: int | None = None) -> Value:
        """Returns a value through tuples, fusions and calls."""
        while True:
            if i.opcode == "get-tuple-element":
                i, element = i.operands[0], int(i.after("index="))
            elif i.opcode == "tuple" and element is not None and element < len(i.operands):
                i, element = i.operands[element], None
            elif i.opcode in _FUSIONS and i.called:
                i = i.called[0].root
            elif "barrier" in i.opcode and i.operands:
                i = i.operands[0]
            else:
                break
        keeps = i.opcode in ("while", "conditional", "parameter", *_BY_OPERAND, *_ELSEWHERE)
        return Value(i, element if keeps and i.type_text.startswith("(") else None)

    def maker(self, i: Instruction) -> Value:
        """Returns the maker, also outside of its computation."""
        value = self.value(i)
        while value.kind == "parameter":
            sources = [source for source in self.sources(value) if source != value]
            if len(sources) != 1:
                break
            (value,) = sources
        return value

    def sources(self, value: Value) -> Iterator[Value]:
        i, element = value
        if i.opcode == "parameter":
            number = int(i.operand_text)
            for caller in self.callers[self.home[i]]:
                yield from self._given(caller, self.home[i], number, element)
        elif i.opcode == "while":
            yield self.value(i.operands[0], element)
            yield self.value(i.called_as("body").root, element)
        elif i.opcode == "conditional":
            yield from (self.value(branch.root, element) for branch in i.called)
        elif i.opcode == "dynamic-slice" or i.opcode == "gather":
            yield self.value(i.operands[0])
        elif i.opcode == "dynamic-update-slice":
            yield from map(self.value, i.operands[:2])
        elif element is not None and i.opcode in _BY_OPERAND:
            is_done = i.opcode.endswith("-done")
            yield self.value(i.operands[0], element) if is_done else self.value(i.operands[element])
        elif element is not None and i.opcode in _ELSEWHERE:
            yield self.value(i.called[0].root if i.called else i.operands[0], element)
        elif i.opcode in ("async-start", "call-start") and i.called:
            yield self.value(i.called[0].root)
            yield from map(self.value, i.operands)
        else:
            yield from map(self.value, i.operands)

    def _given(
        self, caller: Instruction, to: Computation, number: int, element: int | None
    ) -> Iterator[Value]:
        if caller.opcode == "while":
            yield self.value(caller.operands[0], element)
            yield self.value(caller.called_as("body").root, element)
        elif caller.opcode == "conditional":  # the first operand is the choice
            yield self.value(caller.operands[1 + caller.called.index(to)], element)
        elif caller in self.updates and not caller.operands:
            yield self.value(self.updates[caller].operands[1 + number], element)
        elif number < len(caller.operands):
            yield self.value(caller.operands[number], element)

    @cached_property
    def users(self) -> dict[Value, list[Value]]:
        users: dict[Value, list[Value]] = defaultdict(list)
        seen = set[Value]()
        todo = [
            self.value(i)
            for computation in self.hlo.computations.values()
            for i in computation.instructions
            if i.opcode not in (*_FUSIONS, "tuple", "get-tuple-element")
        ]
        todo += [value for i in self._tuples() for value in i]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            for source in self.sources(value):
                users[source].append(value)
                todo.append(source)
        return users

    def _tuples(self) -> Iterator[list[Value]]:
        for computation in self.hlo.computations.values():
            root = computation.root
            if root.opcode == "tuple":
                yield [self.value(root, n) for n in range(len(root.operands))]

    def results(self) -> list[Value]:
        root = self.hlo.entry.root
        if not root.type_text.startswith("("):
            return [self.value(root)]
        return [self.value(root, n) for n in range(len(root.arrays))]

    def collective(self, name: str) -> Instruction | None:
        i = self.instructions.get(name)
        return None if i is None else collective_in(i)


def reached(start: Iterable[Value], step: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    level, seen = list(start), set[Value]()
    while level:
        following: list[Value] = []
        for value in level:
            if value not in seen:
                seen.add(value)
                yield value
                following += step(value)
        level = following
