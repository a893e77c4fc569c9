"""Intervals of errors: where four in five unseen operations of a class lie.

Read here, made by `calibrate.py`. A class with few measurements has a wider interval: it leans on
the classes above it, up to all of its platform.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import hypot
from typing import NamedTuple

from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.links import BETWEEN_SLICES as DCN
from jaxpar.tools.timeline.links import OWN_KERNEL
from jaxpar.tools.timeline.target import LONG, Target, target_of, under_load
from jaxpar.tools.timeline.timeline import Timeline
from jaxpar.tools.toolkit_api import is_tpu

LARGE = 20e-6  # predicted seconds of an operation; below it latencies matter
LEAST = 0.05  # of a step: a smaller part is not printed
FEWEST = 4  # measurements of a kind on a platform; with fewer there is no interval
SENTENCE = "80% of unseen predictions lie within (predicted / measured - 1)"

_PLURALS = {
    "matmul": "matmuls",
    "memory": "passes over memory",
    "gather": "gathers",
    "sum": "sums",
    "permute": "permutes",
    "all-to-all": "all-to-alls",
}
_NONE = ": no measurement"
WHOLE = "step"  # the kind of a whole training step
BETWEEN_SLICES = " between slices"  # ends a kind
BETWEEN_HOSTS = " between hosts"  # likewise, of GPUs
_ENDINGS = {DCN: BETWEEN_SLICES, OWN_KERNEL: " in kernels of XLA's own"}  # by what a row says
_KINDS = {
    "all-gather": "gather",
    "all-reduce": "sum",
    "reduce-scatter": "sum",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}

Class = tuple[str, ...]


class KindOfWork(NamedTuple):
    """A class of operations."""

    chip: str  # as in `Chip.kind`
    kind: str
    is_large: bool

    @property
    def platform(self) -> str:
        return "TPU" if is_tpu(self.chip) else "GPU"

    @property
    def computes(self) -> bool:
        return self.kind in ("matmul", "memory")

    @property
    def classes(self) -> list[Class]:
        """Returns the classes that hold it, the widest first."""
        way = "computes" if self.computes else "sends"
        of_chip, size = (self.chip, self.kind), "large" if self.is_large else "small"
        platform = self.platform
        if self.kind == WHOLE:
            return [(platform, WHOLE), of_chip]
        return [(platform,), (platform, way), (platform, way, self.kind), of_chip, (*of_chip, size)]

    def __str__(self) -> str:
        where = next((end for end in _ALL_ENDINGS if self.kind.endswith(end)), "")
        kinds = _PLURALS[self.kind.removesuffix(where)]
        return f"{self.chip}, {'large' if self.is_large else 'small'} {kinds}{where}"


_ALL_ENDINGS = (*_ENDINGS.values(), BETWEEN_HOSTS)


@dataclass(frozen=True)
class Interval:
    """Errors, predicted / measured - 1, and how many measurements tell them."""

    low: float
    high: float
    rows: int = 0  # of the class itself
    others: int = 0  # of the same kind on other chips or of other sizes

    def __str__(self) -> str:
        return f"{self.low:+.0%} to {self.high:+.0%}"

    def or_wider(self, other: Interval | None) -> Interval:
        """Returns the least interval that contains both."""
        if other is None:
            return self
        return Interval(min(self.low, other.low), max(self.high, other.high))


def interval_of(work: KindOfWork) -> Interval | None:
    """Returns the interval of a class, or None without measurements of its kind."""
    table = _intervals()
    *_, kind, _, of_chip = work.classes
    if kind not in table or table[kind].rows < FEWEST:
        return None
    nearest = next(table[key] for key in reversed(work.classes) if key in table)
    rows = table[of_chip].rows if of_chip in table else 0
    return Interval(nearest.low, nearest.high, rows, table[kind].rows - rows)


def text_of(work: KindOfWork) -> str:
    if (interval := interval_of(work)) is None:
        return f"{work}{_NONE}"
    few = interval.rows < FEWEST
    more = f", {interval.others} of other {work.platform}s and sizes" if few else ""
    s = "s" * (interval.rows != 1)
    return f"{work}: {interval} ({interval.rows or 'no'} measurement{s}{more})"


def total_of(played: Timeline, target: Target) -> Interval | None:
    """Returns the interval of a program's seconds: that of its parts, or of published steps.

    Whole steps show what parts do not, such as clocks that fall under a load. For a program of
    `LONG` or more it is the least interval that contains both.
    """
    made = of_parts(played, target)
    if made is None or target.chip is None or played.total < LONG:
        return made
    return made.or_wider(of_steps(target.chip.kind))


def of_steps(chip: str) -> Interval | None:
    """Returns the interval of published steps of a chip, or of its platform."""
    classes = reversed(KindOfWork(chip, WHOLE, True).classes)
    return next((known for key in classes if (known := _intervals().get(key))), None)


def of_parts(played: Timeline, target: Target) -> Interval | None:
    """Returns the interval of a program's seconds from those of its operations.

    Errors of a class are alike, those of several classes independent: half-widths add as squares,
    each by its part of the seconds. None if a part of `LEAST` or more has no measurement.
    """
    parts = _parts(played, target)
    known = {work: interval_of(work) for work in parts}
    least = LEAST * sum(parts.values())
    if not parts or any(known[work] is None and part >= least for work, part in parts.items()):
        return None
    shares = {work: part / sum(parts.values()) for work, part in parts.items() if known[work]}
    middle = wide = 0.0
    for work, share in shares.items():
        interval = known[work]
        assert interval is not None
        middle += share * (interval.low + interval.high) / 2
        wide = hypot(wide, share * (interval.high - interval.low) / 2)
    return Interval(middle - wide, middle + wide)


def texts_of(played: Timeline, target: Target) -> list[str]:
    """Returns the intervals of a program's seconds and of its parts, the longest first.

    Where a chip computes slower in long programs, none of its operations was measured so.
    """
    parts = _parts(played, target)
    shown = [work for work in parts if parts[work] >= LEAST * sum(parts.values())]
    several = len(shown) > 1 or played.total >= LONG
    if played.total >= LONG and target.chip and under_load(target.chip) != target.chip:
        shown = [work for work in shown if not work.computes]
    total = total_of(played, target) if several else None
    return [*([f"in all: {total}"] if total else []), *map(text_of, shown)]


def lines_of(texts: Iterable[str]) -> list[str]:
    """Returns texts, each once, with a chip's unmeasured kinds in one line."""
    measured: list[str] = []
    others: dict[str, list[str]] = defaultdict(list)
    for text in dict.fromkeys(texts):
        chip, _, kind = text.removesuffix(_NONE).partition(", ")
        if text.endswith(_NONE):
            others[chip].append(kind)
        else:
            measured.append(text)
    return [*measured, *(f"{chip}, {', '.join(kinds)}{_NONE}" for chip, kinds in others.items())]


