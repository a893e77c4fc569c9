"""Searches the fastest algorithm for each decision in turn.

A *decision* is a part of a call site, such as its backward pass. A *way* is an algorithm for it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

from jaxpar.tools.cli.workers import one_line
from jaxpar.tools.toolkit_api import AUTO, MODES, Asked, Choices

SAME = "the same program"  # the begin of notes on programs that need no timing

Record = dict[str, Any]  # an entry: what it is, and the thing itself


@dataclass
class Candidate:
    choices: Choices
    lowered: Any
    asked: Mapping[tuple[str, str], Asked]
    compiled: Any = None  # set by the clock
    seconds: float = 0.0
    intervals: Sequence[str] = ()  # of predicted seconds

    @property
    def digest(self) -> str:
        return sha256(self.lowered.as_text().encode()).hexdigest()


class Clock(Protocol):
    name: str

    def lower(self, choices: Choices) -> Candidate: ...

    def time(self, candidate: Candidate) -> float: ...

    def wins(self, candidate: Candidate, best: Candidate) -> bool:
        """Returns whether a program should replace the best."""
        ...

    def compare(self, first: Candidate, best: Candidate) -> tuple[float, float]:
        """Returns the seconds of both, in one run."""
        ...


@dataclass(frozen=True)
class TriedWay:
    """The result of a way for a decision.

    Uncompiled ways have no `seconds`, and a `note` why. Timed ways have their program's `digest`.
    """

    site: str
    part: str
    way: str
    seconds: float | None = None
    note: str = ""
    wins: bool = False
    digest: str = ""

    @property
    def key(self) -> str:
        return f"{self.site} | {self.part} | {self.way}"


def search(
    clock: Clock, known: Mapping[str, TriedWay], most: int, modes: Collection[str]
) -> Iterator[Record]:
    """Tries every way of every decision, the largest first, and keeps the best.

    `known` are an earlier search's ways; `most` limits the compiled programs. Yields `begin` before
    each way, `tried` after it, and `found` at the end.
    """
    yield {"begin": AUTO}
    first = clock.lower({})
    first.seconds = clock.time(first)
    yield {"begin": ""}
    so_far = _WaySearch(clock, known, most, first, {first.digest: AUTO})
    for decision in so_far.decisions():
        here = partial(TriedWay, decision.site, decision.part)
        yield {"tried": asdict(here(AUTO, so_far.best.seconds))}
        for way in decision.ways:
            if way in MODES and way not in modes:
                continue
            if here(way).key not in known:
                yield {"begin": here(way).key}
            if tried := so_far.attempt(here(way)):
                yield {"tried": asdict(tried)}
    yield {"begin": "the comparison"}
    best, before, after = so_far.best, first.seconds, first.seconds
    if best is not first:
        before, after = clock.compare(first, best)
    faster = after < before
    chosen = best if faster else first
    yield {
        "found": {
            "sites": _sites(chosen),
            "clock": clock.name,
            "before": before,
            "after": after if faster else before,
            "intervals": list(chosen.intervals),
            "left": so_far.left,
        }
    }


@dataclass
class _WaySearch:
    """The state of a search.

    `same` has the first way of each program, by digest; `left` counts ways beyond `most`.
    """

    clock: Clock
    known: Mapping[str, TriedWay]
    most: int
    best: Candidate
    same: dict[str, str]
    compiled: int = 1
    left: int = 0

    def decisions(self) -> Iterator[Asked]:
        # A better program may ask for more.
        done: set[tuple[str, str]] = set()
        while todo := [asked for key, asked in self.best.asked.items() if key not in done]:
            decision = max(todo, key=lambda asked: asked.size)  # the first call's, if equal
            done.add((decision.site, decision.part))
            yield decision

    def attempt(self, way: TriedWay) -> TriedWay | None:
        """Keeps a better way; None if `most` is reached."""
        tried, candidate = self.known.get(way.key), None
        try:
            if tried is None or tried.wins:
                candidate = self.clock.lower(_with(self.best.choices, way))
            if tried is None and candidate is not None:
                tried = self._time(way, candidate)
        except Exception as reason:
            tried = replace(way, note=f"failed: {one_line(reason)}")
        if tried is not None and tried.digest:
            self.compiled += 1
            self.same.setdefault(tried.digest, f"{tried.way} ({tried.part})")
        if tried is not None and tried.wins and candidate is not None:
            candidate.seconds = tried.seconds or 0.0
            self.best = candidate
        return tried

    def _time(self, way: TriedWay, candidate: Candidate) -> TriedWay | None:
        digest = candidate.digest
        if digest in self.same:
            return replace(way, note=f"{SAME} as with {self.same[digest]}")
        if self.compiled >= self.most:
            self.left += 1
            return None
        wins = self.clock.wins(candidate, self.best)
        return replace(way, seconds=candidate.seconds, wins=wins, digest=digest)


def _with(choices: Choices, tried: TriedWay) -> Choices:
    parts = {**choices.get(tried.site, {}), tried.part: tried.way}
    return {**choices, tried.site: parts}


def _sites(best: Candidate) -> dict[str, dict[str, str]]:
    sites: dict[str, dict[str, str]] = {}
    for site, part in best.asked:
        sites.setdefault(site, {})[part] = best.choices.get(site, {}).get(part, AUTO)
    return sites
