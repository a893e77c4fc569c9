"""The numbers of the model of `auto`, fitted to compiled times, and what a choice by it costs.

Two thirds of the points fit the numbers, the last third judges. One number after the other is
changed by a factor where that makes the choices of the points faster, or as fast and the model
nearer to what was compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from math import exp, log
from typing import Any

import jax

import jaxpar
from jaxpar.choose import choice
from jaxpar.matmul import _saved_blocks
from jaxpar.platforms.chips import Fitted, Tpu, fitted_to, platform_of
from jaxpar.ring import chunked, hierarchical, of_mode, order, seconds, staying, stepwise
from jaxpar.schedule import Target
from jaxpar.schedule import target as describe
from sweep.points import Point, grid
from sweep.times import Times
from sweep.worker import ONE_RING, candidates, decided, forms
from tables import Table

MODULES = (seconds, choice, stepwise, chunked, of_mode, staying, hierarchical, order, _saved_blocks)
# Of all chips; those of each are the fields of `Fitted`.
SHARED = (
    *("MATMUL_SHARE", "SCATTERED_SHARE", "INSTRUCTION", "KEPT_JOINED", "KEPT_TOGETHER", "MARGIN"),
    "FLOPS_WITHIN",
)
FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)
ADDED = {"within": 0.5, "step_passes": 1.0, "chunk_passes": 1.0}  # to a number that is 0
# Of two sets of numbers that choose alike, the one that is nearer to the compiled times.
WEIGHT = 0.02
LEAST = 1e-4  # by which a number must better the score to be changed


@dataclass(frozen=True)
class Case:
    """A point, what its algorithms take, and what is to be chosen from."""

    point: Point
    target: Target
    options: dict[str, Any]
    problem: Any
    compiled: dict[str, float]

    def regret(self) -> tuple[float, float]:
        """Returns log(what the choice takes / the least), and the mean error of the logarithms."""
        compared: dict[str, float] = {}
        errors: list[float] = []
        with jax.set_mesh(self.target.mesh), jaxpar.compiled_with(self.options):
            for name, compiled in self.compiled.items():  # an algorithm, or one for each pass
                modes: list[Any] = name.split(" | ")
                # A mode that is named keeps what JAX does, no more.
                problem = self.problem if len(modes) > 1 else replace(self.problem, keeps=False)
                predictions = choice.Predictions(problem)
                first = choice.way_of(problem, modes[0], problem.forward)
                seconds = predictions.seconds(first, problem.forward)
                compared[name] = predictions.forward(first)
                if problem.backward:
                    second = choice.way_of(problem, modes[-1], problem.backward)
                    kept = predictions.kept(first, second)
                    seconds += predictions.seconds(second, problem.backward, kept)
                    compared[name] += predictions.backward(second, first)
                errors.append(abs(log(seconds / compiled)))
        taken = min(compared, key=lambda name: compared[name])
        late = log(self.compiled[taken] / min(self.compiled.values()))
        return late, sum(errors) / len(errors)


def judges(point: Point) -> bool:
    """Whether a point is of the third that judges."""
    return sha256(point.label.encode()).digest()[0] % 3 == 0


def cases_of(times: Times) -> list[Case]:
    """Traces the points of which several algorithms were compiled."""
    found: list[Case] = []
    for point, of_forms in times.items():
        target = describe(point.slice, point.mesh)
        function, operands, options = next(
            rest for form, *rest in forms(point, target, ways=False) if form == "auto"
        )
        decisions = decided(function, operands, target, options, point.grad)
        allowed = {"naive", *candidates(decisions)}
        compiled = {name: of_forms[name] for name in of_forms if set(name.split(" | ")) <= allowed}
        if len(compiled) > 1:
            found.append(Case(point, target, options, decisions[0].problem, compiled))
    return found


def standing(times: Times) -> dict[Point, dict[str, dict[str, float]]]:
    """What a run would find of the points of the grid, by kept times; `auto` is decided anew.

    Without `auto` where what it takes now was never compiled.
    """
    found: dict[Point, dict[str, dict[str, float]]] = {}
    for point in grid():
        known, target = times.get(point, {}), describe(point.slice, point.mesh)
        programs = {form: rest for form, *rest in forms(point, target, ways=False)}
        function, operands, options = programs["auto"]
        decisions = decided(function, operands, target, options, point.grad)
        taken = [decision.taken for decision in decisions]
        names = {form: [form] for form in programs} | {ONE_RING: ["bidirectional"]}
        names["auto"] = [" | ".join(taken)]
        if set(taken) == {"naive"} or not point.grad:  # named, it keeps as much
            names["auto"].append(taken[0])
        seconds = {
            form: [known[name] for name in names[form] if name in known] for form in programs
        }
        found[point] = {form: {"total": s[0]} for form, s in seconds.items() if s}
    return found


@dataclass(frozen=True)
class Judgement:
    """What choices cost: geometric means and the worst, over the best algorithm of each point."""

    points: int
    regret: float
    worst: float
    error: float

    @property
    def score(self) -> float:
        """The less, the better."""
        return log(self.regret) + WEIGHT * self.error

    def __str__(self) -> str:
        return (
            f"{self.points} points, regret {self.regret:.4f}, worst {self.worst:.2f}, "
            f"error {self.error:.1%}"
        )


def judge(cases: list[Case]) -> Judgement:
    """Returns what the numbers as they are cost at some points."""
    late, errors = zip(*(case.regret() for case in cases), strict=True)
    n = len(cases)
    return Judgement(n, exp(sum(late) / n), exp(max(late)), sum(errors) / n)


@contextmanager
def with_number(name: str, kind: str, value: float) -> Iterator[None]:
    """Has the model use another number, of one kind of chip or of all."""
    if name in SHARED:
        holders = [(m, getattr(m, name)) for m in MODULES if hasattr(m, name)]
        for module, _ in holders:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, old in holders:
                setattr(module, name, old)
    else:
        known = platform_of(kind)
        assert isinstance(known, Tpu)
        old = known.fitted
        object.__setattr__(known, "fitted", replace(old, **{name: value}))  # it is frozen
        try:
            yield
        finally:
            object.__setattr__(known, "fitted", old)


def number(name: str, kind: str) -> float:
    """A number as it is."""
    of = fitted_to(kind) if name not in SHARED else next(m for m in MODULES if hasattr(m, name))
    found: float = getattr(of, name)
    return found


def fit(cases: list[Case], tell: Callable[[str], None] = print) -> Table:
    """Fits the numbers of each chip, and then those of all chips; returns the ones that change."""
    kinds = sorted({case.problem.chip.kind for case in cases})
    rows: list[list[str]] = []
    with ExitStack() as stack:
        for kind in [*kinds, ""]:
            own = [case for case in cases if case.problem.chip.kind == kind or not kind]
            fitting = [case for case in own if not judges(case.point)]
            judging = [case for case in own if judges(case.point)]
            if not fitting or not judging:
                continue
            tell(f"{kind or 'all chips'}: {judge(fitting)}; of those that judge: {judge(judging)}")
            names = [f.name for f in fields(Fitted)] if kind else [*SHARED]
            for name in names:
                now = number(name, kind)
                best = best_value(name, kind, fitting)
                if best != now:
                    stack.enter_context(with_number(name, kind, best))
                    after = judge(judging)
                    row = [f"{kind or 'all'} {name}", f"{now:.3g}", f"{best:.3g}"]
                    rows.append([*row, f"{after.regret:.4f}", f"{after.worst:.2f}"])
            tell(f"  fitted: {judge(fitting)}; of those that judge: {judge(judging)}")
    return Table(["number", "is", "fits", "regret of those that judge", "worst"], rows)


def best_value(name: str, kind: str, cases: list[Case]) -> float:
    """The value of a number with which the choices at some points cost the least."""
    now = number(name, kind)
    best, least = now, judge(cases).score
    for value in [now * factor for factor in FACTORS] if now else [ADDED.get(name, 0.0)]:
        with with_number(name, kind, value):
            score = judge(cases).score
        if score < least - LEAST:
            best, least = value, score
    return best
