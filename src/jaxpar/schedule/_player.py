"""Plays operations on a model of a chip: a clock for what computes, and one for every link."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from jaxpar.schedule._costs import Matmul, Work
from jaxpar.schedule._links import Links, Transfer
from jaxpar.schedule._operations import (
    Call,
    Collective,
    Conditional,
    Copy,
    Done,
    Free,
    Loop,
    Operation,
    Schedule,
)

Kind = Literal["compute", "transfer", "copy", "wait"]
Rows = int | float | None


@dataclass(frozen=True)
class Assumed:
    """What a timeline takes for granted where a program's shapes do not say it.

    Attributes:
      sent_rows: the most rows that a ragged all-to-all sends of its operand, those that stay on the
        device included; None: all rows that the operand has.
      grouped_rows: the most rows that a grouped matmul of the TPU compiler (`lax.ragged_dot`)
        multiplies; None: all rows that the operand has.
      trips: how often loops run whose length depends on data, by a part of the name of the
        operation of the traced program that they come from (see `jax.named_scope`); the first
        that fits. A loop that none fits runs once, and `Timeline.loops_of_unknown_length` names it.

    Example:
      >>> Assumed(trips={"decode": 128}).trips_of("jit(f)/decode/while")
      128
    """

    sent_rows: Rows = None
    grouped_rows: Rows = None
    trips: Mapping[str, int] = field(default_factory=dict[str, int])

    def trips_of(self, op: str) -> int | None:
        """The trips of a loop whose length depends on data."""
        return next((trips for part, trips in self.trips.items() if part in op), None)


def _share(rows: int, most: Rows) -> float:
    """The share of an operand's rows that are in use; 1 of an operand that has no rows."""
    return 1.0 if most is None or not rows else min(1.0, most / rows)


@dataclass(frozen=True)
class Event:
    """One interval on one row of the timeline.

    `kind` is `compute`; `transfer`, of a collective; `copy`, between the memories of the chip; or
    `wait`, when nothing computes because a transfer or a copy has not arrived.

    Example:
      >>> Event("dot.1", "jit(f)/dot_general", "compute", "compute", 0.0, 2e-6).seconds
      2e-06
    """

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program it comes from
    kind: Kind
    row: str  # "compute", "memory", or where a transfer goes, such as "tp +1"
    start: float  # seconds
    end: float
    bytes: float = 0.0  # that one device sends
    synchronous: bool = False  # of a transfer: nothing can run beside it
    covers: tuple[str, ...] = ()  # of a transfer: the matmuls between its start and its done
    is_matmul: bool = False
    queued: float = 0.0  # of a transfer: seconds for which its links were not free
    latency: float = 0.0  # of a transfer: seconds of it that no smaller message takes less of
    links: float = 0.0  # of a transfer: how many a device sends it over, in the mean

    @property
    def seconds(self) -> float:
        """The length of the interval."""
        return self.end - self.start


@dataclass(eq=False)
class _Open:
    """A collective or copy that was started and is not done."""

    start: Collective | Copy
    event: Event | None  # None: it has arrived
    covers: list[str] = field(default_factory=list[str])


