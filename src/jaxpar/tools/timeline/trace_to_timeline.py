"""Makes a timeline's events from what ran on a device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite

import numpy as np

from jaxpar.tools.program.costs import Demand, Message
from jaxpar.tools.program.operations import (
    Call,
    Collective,
    Compute,
    Control,
    Copy,
    Done,
    Free,
    Operation,
)
from jaxpar.tools.timeline.event import Event, Kind
from jaxpar.tools.timeline.in_flight import Open, UnderWay
from jaxpar.tools.timeline.links import Links, Transfer
from jaxpar.tools.timeline.trace_events import Ran

# Names of collectives in HLO, JAX and NCCL. In order: `psum-scatter` begins with `psum`.
_NAMES = {
    "reduce-scatter": ("reduce-scatter", "psum-scatter", "nccldevkernel-reducescatter"),
    "all-gather": ("all-gather", "nccldevkernel-allgather"),
    "all-reduce": ("all-reduce", "psum", "pmax", "pmin", "nccldevkernel-allreduce"),
    "all-to-all": ("all-to-all", "ragged-all-to-all"),
    "collective-permute": ("collective-permute", "ppermute", "nccldevkernel-sendrecv"),
    "collective-broadcast": ("collective-broadcast", "pbroadcast", "nccldevkernel-broadcast"),
}
_MATMULS = ("dot", "convolution", "gemm", "matmul")
_CONTROL = ("while", "conditional", "call")
_NS = 1e-9


class Measured:
    def __init__(
        self, ran: Sequence[Ran], start: float, known: Mapping[str, Operation], links: Links | None
    ) -> None:
        self.known, self.links = known, links
        self.in_order = any(span.where == "core" for span in ran)  # a TPU's core computes alone
        self.is_cpu = any(span.where == "thread" for span in ran)
        ran = list(_until_done(ran, known)) if self.is_cpu else ran
        self.ran = [replace(span, start=span.start - start, end=span.end - start) for span in ran]
        self.starts = [span.start for span in self.ran]
        self.names = {span.name for span in ran}
        self.beside: dict[str, list[Ran]] = defaultdict(list)
        for span in self.ran:
            if span.where == "beside":
                self.beside[span.name].append(span)
        self.under_way = UnderWay[Ran]()
        self.intervals: list[Event] = []
        self.busy = np.zeros(0 if links is None else links.count)  # seconds that links must send
        self._transfers: dict[str, Transfer] = {}

    def events(self) -> tuple[Event, ...]:
        for span in self.ran:
            if span.where != "beside":
                self._take(span, self.known.get(span.name) or _by_name(span))
        for open in self.under_way.open:  # the trace shows no time of its done
            self._arrive(open, open.event.end)
        if not self.in_order:
            self.intervals += _waits(self.intervals)
        events = sorted(_covering(self.intervals), key=lambda e: (e.start, e.end))
        return tuple(self._queued(events))

    def utilisation(self, total: float) -> float:
        # The used links run at their published speed.
        used = self.busy[self.busy > 0]
        return float(used.mean() / total) if used.size and total else 0.0

    def _take(self, span: Ran, operation: Operation) -> None:
        match operation:
            case Control() if self._shows_inside(span, operation):
                pass
            case Done():
                self._done(span, operation)
            case Copy():
                self.under_way.begin(operation, span)
            case Collective() if not self.under_way.has(operation):
                self._send(span, operation)
            case _:
                self._add(span, operation, "compute", "compute", span.start, span.end)

    def _shows_inside(self, span: Ran, control: Control) -> bool:
        if control.runs:
            inside = (inner.name for run in control.runs for inner in run.operations)
            return not self.names.isdisjoint(inside)
        return bisect_left(self.starts, span.end) - bisect_right(self.starts, span.start) > 0

    def _send(self, span: Ran, start: Collective) -> None:
        if self.in_order:
            self._add(span, start, "wait", "compute", span.start, span.end)
        if start.has_done:
            self.under_way.begin(start, span)
        else:
            self._arrive(Open(start, span), span.end)

    def _done(self, span: Ran, done: Done) -> None:
        open = self.under_way.end(done)
        if open is None:
            return
        if self.in_order or isinstance(open.start, Copy):
            row = "memory" if isinstance(open.start, Copy) else "compute"
            self._add(open.event, open.start, "wait", row, span.start, span.end)
        self._arrive(open, span.end)

    def _arrive(self, open: Open[Ran], end: float) -> None:
        start, begin = open.start, open.event.start
        beside = [x for x in self.beside[start.name] if x.start < end and x.end > begin]
        if beside:
            begin = max(begin, min(x.start for x in beside))
            end = min(end, max(x.end for x in beside))
        if isinstance(start, Copy):
            self._add(open.event, start, "copy", "memory", begin, end)
            return
        self._add(open.event, start, "transfer", start.message.kind, begin, end)
        if self.links is None or start.name not in self.known:
            return
        if start.name not in self._transfers:
            self._transfers[start.name] = self.links.transfer(start.message, 1.0)
        transfer = self._transfers[start.name]
        route, latency = transfer.route, self.links.latency(transfer.route)
        self.busy[route.links] += route.seconds
        self.intervals[-1] = replace(
            self.intervals[-1],
            row=transfer.row,
            bytes=transfer.sent,
            synchronous=start.is_synchronous and not self.is_cpu,
            latency=min(latency, (end - begin) * _NS),
            links=self.links.used(transfer),
        )

    def _queued(self, events: Iterable[Event]) -> Iterator[Event]:
        """Sets how long links were busy before transfers."""
        free = np.zeros(self.busy.size)  # when earlier transfers have left each link
        for event in events:
            transfer = self._transfers.get(event.name) if event.kind == "transfer" else None
            if transfer is None or self.links is None or not isfinite(self.links.chip.link):
                yield event
                continue
            links = transfer.route.links
            until = min(float(free[links].max(initial=0.0)), event.end)
            free[links] = np.maximum(free[links], event.end)
            yield replace(event, queued=max(0.0, until - event.start))

    def _add(
        self, span: Ran, operation: Operation, kind: Kind, row: str, start: float, end: float
    ) -> None:
        # Equal times stay equal: until here all are whole nanoseconds.
        times = start * _NS, end * _NS
        event = Event(operation.name, operation.op or span.op, kind, row, *times)
        is_matmul = kind == "compute" and operation.work.is_matmul
        self.intervals.append(replace(event, is_matmul=is_matmul))


def _by_name(span: Ran) -> Operation:
    said = [word.lower().replace("_", "-") for word in (span.kind, span.name) if word]
    is_matmul = any(word in text for text in said for word in _MATMULS)
    known = (span.name, span.op, (), Demand(is_matmul=is_matmul))
    if any(text.partition(".")[0] in _CONTROL for text in said):
        return Call(*known, ())
    kinds = (kind for kind, names in _NAMES.items() if any(text.startswith(names) for text in said))
    kind = next(kinds, None)
    if any("-done" in text for text in said):
        return Done(*known, kind or "copy")
    has_done = any("-start" in text for text in said) and span.where != "stream"
    if kind is not None:
        return Collective(*known, Message(kind, 0.0), kind, has_done, not has_done, False)
    return Copy(*known, 0, "copy") if has_done else Compute(*known)


def _until_done(ran: Sequence[Ran], known: Mapping[str, Operation]) -> Iterator[Ran]:
    """Yields what ran, until done or used."""
    users: dict[str, list[Operation]] = defaultdict(list)
    for operation in known.values():
        for operand in operation.operands:
            users[operand.name].append(operation)
    starts: dict[str, list[float]] = defaultdict(list)
    for span in ran:
        starts[span.name].append(span.start)
    for span in ran:
        end, level = span.noticed, users[span.name]
        while span.noticed > span.end and level:
            for user in level:
                after = bisect_right(starts[user.name], span.start)
                end = min([end, *starts[user.name][after : after + 1]])
            level = [user for free in level if isinstance(free, Free) for user in users[free.name]]
        yield replace(span, end=max(span.end, end))


# -- waits and overlaps, which no event of the trace shows ----------------------------------------


class _During:
    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda e: e.start)
        self.starts = [event.start for event in self.events]
        self.longest = max((event.seconds for event in self.events), default=0.0)

    def at(self, start: float, end: float) -> list[Event]:
        first = bisect_left(self.starts, start - self.longest)
        last = bisect_left(self.starts, end)
        return [event for event in self.events[first:last] if event.end > start]


def _waits(events: Sequence[Event]) -> Iterator[Event]:
    transfers = _During(event for event in events if event.kind == "transfer")
    for begin, end in _gaps(event for event in events if event.kind == "compute"):
        near = transfers.at(begin, end)
        edges = {begin, end, *(t for event in near for t in (event.start, event.end))}
        cuts = sorted(edge for edge in edges if begin <= edge <= end)
        waiting: Event | None = None
        for start, stop in pairwise(cuts):
            under_way = [event for event in near if event.start <= start and event.end >= stop]
            if not under_way:
                continue
            first = min(under_way, key=lambda event: event.end)
            if waiting is not None and (waiting.name, waiting.end) == (first.name, start):
                waiting = replace(waiting, end=stop)
                continue
            if waiting is not None:
                yield waiting
            waiting = Event(first.name, first.op, "wait", "compute", start, stop)
        if waiting is not None:
            yield waiting


def _gaps(computing: Iterable[Event]) -> Iterator[tuple[float, float]]:
    reached = 0.0
    for event in sorted(computing, key=lambda e: e.start):
        if event.start > reached:
            yield reached, event.start
        reached = max(reached, event.end)
    yield reached, float("inf")


def _covering(events: Sequence[Event]) -> Iterator[Event]:
    matmuls = _During(event for event in events if event.is_matmul)
    for event in events:
        if event.kind == "transfer" and not event.synchronous:
            beside = matmuls.at(event.start, event.end)
            yield replace(event, covers=tuple(matmul.name for matmul in beside))
        else:
            yield event
