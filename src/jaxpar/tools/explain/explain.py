"""Explains waits for transfers, and tries edits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple

from jaxpar.tools.explain.causes import Rules
from jaxpar.tools.explain.compare_instructions import MeasuredInstruction, instructions_of
from jaxpar.tools.explain.edits import Edit, Edits
from jaxpar.tools.explain.explanation_text import WORTH, record_of, text_of
from jaxpar.tools.explain.exposed import ExposedCollective, Exposures
from jaxpar.tools.explain.memory import LiveArray, live_at_peak
from jaxpar.tools.explain.overheads import Overhead, overheads
from jaxpar.tools.explain.trials import Budget, Trials, TriedEdit
from jaxpar.tools.explain.verdict import CAUSES, Cause, Verdict
from jaxpar.tools.explain.windowed import WindowedEinsums, windowed_einsums
from jaxpar.tools.program.sources import Sources, counted_as_own
from jaxpar.tools.timeline.floor import Floor, program_floor
from jaxpar.tools.timeline.player import Assumptions
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline, timeline
from jaxpar.tools.toolkit_api import naming, readable, type_error, value_error

LEAST = 0.005  # of the step: a shorter wait has no finding
FASTER = 0.995  # of the step's time: an edit must make it shorter than this


@readable
@dataclass(frozen=True)
class Finding:
    """Time that a line costs, its cause and an edit.

    Attributes:
      of: the exposed collectives, a loop's copies, windowed einsums, or recomputed arrays.
      cause: a cause of the guide "Why is this step slow?"; `meaning` explains it.
      why: the evidence.
      edit: what to change.
      tried: the compiled edits, the fastest first.
      gain: predicted seconds that the edit saves; 0 if none, or untried.
      is_tried: whether `edit` was tried.
      left: edits not tried because `tries` was too small.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> explanation = explain(compile_for(lambda x: x @ x, target("v5e:2x2"), x))
      >>> explanation.findings[0].meaning
      'the compiler makes it synchronous: no work overlaps with it'
    """

    of: ExposedCollective | Overhead
    cause: Cause
    why: str
    edit: str
    tried: tuple[TriedEdit, ...]
    gain: float
    is_tried: bool
    left: int

    @property
    def meaning(self) -> str:
        """Returns the cause in a few words."""
        return CAUSES[self.cause]


@readable
@dataclass(frozen=True)
class Explanation:
    """The reasons why a step takes as long as it does, from `explain`.

    Attributes:
      program: the compiled program.
      timeline: its schedule, simulated or measured.
      floor: lower limits of the program's time.
      findings: exposed time with causes and edits, the longest first.
      overheads: other time that computes nothing new, the largest first.
      at_peak: arrays in memory at the peak, the largest first.
      utilisation: the FLOPs of the matmuls, divided by the chip's peak in the step's time.
      refused: edits that could not be compiled, and why.
      predicted: the simulated schedule if `timeline` was measured; None without the chip's figures.
      instructions: predicted and measured times, the longest first; empty if not measured.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> explanation = explain(compile_for(lambda x: x @ x, target("v5e:2x2"), x))
      >>> print(explanation.text().splitlines()[0])
      a step on v5e:2x2 (tp=4) takes ... us; it waits ... us (...) for transfers
    """

    program: CompiledProgram
    timeline: Timeline
    floor: Floor
    findings: tuple[Finding, ...]
    overheads: tuple[Overhead, ...]
    at_peak: tuple[LiveArray, ...]
    utilisation: float
    refused: dict[str, str] = field(repr=False)
    predicted: Timeline | None = field(default=None, repr=False)
    instructions: tuple[MeasuredInstruction, ...] = field(default=(), repr=False)

    def record(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text."""
        return record_of(self)

    def json(self) -> str:
        """Returns JSON, which `jaxpar explain --against` reads."""
        return json.dumps(self.record(), indent=1)

    def text(self, rows: int = 10) -> str:
        """Returns the report, with at most `rows` findings."""
        return text_of(self.record(), rows)

    def __str__(self) -> str:
        return self.text()


