"""The search: one decision after the other, every way of it, and what is the fastest is kept."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Protocol

from jaxpar._axis import MODES
from jaxpar._tuning import AUTO, Asked, Choices
from jaxpar.cli._processes import one_line

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
class Tried:
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
    clock: Clock, known: Mapping[str, Tried], most: int, modes: Collection[str]
) -> Iterator[Record]:
    """Tries every way of every decision, the largest first; the best so far is kept.

    Args:
      clock: times programs.
      known: what a search that died has tried already.
      most: programs that are compiled.
      modes: those that are tried, of all that there are.

    Yields:
      `begin` before each program that is compiled, `tried` after each way, and `found` in the end.
    """
    yield {"begin": AUTO}
    first = best = clock.lower({})
    first.seconds = clock.time(first)
    yield {"begin": ""}
    same = {first.digest: AUTO}  # what had a program first
    done: set[tuple[str, str]] = set()
    compiled, left = 1, 0
    while todo := [asked for key, asked in best.asked.items() if key not in done]:
        decision = max(todo, key=lambda asked: asked.size)  # of several, that of the first call
        done.add((decision.site, decision.part))
        yield {"tried": asdict(Tried(decision.site, decision.part, AUTO, best.seconds))}
        for way in decision.ways:
            if way in MODES and way not in modes:
                continue
            tried, candidate = Tried(decision.site, decision.part, way), None
            if known_here := known.get(tried.key):
                tried = known_here
                if tried.wins:
                    candidate = clock.lower(_with(best.choices, tried))
                    candidate.seconds = tried.seconds or 0.0
            else:
                try:
                    candidate = clock.lower(_with(best.choices, tried))
                    digest = candidate.digest
                    if digest in same:
                        tried = _noted(tried, f"the same program as with {same[digest]}")
                    elif compiled >= most:
                        left += 1
                        continue
                    else:
                        yield {"begin": tried.key}
                        wins = clock.wins(candidate, best)
                        tried = Tried(
                            *(tried.site, tried.part, way), candidate.seconds, "", wins, digest
                        )
                except Exception as reason:
                    tried = _noted(tried, f"failed: {one_line(reason)}")
            if tried.digest:
                compiled += 1
                same.setdefault(tried.digest, f"{way} ({tried.part})")
            if tried.wins and candidate is not None:
                best = candidate
            yield {"tried": asdict(tried)}
    yield {"begin": "the comparison"}
    before, after = first.seconds, first.seconds
    if best is not first:
        before, after = clock.compare(first, best)
        best = best if after < before else first
    yield {
        "found": {
            "sites": _sites(best),
            "clock": clock.name,
            "before": before,
            "after": min(before, after),
            "left": left,
        }
    }


def _with(choices: Choices, tried: Tried) -> Choices:
    parts = {**choices.get(tried.site, {}), tried.part: tried.way}
    return {**choices, tried.site: parts}


def _noted(tried: Tried, note: str) -> Tried:
    return Tried(tried.site, tried.part, tried.way, None, note)


def _sites(best: Candidate) -> dict[str, dict[str, str]]:
    """What is chosen for all that the program asks for."""
    sites: dict[str, dict[str, str]] = {}
    for site, part in best.asked:
        sites.setdefault(site, {})[part] = best.choices.get(site, {}).get(part, AUTO)
    return sites
