"""The parts of a check: each fills rows, watches the clock, and says what it left out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import jaxpar
from device import cases
from device.clock import Clock
from device.programs import (
    CALLS,
    WARMING,
    Case,
    Compiled,
    call,
    compile_case,
    kernels,
    middle,
    spent,
    wall,
)
from device.results import Results, Row
from device.values import checks
from jaxpar.schedule import Target, explain, read_trace
from jaxpar.tools.cli.bench_times import make_problem, measure
from jaxpar.tools.cli.ops import OPS

COMPILING = 0.7  # of what a part has; the rest is for measuring


@dataclass
class Check:
    """One run of the check: where, for how long, and what it has found.

    Attributes:
      where: the device, or a described one that cannot run anything.
      measures: whether it can.
      known: rows of an earlier run, by name, whose measured times stand in for those of a device.
      only: of cases, those that have one of these in their names; none: all.
    """

    where: Target
    measures: bool
    clock: Clock
    results: Results
    show: Callable[[Row], None]
    known: Mapping[str, Row] = field(default_factory=dict[str, Row])
    only: tuple[str, ...] = ()

    def add(self, row: Row) -> None:
        """Keeps and shows a row."""
        if row.name in self.known:
            earlier = self.known[row.name]
            row.measured, row.wall = earlier.measured, earlier.wall
        self.results.rows.append(row)
        self.show(row)

    def leave_out(self, part: str, names: Sequence[str]) -> None:
        """Says what was left out for want of time."""
        if names:
            self.results.left_out.setdefault(part, []).extend(names)

    def wants(self, name: str) -> bool:
        """Whether a case is asked for."""
        return not self.only or any(text in name for text in self.only)


# -- values ---------------------------------------------------------------------------------------


def values(check: Check) -> None:
    """Values and gradients against NumPy: on the device, or without one on the CPU."""
    mesh = jaxpar.make_mesh("tp=1", devices=jax.devices()[:1])
    late: list[str] = []
    for one in checks():
        if not check.wants(one.name):
            continue
        if check.clock.left("values") < 0:
            late.append(one.name)
            continue
        row = Row("values", one.name, "value")
        try:
            errors = one.errors(mesh)
            wrong = {name: e for name, e in errors.items() if not e <= one.allowed}
            row.is_right = not wrong
            row.said = f"off by {max(errors.values()):.1e} of {one.allowed:.1e} allowed"
            row.said += "".join(f"; WRONG: {name} {e:.1e}" for name, e in wrong.items())
        except Exception as reason:
            row.is_right, row.said = False, said(reason)
        check.add(row)
    check.leave_out("values", late)


def matmuls_of_jaxpar(check: Check) -> None:
    """Every matmul and its gradients, by the default form and the naive one, against float64."""
    mesh = jaxpar.make_mesh("tp=1", devices=jax.devices()[:1])
    late: list[str] = []
    for dtype in ("float32", "bfloat16"):
        problem = make_problem((256, 192, 320), dtype)
        for op in OPS.values():
            name = f"{op.name} {dtype}"
            if not check.wants(name):
                continue
            if check.clock.left("matmuls of jaxpar") < 0:
                late.append(name)
                continue
            row = Row("matmuls of jaxpar", name, "value")
            try:
                how = ("forward+backward", mesh, ("tp",), ("naive", "auto"), 1, lambda: None)
                _, refused = measure(op, problem, *how)
                row.is_right = not refused
                row.said = "; ".join(map(str, refused)) or "right, gradients too"
            except Exception as reason:
                row.is_right, row.said = False, said(reason)
            check.add(row)
    check.leave_out("matmuls of jaxpar", late)


# -- options --------------------------------------------------------------------------------------


def options(check: Check) -> None:
    """Each option that jaxpar gives the compiler of this chip, and all of them."""
    known = jaxpar.compiler_options(check.where)
    case = Case("a product", "option", cases.product, (((256, 256), "float32"),) * 2)
    for number, some in enumerate({k: known[k]} for k in known):
        (name,) = some
        row = Row("options", name, "option")
        try:
            compiled = compile_case(case, check.where, number, some)
            if check.measures:
                call(compiled)
            row.said = f"accepted: {some[name]}"
        except Exception as reason:
            row.is_right, row.said = False, said(reason)
        check.add(row)


# -- steps, and a trace of each -------------------------------------------------------------------


def traces(check: Check) -> None:
    """Steps of several kernels: the trace as `read_trace` reads it, beside the prediction."""
    late: list[str] = []
    for number, case in enumerate(case for case in cases.steps() if check.wants(case.name)):
        if check.clock.left("traces") < 0:
            late.append(case.name)
            continue
        row = Row("traces", case.name, case.kind)
        try:
            compiled = compile_case(case, check.where, number, jaxpar.compiler_options(check.where))
            compiled.predict(row)
            if check.measures:
                row.wall = wall(compiled)
                _read(check, compiled, row)
        except Exception as reason:
            row.is_right, row.said = False, said(reason)
        check.add(row)
    check.leave_out("traces", late)


def _read(check: Check, compiled: Compiled, row: Row) -> None:
    """Measures the run of median length by `read_trace`, and says what it made of the trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call(compiled)
        check.results.keep(case_files(compiled, Path(folder)))
        measured = read_trace(folder, compiled.program)
        own = middle(spent(Path(folder), [compiled]).get(compiled.case.name, ()))
    row.measured = measured.total * 1e6
    names = {event.name for event in measured.events}
    row.said = f"{len(names)} instructions" + ("" if own is None else f", kernels {own:,.1f} us")
    if len(measured.runs) != CALLS + WARMING:
        row.is_right = False
        row.said += f"; read_trace found {len(measured.runs)} runs of {CALLS + WARMING}"
    if check.where.chip is not None:
        text = str(explain(compiled.program, measured=measured, tries=0))
        check.results.texts[compiled.case.name] = text


