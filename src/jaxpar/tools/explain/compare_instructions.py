"""Compares predicted and measured times of instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.program.sources import Line, own_line
from jaxpar.tools.timeline.event import Event, Kind
from jaxpar.tools.timeline.timeline import Timeline
from jaxpar.tools.toolkit_api import readable, us

Record = Mapping[str, Any]  # of an explanation
Cells = tuple[str, str, str, str]  # predicted, measured, ratio, name


@readable
@dataclass(frozen=True)
class MeasuredInstruction:
    """Predicted and measured time of all runs of one instruction in a step.

    Attributes:
      name: the instruction's name.
      kind: as for `Event`. A transfer and the wait for it are two entries.
      line: the user's line that it comes from, or None.
      predicted: simulated seconds, or None.
      measured: seconds in the trace, or None.

    Example:
      >>> MeasuredInstruction("fusion.1", "compute", None, predicted=2e-6, measured=3e-6).ratio
      1.5
    """

    name: str
    kind: Kind
    line: Line | None
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Returns measured over predicted, or None."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted


def instructions_of(
    exposures: Exposures, predicted: Timeline | None, measured: Timeline
) -> tuple[MeasuredInstruction, ...]:
    expected = _seconds(() if predicted is None else predicted.events)
    found = _seconds(measured.events)
    both = [
        MeasuredInstruction(name, kind, _line(exposures, name), expected.get((name, kind)), seconds)
        for (name, kind), seconds in found.items()
    ]
    both += [
        MeasuredInstruction(name, kind, _line(exposures, name), seconds, None)
        for (name, kind), seconds in expected.items()
        if (name, kind) not in found
    ]
    longest = sorted(both, key=lambda one: max(one.predicted or 0.0, one.measured or 0.0))
    return tuple(reversed(longest))


def _seconds(events: Iterable[Event]) -> dict[tuple[str, Kind], float]:
    found: dict[tuple[str, Kind], float] = defaultdict(float)
    for event in events:
        found[event.name, event.kind] += event.seconds
    return dict(found)


def _line(exposures: Exposures, name: str) -> Line | None:
    if name not in exposures.homes:
        return None
    return own_line(exposures.origin(exposures.instruction(name))[1])


# -- as text -------------------------------------------------------------------------------------


def side_by_side(record: Record, most: int) -> Iterator[str]:
    for cells in (("predicted", "measured", "ratio", ""), *totals(record)):
        yield _columns(cells)
    for one in record["instructions"][:most]:
        yield _columns(side(one))
    if (left := len(record["instructions"]) - most) > 0:
        yield f"  and {left} more"
    yield from alone(record)


def _columns(cells: Sequence[str]) -> str:
    predicted, measured, ratio, what = cells
    return f"  {predicted:>10}  {measured:>10}  {ratio:>5}  {what}".rstrip()


def totals(record: Record) -> Iterator[Cells]:
    predicted = record["predicted"] or {}
    for name, what in (
        ("seconds", "the step"),
        ("compute", "computing"),
        ("exposed", "waiting for transfers"),
        ("transfer", "with a transfer under way"),
    ):
        yield _cells(predicted.get(name), record[name], what)


def side(one: Record) -> Cells:
    line = f", {Line(**one['line'])}" if one["line"] else ""
    return _cells(one["predicted"], one["measured"], f"{one['kind']} {one['name']}{line}")


def _cells(predicted: float | None, measured: float | None, what: str) -> Cells:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    return _time(predicted), _time(measured), ratio, what


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else us(seconds)


def alone(record: Record) -> Iterator[str]:
    for own, other in (("predicted", "measured"), ("measured", "predicted")):
        found = [one for one in record["instructions"] if one[other] is None and one[own]]
        if found and record["predicted"] is not None:
            seconds = sum(one[own] for one in found)
            longest = ", ".join(f"{one['kind']} {one['name']}" for one in found[:3])
            entries = "1 entry" if len(found) == 1 else f"{len(found)} entries"
            yield f"  only {own}: {entries} of {us(seconds)} together, such as {longest}"
