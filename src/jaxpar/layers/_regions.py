"""Entry and exit of parallel regions: four collectives with exact derivatives.

Derivatives are documented for `check_vma=True`. Under `check_vma=False`, each device's copy of a
replicated value has its own gradient, and their sum is the documented gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped

from jaxpar.arguments.calls import public
from jaxpar.arguments.dtypes import check_wire
from jaxpar.arguments.types import Integer, Tree
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import PARTIAL_SUMS, check_dim, check_divides
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import checks_varying, vary_on_wire, vary_over, varying_axes
from jaxpar.compiler.compat import all_gather


@public
def copy_region(x: Tree, axis: AxisLike) -> Tree:
    """Types a replicated value as varying; the derivative sums the cotangents.

    Args:
      x: pytree of local arrays, replicated over `axis`.
      axis: mesh axes, or an `Axis` with a `wire_dtype`, used only if wider than a leaf's dtype.

    Returns:
      `x`, typed as varying over `axis`. The derivative is a `lax.psum` over axes over which x did
      not vary.

    Raises:
      ValueError: an axis is unknown.

    Cost: one psum a leaf backward. Under `check_vma=False`, cotangents are summed by the psum that
    made x, or at the boundary of `jax.shard_map`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> loss = jax.shard_map(lambda x, w: reduce_region(jnp.vdot(copy_region(x, "tp"), w), "tp"),
      ...     mesh=mesh, in_specs=(P(), P(None, "tp")), out_specs=P())
      >>> x, w = jnp.array([[3.0], [5.0]]), jnp.arange(16.0).reshape(2, 8)
      >>> jaxpar.jit(jax.grad(loss))(x, w).ravel()
      Array([28., 92.], dtype=float32)

    Source: Shoeybi et al., "Megatron-LM" (2019), operator f; `reduce_region` is its operator g.
    """
    ring = bind(axis, takes=("wire_dtype",))

    def copy(x: Array) -> Array:
        return vary_on_wire(ring.names, x, ring.wire_dtype).astype(x.dtype)

    return jax.tree.map(copy, as_arrays("x", x))


@public
def reduce_region(x: Tree, axis: AxisLike) -> Tree:
    """Sums partial results over devices.

    Args:
      x: pytree of partial sums.
      axis: mesh axes, or an `Axis` with a `wire_dtype` alone. Sums are always `lax.psum`s.

    Returns:
      The sum, in the dtype of x. Under `check_vma=True` it is typed as replicated, and the
      derivative passes the cotangent on unchanged.

    Raises:
      ValueError: x is typed as replicated over `axis`.

    Cost: one psum a leaf; under `check_vma=False`, also one backward, of cotangents.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> total = jaxpar.jit(jax.shard_map(lambda x: reduce_region(x, "tp"),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> total(jnp.arange(8.0))
      Array([28.], dtype=float32)
    """
    ring = bind(axis, takes=("wire_dtype",))
    x = as_arrays("x", x, "sum")
    for leaf in jax.tree.leaves(x):
        check_wire(ring.wire_dtype, leaf.dtype)
    check_own_leaves("x", x, ring, "a partial sum", PARTIAL_SUMS)

    def reduce(x: Array) -> Array:
        wide = x.astype(ring.wire(x.dtype))
        return lax.psum(vary_over(ring.names, wide), ring.names).astype(x.dtype)

    return jax.tree.map(reduce, x)


@public
def gather_region(x: Tree, axis: AxisLike, *, dim: Integer = -1) -> Tree:
    """Gathers all blocks into the full array.

    Args:
      x: pytree of local blocks.
      axis: mesh axes, without options. The gather is always a `lax.all_gather`.
      dim: the dimension to join, in logical order.

    Returns:
      The full array. Under `check_vma=True` it is typed as replicated over `axis`, and the
      derivative takes this device's block of the cotangent.

    Raises:
      ValueError: x is typed as replicated over `axis`, or `dim` is out of range.

    Cost: one all-gather a leaf forward, (n-1)/n of the full array. Under `check_vma=False`, also a
    reduce-scatter backward.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> whole = jaxpar.jit(jax.shard_map(lambda x: gather_region(x, "tp"),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> whole(jnp.arange(8.0))
      Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    ring = bind(axis, takes=())
    x = as_arrays("x", x)
    dims = jax.tree.map(lambda leaf: check_dim("dim", dim, leaf.shape), x)
    check_own_leaves("x", x, ring, "a block")
    return jax.tree.map(lambda along, leaf: _joined(ring, along, leaf), dims, x)


@public
def scatter_region(x: Tree, axis: AxisLike, *, dim: Integer = -1) -> Tree:
    """Cuts a replicated value into a block a device.

    Args:
      x: pytree of local arrays, usually replicated over `axis`.
      axis: mesh axes, without options.
      dim: the dimension to cut, in logical order.

    Returns:
      This device's block, varying over `axis`. The derivative gathers the cotangent's blocks. Along
      axes over which x varies already, it pads the block with zeros instead.

    Raises:
      ValueError: the size of `axis` does not divide the dimension, or `dim` is out of range.

    Cost: one all-gather a leaf backward, (n-1)/n of the full array; under `check_vma=False`, a sum
    of blocks padded with zeros, as in `copy_region`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> blocks = jaxpar.jit(jax.shard_map(lambda x: 2 * scatter_region(x, "tp"),
      ...     mesh=mesh, in_specs=P(), out_specs=P("tp")))
      >>> blocks(jnp.arange(8.0))
      Array([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.], dtype=float32)
    """
    ring = bind(axis, takes=())

    def scatter(x: Array) -> Array:
        along = check_dim("dim", dim, x.shape)
        check_divides("x", x.shape, along, ring)
        if not checks_varying(ring.names):
            return _own_block(x, ring.names, along)
        if not varying_axes(x) & set(ring.names):
            return _cut(ring.names, along, x)
        for name in ring.names:  # the major axis first, so that blocks are in logical order
            varies = name in varying_axes(x)
            x = _own_block(x, (name,), along) if varies else _cut((name,), along, x)
        return x

    return jax.tree.map(scatter, as_arrays("x", x))


def _joined(ring: Ring, dim: int, x: Shaped[Array, "*block"]) -> Shaped[Array, "*whole"]:
    if not x.size:  # XLA does not gather empty arrays
        return jnp.zeros((*x.shape[:dim], x.shape[dim] * ring.size, *x.shape[dim + 1 :]), x.dtype)
    if not checks_varying(ring.names):
        return all_gather(x, ring.names, dim)
    x = vary_over(ring.names, x)
    return lax.all_gather(x, ring.names, axis=dim, tiled=True, to="invarying")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cut(names: tuple[str, ...], dim: int, x: Shaped[Array, "*whole"]) -> Shaped[Array, "*block"]:
    return _own_block(vary_over(names, x), names, dim)


def _cut_fwd(
    names: tuple[str, ...], dim: int, x: Shaped[Array, "*whole"]
) -> tuple[Shaped[Array, "*block"], None]:
    return _cut(names, dim, x), None


def _cut_bwd(
    names: tuple[str, ...], dim: int, _: None, ct: Shaped[Array, "*block"]
) -> tuple[Shaped[Array, "*whole"]]:
    # Without this rule, JAX would sum full arrays that are zero except for a block.
    return (_joined(Ring(names, size=lax.axis_size(names)), dim, ct),)


_cut.defvjp(_cut_fwd, _cut_bwd)


def _own_block(
    x: Shaped[Array, "*whole"], names: tuple[str, ...], dim: int
) -> Shaped[Array, "*block"]:
    ring = Ring(names, size=lax.axis_size(names))
    length = x.shape[dim] // ring.size
    return lax.dynamic_slice_in_dim(x, ring.index() * length, length, dim)
