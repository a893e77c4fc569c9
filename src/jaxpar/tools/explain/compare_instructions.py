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
    """Predicted and measured time of all runs of an instruction in a step.

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
    in_trace = _seconds(measured.events)
    both = [
        MeasuredInstruction(name, kind, _line(exposures, name), expected.get((name, kind)), seconds)
        for (name, kind), seconds in in_trace.items()
    ]
    both += [
        MeasuredInstruction(name, kind, _line(exposures, name), seconds, None)
        for (name, kind), seconds in expected.items()
        if (name, kind) not in in_trace
    ]
    longest = sorted(both, key=lambda entry: max(entry.predicted or 0.0, entry.measured or 0.0))
    return tuple(reversed(longest))


def _seconds(events: Iterable[Event]) -> dict[tuple[str, Kind], float]:
    seconds: dict[tuple[str, Kind], float] = defaultdict(float)
    for event in events:
        seconds[event.name, event.kind] += event.seconds
    return dict(seconds)


def _line(exposures: Exposures, name: str) -> Line | None:
    if name not in exposures.homes:
        return None
    return own_line(exposures.origin(exposures.instruction(name))[1])


# -- as text -------------------------------------------------------------------------------------


def side_by_side(record: Record, most: int) -> Iterator[str]:
    for cells in (("predicted", "measured", "ratio", ""), *totals(record)):
        yield _columns(cells)
    for entry in record["instructions"][:most]:
        yield _columns(side(entry))
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


def side(entry: Record) -> Cells:
    line = f", {Line(**entry['line'])}" if entry["line"] else ""
    return _cells(entry["predicted"], entry["measured"], f"{entry['kind']} {entry['name']}{line}")


def _cells(predicted: float | None, measured: float | None, what: str) -> Cells:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
    return _time(predicted), _time(measured), ratio, what


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else us(seconds)


def alone(record: Record) -> Iterator[str]:
    for key, other in (("predicted", "measured"), ("measured", "predicted")):
        rows = [entry for entry in record["instructions"] if entry[other] is None and entry[key]]
        if rows and record["predicted"] is not None:
            seconds = sum(entry[key] for entry in rows)
            longest = ", ".join(f"{entry['kind']} {entry['name']}" for entry in rows[:3])
            entries = "1 entry" if len(rows) == 1 else f"{len(rows)} entries"
            yield f"  only {key}: {entries} of {us(seconds)} together, such as {longest}"