class Player:
    """The state of one device while its program is played."""

    def __init__(self, links: Links, assumed: Assumed) -> None:
        self.links, self.chip, self.assumed = links, links.chip, assumed
        self.now = 0.0  # of the compute units
        self.free = np.zeros(links.count)  # when each link has nothing left to send
        self.busy = np.zeros(links.count)
        self.stream = 0.0  # a GPU's transfers take turns on one stream
        self.memory = 0.0  # as do copies between memories
        self.events: list[Event] = []
        # In the order of their starts. A loop can start one again before it waits for the one of
        # the trip before.
        self.open: list[_Open] = []
        self.unknown: dict[str, None] = {}  # names of loops, in order
        self._length = cache(self._computing)
        self._transfers: dict[Collective, Transfer] = {}

    def run(self, schedule: Schedule) -> None:
        for operation in schedule.operations:
            self._step(operation)

    def _step(self, operation: Operation) -> None:
        match operation:
            case Free():
                pass
            case Loop():
                self._loop(operation)
            case Conditional():
                self.run(self._branch(operation))
            case Call():
                self.run(operation.runs[0])
            case Done():
                self._done(operation)
            case Copy():
                self._copy(operation)
            case Collective() if self._is_under_way(operation):
                self._compute(operation)
            case Collective():
                self._send(operation)
            case _:
                self._compute(operation)

    # -- control flow -------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> None:
        trips = self.assumed.trips_of(loop.op) if loop.trips is None else loop.trips
        if trips is None:
            self.unknown[loop.name] = None
        _, body = loop.runs
        for _ in range(1 if trips is None else trips):
            self.run(body)

    def _branch(self, conditional: Conditional) -> Schedule:
        """The branch that is taken: where devices or data differ, the one that computes longest."""
        if conditional.taken is not None:
            return conditional.runs[conditional.taken]
        return max(conditional.runs, key=self._length)

    def _computing(self, schedule: Schedule) -> float:
        """Seconds of what a schedule computes; one trip of a loop tells branches apart.

        Starts and dones count as what they would compute, not as what they send.
        """
        total = 0.0
        for operation in schedule.operations:
            match operation:
                case Conditional():
                    total += self._length(self._branch(operation))
                case Call() | Loop():
                    total += sum(map(self._length, operation.runs), 0.0)
                case _:
                    total += self._seconds(operation.work)
        return total

    # -- what computes ------------------------------------------------------------------------

    def _compute(self, operation: Operation) -> None:
        start, self.now = self.now, self.now + self._seconds(operation.work)
        is_matmul = operation.work.is_matmul
        event = Event(operation.name, operation.op, "compute", "compute", start, self.now)
        self.events.append(replace(event, is_matmul=is_matmul))
        if is_matmul:
            for beside in self.open:
                beside.covers.append(operation.name)

    def _seconds(self, work: Work) -> float:
        """The compiler's cycles over the clock, where it gives them; otherwise a roofline.

        That is the longer of FLOPs at peak and bytes read and written at the memory's speed.
        """
        if work.cycles is not None and self.chip.clock:
            return work.cycles / self.chip.clock
        multiplying = sum(map(self._multiplying, work.matmuls), 0.0)
        return max(multiplying, work.moved / self.chip.hbm)

    def _multiplying(self, matmul: Matmul) -> float:
        flops = matmul.flops
        if matmul.rows:
            flops *= _share(matmul.rows, self.assumed.grouped_rows) + matmul.twice
        return flops / (self.chip.flops * 2 / max(matmul.width, 1.0))

    # -- transfers and copies -----------------------------------------------------------------

    def _send(self, start: Collective) -> None:
        if start not in self._transfers:
            share = _share(start.message.rows, self.assumed.sent_rows)
            self._transfers[start] = self.links.transfer(start.message, share)
        transfer = self._transfers[start]
        links, seconds = transfer.route.links, transfer.route.seconds
        latency = transfer.route.hops * self.chip.latency
        begin = self.now if self.chip.torus else max(self.now, self.stream)
        ends = np.maximum(self.free[links], begin) + seconds  # a link sends one after the other
        first = float((ends - seconds).min()) if ends.size else begin
        end = float(ends.max(initial=begin)) + latency
        self.free[links] = ends
        self.busy[links] += seconds
        self.stream = end
        event = Event(
            *(start.name, start.op, "transfer", transfer.row, first, end, transfer.sent),
            # Of its slowest link: others may have been free.
            queued=max(0.0, end - latency - self.now - float(seconds.max(initial=0.0))),
            latency=latency,
            links=self.links.used(transfer),
        )
        if start.is_synchronous:
            self.events.append(replace(event, synchronous=True))
            self._wait(start, end, "compute")
        if start.has_done:  # that of a synchronous start has nothing left to wait for
            self.open.append(_Open(start, None if start.is_synchronous else event))

    def _copy(self, start: Copy) -> None:
        begin = max(self.now, self.memory)
        self.memory = begin + start.bytes / self.chip.hbm
        event = Event(start.name, start.op, "copy", "memory", begin, self.memory)
        self.open.append(_Open(start, event))

    def _done(self, done: Done) -> None:
        # Without one that it uses, what a loop carries is meant: the oldest that such a done ends.
        carried = (transfer for transfer in self.open if transfer.start.pair == done.pair)
        transfer = self._used(done) or next(carried, None)
        if transfer is None:
            return
        self.open.remove(transfer)
        if (event := transfer.event) is not None:
            self.events.append(replace(event, covers=tuple(transfer.covers)))
            self._wait(transfer.start, event.end, "memory" if event.kind == "copy" else "compute")

    def _is_under_way(self, collective: Collective) -> bool:
        """Whether it is no collective of its own, but what computes beside one that has started."""
        found = self._used(collective) if collective.is_fused else None
        return (
            found is not None
            and isinstance(found.start, Collective)
            and found.start.message == collective.message
        )

    def _used(self, operation: Operation) -> _Open | None:
        """Of what is under way, what an operation uses: an operand, or what that is part of."""
        seen: set[Operation] = set()
        operands = deque(operation.operands)
        while operands:
            operand = operands.popleft()
            if operand in seen:
                continue
            for transfer in reversed(self.open):
                if transfer.start is operand:
                    return transfer
            seen.add(operand)
            operands += operand.operands
        return None

    def _wait(self, start: Operation, until: float, row: str) -> None:
        if until > self.now:
            self.events.append(Event(start.name, start.op, "wait", row, self.now, until))
            self.now = until

    def finish(self) -> tuple[Event, ...]:
        """The events by time, with the transfers that nothing has waited for."""
        pending = [transfer.event for transfer in self.open if transfer.event is not None]
        self.events += [event for event in pending if event.kind == "transfer"]
        return tuple(sorted(self.events, key=lambda e: (e.start, e.end)))
