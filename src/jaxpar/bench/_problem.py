"""A seeded problem of one global shape, its float64 reference, and how far a result may be off."""

from dataclasses import dataclass
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.bench._ops import Shape, shape_text


@dataclass(frozen=True)
class Problem:
    """Operands, a cotangent, and what `out`, `dlhs` and `drhs` must be."""

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


def make_problem(shape: Shape, dtype: str) -> Problem:
    """Draws standard normal operands, alike in every process, and multiplies them in float64."""
    rows, depth, cols = shape
    rng = np.random.default_rng(0)

    def draw(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32).astype(jnp.dtype(dtype))

    lhs, rhs, cotangent = draw(rows, depth), draw(depth, cols), draw(rows, cols)
    lhs64, rhs64, cotangent64 = (x.astype(np.float64) for x in (lhs, rhs, cotangent))
    return Problem(
        shape=shape,
        lhs=lhs,
        rhs=rhs,
        cotangent=cotangent,
        out=lhs64 @ rhs64,
        dlhs=cotangent64 @ rhs64.T,
        drhs=lhs64.T @ cotangent64,
    )


def place(x: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Puts `x` where the program wants it; each process supplies its own devices only."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def error(got: jax.Array, want: np.ndarray) -> float:
    """The largest absolute error of any element on any device, in units of the rms of `want`."""
    if got.shape != want.shape:
        return float("inf")
    rms = np.sqrt(np.mean(np.square(want)))
    worst = np.float64(0.0)
    for shard in got.addressable_shards:  # copies too: each of them must be right
        difference = np.asarray(shard.data).astype(np.float64) - want[shard.index]
        worst = np.maximum(worst, np.max(np.abs(difference)) / rms)  # keeps a NaN
    if jax.process_count() > 1:
        # The verdict must be the same everywhere: a process that stops alone hangs its peers.
        worst = np.max(multihost_utils.process_allgather(np.float32(worst)))
    return float(worst)


def tolerance(dtype: str, depth: int, ring: int, platform: str) -> float:
    """What `error` may reach for a product of standard normal operands over `depth`.

    `8 (u_dtype (1 + sqrt(ring / 2)) + u_float32 sqrt(depth / 2) + 2 u_product)`, `u` being the
    relative error of one rounding. The result is rounded to the dtype, and so at most is a partial
    sum on each device; within a device float32 sums are rounded `depth` times. Partial sums grow
    as the square root of their length and their roundings are independent, which together make
    `sqrt(length / 2)`. `u_product` is for float32 operands that the default matmul precision
    rounds: to bfloat16 on TPU, to 10 bits of fraction on GPU. 8: no element of a matrix that fits
    in memory lies further than 8 standard deviations out.
    """
    product = {"cpu": 0.0, "tpu": 2.0**-9}.get(platform, 2.0**-11) if dtype == "float32" else 0.0
    result, partial = (float(jnp.finfo(name).eps) / 2 for name in (dtype, "float32"))
    return 8 * (result * (1 + sqrt(ring / 2)) + partial * sqrt(depth / 2) + 2 * product)
