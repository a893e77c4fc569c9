"""Simulates operations on a model of a chip."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, prod

import numpy as np

from jaxpar.tools.program.costs import Demand, Matmul
from jaxpar.tools.program.operations import (
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
from jaxpar.tools.timeline.event import Event, idle_share
from jaxpar.tools.timeline.in_flight import UnderWay
from jaxpar.tools.timeline.links import Links, Transfer
from jaxpar.tools.timeline.target import measured_of
from jaxpar.tools.toolkit_api import REACHED

Rows = int | float | None

# Seconds until a pass over HBM has begun, fitted to half of 30 public measurements of copies, sums
# and pointwise functions on v6e and tpu7x. For GPUs, measured on an H100 (`benchmarks/device`): the
# share of HBM's published speed that is reached, and a kernel's least seconds.
FIRST_BYTE, REACHED_BY_GPUS, KERNEL = 1.2e-6, 0.88, 2e-6
# The longest time of a TPU's matmul that does not wait for HBM, relative to its peak, in full tiles
# of TILE rows, columns and depth. Fitted to half of 50 public measurements on v6e.
SLOWEST, TILE = 1.2, 256
# A GPU's slowdown against XLA's table if rows are not whole 16 bytes, measured on an H100.
UNALIGNED = 2.4
# Results per cycle of a kernel's vector operations on a TPU core: 2.25 vectors of 8 x 128.
# Fitted to attention's forward and backward kernels in a profile of v6e.
ON_VECTORS = 2.25 * 8 * 128


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about quantities that depend on data.

    Attributes:
      sent_rows: the most rows that a ragged all-to-all sends, including those that stay on the
        device. None: all rows of its operand.
      grouped_rows: the most rows that a TPU's grouped matmul (`lax.ragged_dot`) multiplies. None:
        all.
      trips: iterations of loops of unknown length. A key is a part of the operation's name (see
        `jax.named_scope`); the first that fits counts. Other loops run once, and
        `Timeline.loops_of_unknown_length` names them.

    Example:
      >>> Assumptions(trips={"decode": 128}).trips_of("jit(f)/decode/while")
      128
    """

    sent_rows: Rows = None
    grouped_rows: Rows = None
    trips: Mapping[str, int] = field(default_factory=dict[str, int])

    def trips_of(self, op: str) -> int | None:
        """Returns the assumed iterations of a loop, or None."""
        return next((trips for part, trips in self.trips.items() if part in op), None)


def _share(rows: int, most: Rows) -> float:
    return 1.0 if most is None or not rows else min(1.0, most / rows)


