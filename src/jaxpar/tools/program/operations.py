"""The operations of a program and how often they run."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.tools.program.between_slices import (
    channel_of,
    is_between_slices,
    message_of_send,
    name_of,
    sends_of,
)
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
from jaxpar.tools.program.known_values import LoopState, Scope

Way = Literal["memory", "to the host", "from the host"]


@dataclass(frozen=True, eq=False)
class Operation:
    """An instruction; its class says what it does."""

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program
    operands: tuple["Operation", ...] = field(repr=False)
    work: Demand  # also of collectives; empty for copies, dones and control flow

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
    """Copies between memories, or computes on another core."""

    bytes: int  # through HBM
    pair: str
    way: Way = "memory"


@dataclass(frozen=True, eq=False)
class Done(Operation):
    """Waits for a collective or a copy."""

    pair: str


@dataclass(frozen=True, eq=False)
class Control(Operation):
    runs: tuple["Schedule", ...] = field(repr=False)
    source: Instruction | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{super().__str__()}: {', '.join(schedule.name for schedule in self.runs)}"


class Call(Control):
    """Runs its schedule."""


@dataclass(frozen=True, eq=False)
class Conditional(Control):
    taken: int | None = None  # by all devices, always; None: trips, devices or data decide

    def __str__(self) -> str:
        return f"{super().__str__()}{'' if self.taken is None else f', taken: {self.taken}'}"


@dataclass(frozen=True, eq=False)
class Loop(Control):
    """Runs its condition, then its body, repeatedly."""

    trips: int | None = None  # None: data decide, or a loop around it

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
    scope, sends = Scope(hlo.partitions), sends_of(hlo)

    def schedule(computation: Computation) -> Schedule:
        if computation not in known:
            operations: dict[Instruction, Operation] = {}
            for i in computation.instructions:
                operands = [operations[operand] for operand in i.operands if operand in operations]
                if is_between_slices(i):
                    send = sends.get(channel_of(i)) if i.opcode == "recv-done" else None
                    began = [operations[send]] if send in operations else []
                    operations[i] = _between_slices(i, (*began, *operands), send)
                    continue
                operations[i] = _operation(i, tuple(operands), schedule, scope, kernels or {})
            known[computation] = Schedule(computation.name, tuple(operations.values()))
        return known[computation]

    entry = schedule(hlo.entry)
    return Module(entry, tuple(known.values()), hlo)


def _between_slices(
    i: Instruction, operands: tuple[Operation, ...], send: Instruction | None
) -> Operation:
    # A transfer begins with its send, and has arrived when its receive is done.
    known = (i.name, i.op_name, operands, Demand())
    if i.opcode == "send":
        return Collective(*known, message_of_send(i), name_of(i), True, False, False)
    return Free(*known) if send is None else Done(*known, name_of(send))


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
    scope: Scope,
    kernels: Kernels,
) -> Operation:
    # The class of an instruction is decided here and nowhere else.
    work = work_of(i, kernels)
    known, idle = ((i.name, i.op_name, operands, each) for each in (work, Demand()))
    if i.opcode == "while":
        runs = (schedule(i.called_as("condition")), schedule(i.called_as("body")))
        return Loop(*known, runs, i, LoopState(scope, i).trips())
    if i.opcode == "conditional":
        taken = scope.branch(i)
        same = None if taken is None or len({*taken.tolist()}) > 1 else int(taken[0])
        return Conditional(*known, tuple(map(schedule, i.called)), i, same)
    if i.opcode == "call":
        return Call(*known, (schedule(i.called[0]),), i)
    pair = re.sub("-(start|update|done)$", "", i.opcode)
    # On TPU a collective that overlaps with matmuls is three kinds of fusion: its start and its
    # done, which contain a mark, and between them matmuls, which contain the collective.
    marks = {inner.target for inner in i.inside}
    if i.opcode.endswith("-done") or "AsyncCollectiveDone" in marks:
        return Done(*idle, pair)
    # The first is only another name of what its operand has started. The second starts work on
    # another core, whose operands come with the update.
    if i.opcode == "async-update" or (i.opcode == "call-start" and not i.operands):
        return Free(*idle)
    inner = collective_in(i)
    is_start = i.opcode.endswith(("-start", "call-update")) or "AsyncCollectiveStart" in marks
    is_fused = i.opcode == "fusion" and not is_start
    if inner is not None and not (is_fused and work.is_matmul):
        is_synchronous = i.is_synchronous or not is_start
        return Collective(*known, message_of(i, inner), pair, is_start, is_synchronous, is_fused)
    if i.opcode.endswith(("-start", "call-update")) and not work.is_matmul:
        is_elsewhere = i.called and i.opcode != "fusion-start"
        size = _moved(schedule(i.called[0])) if is_elsewhere else _in_hbm(work)
        return Copy(*idle, size, pair, _way(i))
    return Free(*idle) if is_free(i) else Compute(*known)


def _in_hbm(work: Demand) -> int:
    return work.moved - work.in_vmem


def _moved(schedule: Schedule) -> int:
    """Returns the bytes that all its operations move through HBM."""
    total = 0
    for operation in schedule.operations:
        match operation:
            case Control():
                trips = operation.trips if isinstance(operation, Loop) else 1
                total += (trips or 1) * max(map(_moved, operation.runs))
            case Copy():
                total += operation.bytes
            case _:
                total += _in_hbm(operation.work)
    return total
