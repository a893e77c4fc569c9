"""Public measurements of single operations, and equal programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.tools.timeline.target import parts_of, target
from jaxpar.tools.timeline.timeline import CompiledProgram, compile_for
from jaxpar.tools.toolkit_api import platforms

# Functions of one device, of local operands.
_POINTWISE: dict[str, Callable[..., Any]] = {
    "copy": jnp.copy,
    "scale": lambda x: 1.0001 * x + 1,
    "add": jnp.add,
    "exp": jnp.exp,
    "sum": lambda x: jnp.sum(x, dtype=jnp.float32),
}
# Functions of all devices of the axes together, each with a local operand.
_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, axes, n: lax.all_gather(x, axes, tiled=True),
    "psum": lambda x, axes, n: lax.psum(x, axes),
    "reduce_scatter": lambda x, axes, n: lax.psum_scatter(x, axes, tiled=True),
    "all_to_all": lambda x, axes, n: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "ppermute": lambda x, axes, n: lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)]),
}


@dataclass(frozen=True)
class Measurement:
    name: str
    kind: str  # matmul, memory, gather, sum (between slices), permute, all-to-all, or two of them
    target: str  # for `jaxpar.schedule.target`
    mesh: str
    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # of a device's operand; for a matmul m, k, n on a device
    dtype: str
    seconds: float
    source: str
    options: dict[str, str] = field(default_factory=dict[str, str])
    times: int = 1  # how often the program did it, each time with the last result

    @property
    def chip(self) -> str:
        return parts_of(self.target)[1]

    @property
    def kind_of_chip(self) -> str:
        return next((known.kind for known in platforms() if self.chip in known.names), self.chip)

    @property
    def group(self) -> int:
        sizes = dict(part.split("=") for part in self.mesh.split(","))
        return prod(int(sizes[axis]) for axis in self.axes)

    @property
    def flops(self) -> float:
        return 2.0 * prod(self.shape) if "matmul" in self.op else 0.0

    @property
    def sent_bytes(self) -> float:
        m, k, n = self.shape if "matmul" in self.op else (prod(self.shape), 1, 1)
        share = (self.group - 1) / self.group
        match self.op:
            case "all_gather_matmul":
                travels = m * k * share
            case "gathered_rhs_matmul":
                travels = k * n * share
            case "matmul_reduce_scatter":
                travels = m * n * share
            case "all_gather":
                travels = m * (self.group - 1)
            case "ppermute":
                travels = m
            case _:
                travels = m * share * (2 if self.op == "psum" else 1)
        return float(travels * jnp.dtype(self.dtype).itemsize)

    @property
    def is_held_out(self) -> bool:
        """Returns whether nothing was fitted to it."""
        return sha256(self.name.encode()).digest()[0] % 2 == 1

    def compile(self, cache: str | Path | None = None) -> CompiledProgram:
        described = target(self.target, self.mesh)
        devices = described.mesh.size
        n = prod(described.mesh.shape[axis] for axis in self.axes)
        function, operands, shared = _local(self, n)
        function = function if self.times == 1 else _repeated(function, self.times)
        spec = PartitionSpec() if shared else PartitionSpec(described.mesh.axis_names)
        mapped = jax.shard_map(
            function, in_specs=(spec,) * len(operands), out_specs=spec, check_vma=False
        )
        args = [
            jax.ShapeDtypeStruct(
                shape if shared else (rows * devices, *rest), self.dtype, sharding=spec
            )
            for shape in operands
            for rows, *rest in [shape]
        ]
        return compile_for(mapped, described, *args, compiler_options=self.options, cache=cache)


def _local(measured: Measurement, n: int) -> tuple[Callable[..., Any], list[tuple[int, ...]], bool]:
    """Returns function, operands' shapes, and whether devices share."""
    axes = measured.axes
    if measured.op in _POINTWISE:
        operands = [_matrix(prod(measured.shape), 1)] * (2 if measured.op == "add" else 1)
        return _POINTWISE[measured.op], operands, True
    if measured.op in _COLLECTIVES:
        rows = n if measured.op in ("all_to_all", "reduce_scatter") else 1
        shape = measured.shape if len(measured.shape) > 1 else _matrix(prod(measured.shape), rows)
        return lambda x: _COLLECTIVES[measured.op](x, axes, n), [shape], False
    m, k, columns = measured.shape
    match measured.op:
        case "matmul":
            return jnp.matmul, [(m, k), (k, columns)], True
        case "all_gather_matmul":
            gathered = [(m // n, k), (k, columns)]
            return lambda x, w: _gathered(x, axes) @ w, gathered, False
        case "gathered_rhs_matmul":
            gathered = [(m, k), (k // n, columns)]
            return lambda x, w: x @ _gathered(w, axes), gathered, False
        case _:
            scatter = _COLLECTIVES["reduce_scatter"]
            return lambda x, w: scatter(x @ w, axes, n), [(m, k), (k, columns)], False


def _repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    # Without the barrier the compiler would compute one number.
    def trip(number: Any, operands: tuple[Any, ...]) -> Any:
        first, *others = operands
        array = lax.optimization_barrier(function(first + number.astype(first.dtype), *others))
        return array[(0,) * array.ndim].astype(jnp.float32)

    def run(*operands: Any) -> Any:
        return lax.fori_loop(
            0, times, lambda _, number: trip(number, operands), jnp.zeros((), jnp.float32)
        )

    return run


def _gathered(x: Any, axes: tuple[str, ...]) -> Any:
    return lax.all_gather(x, axes, tiled=True)


def _matrix(size: int, rows: int) -> tuple[int, ...]:
    if size % (1024 * rows) == 0:
        return size // 1024, 1024
    return (rows, max(1, size // rows)) if rows > 1 else (size,)


@cache
def measurements() -> tuple[Measurement, ...]:
    table = json.loads(files("jaxpar.tools.accuracy").joinpath("measurements.json").read_text())
    return tuple(
        Measurement(
            name=row["name"],
            kind=row["kind"],
            target=row["target"],
            mesh=row["mesh"],
            op=row["op"],
            axes=tuple(row["axes"]),
            shape=tuple(row["shape"]),
            dtype=row["dtype"],
            seconds=row["microseconds"] * 1e-6,
            source=table["sources"][row["source"]],
            options=row.get("options", {}),
            times=row.get("times", 1),
        )
        for row in table["measurements"]
    )
