"""Compiles an operation's modes, checks results, times them interleaved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpar
from jaxpar.schedule import CompiledProgram
from jaxpar.testing import count_collectives
from jaxpar.tools.cli.ops import Op, Ring, Shape, ring_size, shape_text, with_gradients
from jaxpar.tools.timeline.target import target_of
from jaxpar.tools.timeline.timeline import program_of

PHASES = ("forward", "forward+backward")


@dataclass(frozen=True)
class BenchCase:
    shape: Shape
    lhs: np.ndarray  # [M, K] in the dtype of the run, like rhs and cotangent
    rhs: np.ndarray  # [K, N]
    cotangent: np.ndarray  # [M, N]
    out: np.ndarray  # float64[M, N], like dlhs and drhs
    dlhs: np.ndarray  # float64[M, K]
    drhs: np.ndarray  # float64[K, N]

    @property
    def label(self) -> str:
        return shape_text(self.shape)


def make_problem(shape: Shape, dtype: str) -> BenchCase:
    # The operands are equal in all processes.
    rows, depth, cols = shape
    rng = np.random.default_rng(0)

    def draw(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32).astype(jnp.dtype(dtype))

    lhs, rhs, cotangent = draw(rows, depth), draw(depth, cols), draw(rows, cols)
    lhs64, rhs64, cotangent64 = (x.astype(np.float64) for x in (lhs, rhs, cotangent))
    return BenchCase(
        shape=shape,
        lhs=lhs,
        rhs=rhs,
        cotangent=cotangent,
        out=lhs64 @ rhs64,
        dlhs=cotangent64 @ rhs64.T,
        drhs=lhs64.T @ cotangent64,
    )


def place(x: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    # Each process supplies only its own devices.
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def error(got: jax.Array, want: np.ndarray) -> float:
    """Returns the largest error, in rms of `want`."""
    if got.shape != want.shape:
        return float("inf")
    rms = np.sqrt(np.mean(np.square(want)))
    worst = np.float64(0.0)
    for shard in got.addressable_shards:  # copies too: each of them must be right
        difference = np.asarray(shard.data).astype(np.float64) - want[shard.index]
        worst = np.maximum(worst, np.max(np.abs(difference)) / rms)  # keeps a NaN
    if jax.process_count() > 1:
        # All processes must decide alike: a process that stops alone hangs its peers.
        worst = np.max(multihost_utils.process_allgather(np.float32(worst)))
    return float(worst)


def tolerance(dtype: str, depth: int, ring: int, platform: str) -> float:
    """Returns the largest allowed `error` for a matmul of normal operands over `depth`.

    `8 (u_dtype (1 + sqrt(ring / 2)) + u_float32 sqrt(depth / 2) + 2 u_product)`, where `u` is the
    relative error of a rounding. The result and at most one partial sum a device are rounded to
    the dtype; float32 sums are rounded `depth` times. Partial sums grow as the square root of their
    length, and roundings are independent: together `sqrt(length / 2)`. `u_product` rounds float32
    operands: to bfloat16 on TPU, to 10 bits of fraction on GPU. The 8: no element of a matrix in
    memory is more than 8 standard deviations away.
    """
    product = {"cpu": 0.0, "tpu": 2.0**-9}.get(platform, 2.0**-11) if dtype == "float32" else 0.0
    result, partial = (float(jnp.finfo(name).eps) / 2 for name in (dtype, "float32"))
    return 8 * (result * (1 + sqrt(ring / 2)) + partial * sqrt(depth / 2) + 2 * product)


@dataclass(frozen=True)
class Row:
    # Bytes are those of one device.
    op: str
    shape: str
    phase: str
    mode: str
    seconds: list[float]  # each round's; a round runs all modes of a case
    ratios: list[float]  # seconds over the seconds of naive in the same round
    temp_bytes: int | None  # None: the backend does not say
    sent_bytes: int
    collectives: dict[str, int]
    errors: dict[str, float]  # of each result, in units of the rms of its reference
    tolerances: dict[str, float]
    program: CompiledProgram = field(repr=False)


@dataclass(frozen=True)
class Refusal:
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
    compiled: Callable[..., Any]
    program: CompiledProgram
    temp_bytes: int | None
    sent_bytes: int
    collectives: dict[str, int]


def measure(
    op: Op,
    problem: BenchCase,
    phase: str,
    mesh: Mesh,
    ring: Ring,
    modes: Sequence[str],
    repeats: int,
    tick: Callable[[], None],
) -> tuple[list[Row], list[Refusal]]:
    """Measures `op` in a phase of `PHASES`, naive first.

    If any mode computes a wrong result, returns refusals and no row.
    """
    size, backward = ring_size(mesh, ring), phase == "forward+backward"
    args = [problem.lhs, problem.rhs, *([problem.cotangent] if backward else [])]
    specs = op.specs(ring)[: len(args)]
    placed = [place(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    programs = {mode: _compile(op.bind(mesh, ring, mode), placed, mesh) for mode in modes}

    rows, depth, cols = problem.shape
    want = {"out": (problem.out, depth)}
    if backward:
        want |= {"dlhs": (problem.dlhs, cols), "drhs": (problem.drhs, rows)}
    platform = mesh.devices.flat[0].platform
    tolerances = {
        name: tolerance(str(problem.lhs.dtype), summed, size, platform)
        for name, (_, summed) in want.items()
    }
    errors: dict[str, dict[str, float]] = {}
    for mode, program in programs.items():
        got = dict(zip(want, program.compiled(*placed), strict=True))
        errors[mode] = {name: error(got[name], want[name][0]) for name in want}
    refusals = [
        Refusal(op.name, problem.label, phase, mode, errors[mode], tolerances)
        for mode in modes
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
            program=programs[mode].program,
        )
        for mode, times in zip(modes, seconds, strict=True)
    ], []


def time_interleaved(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    repeats: int,
    tick: Callable[[], None],
    renew: Callable[[Any], Any] = lambda x: x,
) -> list[list[float]]:
    """Times each function once a round, so that drift affects all alike.

    The order is rotated and reversed. The first round warms up and is dropped.
    `renew` copies donated arguments outside of the timed part.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(-1, repeats):
        order = [(i + turn) % len(functions) for i in range(len(functions))]
        for which in order if turn % 2 else reversed(order):
            if jax.process_count() > 1:
                # Without it, a process would pay for peers that are late in the previous call.
                multihost_utils.sync_global_devices("jaxpar bench")
            copies = jax.block_until_ready([renew(x) for x in args])
            start = perf_counter()
            jax.block_until_ready(functions[which](*copies))
            if turn >= 0:
                seconds[which].append(perf_counter() - start)
        tick()
    return seconds


def _compile(function: Callable[[Any, Any], Any], args: list[jax.Array], mesh: Mesh) -> _Program:
    def forward(lhs: Any, rhs: Any) -> Any:
        return (function(lhs, rhs),)

    backward = len(args) == 3
    program = with_gradients(function) if backward else forward
    traced = jaxpar.jit(program, mesh=mesh).trace(*args)
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    counts = count_collectives(
        function, *args[:2], grad=backward, platform=mesh.devices.flat[0].platform
    )
    return _Program(
        compiled=compiled,
        program=program_of(target_of(mesh), traced, compiled, jaxpar.compiler_options(mesh)),
        temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
        sent_bytes=counts.forward_bytes + counts.backward_bytes,
        collectives=dict(sorted((counts.forward + counts.backward).items())),
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(median), float(high)
