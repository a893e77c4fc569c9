"""Finds all-reduces in disguise."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpar.tools.program.hlo import Instruction, integers
from jaxpar.tools.program.known_values import ARITHMETIC
from jaxpar.tools.program.values import Value, Values

_SAME = {"bitcast", "convert", "copy", "reshape", "transpose", "opt-barrier"}
_UNITS = {"add", "or", "xor"}  # to which zero adds nothing
_ZERO = {"0", "-0", "false"}


class Disguise(NamedTuple):
    really: Literal["gather", "reduce-scatter"]
    part: Instruction  # written into the zeros, or sliced from the sum


class Disguises:
    """Finds all-reduces that are gathers or reduce-scatters.

    A gather: each device writes its shard into zeros. A reduce-scatter: each device keeps only its
    shard. A shard's place must follow from the device alone, not from data.
    """

    def __init__(self, values: Values) -> None:
        self.values, self.devices = values, np.arange(values.hlo.partitions)

    def of(self, collective: Instruction) -> Disguise | None:
        # The largest operand counts.
        if collective.opcode.removesuffix("-start") != "all-reduce" or not collective.called:
            return None
        if collective.called[0].root.opcode not in _UNITS:
            return None
        groups = collective.groups or [list(range(len(self.devices)))]
        largest = max(collective.operands, key=lambda operand: operand.bytes)
        if written := self._written(self.values.value(largest)):
            _, update, *starts = written.operands
            if self._is_apart(starts, update, groups):
                return Disguise("gather", update)
        several = len(collective.operands) > 1
        element = collective.operands.index(largest) if several else None
        kept = self._kept(self.values.value(collective, element))
        if kept and all(self._is_apart(part.operands[1:], part, groups) for part in kept):
            return Disguise("reduce-scatter", kept[0])
        return None

    def _written(self, value: Value) -> Instruction | None:
        """Returns the update if it updates zeros."""
        while value.kind in (*_SAME, "parameter", "pad"):
            if value.kind == "pad" and not self._is_zero(value.instruction.operands[1]):
                return None
            sources = self._sources(value)[:1] if value.kind == "pad" else self._sources(value)
            if len(sources) != 1:
                return None
            (value,) = sources
        update = value.instruction
        is_one = update.opcode == "dynamic-update-slice"
        return update if is_one and self._is_zero(update.operands[0]) else None

    def _is_zero(self, i: Instruction) -> bool:
        value = self.values.value(i)
        while value.kind in (*_SAME, "parameter", "broadcast"):
            sources = self._sources(value)
            if len(sources) != 1:
                return False
            (value,) = sources
        if value.kind != "constant":
            return False
        numbers = value.instruction.operand_text.replace("{", "").replace("}", "").split(",")
        return all(number.strip().removesuffix(".0") in _ZERO for number in numbers)

    def _kept(self, value: Value) -> list[Instruction]:
        """Returns slices; empty if anything else uses it."""
        slices: list[Instruction] = []
        level, seen, results = [value], {value}, set(self.values.results())
        while level:
            value = level.pop()
            if value in results:
                return []
            for user in self.values.users[value]:
                if user.kind == "dynamic-slice":
                    slices.append(user.instruction)
                elif user.kind not in (*_SAME, "parameter", "all-reduce", "async", "call"):
                    return []
                elif user not in seen:
                    seen.add(user)
                    level.append(user)
        return slices

    def _sources(self, value: Value) -> list[Value]:
        return list(dict.fromkeys(x for x in self.values.sources(value) if x != value))

    # -- places of shards ---------------------------------------------------------------------

    def _is_apart(
        self, starts: Sequence[Instruction], part: Instruction, groups: Sequence[Sequence[int]]
    ) -> bool:
        """Returns whether shards of a group do not overlap."""
        sizes = np.array(part.arrays[0].shape, dtype=int)
        if not prod(sizes.tolist()) or len(starts) != len(sizes):
            return False
        try:
            places = [self._on_devices(self.values.value(start), ()) for start in starts]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return False  # unknown, or depends on data
        lies = np.stack([np.broadcast_to(place, self.devices.shape) for place in places], axis=1)
        for group in groups:
            offsets = lies[list(group)] - lies[group[0]]  # [devices, dims]
            if (offsets % sizes).any() or len(np.unique(offsets // sizes, axis=0)) < len(group):
                return False
        return len(groups[0]) > 1

    def _on_devices(self, value: Value, within: tuple[Value, ...]) -> np.ndarray:
        """Returns each device's number, or raises `LookupError`."""
        i, kind = value.instruction, value.kind
        if value in within:
            raise LookupError("a loop changes it")

        def inner(x: Value) -> np.ndarray:
            return self._on_devices(x, (*within, value))

        if kind == "partition-id":
            return self.devices
        if kind == "replica-id":  # a program has one replica, which is partitioned
            return np.zeros_like(self.devices)
        if kind == "constant":
            text = i.operand_text.strip()
            return np.array(text == "true" if text in ("true", "false") else int(text))
        if kind == "dynamic-slice":  # a lookup in a table with an entry for each device
            (place,) = map(inner, map(self.values.value, i.operands[1:]))
            return np.array(self._table(self.values.value(i.operands[0])))[place]
        if kind == "compare":
            compare: Any = getattr(operator, i.after("direction=").lower())
            return compare(*map(inner, map(self.values.value, i.operands)))
        if kind in ARITHMETIC:
            return ARITHMETIC[kind](*map(inner, map(self.values.value, i.operands)))
        if kind not in (*_SAME, "parameter", "while", "broadcast"):
            raise LookupError(f"{kind} is none of a device's own")
        first, *others = map(inner, self._sources(value))
        if any(not np.array_equal(first, other) for other in others):
            raise LookupError("it changes")
        return first

    def _table(self, value: Value) -> list[int]:
        while value.kind in (*_SAME, "parameter"):
            (value,) = self._sources(value)
        if value.kind != "constant":
            raise LookupError("it is no table")
        return integers(value.instruction.operand_text)
