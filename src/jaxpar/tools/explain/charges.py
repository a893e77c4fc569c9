"""Whom a wait is charged to: the transfers that hold the links, not the one that stands behind."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from jaxpar.tools.program.operations import Collective, Operation
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.links import Links

_SHORTEST = 1e-9  # seconds: less is rounding


@dataclass(frozen=True)
class Charged(Event):
    """A wait for a transfer behind which others stand on the links, until it is over."""

    standing: str = ""  # the instruction that is waited for


class Charges:
    """Splits waits at the times at which the links of what is waited for become free."""

    def __init__(self, operations: Mapping[str, Operation], links: Links) -> None:
        self.operations, self.links = operations, links
        self._used: dict[str, frozenset[int]] = {}
        self._slowest: dict[str, float] = {}  # seconds on the slowest link, a byte that is sent

    def of(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yields events, in place of each wait for a transfer those for what held it up.

        While earlier transfers still send over its links, a transfer does not move: that time is
        theirs. What is left of the wait, when it sends itself, is its own.
        """
        events = list(events)
        if not isfinite(self.links.chip.link):  # nothing is known of the links
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
            under_way = [one for one in under_way if self._released(one) > event.start]
            runs = known[event.name]
            latest = bisect_left(runs, event.end, key=lambda run: run.start)
            yield from self._split(event, runs[max(0, latest - 1)], under_way)

    def _split(self, wait: Event, own: Event, under_way: list[Event]) -> Iterator[Event]:
        """A wait in parts: of those that hold the links, one after the other, and its own."""
        at = wait.start
        until = min(wait.end, self._begins(own))
        ahead = [one for one in under_way if _turn(one) < _turn(own) and self._meet(one, own)]
        for one in sorted(ahead, key=self._released):
            end = min(until, self._released(one))
            if end - at > _SHORTEST:
                yield Charged(one.name, one.op, "wait", wait.row, at, end, standing=wait.name)
                at = end
        yield wait if at == wait.start else replace(wait, start=at)

    def _begins(self, event: Event) -> float:
        """When a transfer begins to send over the link on which it is the last to be there."""
        self._look_at(event.name)
        return event.end - event.latency - event.bytes * self._slowest[event.name]

    def _released(self, event: Event) -> float:
        """When the links of a transfer are free; those of a GPU's stream when it has arrived."""
        return event.end - event.latency if self.links.chip.torus else event.end

    def _meet(self, one: Event, other: Event) -> bool:
        """Whether two transfers cannot be sent at once."""
        if not self.links.chip.torus:  # they take turns on one stream
            return True
        for name in (one.name, other.name):
            self._look_at(name)
        return not self._used[one.name].isdisjoint(self._used[other.name])

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
    """When it is a transfer's turn on the links that it shares with others."""
    return event.start, event.end
