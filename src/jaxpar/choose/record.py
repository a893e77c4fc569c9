"""Records the tables from which `auto` chooses."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxpar.arguments.types import Mode
from jaxpar.choose.choice import RULES, Flows, Predictions, Ways, way_of, ways_of
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import NAMED, notes

if TYPE_CHECKING:
    from jaxpar.ring.ways import Way


@dataclass(frozen=True)
class WayRow:
    """An algorithm in a decision's table; `out` says why it is excluded.

    A forward pass's `both` are its seconds and those of the backward pass that fits it best.
    """

    way: str
    seconds: float | None = None
    out: str = ""
    both: float | None = None


@dataclass(frozen=True)
class Decision:
    """A decision for a part of a call site, such as "forward"."""

    problem: Problem
    part: str
    rows: tuple[WayRow, ...]
    taken: str
    tuned: bool  # whether a file of `jaxpar tune` decided
    # of the stack, the innermost last: file, line and function
    frames: tuple[tuple[str, int, str], ...]

    @property
    def asked(self) -> str:
        ring = self.problem.ring
        return (ring.backward or ring.mode) if self.part == "backward" else ring.mode


@dataclass(eq=False)
class Notes:
    decisions: list[Decision] = field(default_factory=list[Decision])

    def part(
        self, problem: Problem, part: str, rows: Iterable[WayRow], taken: str, tuned: bool = False
    ) -> None:
        stack = traceback.extract_stack()
        frames = tuple((f.filename, f.lineno or 0, f.name) for f in stack)
        self.decisions.append(Decision(problem, part, tuple(rows), taken, tuned, frames))

    def passes(self, problem: Problem, taken: Ways, tuned: bool) -> None:
        auto = replace(problem, ring=replace(problem.ring, mode="auto", backward=None))
        predictions = Predictions(auto)
        passes = {"forward": problem.forward, "backward": problem.backward}
        mode: Any = taken[0].mode
        for (part, flows), way in zip(passes.items(), taken, strict=True):
            if part == "forward" or flows:
                first = None if part == "forward" else way_of(auto, mode, problem.forward)
                rows = [_row(predictions, named, flows, first) for named in NAMED]
                if part == "forward":
                    rows = _with_backward(predictions, rows)
                self.part(problem, part, rows, way.mode, tuned)


@contextmanager
def noting() -> Generator[Notes]:
    """Records the decisions of what is traced here."""
    noted = Notes()
    with notes(noted):
        yield noted


def _with_backward(predictions: Predictions, rows: list[WayRow]) -> list[WayRow]:
    """Returns rows of a forward pass, with the seconds of both passes: they are chosen together."""
    problem, flows = predictions.problem, predictions.problem.backward
    others = ways_of(problem, "auto", flows) if flows else []
    done: list[WayRow] = []
    for row in rows:
        if row.seconds is not None and others:
            mode: Any = row.way
            first = way_of(problem, mode, problem.forward)
            second = min(others, key=lambda way: predictions.of_both((first, way)))
            kept = predictions.kept(first, second)
            row = replace(row, both=row.seconds + predictions.seconds(second, flows, kept))
        done.append(row)
    return done


def _row(predictions: Predictions, mode: Mode, flows: Flows, first: Way | None) -> WayRow:
    problem = predictions.problem
    out = RULES[problem.kind](problem, mode, flows)
    if problem.chip is None or not flows or (mode == "multi-ring" and not problem.spans_a_torus):
        return WayRow(mode, None, out)
    way = way_of(problem, mode, flows)
    kept = predictions.kept(first, way) if first else 0
    return WayRow(mode, predictions.seconds(way, flows, kept), out)
