"""Integers of a program that do not depend on data: of devices, constants and loop counters."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxpar.tools.program.hlo import Instruction, integers

# An array [devices, ...] of integers or truth values, slice by slice; [1, ...] if all devices have
# the same. For a tuple, a dict of its wanted elements.
Known = Any
Wanted = set[int] | None  # elements of a tuple; None: all
Parameters = Callable[[int, Wanted], Known]

MOST_TRIPS = 100_000
_DTYPES = {"pred": np.bool_} | {
    f"{letter}{bits}": np.dtype(f"{kind}{bits}")
    for letter, kind in (("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}
_MOVES = {
    *("constant", "partition-id", "replica-id", "custom-call", "iota", "compare", "convert"),
    *("bitcast", "reshape", "broadcast", "transpose", "slice", "dynamic-slice", "concatenate"),
}
ARITHMETIC: dict[str, Callable[..., Known]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda x, y: _towards_zero(x, y),
    "remainder": lambda x, y: x - y * _towards_zero(x, y),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "clamp": lambda least, x, most: np.minimum(np.maximum(x, least), most),
    "abs": abs,
    "sign": np.sign,
    "negate": operator.neg,
    "shift-left": operator.lshift,
    "shift-right-arithmetic": operator.rshift,
    "shift-right-logical": lambda x, y: _unsigned(x) >> _unsigned(y),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "select": np.where,
}


class UnknownError(Exception):
    """A value that depends on data."""


class Scope:
    """What is known where a computation runs: once, in a trip of a loop, or in a branch.

    Args:
      partitions: the number of devices of a TPU slice, or of all.
      slices: the number of slices; 0: unknown.
      parameters: gives the wanted elements of a parameter. None: they depend on data.
    """

    def __init__(
        self, partitions: int, slices: int = 0, parameters: Parameters | None = None
    ) -> None:
        self.partitions, self.slices, self._parameters = partitions, slices, parameters
        self._values: dict[Any, Known] = {}

    def branch(self, conditional: Instruction) -> Int[np.ndarray, " devices"] | None:
        """Returns the branch that each device takes, or one for all; None if data decide."""
        try:
            number = self.value(conditional.operands[0]).reshape(-1).astype(int)
        except UnknownError:
            return None
        last = len(conditional.called) - 1
        if "true_computation=" in conditional.attributes:
            return 1 - number
        return np.where((number >= 0) & (number <= last), number, last)

    def in_branch(self, conditional: Instruction, number: int) -> Scope:
        return self.called(conditional.operands[1 + number : 2 + number])

    def called(self, operands: Sequence[Instruction]) -> Scope:
        return self.with_parameters(lambda n, wanted: self.value(operands[n], wanted))

    def with_parameters(self, parameters: Parameters) -> Scope:
        return Scope(self.partitions, self.slices, parameters)

    def value(self, i: Instruction, wanted: Wanted = None) -> Known:
        key = i, wanted and frozenset(wanted)
        if key not in self._values:
            self._compute_operands(i)
            self._values[key] = self._value(i, wanted)
        return self._values[key]

    def _compute_operands(self, i: Instruction) -> None:
        # In order: a chain of them may be longer than Python's stack is deep.
        todo = [i]
        while todo:
            last = todo[-1]
            left = [
                operand
                for operand in (last.operands if _is_array_operation(last) else ())
                if _is_array_operation(operand) and (operand, None) not in self._values
            ]
            if left:
                todo.append(left[0])
            elif todo.pop() is not i:
                self._values[last, None] = self._value(last, None)

    def _value(self, i: Instruction, wanted: Wanted) -> Known:
        match i.opcode:
            case "parameter":
                if self._parameters is None:
                    raise UnknownError
                return self._parameters(int(i.operand_text), wanted)
            case "tuple":
                chosen = range(len(i.operands)) if wanted is None else wanted
                return {n: self.value(i.operands[n]) for n in chosen}
            case "get-tuple-element":
                index = int(i.after("index="))
                elements = self.value(i.operands[0], {index})
                if index not in elements:  # of a copy's start
                    raise UnknownError
                return elements[index]
            case "copy-start":  # (destination, source, context)
                return {0: self.value(i.operands[0])}
            case "copy-done":
                return self.value(i.operands[0], {0})[0]
            case "copy" | "opt-barrier":
                return self.value(i.operands[0], wanted)
            case "fusion" | "call":
                # Only what the result needs: a fusion's other operands may be arrays.
                return self.called(i.operands).value(i.called[0].root, wanted)
            case _:
                return self._array(i)

    def _array(self, i: Instruction) -> Known:
        (array,) = i.arrays if len(i.arrays) == 1 else (None,)
        if array is None or array.dtype not in _DTYPES or not _is_array_operation(i):
            raise UnknownError
        dtype = _DTYPES[array.dtype]
        match i.opcode:
            case "constant":
                return _constant(i.operand_text, dtype).reshape(1, *array.shape)
            case "partition-id":
                return np.tile(np.arange(self.partitions, dtype=dtype), max(self.slices, 1))
            case "custom-call":
                if i.target != "SliceId" or not self.slices:
                    raise UnknownError
                return np.repeat(np.arange(self.slices, dtype=dtype), self.partitions)
            case "replica-id":
                return np.zeros(1, dtype)
            case "iota":
                if not array.shape:
                    return np.zeros(1, dtype)
                dim = int(i.after("iota_dimension="))
                numbers = np.arange(array.shape[dim], dtype=dtype)
                shape = [size if d == dim else 1 for d, size in enumerate(array.shape)]
                return np.broadcast_to(numbers.reshape(shape), array.shape)[None]
            case _:
                pass
        operands = [self.value(operand) for operand in i.operands]
        made = _made(i, array.shape, operands)
        return np.asarray(made).astype(dtype)


def _made(i: Instruction, shape: tuple[int, ...], operands: list[Known]) -> Known:
    x = operands[0]
    match i.opcode:
        case "compare":
            compare = getattr(operator, i.after("direction=").lower())  # such as LT
            return compare(*operands)
        case "convert":
            return x
        case "bitcast" | "reshape":
            # A bitcast keeps the order in memory.
            if i.opcode == "bitcast" and not (_is_row_major(i.operands[0]) and _is_row_major(i)):
                raise UnknownError
            return x.reshape(len(x), *shape)
        case "broadcast":
            dims = integers(i.after("dimensions={"))
            sizes = [x.shape[1 + dims.index(d)] if d in dims else 1 for d in range(len(shape))]
            return np.broadcast_to(x.reshape(len(x), *sizes), (len(x), *shape))
        case "transpose":
            return x.transpose(0, *(1 + dim for dim in integers(i.after("dimensions={"))))
        case "concatenate":
            return np.concatenate(_alike(operands), 1 + integers(i.after("dimensions={"))[0])
        case "slice":
            parts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", i.attributes.split("}")[0])
            steps = [slice(int(start), int(stop), int(step or 1)) for start, stop, step in parts]
            return x[:, *steps]
        case "dynamic-slice":
            rows = _alike([x, *operands[1:]])
            return np.stack([_part(shape, *row) for row in zip(*rows, strict=True)])
        case _:
            # A scalar may choose for an array.
            sizes = [x.shape[1:] or (1,) * len(shape) for x in operands]
            return ARITHMETIC[i.opcode](
                *(x.reshape(len(x), *dims) for x, dims in zip(operands, sizes, strict=True))
            )


def _part(shape: tuple[int, ...], x: Known, *starts: Known) -> Known:
    parts: list[slice] = []
    for start, whole, size in zip(starts, x.shape, shape, strict=True):
        first = min(max(int(start), 0), whole - size)
        parts.append(slice(first, first + size))
    return x[tuple(parts)]


def _alike(arrays: list[Known]) -> list[Known]:
    most = max(map(len, arrays))
    return [np.broadcast_to(x, (most, *x.shape[1:])) for x in arrays]


def _is_array_operation(i: Instruction) -> bool:
    return i.opcode in _MOVES or i.opcode in ARITHMETIC


def _is_row_major(i: Instruction) -> bool:
    """Returns whether its dimensions are in order in memory, but for those of size 1."""
    match = re.search(r"\]\{([0-9,]+)", i.type_text)
    order = integers(match[1])[::-1] if match else []
    long = [dim for dim in order if i.arrays[0].shape[dim] > 1]
    return long == sorted(long)


def _unsigned(x: Known) -> Known:
    return x.view(f"u{x.dtype.itemsize}")


def _towards_zero(x: Known, y: Known) -> Known:
    if not np.all(y):
        raise UnknownError
    quotient = abs(x) // abs(y)
    return np.where((x < 0) == (y < 0), quotient, -quotient)


def _constant(text: str, dtype: Any) -> Known:
    if "..." in text:
        raise UnknownError
    words = re.findall(r"true|false|-?\d+", re.sub(r"/\*.*?\*/", "", text))
    return np.array([word == "true" if word.isalpha() else int(word) for word in words], dtype)


class LoopState:
    """A loop's state before each trip, in the scope around it."""

    def __init__(self, around: Scope, loop: Instruction) -> None:
        self._around, self._loop = around, loop
        self._condition, self._body = loop.called_as("condition"), loop.called_as("body")
        self._elements: dict[int | None, list[Known]] = {}  # by trip; None: unknown

    def at(self, trip: int) -> Scope:
        """Returns the scope of a trip."""

        def state(_: int, wanted: Wanted) -> Known:
            if wanted is not None:
                return {n: self._element(n, trip) for n in wanted}
            if self._loop.type_text.startswith("("):
                raise UnknownError
            return self._element(None, trip)  # a state that is no tuple

        return self._around.with_parameters(state)

    def trips(self) -> int | None:
        """Returns the number of trips; None if data decide, or devices differ.

        Without the compiler's annotation, the scalars of the condition are computed.
        """
        if (known := self._loop.after('"known_trip_count":{"n":"')).isdecimal():
            return int(known)
        for trip in range(MOST_TRIPS):
            try:
                goes_on = self.at(trip).value(self._condition.root)
            except UnknownError:
                return None
            if not goes_on.any():
                return trip
            if not goes_on.all():
                return None
        return None

    def _element(self, n: int | None, trip: int) -> Known:
        known = self._elements.setdefault(n, [])
        # In order: an element needs others, and itself, of the trip before.
        while len(known) <= trip:
            known.append(self._next(n, len(known)))
        if known[trip] is None:
            raise UnknownError
        return known[trip]

    def _next(self, n: int | None, trip: int) -> Known:
        wanted = None if n is None else {n}
        try:
            if not trip:
                value = self._around.value(self._loop.operands[0], wanted)
            else:
                value = self.at(trip - 1).value(self._body.root, wanted)
        except UnknownError:
            return None
        return value if n is None else value[n]