def _parts(played: Timeline, target: Target) -> dict[KindOfWork, float]:
    """Returns what a program's seconds are made of, the longest first."""
    # Rooflines have no intervals, nor have other figures than the chip's own.
    chip = target.chip
    here = target_of(target.mesh).chip
    if chip is None or here is None or chip != replace(here, nccl=chip.nccl):
        return {}
    if played.estimate in ("measured", "roofline"):
        return {}
    seconds: dict[KindOfWork, float] = defaultdict(float)
    for event, taken in _made_of(played.events):
        seconds[KindOfWork(chip.kind, _kind(event), event.seconds >= LARGE)] += taken
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _made_of(events: Iterable[Event]) -> Iterable[tuple[Event, float]]:
    """Yields computation and waits, with their seconds."""
    transfers: dict[str, Event] = {}
    for event in events:
        if event.kind == "transfer":
            transfers[event.name] = event
    for event in events:
        if event.kind == "compute":
            yield event, event.seconds
        elif event.kind == "wait" and event.name in transfers:
            yield transfers[event.name], event.seconds


def _kind(event: Event) -> str:
    if event.kind == "compute":
        return "matmul" if event.is_matmul else "memory"
    kind = _KINDS.get(event.row.rpartition(" ")[2], "permute")
    ending = next((end for mark, end in _ENDINGS.items() if mark in event.row), "")
    return kind + (ending or BETWEEN_HOSTS * event.slow)


@cache
def _intervals() -> Mapping[Class, Interval]:
    """Returns what `benchmarks/accuracy` last made."""
    table = json.loads(files("jaxpar.tools.accuracy").joinpath("intervals.json").read_text())
    return {tuple(row["of"]): Interval(row["low"], row["high"], row["rows"]) for row in table}