@readable
@naming("explain")
def explain(
    program: Any,
    *,
    tries: int | str = 8,
    findings: int = 10,
    measured: Timeline | None = None,
    assumed: Assumptions | None = None,
    own: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explains why a step takes as long as it does, line by line, and tries edits.

    The schedule is simulated as by `timeline`. Rules give each wait for a transfer a source line,
    one cause and an edit. jaxpar compiles and simulates the full program with each edit that it can
    make itself: compiler options, mesh orders, modes, overlapped forms, argument shardings, removed
    constraints and barriers, merged repeated collectives, sums in bfloat16, unrolled scans.

    Args:
      program: from `compile_for`. It need not use anything else of jaxpar.
      tries: the number of edits, or a time as in `"10min"`, after which none is begun. Edits that
        may save the most come first. With 0, causes that only a trial can show are left out, except
        for arguments whose shardings disagree.
      findings: the largest number of findings.
      measured: from `read_trace` of this program. Times are then measured; gains stay predicted.
      assumed: as for `timeline`.
      own: import names of installed packages whose lines count as yours, such as `("maxtext",)`. A
        finding names your innermost line.
      progress: called with each edit before it is compiled.

    Returns:
      An `Explanation`; `print` shows it. Waits below 0.5% of the step have no finding.

    Raises:
      ValueError: no figures of the chip and no `measured`; a `measured` that is predicted or of
        another function; an unknown package in `own`; wrong `tries` or `findings`.
      RuntimeError: as for `timeline`.

    Cost: a compilation for each edit, unless the `cache` of `compile_for` has it.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> explanation = explain(compile_for(lambda x: x @ x, target("v5e:2x2"), x), tries=0)
      >>> [(finding.of.collective, finding.of.axes) for finding in explanation.findings]
      [('all-gather', ('tp',))]
    """
    if not isinstance(program, CompiledProgram):
        raise type_error(f"program must be what compile_for returns, got {type(program).__name__}")
    try:
        budget = Budget.of(tries)
    except ValueError as wanted:
        raise value_error(f"tries {wanted}") from None
    if findings < 0:
        raise value_error(f"findings={findings} must not be negative")
    if measured is not None and measured.estimate != "measured":
        raise value_error("measured must be from read_trace, got a timeline that was predicted")
    if measured is not None:
        _require_same(program, measured)
    require_known(program, own)
    with counted_as_own(own):
        return _explained(program, budget, findings, measured, assumed, progress)


def _explained(
    program: CompiledProgram,
    budget: Budget,
    findings: int,
    measured: Timeline | None,
    assumed: Assumptions | None,
    progress: Callable[[str], None] | None,
) -> Explanation:
    can_play = measured is None or program.target.chip is not None
    predicted = timeline(program, assumed=assumed) if can_play else None
    played = measured or predicted
    assert played is not None
    exposures = Exposures(program, played)
    # A program that was not made by `compile_for` cannot be compiled again.
    can_try = program.function is not None and predicted is not None
    compared = exposures
    if predicted is not None and predicted is not played:
        compared = Exposures(program, predicted)
    floor = program_floor(program, played, exposures.chip)
    before = Before(compared)
    cut = windowed_einsums(exposures)
    rules, costs = Rules(exposures, Edits(program)), overheads(exposures, cut)
    waits = [e for e in exposures.found() if e.seconds >= LEAST * played.total][:findings]
    others = [o for o in costs if o.kind in CAUSES and (o.in_loop or o.kind != "copies")]
    others = [o for o in others if o.seconds >= LEAST * played.total]
    worth = WORTH * played.total if can_try else inf
    ruled = [_ruled(of, rules, of.seconds >= worth) for of in (*waits, *others)]
    trials = Trials(assumed, progress)
    trials.run(((ruling.of.seconds, ruling.edits) for ruling in ruled), budget)
    kept = _without_what_others_mend([_finding(ruling, trials, before) for ruling in ruled], cut)
    return Explanation(
        program=program,
        timeline=played,
        floor=floor,
        findings=tuple(sorted(kept, key=lambda f: f.of.seconds, reverse=True)[:findings]),
        overheads=costs,
        at_peak=live_at_peak(exposures),
        utilisation=floor.compute / played.total if played.total else 0.0,
        refused=trials.refused,
        predicted=None if measured is None else predicted,
        instructions=() if measured is None else instructions_of(exposures, predicted, measured),
    )


def _without_what_others_mend(findings: list[Finding], cut: WindowedEinsums) -> list[Finding]:
    """Drops windowed einsums that help, or harmful ones' waits."""
    harmful = [f for f in findings if f.cause == "windowed einsums" and (f.gain or not f.tried)]
    if not harmful:
        return [f for f in findings if f.cause != "windowed einsums"]
    return [
        f
        for f in findings
        if not (isinstance(f.of, ExposedCollective) and cut.permutes.issuperset(f.of.names))
    ]


def _require_same(program: CompiledProgram, measured: Timeline) -> None:
    schedules = program.module.schedules
    own = _functions(operation.op for schedule in schedules for operation in schedule.operations)
    ran = _functions(event.op for event in measured.events)
    if own and ran and own.isdisjoint(ran):
        raise value_error(
            f"measured is a run of {', '.join(sorted(ran))}, not of {', '.join(sorted(own))}; pass "
            "what read_trace(folder, program) returns"
        )


def require_known(program: CompiledProgram, packages: Sequence[str]) -> None:
    if isinstance(packages, str):
        raise type_error(f"own={packages!r} must be names of packages; pass own=({packages!r},)")
    sources = Sources(program.text) if packages else None
    for package in packages:
        assert sources is not None
        top = package.partition(".")[0].replace("-", "_")
        if not sources.has(package) and not (top.isidentifier() and find_spec(top)):
            there = ", ".join(sources.packages()) or "none"
            raise value_error(
                f"own={package!r} is no package that is installed; name one as it is imported. "
                f"Those that the program has lines of: {there}"
            )


def _functions(ops: Iterable[str]) -> set[str]:
    return {op.partition("/")[0] for op in ops if op.startswith("jit(")}


class Before:
    def __init__(self, exposures: Exposures) -> None:
        self.total, self._exposures = exposures.played.total, exposures

    @cached_property
    def exposed(self) -> Mapping[str, ExposedCollective]:
        return {name: exposed for exposed in self._exposures.all() for name in exposed.names}


class _Ruled(NamedTuple):
    """Verdicts up to the first that is sure, with edits."""

    of: ExposedCollective | Overhead
    verdicts: list[Verdict]
    edits: list[list[Edit]]


def _ruled(of: ExposedCollective | Overhead, rules: Rules, is_worth: bool) -> _Ruled:
    verdicts: list[Verdict] = []
    for verdict in rules.of(of):
        verdicts.append(verdict)
        if verdict.is_sure:
            break
    # Two arguments that change together propose the same edit.
    edits = [
        list({edit.text: edit for edit in verdict.edits}.values()) if is_worth else []
        for verdict in verdicts
    ]
    return _Ruled(of, verdicts, edits)


def _finding(ruled: _Ruled, trials: Trials, before: Before) -> Finding:
    # An unsure verdict needs an edit that helps, or an untried edit that repairs a mistake.
    of, left, slower = ruled.of, 0, list[TriedEdit]()
    for verdict, edits in zip(ruled.verdicts, ruled.edits, strict=True):
        tried = trials.of(edits)
        untried = [edit for edit in edits if edit.text not in trials.done]
        left += len(untried)
        slower += [edit for edit in tried if edit.seconds > FASTER * before.total]
        faster = [edit for edit in tried if edit not in slower]
        if not verdict.is_sure and isinstance(of, ExposedCollective):
            faster = [edit for edit in faster if edit.removes(before.exposed.get(of.name, of))]
        mends = [edit for edit in untried if edit.disagrees]
        known = max(mends, key=lambda edit: trials.gains[edit.text], default=None)
        if not (verdict.is_sure or faster or known):
            continue
        best = next((edit for edit in edits if faster and edit.text == faster[0].edit), known)
        return Finding(
            of=of,
            cause=verdict.cause,
            why="; ".join(filter(None, (verdict.why, best and best.disagrees))),
            edit=best.text if best else verdict.edit,
            tried=(*faster, *slower),
            gain=before.total - faster[0].seconds if faster else 0.0,
            is_tried=bool(faster) or (best is None and bool(tried)),
            left=left,
        )
    raise AssertionError("the last rule holds without a trial")
