"""Explaining a program: what it exposes, why, and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple

from jaxpar.tools.explain.causes import Rules
from jaxpar.tools.explain.edits import Edit, Edits
from jaxpar.tools.explain.explained import WORTH, record_of, text_of
from jaxpar.tools.explain.exposed import ExposedCollective, Exposures
from jaxpar.tools.explain.overheads import Overhead, overheads
from jaxpar.tools.explain.trials import Budget, Trials, TriedEdit
from jaxpar.tools.explain.verdict import CAUSES, Cause, Verdict
from jaxpar.tools.explain.windowed import WindowedEinsums, windowed_einsums
from jaxpar.tools.private_names import naming, readable, type_error, value_error
from jaxpar.tools.program.memory import LiveArray, live_at_peak
from jaxpar.tools.program.sources import Sources, counted_as_own
from jaxpar.tools.timeline.floor import Floor, program_floor
from jaxpar.tools.timeline.measured_instructions import MeasuredInstruction, instructions_of
from jaxpar.tools.timeline.player import Assumptions
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline, timeline

LEAST = 0.005  # of the step: what is exposed for less is not worth a line
FASTER = 0.995  # of the step's time: an edit that gains less gains nothing


@readable
@dataclass(frozen=True)
class Finding:
    """Time of one line that could be saved, its cause and what to do about it.

    Attributes:
      of: the collectives that are exposed, the copies of a loop, or windowed einsums.
      cause: one of the closed list.
      why: the evidence.
      edit: what to change.
      tried: what edits bring that could be tried by themselves, the fastest first.
      gain: seconds that the step is faster with the edit, by the model; 0 if it was not tried, or
        gains nothing.
      is_tried: whether the edit that is named was tried. If not, `gain` is 0 and says nothing.
      left: how many edits could have been tried, had `tries` been more.

    Example:
      >>> from jaxpar.schedule import compile_for, explain, target
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P(None, "tp"))
      >>> found = explain(compile_for(lambda x, w: jnp.sin(x @ w), target("v5e:2x2"), x, w))
      >>> found.findings[0].meaning
      'the compiler makes it synchronous: nothing runs beside it'
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
        """The cause in a few words."""
        return CAUSES[self.cause]


