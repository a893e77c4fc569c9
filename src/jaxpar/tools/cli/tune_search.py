"""The search: one decision after the other, every way of it, and what is the fastest is kept."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

from jaxpar.tools.cli.workers import one_line
from jaxpar.tools.private_names import AUTO, MODES, Asked, Choices

SAME = "the same program"  # so begins the note of what need not be timed

Record = dict[str, Any]  # one entry: what it is, and the thing itself


@dataclass
class Candidate:
    """A program: what is chosen in it, and what it asks for."""

    choices: Choices
    lowered: Any
    asked: Mapping[tuple[str, str], Asked]
    compiled: Any = None  # by the clock, when it needs it
    seconds: float = 0.0

    @property
    def digest(self) -> str:
        """Two programs of one digest are the same."""
        return sha256(self.lowered.as_text().encode()).hexdigest()


class Clock(Protocol):
    """Says what a program takes."""

    name: str

    def lower(self, choices: Choices) -> Candidate:
        """Traces the program with these choices."""
        ...

    def time(self, candidate: Candidate) -> float:
        """Compiles a program, and returns its seconds."""
        ...

    def wins(self, candidate: Candidate, best: Candidate) -> bool:
        """Times a program as one that might replace the best so far, and says if it does."""
        ...

    def compare(self, first: Candidate, best: Candidate) -> tuple[float, float]:
        """Returns the seconds of both, in one run."""
        ...


@dataclass(frozen=True)
class TriedWay:
    """What came of one way of one decision.

    Attributes:
      seconds: of the whole program; None: nothing was compiled.
      note: why it was not compiled: the same program as another, or a failure.
      digest: of the program, where one was timed.
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
        """Names it among all that are tried."""
        return f"{self.site} | {self.part} | {self.way}"


def search(
    clock: Clock, known: Mapping[str, TriedWay], most: int, modes: Collection[str]
) -> Iterator[Record]:
    """Tries every way of every decision, the largest first; the best so far is kept.

    Args:
      clock: times programs.
      known: what a search that died has tried already.
      most: programs that are compiled.
      modes: those that are tried, of all that there are.

    Yields:
      `begin` before each way, `tried` after it, and `found` in the end.
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
    yield {
        "found": {
            "sites": _sites(best if faster else first),
            "clock": clock.name,
            "before": before,
            "after": after if faster else before,
            "left": so_far.left,
        }
    }


@dataclass
class _WaySearch:
    """A search under way.

    Attributes:
      same: by digest, with what a program was first compiled.
      compiled: programs.
      left: ways that were not tried, because there were as many programs as there may be.
    """

    clock: Clock
    known: Mapping[str, TriedWay]
    most: int
    best: Candidate
    same: dict[str, str]
    compiled: int = 1
    left: int = 0

    def decisions(self) -> Iterator[Asked]:
        """What is to be decided; a better program may ask for more."""
        done: set[tuple[str, str]] = set()
        while todo := [asked for key, asked in self.best.asked.items() if key not in done]:
            decision = max(todo, key=lambda asked: asked.size)  # of several, that of the first call
            done.add((decision.site, decision.part))
            yield decision

    def attempt(self, way: TriedWay) -> TriedWay | None:
        """Tries a way, and keeps it if it is better; None: there were too many programs before."""
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
    """What is chosen for all that the program asks for."""
    sites: dict[str, dict[str, str]] = {}
    for site, part in best.asked:
        sites.setdefault(site, {})[part] = best.choices.get(site, {}).get(part, AUTO)
    return sites
