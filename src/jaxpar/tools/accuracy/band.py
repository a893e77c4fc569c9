"""Bands: ranges of errors, by chip and kind of work."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.links import BETWEEN_SLICES as DCN
from jaxpar.tools.timeline.links import OWN_KERNEL
from jaxpar.tools.timeline.target import Target, target_of
from jaxpar.tools.timeline.timeline import Timeline

LARGE = 20e-6  # predicted seconds of an operation; below it latencies matter
LEAST = 0.05  # of a step: a smaller part has no band printed

_PLURALS = {
    "matmul": "matmuls",
    "memory": "passes over memory",
    "gather": "gathers",
    "sum": "sums",
    "permute": "permutes",
    "all-to-all": "all-to-alls",
}
_NONE = ": no measurement"
BETWEEN_SLICES = " between slices"  # ends a kind
_ENDINGS = {DCN: BETWEEN_SLICES, OWN_KERNEL: " in kernels of XLA's own"}  # by what a row says
_KINDS = {
    "all-gather": "gather",
    "all-reduce": "sum",
    "reduce-scatter": "sum",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}


@dataclass(frozen=True)
class Band:
    chip: str  # as in `Chip.kind`
    kind: str
    is_large: bool
    rows: int = 0  # the number of measurements
    low: float = 0.0  # the least of predicted / measured - 1
    high: float = 0.0

    def __str__(self) -> str:
        where = next((end for end in _ENDINGS.values() if self.kind.endswith(end)), "")
        kinds = _PLURALS[self.kind.removesuffix(where)]
        what = f"{self.chip}, {'large' if self.is_large else 'small'} {kinds}{where}"
        if not self.rows:
            return f"{what}{_NONE}"
        rows = f"{self.rows} measurement{'s' * (self.rows > 1)}"
        return f"{what}: {self.low:+.0%} to {self.high:+.0%} in {rows}"


def band_lines(bands: Iterable[str]) -> list[str]:
    """Returns the texts of bands, each once, with a chip's unmeasured kinds in one line."""
    measured: list[str] = []
    others: dict[str, list[str]] = defaultdict(list)
    for text in dict.fromkeys(bands):
        chip, _, kind = text.removesuffix(_NONE).partition(", ")
        if text.endswith(_NONE):
            others[chip].append(kind)
        else:
            measured.append(text)
    return [*measured, *(f"{chip}, {', '.join(kinds)}{_NONE}" for chip, kinds in others.items())]


def bands_of(played: Timeline, target: Target) -> list[Band]:
    # There are none for rooflines, or for other figures than the chip's own.
    own = target.chip
    if own is None or own != target_of(target.mesh).chip:
        return []
    if played.estimate in ("measured", "roofline"):
        return []
    chip = own.kind
    seconds: dict[tuple[str, bool], float] = defaultdict(float)
    for event, taken in _made_of(played.events):
        seconds[_kind(event), event.seconds >= LARGE] += taken
    known = {(one.chip, one.kind, one.is_large): one for one in bands()}
    ranked = sorted(seconds, key=lambda key: -seconds[key])
    return [
        known.get((chip, *key), Band(chip, *key))
        for key in ranked
        if seconds[key] >= LEAST * played.total
    ]


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
    return kind + "".join(end for mark, end in _ENDINGS.items() if mark in event.row)


@cache
def bands() -> tuple[Band, ...]:
    """Returns the bands that `benchmarks/accuracy` last found."""
    found = json.loads(files("jaxpar.tools.accuracy").joinpath("bands.json").read_text())
    return tuple(Band(**one) for one in found)


def text_of(found: Iterable[Band]) -> str:
    lines = ",\n".join(json.dumps(asdict(one)) for one in found)
    return f"[\n{lines}\n]\n"
