"""Compiles the modes of one operation, checks each result, then times them interleaved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar.bench import _problem
from jaxpar.bench._ops import MODES, Op, Ring, ring_size
from jaxpar.bench._problem import Problem
from jaxpar.testing import count_collectives

PHASES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Row:
    """What was measured of one op, shape, phase and mode. Bytes are of one device."""

    op: str
    shape: str
    phase: str
    mode: str
    seconds: list[float]  # one a round; round i of every mode of a case ran side by side
    ratios: list[float]  # seconds over those of naive in the same round
    temp_bytes: int | None  # None: the backend does not tell
    sent_bytes: int
    collectives: dict[str, int]
    errors: dict[str, float]  # of each result, in units of the rms of its reference
    tolerances: dict[str, float]


@dataclass(frozen=True)
class Refusal:
    """A result that was wrong, so that its case was not timed."""

    op: str
    shape: str
    phase: str
    mode: str
    errors: dict[str, float]
    tolerances: dict[str, float]

    def __str__(self) -> str:
        wrong = ", ".join(
            f"{name} is off by {error:.3g} rms (allowed {self.tolerances[name]:.3g})"
            for name, error in self.errors.items()
            if not error <= self.tolerances[name]
        )
        return f"{self.op} {self.shape} {self.phase}, {self.mode}: wrong result: {wrong}"


@dataclass(frozen=True)
class _Program:
    """One mode, compiled."""

    compiled: Callable[..., Any]
    temp_bytes: int | None
    sent_bytes: int
    collectives: dict[str, int]


def measure(
    op: Op,
    problem: Problem,
    phase: str,
    mesh: Mesh,
    ring: Ring,
    repeats: int,
    tick: Callable[[], None],
) -> tuple[list[Row], list[Refusal]]:
    """Measures one case: every mode of `op` on `problem`, in one of `PHASES`.

    Returns a row a mode; or, if any mode computes something wrong, a refusal for each that does and
    no row at all. `tick` is called once a round.
    """
    size, backward = ring_size(mesh, ring), phase == "forward+backward"
    args = [problem.lhs, problem.rhs, *([problem.cotangent] if backward else [])]
    specs = op.specs(ring)[: len(args)]
    placed = [_problem.place(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    programs = {mode: _compile(op.bind(mesh, ring, mode), placed, mesh) for mode in MODES}

    rows, depth, cols = problem.shape
    want = {"out": (problem.out, depth)}
    if backward:
        want |= {"dlhs": (problem.dlhs, cols), "drhs": (problem.drhs, rows)}
    platform = mesh.devices.flat[0].platform
    tolerances = {
        name: _problem.tolerance(str(problem.lhs.dtype), summed, size, platform)
        for name, (_, summed) in want.items()
    }
    errors: dict[str, dict[str, float]] = {}
    for mode, program in programs.items():
        got = dict(zip(want, program.compiled(*placed), strict=True))
        errors[mode] = {name: _problem.error(got[name], want[name][0]) for name in want}
    refusals = [
        Refusal(op.name, problem.label, phase, mode, errors[mode], tolerances)
        for mode in MODES
        if not all(errors[mode][name] <= tolerances[name] for name in want)
    ]
    if refusals:
        return [], refusals

    seconds = time_interleaved([p.compiled for p in programs.values()], placed, repeats, tick)
    return [
        Row(
            op=op.name,
            shape=problem.label,
            phase=phase,
            mode=mode,
            seconds=times,
            ratios=[t / naive for t, naive in zip(times, seconds[0], strict=True)],
            temp_bytes=programs[mode].temp_bytes,
            sent_bytes=programs[mode].sent_bytes,
            collectives=programs[mode].collectives,
            errors=errors[mode],
            tolerances=tolerances,
        )
        for mode, times in zip(MODES, seconds, strict=True)
    ], []


def time_interleaved(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    repeats: int,
    tick: Callable[[], None],
) -> list[list[float]]:
    """Times each function once a round, so that drift of the machine meets all of them alike.

    From round to round the order is rotated and turned around, so that no function always runs in
    the wake of the same one. The first round, which warms up, is dropped.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(-1, repeats):
        order = [(i + turn) % len(functions) for i in range(len(functions))]
        for which in order if turn % 2 else reversed(order):
            if jax.process_count() > 1:
                # Or a process would be charged for the lateness of its peers in the call before.
                multihost_utils.sync_global_devices("jaxpar bench")
            start = perf_counter()
            jax.block_until_ready(functions[which](*args))
            if turn >= 0:
                seconds[which].append(perf_counter() - start)
        tick()
    return seconds


def _compile(function: Callable[[Any, Any], Any], args: list[jax.Array], mesh: Mesh) -> _Program:
    def forward(lhs: Any, rhs: Any) -> Any:
        return (function(lhs, rhs),)

    def forward_and_backward(lhs: Any, rhs: Any, cotangent: Any) -> Any:
        out, pull_back = jax.vjp(function, lhs, rhs)
        return (out, *pull_back(cotangent))  # with out, which a model would use

    backward = len(args) == 3
    program = forward_and_backward if backward else forward
    compiled = jax.jit(program).lower(*args).compile()
    memory = compiled.memory_analysis()
    counts = count_collectives(
        function, *args[:2], grad=backward, platform=mesh.devices.flat[0].platform
    )
    return _Program(
        compiled=compiled,
        temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
        sent_bytes=counts.forward_bytes + counts.backward_bytes,
        collectives=dict(sorted((counts.forward + counts.backward).items())),
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(median), float(high)