@readable
@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does on a described chip; made by `explain`.

    Attributes:
      program: as it was compiled.
      timeline: its schedule under the model of the chip, or as it was measured.
      floor: what no schedule of it beats.
      findings: what is exposed, with causes and edits, the longest first.
      overheads: what else costs time and computes nothing new, the largest first.
      at_peak: the arrays in memory where the program needs the most of it, the largest first.
      utilisation: the FLOPs of its matmuls over what the chip could do in its time.
      refused: edits that could not be tried, and why.
      predicted: the schedule under the model where `timeline` was measured; None of a chip that
        jaxpar has no figures of.
      instructions: what was predicted and measured of each, the longest first; empty where
        nothing was measured.

    Example:
      >>> from jaxpar.schedule import compile_for, explain, target
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P(None, "tp"))
      >>> found = explain(compile_for(lambda x, w: jnp.sin(x @ w), target("v5e:2x2"), x, w))
      >>> print(found.text().splitlines()[0])
      a step on v5e:2x2 (tp=4) takes ... us; ... us (...) of that it waits for transfers
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
        """Returns everything as plain numbers and text, as `json` writes it."""
        return record_of(self)

    def json(self) -> str:
        """Returns everything as JSON, which `jaxpar explain --against` reads."""
        return json.dumps(self.record(), indent=1)

    def text(self, rows: int = 10) -> str:
        """Returns the report as text, with at most `rows` findings, overheads and arrays."""
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
    """Says why a step takes as long as it does, line by line, and which edits make it faster.

    The program's schedule is played on a model of its chip, as by `timeline`. Each wait for a
    transfer is traced to the line it comes from, gets one cause out of a closed list
    (see `Finding.meaning`), decided by rules on the schedule, and an edit. Edits that can be
    tried by themselves are: compiler options, the order of the mesh, modes of jaxpar's collectives
    and overlapped forms in place of plain ones, shardings of arguments, and a program without one
    of its sharding constraints or barriers, with repeated collectives run once, sums in bfloat16,
    or scans unrolled. For each of them the whole program is compiled and played again.

    Args:
      program: from `compile_for`. It need not use anything else of jaxpar.
      tries: the number of edits to try, or a time as in `"10min"`, after which none is begun.
        Edits that may mend the most seconds come first. 0 tries none. Causes that need a trial are
        then left out, but for arguments whose dimensions disagree.
      findings: how many findings there may be.
      measured: from `read_trace` of this program: then findings, shares and times are those of the
        measurement. Gains stay predicted: the predicted step with the edit is compared to the
        predicted step without it.
      assumed: as for `timeline`.
      own: installed packages whose lines count as the program's own, by the names that are
        imported, such as `("maxtext",)`. The line of a finding is the innermost of them; without,
        it is the innermost that is not installed. Its chain shows frameworks either way.
      progress: called with each edit before it is compiled.

    Returns:
      An `Explanation`; `print` shows it. Without findings no transfer is to blame.

    Raises:
      ValueError: a chip that jaxpar has no figures of, and nothing measured; a negative number, or
        `tries` that are neither a number nor minutes; a `measured` that was not, or is of another
        function; a package in `own` that is not there.
      TypeError: `program` is no `CompiledProgram`, or `own` is one text.
      RuntimeError: the prediction is below the program's floor, which is a fault of jaxpar; the
        message names a file with the program's text, for a report.

    Cost: an edit takes as long as the program took to compile. With the `cache` of `compile_for`,
    one that was tried before takes no compiling: the next call with as many minutes tries others.

    Example:
      >>> from jaxpar.schedule import compile_for, explain, target
      >>> v5e = target("v5e:2x2")
      >>> x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=P(None, "tp"))
      >>> def layer(x, w):
      ...     return lax.all_gather(x, "tp", tiled=True) @ w
      >>> step = jax.shard_map(layer, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
      >>> found = explain(compile_for(step, v5e, x, w), tries=0)
      >>> [(finding.of.collective, finding.of.axes) for finding in found.findings]
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
    """What `explain` returns."""
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
    others = [
        o for o in costs if o.kind == "windowed einsums" or (o.in_loop and o.kind == "copies")
    ]
    others = [o for o in others if o.seconds >= LEAST * played.total]
    worth = WORTH * played.total if can_try else inf
    ruled = [_ruled(of, rules, of.seconds >= worth) for of in (*waits, *others)]
    trials = Trials(assumed, progress)
    trials.run(((one.of.seconds, one.edits) for one in ruled), budget)
    found = _without_what_others_mend([_finding(one, trials, before) for one in ruled], cut)
    return Explanation(
        program=program,
        timeline=played,
        floor=floor,
        findings=tuple(sorted(found, key=lambda f: f.of.seconds, reverse=True)[:findings]),
        overheads=costs,
        at_peak=live_at_peak(exposures),
        utilisation=floor.compute / played.total if played.total else 0.0,
        refused=trials.refused,
        predicted=None if measured is None else predicted,
        instructions=() if measured is None else instructions_of(exposures, predicted, measured),
    )


def _without_what_others_mend(found: list[Finding], cut: WindowedEinsums) -> list[Finding]:
    """Drops waits of windowed einsums, which are findings themselves; or those, if they do well."""
    harmful = [f for f in found if f.cause == "windowed einsums" and (f.gain or not f.tried)]
    if not harmful:
        return [f for f in found if f.cause != "windowed einsums"]
    return [
        f
        for f in found
        if not (isinstance(f.of, ExposedCollective) and cut.permutes.issuperset(f.of.names))
    ]


def _require_same(program: CompiledProgram, measured: Timeline) -> None:
    """Refuses a run of another function: its instructions may have the same names."""
    schedules = program.module.schedules
    own = _functions(one.op for schedule in schedules for one in schedule.operations)
    ran = _functions(event.op for event in measured.events)
    if own and ran and own.isdisjoint(ran):
        raise value_error(
            f"measured is a run of {', '.join(sorted(ran))}, not of {', '.join(sorted(own))}; pass "
            "what read_trace(folder, program) returns"
        )


def require_known(program: CompiledProgram, own: Sequence[str]) -> None:
    """Refuses packages that are neither lines of the program nor installed: a slip of the pen."""
    if isinstance(own, str):
        raise type_error(f"own={own!r} must be names of packages; pass own=({own!r},)")
    sources = Sources(program.text) if own else None
    for package in own:
        assert sources is not None
        top = package.partition(".")[0].replace("-", "_")
        if not sources.has(package) and not (top.isidentifier() and find_spec(top)):
            there = ", ".join(sources.packages()) or "none"
            raise value_error(
                f"own={package!r} is no package that is installed; name one as it is imported. "
                f"Those that the program has lines of: {there}"
            )


def _functions(ops: Iterable[str]) -> set[str]:
    """The jitted functions that operations are named after."""
    return {op.partition("/")[0] for op in ops if op.startswith("jit(")}


class Before:
    """What edits are compared with: the step without them, as it is predicted."""

    def __init__(self, exposures: Exposures) -> None:
        self.total, self._exposures = exposures.played.total, exposures

    @cached_property
    def exposed(self) -> Mapping[str, ExposedCollective]:
        """What it exposes, by the names of the instructions."""
        return {name: one for one in self._exposures.all() for name in one.names}


class _Ruled(NamedTuple):
    """What costs time, what rules say of it up to the first that is sure, and their edits."""

    of: ExposedCollective | Overhead
    verdicts: list[Verdict]
    edits: list[list[Edit]]


def _ruled(of: ExposedCollective | Overhead, rules: Rules, is_worth: bool) -> _Ruled:
    verdicts: list[Verdict] = []
    for verdict in rules.of(of):
        verdicts.append(verdict)
        if verdict.is_sure:
            break
    # Edits of two arguments that change together are the same.
    edits = [
        list({edit.text: edit for edit in verdict.edits}.values()) if is_worth else []
        for verdict in verdicts
    ]
    return _Ruled(of, verdicts, edits)


def _finding(ruled: _Ruled, trials: Trials, before: Before) -> Finding:
    """The first verdict that holds; one that is not sure needs an edit that makes it so.

    Or one that was not tried, for want of tries, and that mends what is at odds as it stands.
    """
    of, left, slower = ruled.of, 0, list[TriedEdit]()
    for verdict, edits in zip(ruled.verdicts, ruled.edits, strict=True):
        tried = trials.of(edits)
        untried = [edit for edit in edits if edit.text not in trials.done]
        left += len(untried)
        slower += [one for one in tried if one.seconds > FASTER * before.total]
        faster = [one for one in tried if one not in slower]
        if not verdict.is_sure and isinstance(of, ExposedCollective):
            faster = [one for one in faster if one.removes(before.exposed.get(of.name, of))]
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
