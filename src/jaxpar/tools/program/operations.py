"""The operations of a program and how often they run."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from jaxpar.tools.program.costs import (
    Demand,
    Kernels,
    Message,
    collective_in,
    is_free,
    message_of,
    work_of,
)
from jaxpar.tools.program.hlo import Computation, Hlo, Instruction, parse

MOST_TRIPS = 1_000_000

Way = Literal["memory", "to the host", "from the host"]

# An integer or a truth value; for a tuple, a dict of its wanted elements. If devices differ, an
# array [devices] of NumPy.
Value = Any


def _select(which: Value, yes: Value, no: Value) -> Value:
    return np.where(which, yes, no) if isinstance(which, np.ndarray) else yes if which else no


def _not(x: Value) -> Value:
    return not x if isinstance(x, bool) else ~x


ARITHMETIC: dict[str, Callable[..., Value]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda x, y: _towards_zero(x, y),
    "remainder": lambda x, y: x - y * _towards_zero(x, y),
    "minimum": lambda x, y: _select(x < y, x, y),
    "maximum": lambda x, y: _select(x > y, x, y),
    "shift-left": operator.lshift,
    "shift-right-logical": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "not": _not,
    "negate": operator.neg,
    "select": _select,
}
_SAME = ("bitcast", "copy", "convert", "reshape", "copy-done", "broadcast", "optimization-barrier")


class _UnknownError(Exception):
    """A value that depends on data."""


def branch_taken(conditional: Instruction, partitions: int) -> int | None:
    # None: devices or data differ.
    try:
        value = _value(conditional.operands[0], None, devices=np.arange(partitions))
    except (_UnknownError, KeyError, TypeError, ZeroDivisionError):
        return None
    found = np.unique(value)
    if found.size > 1:
        return None
    number, last = int(found[0]), len(conditional.called) - 1
    if "true_computation=" in conditional.attributes:
        return 1 - number
    return number if 0 <= number <= last else last


def trip_count(loop: Instruction) -> int | None:
    """Returns a loop's iterations; None if data decide.

    Without the compiler's annotation, the scalars of the condition are computed.
    """
    if (known := loop.after('"known_trip_count":{"n":"')).isdecimal():
        return int(known)
    condition, body = loop.called_as("condition"), loop.called_as("body")
    # Elements of the loop's state that its condition reads.
    needed = {_index(i) for i in condition.instructions if i.opcode == "get-tuple-element"}
    try:
        initial = _value(loop.operands[0], None, wanted=needed)
        state = {n: initial[n] for n in needed}
        for trips in range(MOST_TRIPS):
            arguments = [state].__getitem__  # both have one parameter, the state
            if not _value(condition.root, arguments):
                return trips
            state = _value(body.root, arguments, wanted=needed)
    except (_UnknownError, KeyError, TypeError):
        return None
    return None


def _index(element: Instruction) -> int:
    return int(element.after("index="))


def _value(
    instruction: Instruction,
    arguments: Callable[[int], Value] | None,
    wanted: set[int] | None = None,
    devices: Int[np.ndarray, " devices"] | None = None,
) -> Value:
    """Returns the value of an integer scalar, or of a tuple.

    `wanted` are elements of a tuple; None: all. `arguments` gives parameters; None: they depend on
    data. `devices` are the partitions in question; None: unknown.
    """
    operands = instruction.operands

    def value(operand: Instruction, wanted: set[int] | None = None) -> Value:
        return _value(operand, arguments, wanted, devices)

    match instruction.opcode:
        case "constant":
            return _constant(instruction.operand_text.strip())
        case "parameter":
            if arguments is None:
                raise _UnknownError
            return arguments(int(instruction.operand_text))
        case "partition-id":
            if devices is None:
                raise _UnknownError
            return devices
        case "tuple":
            chosen = range(len(operands)) if wanted is None else wanted
            return {n: value(operands[n]) for n in chosen}
        case "get-tuple-element":
            index = _index(instruction)
            return value(operands[0], {index})[index]
        case "copy-start":  # (destination, source, context)
            return {0: value(operands[0])}
        case "copy-done":
            return value(operands[0], {0})[0]
        case opcode if opcode in _SAME:
            return value(operands[0], wanted)
        case "compare":
            compare = getattr(operator, instruction.after("direction=").lower())  # such as LT
            return compare(*map(value, operands))
        case opcode if opcode in ARITHMETIC:
            return ARITHMETIC[opcode](*map(value, operands))
        case "fusion" | "call":
            # Only what the result needs: a fusion's other operands may be arrays.
            root = instruction.called[0].root
            return _value(root, lambda n: value(operands[n]), wanted, devices)
        case _:
            raise _UnknownError


def _towards_zero(x: Value, y: Value) -> Value:
    return (abs(x) // abs(y)) * _select((x < 0) == (y < 0), 1, -1)


def _constant(text: str) -> int | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        raise _UnknownError from None


@dataclass(frozen=True, eq=False)
class Operation:
    """An instruction; its class says what it does."""

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program
    operands: tuple["Operation", ...] = field(repr=False)
    work: Demand  # also of starts and dones; empty for control flow

    def __str__(self) -> str:
        return f"{type(self).__name__:<11} {self.name}"


class Free(Operation):
    """Takes no time on the device."""


class Compute(Operation):
    def __str__(self) -> str:
        work = self.work
        parts = ["matmul"] if work.is_matmul else []
        parts += [f"{matmul.flops:.3g} FLOPs" for matmul in work.matmuls]
        parts += [f"{work.moved} bytes"]
        parts += [f"{work.cycles} cycles"] if work.cycles is not None else []
        return f"{super().__str__()}: {', '.join(parts)}"


@dataclass(frozen=True, eq=False)
class Collective(Operation):
    message: Message
    pair: str  # common to a start and its done
    has_done: bool  # an instruction that waits for it
    is_synchronous: bool  # no work overlaps with it
    # A fusion with a collective inside and no mark. If it descends from an open collective with the
    # same message, it is the same collective and computes during it.
    is_fused: bool

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.message.kind} of {self.message.payload:.0f} bytes"


@dataclass(frozen=True, eq=False)
class Copy(Operation):
    """Copies between memories, or gathers on another core."""

    bytes: int
    pair: str
    way: Way = "memory"


@dataclass(frozen=True, eq=False)
class Done(Operation):
    """Waits for a collective or a copy."""

    pair: str


@dataclass(frozen=True, eq=False)
class Control(Operation):
    runs: tuple["Schedule", ...] = field(repr=False)

    def __str__(self) -> str:
        return f"{super().__str__()}: {', '.join(schedule.name for schedule in self.runs)}"


class Call(Control):
    """Runs its one schedule."""


@dataclass(frozen=True, eq=False)
class Conditional(Control):
    taken: int | None = None  # on all devices; None: devices or data differ

    def __str__(self) -> str:
        return f"{super().__str__()}{'' if self.taken is None else f', taken: {self.taken}'}"


@dataclass(frozen=True, eq=False)
class Loop(Control):
    """Runs its condition, then its body, repeatedly."""

    trips: int | None  # None: data decide

    def __str__(self) -> str:
        return f"{super().__str__()}, trips: {self.trips}"


@dataclass(frozen=True, eq=False)
class Schedule:
    name: str
    operations: tuple[Operation, ...]

    def __repr__(self) -> str:
        return "\n  ".join([f"{self.name}:", *map(str, self.operations)])


@dataclass(frozen=True, eq=False)
class Module:
    entry: Schedule
    schedules: tuple[Schedule, ...]  # the entry comes after all that it runs
    hlo: Hlo  # its source

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.schedules))


def read(text: str, kernels: Kernels | None = None) -> Module:
    # `kernels` is from `kernels_in`. Text that is not HLO raises a ValueError.
    hlo = parse(text)
    known: dict[Computation, Schedule] = {}

    def schedule(computation: Computation) -> Schedule:
        if computation not in known:
            operations: dict[Instruction, Operation] = {}
            for i in computation.instructions:
                operands = [operations[operand] for operand in i.operands if operand in operations]
                operations[i] = _operation(
                    i, tuple(operands), schedule, hlo.partitions, kernels or {}
                )
            known[computation] = Schedule(computation.name, tuple(operations.values()))
        return known[computation]

    entry = schedule(hlo.entry)
    return Module(entry, tuple(known.values()), hlo)


def _way(start: Instruction) -> Way:
    # A copy goes `to the host` unless all that it reads is there.
    if not any(array.is_on_host for array in start.arrays):
        return "memory"
    read = [array for operand in start.operands for array in operand.arrays if array.shape]
    return "from the host" if read and all(array.is_on_host for array in read) else "to the host"


def _operation(
    i: Instruction,
    operands: tuple[Operation, ...],
    schedule: Callable[[Computation], Schedule],
    partitions: int,
    kernels: Kernels,
) -> Operation:
    # The class of an instruction is decided here and nowhere else.
    work = work_of(i, kernels)
    known = (i.name, i.op_name, operands, work)
    if i.opcode == "while":
        runs = (schedule(i.called_as("condition")), schedule(i.called_as("body")))
        return Loop(*known, runs, trip_count(i))
    if i.opcode == "conditional":
        return Conditional(*known, tuple(map(schedule, i.called)), branch_taken(i, partitions))
    if i.opcode == "call":
        return Call(*known, (schedule(i.called[0]),))
    pair = re.sub("-(start|update|done)$", "", i.opcode)
    # On TPU a collective that overlaps with matmuls is three kinds of fusion: its start and its
    # done, which contain a mark, and between them matmuls, which contain the collective.
    marks = {inner.target for inner in i.inside}
    if i.opcode.endswith("-done") or "AsyncCollectiveDone" in marks:
        return Done(*known, pair)
    if i.opcode == "async-update":
        return Free(*known)  # only another name of what its operand has started
    if i.opcode == "call-start" and not i.operands:
        return Free(*known)  # on another core; its operands come with the update
    inner = collective_in(i.operands[0] if i.opcode == "call-update" else i)
    is_start = i.opcode.endswith(("-start", "call-update")) or "AsyncCollectiveStart" in marks
    is_fused = i.opcode == "fusion" and not is_start
    if inner is not None and not (is_fused and work.is_matmul):
        is_synchronous = i.is_synchronous or not is_start
        return Collective(*known, message_of(i, inner), pair, is_start, is_synchronous, is_fused)
    if i.opcode.endswith("-start") and not work.is_matmul:
        # Destination, source and a context. A slice is the smaller one of the first two.
        size = min((array.bytes for array in i.arrays if array.shape), default=0)
        return Copy(*known, size, pair, _way(i))
    if i.opcode == "call-update":
        return Copy(*known, i.bytes, pair)  # its type has operands and results
    return Free(*known) if is_free(i) else Compute(*known)
