"""Compares predictions with public measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jaxpar.tools.accuracy.band import BETWEEN_SLICES, LARGE, Band
from jaxpar.tools.accuracy.measurement import Measurement
from jaxpar.tools.timeline.timeline import Timeline, timeline

ONE_TRANSFER = ("gather", "sum", "permute", "all-to-all")


@dataclass(frozen=True)
class Held:
    measured: Measurement
    chip: str  # as in `Chip.kind`
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured.seconds - 1


def validate(one: Measurement, cache: str | Path | None) -> Held | str:
    try:
        program = one.compile(cache)
    except Exception as reason:  # each compiler has its own errors
        return f"{type(reason).__name__}: {reason}".partition("\n")[0]
    chip = program.target.chip
    assert chip is not None, one.target
    return Held(one, chip.kind, seconds_of(one, timeline(program)))


def seconds_of(one: Measurement, played: Timeline) -> float:
    # The copy of a collective's result does not count.
    is_transfer = one.kind.removesuffix(BETWEEN_SLICES) in ONE_TRANSFER
    return (played.transfer if is_transfer else played.total) / one.times


def bands_from(found: Iterable[Held]) -> list[Band]:
    rows = _by_class(found)
    return [
        Band(*key, len(held), min(one.error for one in held), max(one.error for one in held))
        for key, held in sorted(rows.items())
        if " and " not in key[1]  # two kinds at once
    ]


def table(found: Iterable[Held]) -> list[list[str]]:
    shown = []
    for (chip, kind, is_large), held in sorted(_by_class(found).items()):
        errors = sorted(abs(one.error) for one in held if one.measured.is_held_out)
        numbers = [f"{median(errors):.0%}", f"{errors[-1]:.0%}"] if errors else ["-", "-"]
        low, high = (f"{choose(one.error for one in held):+.0%}" for choose in (min, max))
        size = "large" if is_large else "small"
        shown.append([chip, kind, size, str(len(held)), str(len(errors)), *numbers, low, high])
    return shown


TITLES = ["chip", "kind", "size", "rows", "held out", "median", "worst", "from", "to"]


def _by_class(found: Iterable[Held]) -> dict[tuple[str, str, bool], list[Held]]:
    rows: dict[tuple[str, str, bool], list[Held]] = defaultdict(list)
    for one in found:
        rows[one.chip, one.measured.kind, one.predicted >= LARGE].append(one)
    return rows
