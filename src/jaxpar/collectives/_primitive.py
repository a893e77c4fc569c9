"""Gathered blocks and scattered sums: two rings, each the derivative of the other."""

from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._dtypes import addition_dtype
from jaxpar._varying import checks_varying, vary_over
from jaxpar.collectives._fold import Arrivals, gather_fold, place_block, scatter_fold
from jaxpar.collectives._plan import Plan
from jaxpar.collectives._ring import Ring


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_blocks(
    x: Array, ring: Ring, plan: Plan, dim: int, wire_dtype: DTypeLike | None
) -> Array:
    """Lays the blocks of all devices along `dim`; the wire is for the sums of its derivative."""

    def place(whole: Array | None, arrivals: Arrivals) -> Array | None:
        for block, source in arrivals:
            whole = place_block(whole, block, dim, source, ring.size)
        return whole

    return gather_fold(x, place, ring, plan, sums=lambda _: ())


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def scatter_sums(x: Array, ring: Ring, plan: Plan, dim: int, wire_dtype: DTypeLike | None) -> Array:
    """Sums `x` over the devices, each keeping its block along `dim`."""

    def take(start: Array, size: int) -> Array:
        return lax.dynamic_slice_in_dim(x, start, size, dim)

    def produce(block: Array) -> Array:
        return block.astype(addition_dtype(x.dtype))

    length = x.shape[dim] // ring.size
    return scatter_fold(produce, ring, plan, dim, length, take, wire_dtype, x.dtype)


def all_reduce(x: Array, ring: Ring, plan: Plan, dim: int, wire_dtype: DTypeLike | None) -> Array:
    """Sums `x`, whose `dim` the ring divides, over the devices, and gives each the whole."""
    if checks_varying(ring.axis_name):
        return _all_reduce_replicated(x, ring, plan, dim, wire_dtype)
    return gather_blocks(scatter_sums(x, ring, plan, dim, wire_dtype), ring, plan, dim, wire_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _all_reduce_replicated(
    x: Array, ring: Ring, plan: Plan, dim: int, wire_dtype: DTypeLike | None
) -> Array:
    block = scatter_sums(x, ring, plan, dim, wire_dtype)
    return lax.all_gather(block, ring.axis_name, axis=dim, tiled=True, to="invarying")


def _gather_fwd(x: Array, *how: Any) -> tuple[Array, None]:
    return gather_blocks(x, *how), None


def _gather_bwd(ring: Ring, plan: Plan, dim: int, wire: Any, _: None, ct: Array) -> tuple[Array]:
    return (scatter_sums(ct, ring, plan, dim, wire),)


def _scatter_fwd(x: Array, *how: Any) -> tuple[Array, None]:
    return scatter_sums(x, *how), None


def _scatter_bwd(ring: Ring, plan: Plan, dim: int, wire: Any, _: None, ct: Array) -> tuple[Array]:
    return (gather_blocks(ct, ring, plan, dim, wire),)


def _all_reduce_fwd(x: Array, *how: Any) -> tuple[Array, None]:
    return _all_reduce_replicated(x, *how), None


def _all_reduce_bwd(ring: Ring, *rest: Any) -> tuple[Array]:
    # The cotangent is replicated: each device has the gradient of its own addend already.
    return (vary_over(ring.axis_name, rest[-1]),)


gather_blocks.defvjp(_gather_fwd, _gather_bwd)
scatter_sums.defvjp(_scatter_fwd, _scatter_bwd)
_all_reduce_replicated.defvjp(_all_reduce_fwd, _all_reduce_bwd)
