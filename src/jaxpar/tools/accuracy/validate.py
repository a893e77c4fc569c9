"""Compares predictions with public measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from jaxpar.tools.accuracy.interval import (
    BETWEEN_HOSTS,
    BETWEEN_SLICES,
    LARGE,
    KindOfWork,
    interval_of,
    total_of,
)
from jaxpar.tools.accuracy.measurement import Measurement
from jaxpar.tools.timeline.timeline import Timeline, timeline

ONE_TRANSFER = ("gather", "sum", "permute", "all-to-all")


@dataclass(frozen=True)
class Held:
    """A measurement, what is predicted of it, and the interval that is printed beside it."""

    measured: Measurement
    chip: str  # as in `Chip.kind`
    predicted: float
    interval: tuple[float, float] | None = None  # of predicted / measured - 1
    slow: bool = False  # whether it is sent between hosts

    @property
    def error(self) -> float:
        return self.predicted / self.measured.seconds - 1

    @property
    def is_one(self) -> bool:
        return " and " not in self.measured.kind

    @property
    def work(self) -> KindOfWork:
        ending = BETWEEN_HOSTS * self.slow
        return KindOfWork(self.chip, self.measured.kind + ending, self.predicted >= LARGE)

    @property
    def is_inside(self) -> bool:
        return self.interval is not None and self.interval[0] <= self.error <= self.interval[1]


def validate(measured: Measurement, cache: str | Path | None) -> Held | str:
    try:
        program = measured.compile(cache)
    except Exception as reason:  # each compiler has its own errors
        return f"{type(reason).__name__}: {reason}".partition("\n")[0]
    chip = program.target.chip
    assert chip is not None, measured.target
    played = timeline(program)
    slow = not chip.torus and any(event.slow for event in played.events)
    held = Held(measured, chip.kind, seconds_of(measured, played), slow=slow)
    known = interval_of(held.work) if held.is_one else total_of(played, program.target)
    return held if known is None else replace(held, interval=(known.low, known.high))


def seconds_of(measured: Measurement, played: Timeline) -> float:
    # The copy of a collective's result does not count.
    is_transfer = measured.kind.removesuffix(BETWEEN_SLICES) in ONE_TRANSFER
    return (played.transfer if is_transfer else played.total) / measured.times


def table(compared: Iterable[Held]) -> list[list[str]]:
    shown: list[list[str]] = []
    rows: dict[tuple[str, str, bool], list[Held]] = defaultdict(list)
    for row in compared:
        rows[row.work].append(row)
    for (chip, kind, is_large), held in sorted(rows.items()):
        errors = sorted(abs(row.error) for row in held if row.measured.is_held_out)
        numbers = [f"{median(errors):.0%}", f"{errors[-1]:.0%}"] if errors else ["-", "-"]
        known = held[0].interval
        ends = [f"{end:+.0%}" for end in known] if known else ["-", "-"]
        inside = f"{sum(row.is_inside for row in held)} of {len(held)}" if known else "-"
        size = "large" if is_large else "small"
        count = [str(len(held)), str(len(errors))]
        shown.append([chip, kind, size, *count, *numbers, *ends, inside])
    return shown


TITLES = ["chip", "kind", "size", "rows", "held out", "median", "worst", "from", "to", "inside"]
