"""Charges waits to the transfers that hold the links."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import isfinite

from jaxpar.tools.program.operations import Collective
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.timeline import CompiledProgram

_SHORTEST = 1e-9  # seconds; anything shorter is rounding


@dataclass(frozen=True)
class Charged(Event):
    """A wait charged to a transfer that holds its links."""

    standing: str = ""  # the other transfer, which queues


class Charges:
    def __init__(self, program: CompiledProgram, links: Links) -> None:
        self.links = links
        schedules = program.module.schedules
        self.operations = {op.name: op for each in schedules for op in each.operations}
        self._used: dict[str, frozenset[int]] = {}
        self._slowest: dict[str, float] = {}  # seconds a sent byte, on the slowest link

    def of(self, events: Iterable[Event]) -> Iterator[Event]:
        # Each wait for a transfer is replaced by waits for what held it up.
        events = list(events)
        if not isfinite(self.links.chip.link):  # the links are unknown
            yield from events
            return
        transfers = [e for e in events if e.kind == "transfer" and e.name in self.operations]
        transfers.sort(key=_turn)
        known: dict[str, list[Event]] = defaultdict(list)
        for transfer in transfers:
            known[transfer.name].append(transfer)
        under_way: list[Event] = []
        begun = 0
        for event in events:
            if event.kind != "wait" or event.row != "compute" or event.name not in known:
                yield event
                continue
            while begun < len(transfers) and transfers[begun].start < event.end:
                under_way.append(transfers[begun])
                begun += 1
            under_way = [transfer for transfer in under_way if transfer.end > event.start]
            runs = known[event.name]
            latest = bisect_left(runs, event.end, key=lambda run: run.start)
            yield from self._split(event, runs[max(0, latest - 1)], under_way)

    def _split(self, wait: Event, transfer: Event, under_way: list[Event]) -> Iterator[Event]:
        ahead = [e for e in under_way if _turn(e) < _turn(transfer) and self._meet(e, transfer)]
        until = wait.end - self._own(wait, transfer) if ahead else wait.start
        at, last = wait.start, len(ahead) - 1
        for n, holder in enumerate(sorted(ahead, key=self._released)):
            end = until if n == last else min(until, self._released(holder))
            if end - at > _SHORTEST:
                yield Charged(holder.name, holder.op, "wait", wait.row, at, end, standing=wait.name)
                at = end
        if wait.end - at > _SHORTEST:
            yield wait if at == wait.start else replace(wait, start=at)

    def _own(self, wait: Event, transfer: Event) -> float:
        """Returns the seconds that the transfer itself costs."""
        self._look_at(transfer.name)
        sent = transfer.end - transfer.latency
        begun = sent - transfer.bytes * self._slowest[transfer.name]
        sends = min(wait.end, sent) - max(wait.start, begun)
        return min(wait.seconds, max(0.0, sends, wait.seconds - transfer.queued))

    def _released(self, event: Event) -> float:
        # A GPU's links are free when the transfer has arrived.
        return event.end - event.latency if self.links.chip.torus else event.end

    def _meet(self, transfer: Event, other: Event) -> bool:
        if not self.links.chip.torus:  # all share one stream
            return True
        for name in (transfer.name, other.name):
            self._look_at(name)
        return not self._used[transfer.name].isdisjoint(self._used[other.name])

    def _look_at(self, name: str) -> None:
        if name in self._used:
            return
        operation = self.operations[name]
        assert isinstance(operation, Collective)
        transfer = self.links.transfer(operation.message, 1.0)
        self._used[name] = frozenset(transfer.route.links.tolist())
        slowest = float(transfer.route.seconds.max(initial=0.0))
        self._slowest[name] = slowest / transfer.sent if transfer.sent else 0.0


def _turn(event: Event) -> tuple[float, float]:
    return event.start, event.end