def case_files(compiled: Compiled, folder: Path) -> dict[str, bytes]:
    """The recorded trace and the text of the program, by the names of files for them."""
    name = compiled.case.name.replace(" ", "_")
    (trace,) = folder.rglob("*.xplane.pb")
    text = compiled.program.text.encode()
    return {f"{name}.xplane.pb": trace.read_bytes(), f"{name}.hlo.txt": text}


# -- single operations ----------------------------------------------------------------------------


def operations(check: Check, part: str, some: Sequence[Case]) -> None:
    """Times each case by the profiler, beside its prediction."""
    rows: dict[str, Row] = {}
    ready: list[Compiled] = []
    late: list[str] = []
    until = time.monotonic() + COMPILING * check.clock.left(part)
    for number, case in enumerate(case for case in some if check.wants(case.name)):
        if time.monotonic() > until:
            late.append(case.name)
            continue
        row = rows[case.name] = Row(part, case.name, case.kind)
        try:
            compiled = compile_case(case, check.where, number)
            compiled.predict(row)
            if check.measures:
                row.wall = wall(compiled)
            ready.append(compiled)
        except Exception as reason:
            row.is_right, row.said = False, said(reason)
    try:
        if check.measures:
            _measure(rows, ready, time.monotonic() + check.clock.left(part))
    finally:
        for row in rows.values():
            check.add(row)
        check.leave_out(part, late)


def _measure(rows: Mapping[str, Row], ready: Sequence[Compiled], until: float) -> None:
    found = kernels(ready, until)
    for compiled in ready:
        row, times = rows[compiled.case.name], found.get(compiled.case.name, ())
        row.measured = middle(times)
        spread = f"{min(times):,.1f} to {max(times):,.1f}" if times else "not in the trace"
        row.said = "; ".join(filter(None, (row.said, spread)))


def said(reason: Exception) -> str:
    """An error in one line."""
    lines = str(reason).strip().splitlines()
    return f"{type(reason).__name__}: {lines[0] if lines else ''}"[:300]


def timed(part: str, some: Callable[[], Sequence[Case]]) -> Callable[[Check], None]:
    """The part that times some cases."""

    def run(check: Check) -> Any:
        operations(check, part, some())

    return run


# With the share of the time that each has, in the order in which they run.
PARTS: dict[str, tuple[float, Callable[[Check], None]]] = {
    "values": (0.2, values),
    "options": (0.02, options),
    "memory": (0.12, timed("memory", cases.memory)),
    "traces": (0.14, traces),
    "matmuls": (0.28, timed("matmuls", cases.matmuls)),
    "experts": (0.08, timed("experts", cases.experts)),
    "matmuls of jaxpar": (0.16, matmuls_of_jaxpar),
}