def _in_tiles(matmul: Matmul) -> float:
    if not matmul.sizes:
        return inf
    batch, *sizes = matmul.sizes
    return 2.0 * batch * prod(-(-size // TILE) * TILE for size in sizes)


class Player:
    """One device, or several that do the same."""

    def __init__(self, links: Links, assumed: Assumptions) -> None:
        self.links, self.chip, self.assumed = links, links.chip, assumed
        self._reached = REACHED if self.chip.torus else REACHED_BY_GPUS
        self.now = 0.0  # of the compute units
        self.beyond = 0.0  # seconds outside of a GPU's tables
        self.at_peak = 0.0  # seconds of the matmuls at the chip's peak, where known
        self.free = np.zeros(links.count)  # when each link is free
        self.busy = np.zeros(links.count)
        self.stream = 0.0  # a GPU's transfers run in turn on one stream
        self.copies = dict[str, float]()  # as do copies between memories, by direction
        self.events: list[Event] = []
        self.under_way = UnderWay[Event | None]()  # None: it has arrived
        self.unsaid: dict[str, None] = {}  # names of kernels of unknown cost, in order
        self.tables = measured_of(self.chip)
        self.length = cache(self.computing)
        self._transfers: dict[Collective, Transfer] = {}

    def clone(self) -> "Player":
        """Returns a device that has done the same."""
        other = copy(self)
        other.free, other.busy = self.free.copy(), self.busy.copy()
        other.copies, other.events = dict(self.copies), list(self.events)
        other.under_way = self.under_way.clone()
        return other

    def step(self, operation: Operation, others: float = 0.0) -> None:
        """Does an operation; `others` is when the other devices of a collective begin it."""
        match operation:
            case Free():
                pass
            case Done():
                self._done(operation)
            case Copy():
                self._copy(operation)
            case Collective() if not self.under_way.has(operation):
                self._send(operation, others)
            case _:
                self._compute(operation)

    def computing(self, schedule: Schedule) -> float:
        """Returns the seconds that a schedule computes, with the longest branches."""
        total = 0.0
        for operation in schedule.operations:
            match operation:
                case Conditional(taken=None):
                    total += max(map(self.length, operation.runs))
                case Conditional(taken=int(taken)):
                    total += self.length(operation.runs[taken])
                case Call():
                    total += self.length(operation.runs[0])
                case Loop():
                    trips = operation.trips
                    trips = self.assumed.trips_of(operation.op) if trips is None else trips
                    total += (1 if trips is None else trips) * self.length(operation.runs[1])
                case _:
                    total += self._seconds(operation.work)
        return total

    # -- what computes ------------------------------------------------------------------------

    def _compute(self, operation: Operation) -> None:
        seconds = self._seconds(operation.work)
        start, self.now = self.now, self.now + seconds
        is_matmul = operation.work.is_matmul
        if is_matmul:
            # Numbers of 32 bits may be multiplied as if they had 16.
            narrow = [replace(dot, width=min(dot.width, 2.0)) for dot in operation.work.matmuls]
            at_peak = sum(map(self._at_peak, narrow)) if narrow else seconds
            self.at_peak += at_peak * (1 - idle_share(operation.op))
            if self.tables and not all(map(self._has, operation.work.matmuls)):
                self.beyond += seconds
        if operation.work.is_unknown:
            self.unsaid[operation.op or operation.name] = None
        event = Event(operation.name, operation.op, "compute", "compute", start, self.now)
        self.events.append(replace(event, is_matmul=is_matmul))
        if is_matmul:
            for beside in self.under_way.open:
                beside.covers.append(operation.name)

    def _seconds(self, work: Demand) -> float:
        """Returns the longest of multiplying, HBM, vector time."""
        speed = self._reached * self.chip.hbm
        memory = (work.moved - work.in_vmem) / speed
        if self.chip.clock:
            memory = max(memory, work.on_vectors / (ON_VECTORS * self.chip.cores * self.chip.clock))
        if work.cycles is None or not self.chip.clock:
            least = 0.0 if self.chip.torus or not (work.moved or work.matmuls) else KERNEL
            return max(least, memory, sum(map(self._multiplying, work.matmuls), 0.0))
        cycles = work.cycles / self.chip.clock
        if work.is_matmul and work.matmuls:
            # The compiler counts the first and the last tiles separately. Chips do not wait for
            # them that long.
            longest = SLOWEST * sum(map(_in_tiles, work.matmuls), 0.0) / self.chip.flops
            cycles = min(cycles, FIRST_BYTE + max(memory, longest))
        elif work.is_streamed and not work.is_matmul:
            # The compiler counts narrow elements as 32 bits, and its cycles are too many: a pass
            # takes the time of its bytes, in VMEM no longer than in HBM.
            narrow = work.moved / (4 * work.elements) if work.elements else 1.0
            cycles = min(cycles, max(FIRST_BYTE + work.moved / speed, cycles / 2 * narrow))
        return max(memory, cycles)

    def _multiplying(self, matmul: Matmul) -> float:
        """Returns the longer of table's and peak time."""
        measured = self.tables and self.tables.matmul(matmul.dtypes, matmul.sizes)
        seconds = max(self._at_peak(matmul), measured or 0.0)
        return seconds if matmul.is_aligned or self.chip.torus else UNALIGNED * seconds

    def _has(self, matmul: Matmul) -> bool:
        return self.tables is not None and self.tables.has(matmul.dtypes, matmul.sizes)

    def _at_peak(self, matmul: Matmul) -> float:
        flops = matmul.flops
        if matmul.rows:
            flops *= _share(matmul.rows, self.assumed.grouped_rows) + matmul.twice
        return flops / (self.chip.flops * 2 / max(matmul.width, 1.0))

    # -- transfers and copies -----------------------------------------------------------------

    def _send(self, start: Collective, others: float) -> None:
        if start not in self._transfers:
            share = _share(start.message.rows, self.assumed.sent_rows)
            self._transfers[start] = self.links.transfer(start.message, share)
        transfer = self._transfers[start]
        links, seconds = transfer.route.links, transfer.route.seconds
        latency = self.links.latency(transfer.route)
        called = max(self.now, others)
        begin = called if self.chip.torus else max(called, self.stream)
        ends = np.maximum(self.free[links], begin) + seconds  # a link sends messages in turn
        first = float((ends - seconds).min()) if ends.size else begin
        end = float(ends.max(initial=begin)) + latency
        self.beyond += 0.0 if transfer.is_measured else end - first
        self.free[links] = ends
        self.busy[links] += seconds
        self.stream = end
        event = Event(
            *(start.name, start.op, "transfer", transfer.row, first, end, transfer.sent),
            # For its slowest link: others may have been free.
            queued=max(0.0, end - latency - called - float(seconds.max(initial=0.0))),
            latency=latency,
            links=self.links.used(transfer),
            slow=self.links.is_slow(transfer),
        )
        if start.is_synchronous:
            self.events.append(replace(event, synchronous=True))
            self._wait(start, end, "compute")
        if start.has_done:  # a synchronous start's done waits for nothing
            self.under_way.begin(start, None if start.is_synchronous else event)

    def _copy(self, start: Copy) -> None:
        begin = max(self.now, self.copies.get(start.way, 0.0))
        speed = self._reached * self.chip.hbm if start.way == "memory" else self.chip.host
        end = self.copies[start.way] = begin + start.bytes / speed
        event = Event(start.name, start.op, "copy", start.way, begin, end)
        self.under_way.begin(start, event)

    def _done(self, done: Done) -> None:
        transfer = self.under_way.end(done)
        if transfer is not None and (event := transfer.event) is not None:
            self.events.append(replace(event, covers=tuple(transfer.covers)))
            self._wait(transfer.start, event.end, "memory" if event.kind == "copy" else "compute")

    def _wait(self, start: Operation, until: float, row: str) -> None:
        if until > self.now:
            self.events.append(Event(start.name, start.op, "wait", row, self.now, until))
            self.now = until

    @property
    def computed(self) -> float:
        return sum((e.seconds for e in self.events if e.kind == "compute"), 0.0)

    @property
    def end(self) -> float:
        return max([self.now, *(e.end for e in self.finish() if e.kind == "transfer")])

    def finish(self) -> tuple[Event, ...]:
        # With transfers that nothing has waited for.
        pending = [begun.event for begun in self.under_way.open if begun.event is not None]
        events = [*self.events, *(event for event in pending if event.kind == "transfer")]
        return tuple(sorted(events, key=lambda e: (e.start, e.end)))
