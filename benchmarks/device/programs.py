"""Programs compiled for a device or a described one, predicted, and measured by the profiler."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData
from jax.sharding import NamedSharding, PartitionSpec

from device.results import Row
from jaxpar.compiler.compat import reading_profiles
from jaxpar.schedule import CompiledProgram, Target, timeline
from jaxpar.tools.timeline.timeline import program_of
from jaxpar.tools.timeline.trace_events import devices_of

CALLS, WARMING = 10, 2
POOL = 1_000_003  # numbers that are drawn; larger arrays repeat them, never in step with a tile


@dataclass(frozen=True)
class Case:
    """A program of one device, to be predicted and measured."""

    name: str
    kind: str
    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes

    def arrays(self, where: Target) -> list[Any]:
        """Operands on the device; they are made on the host, which compiles nothing."""
        sharding = NamedSharding(where.mesh, PartitionSpec())
        return [
            jax.device_put(drawn(shape, dtype, seed), sharding)
            for seed, (shape, dtype) in enumerate(self.operands)
        ]


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Standard normal numbers; integers from the whole range of 8 bits, or group sizes."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.resize(rng.integers(-128, 128, POOL), shape).astype(dtype)
    return np.resize(rng.standard_normal(POOL, np.float32).astype(jnp.dtype(dtype)), shape)


@dataclass(frozen=True)
class Compiled:
    """A case and what the compiler made of it."""

    case: Case
    program: CompiledProgram
    run: Any  # the executable; that of a described device cannot be called

    @property
    def module(self) -> str:
        """The name of the program in a trace."""
        return self.program.text.partition("\n")[0].removeprefix("HloModule ").partition(",")[0]

    def predict(self, row: Row) -> None:
        """Puts the prediction into a row, if figures of the device are known."""
        if self.program.target.chip is None:
            return
        played = timeline(self.program)
        row.predicted = played.total * 1e6
        if loops := played.loops_of_unknown_length:
            row.is_least, row.said = True, f"at least: {len(loops)} loops of a length that data say"


def compile_case(
    case: Case, where: Target, number: int, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compiles once, for the timeline and for the device: two compiles may choose otherwise."""

    def function(*args: Any) -> Any:
        return case.function(*args)

    function.__name__ = f"case_{number}"
    sharding = NamedSharding(where.mesh, PartitionSpec())
    args = [jax.ShapeDtypeStruct(*operand, sharding=sharding) for operand in case.operands]
    with jax.set_mesh(where.mesh):
        traced = jax.jit(function).trace(*args)
        run = traced.lower().compile(compiler_options=dict(options or {}) or None)
    return Compiled(case, program_of(where, traced, run, options or {}), run)


def wall(compiled: Compiled) -> float:
    """Microseconds of a call, where many follow each other; the first ones warm up."""
    arrays = compiled.case.arrays(compiled.program.target)
    for _ in range(WARMING):
        jax.block_until_ready(compiled.run(*arrays))
    start = time.perf_counter()
    for _ in range(CALLS):
        result = compiled.run(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / CALLS * 1e6


def kernels(cases: Sequence[Compiled], until: float) -> dict[str, list[float]]:
    """Microseconds of the kernels of each call, by the case's name, of those that come in time."""
    ran: list[Compiled] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for one in cases:
                if time.monotonic() > until:
                    break
                call(one)
                ran.append(one)
        return spent(Path(folder), ran)


def call(compiled: Compiled) -> None:
    """Runs a case some times, one call after the other."""
    arrays = compiled.case.arrays(compiled.program.target)
    for _ in range(WARMING + CALLS):
        jax.block_until_ready(compiled.run(*arrays))


def spent(folder: Path, cases: Sequence[Compiled]) -> dict[str, list[float]]:
    """What a trace says that the kernels of each call took, without those that warmed up."""
    (file,) = folder.rglob("*.xplane.pb")
    with reading_profiles():
        devices = devices_of(ProfileData.from_serialized_xspace(file.read_bytes()))
    by_module: dict[str, list[Any]] = defaultdict(list)
    for one in next(iter(devices.values())).ran if devices else ():
        by_module[one.module].append(one)
    found: dict[str, list[float]] = {}
    for compiled in cases:
        ran = sorted(by_module[compiled.module], key=lambda one: one.start)
        each = len(ran) // (WARMING + CALLS)  # kernels of a call
        if each:
            last = np.array([one.end - one.start for one in ran[-each * CALLS :]]) / 1e3
            found[compiled.case.name] = last.reshape(CALLS, each).sum(axis=1).tolist()
    return found


def middle(times: Sequence[float]) -> float | None:
    """The median, None of none."""
    return median(times) if times else None
