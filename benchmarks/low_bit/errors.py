"""Gathered matmuls and their gradients on CPU devices, and how far they are from float64."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, LowBit, all_gather_matmul, make_mesh, matmul_reduce_scatter
from low_bit.operands import Case

WIRES: dict[str, LowBit | None] = {
    "none": None,
    "int8": LowBit("int8"),
    "int8 / 128": LowBit("int8", columns=128),
    "int8 / 32": LowBit("int8", columns=32),
    "float8_e4m3fn": LowBit("float8_e4m3fn"),
}
EXACT = {"int8, exact cotangents": LowBit("int8", cotangents=False)}
SUMS = {f"{dtype}, sums": LowBit(dtype, sums=dtype) for dtype in ("int8", "float8_e4m3fn")}
MODES = ("naive", "unidirectional", "bidirectional")

Error = tuple[float, float]  # rms of the error over that of the result, and largest over largest


def error(found: Any, truth: np.ndarray) -> Error:
    """How far an array is from the truth, in float64."""
    apart = np.asarray(found, np.float64) - truth
    rms = np.sqrt(np.mean(np.square(apart)) / np.mean(np.square(truth)))
    return float(rms), float(np.abs(apart).max() / np.abs(truth).max())


def forward(case: Case, dtype: str, wire: str, size: int = 8, mode: str = "naive") -> Error:
    """The error of the product, one operand being gathered over a ring."""
    x, w = jnp.asarray(case.x, dtype), jnp.asarray(case.w, dtype)
    run = _gathered(case.gather, case.dim, wire, size, mode)
    return error(run(x, w), _exact(x) @ _exact(w))


def scattered(case: Case, dtype: str, wire: str, size: int = 8, mode: str = "naive") -> Error:
    """The error of the product, x and w being cut along what is contracted."""
    x, w = jnp.asarray(case.x, dtype), jnp.asarray(case.w, dtype)
    return error(_scattered(wire, size, mode)(x, w), _exact(x) @ _exact(w))


def gradients(
    case: Case, dtype: str, wire: str, size: int = 8, mode: str = "naive"
) -> dict[str, Error]:
    """The errors of what the cotangent gives: of a gather of x, and of a scatter of the result."""
    x, w, ct = (jnp.asarray(a, dtype) for a in (case.x, case.w, case.ct))
    truth = _exact(ct) @ _exact(w).T, _exact(x).T @ _exact(ct)
    found: dict[str, Error] = {}
    for name, run in (
        ("gather", _gathered("lhs", 0, wire, size, mode)),
        ("scatter", _scattered(wire, size, mode)),
    ):
        made = _pulled_back(run)(x, w, ct)
        for of, got, want in zip(("dx", "dw"), made, truth, strict=True):
            found[f"{name}, {of}"] = error(got, want)
    return found


def _exact(x: Array) -> np.ndarray:
    """An operand as it is in its dtype: the truth is a product of these."""
    return np.asarray(x, np.float64)


def _axis(wire: str, mode: Any) -> Axis:
    return Axis("tp", mode=mode, wire_dtype={**WIRES, **EXACT, **SUMS}[wire])


@cache
def _gathered(gather: Any, dim: int, wire: str, size: int, mode: str) -> Callable[..., Array]:
    """Rows of x meet columns of w, as under tensor parallelism, or all of w, as under FSDP."""
    axis = _axis(wire, mode)

    def local(x: Array, w: Array) -> Array:
        return all_gather_matmul(x, w, axis, gather=gather, dim=dim)

    rows, columns = P("tp"), P(None, "tp")
    of_weight = columns if gather == "lhs" or dim else rows
    out = columns if gather == "lhs" else rows
    return _on_ring(local, size, (rows, of_weight), out)


@cache
def _scattered(wire: str, size: int, mode: str) -> Callable[..., Array]:
    axis = _axis(wire, mode)

    def local(x: Array, w: Array) -> Array:
        return matmul_reduce_scatter(x, w, axis)

    return _on_ring(local, size, (P(None, "tp"), P("tp")), P("tp"))


def _on_ring(local: Any, size: int, specs: Any, out: P) -> Callable[..., Array]:
    mesh = make_mesh({"tp": size}, devices=jax.devices()[:size])
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))


@cache
def _pulled_back(run: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    @jax.jit
    def pulled_back(x: Array, w: Array, ct: Array) -> tuple[Array, Array]:
        return jax.vjp(run, x, w)[1](ct)

    return pulled_back
