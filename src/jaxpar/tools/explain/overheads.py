"""Costs besides transfers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.explain.windowed import WindowedEinsums
from jaxpar.tools.program.hlo import Instruction
from jaxpar.tools.program.sources import Line, own_line, phase_of, scopes_of, shown
from jaxpar.tools.toolkit_api import readable

Overheads = Literal[
    "copies",
    "slices",
    "layout changes",
    "recomputation",
    "HBM-bound matmuls",
    "passes over memory",
    "windowed einsums",
    "recomputed by the compiler",
]

_COPIES = {"copy", "copy-start", "copy-done"}
_SLICES = {"dynamic-slice", "dynamic-update-slice", "slice", "concatenate", "pad", "gather"}
_LAYOUTS = {"transpose", "reshape"}
# Operations in a fusion that do not count as work.
_BESIDE = {
    *("bitcast", "parameter", "constant", "tuple", "get-tuple-element", "convert", "broadcast"),
    *("add", "subtract", "multiply", "compare", "select", "clamp", "iota"),
}


@readable
@dataclass(frozen=True)
class Overhead:
    """Other time that a line costs: recomputation, slow matmuls, and passes over memory.

    Attributes:
      kind: such as `"copies"` or `"recomputation"`.
      seconds: the time in a step. For windowed einsums, all pieces and the waits between them. For
        what the compiler recomputes, all of it, from all lines.
      runs: how many instructions ran.
      line: the user's line, or None.
      chain: as in `ExposedCollective`.
      scopes: the named scopes around it.
      in_loop: whether it is in the body of a loop.
      what: the longest instruction, with the shape.

    Example:
      >>> Overhead("copies", 2e-6, 8, None, (), (), True, "copy.1, f32[16]").seconds
      2e-06
    """

    kind: Overheads
    seconds: float
    runs: int
    line: Line | None
    chain: tuple[Line, ...]
    scopes: tuple[str, ...]
    in_loop: bool
    what: str


def overheads(exposures: Exposures, cut: WindowedEinsums) -> tuple[Overhead, ...]:
    groups: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    whole: dict[Overheads, list[tuple[str, float]]] = defaultdict(list)  # one overhead each
    for event in exposures.events:
        if event.name in cut.permutes and event.kind == "wait":
            whole["windowed einsums"].append((event.name, event.seconds))
        waits_for_copy = event.kind == "wait" and event.row == "memory"
        if not waits_for_copy and event.kind != "compute":
            continue
        i = exposures.instruction(event.name)
        op_name, lines = exposures.origin(i)
        if (op_name, lines) in cut.origins:
            whole["windowed einsums"].append((event.name, event.seconds))
            continue
        if event.name in exposures.recomputed:
            whole["recomputed by the compiler"].append((event.name, event.seconds))
            continue
        kind = _kind(exposures, i, op_name)
        if waits_for_copy:  # or for what another core computes
            kind = "passes over memory" if i.called else "copies"
        if kind is not None:
            loop = exposures.loop_around(event.name)
            if loop is not None and kind == "copies":  # they copy the loop's carry
                op_name, lines = exposures.origin(exposures.instruction(loop.name))
            chain = exposures.sources.chain(lines)
            key = kind, own_line(lines), shown(chain), scopes_of(op_name), loop is not None
            groups[key].append((event.name, event.seconds))
    costs = [_as_one(exposures, kind, pieces) for kind, pieces in whole.items()]
    for (kind, line, chain, scopes, in_loop), events in groups.items():
        name, _ = max(events, key=lambda event: event[1])
        i = exposures.instruction(name)
        total = sum(seconds for _, seconds in events)
        what = f"{name}, {', '.join(map(str, i.results[:1]))}"
        costs.append(Overhead(kind, total, len(events), line, chain, scopes, in_loop, what))
    return tuple(sorted(costs, key=lambda cost: cost.seconds, reverse=True))


def _as_one(exposures: Exposures, kind: Overheads, pieces: list[tuple[str, float]]) -> Overhead:
    by_lines: dict[tuple[Line, ...], float] = defaultdict(float)
    for name, seconds in pieces:
        by_lines[exposures.origin(exposures.instruction(name))[1]] += seconds
    lines = max(by_lines, key=by_lines.__getitem__)
    name, _ = max(pieces, key=lambda piece: piece[1])
    i = exposures.instruction(name)
    return Overhead(
        kind=kind,
        seconds=sum(by_lines.values()),
        runs=len(pieces),
        line=own_line(lines),
        chain=shown(exposures.sources.chain(lines)),
        scopes=scopes_of(exposures.origin(i)[0]),
        in_loop=exposures.loop_around(name) is not None,
        what=f"{name}, {', '.join(map(str, i.results[:1]))}",
    )


def _kind(exposures: Exposures, i: Instruction, op_name: str) -> Overheads | None:
    work = exposures.homes[i.name][1].work
    if phase_of(op_name) == "recomputation":
        return "recomputation"
    if work.is_matmul:
        # In FLOPs of 16 bits.
        flops = sum(matmul.flops * max(matmul.width, 1.0) / 2 for matmul in work.matmuls)
        chip = exposures.chip
        by_memory = (work.moved - work.in_vmem) / chip.hbm > flops / chip.flops
        return "HBM-bound matmuls" if flops and by_memory else None
    inside = {part.opcode for part in (i, *i.inside)} - {"fusion"} - _BESIDE
    if inside and inside <= _COPIES:
        return "copies"
    if inside and inside <= _LAYOUTS | _COPIES:
        return "layout changes"
    if inside and inside <= _SLICES | _COPIES:
        return "slices"
    return "passes over memory" if work.moved > work.in_vmem else None
