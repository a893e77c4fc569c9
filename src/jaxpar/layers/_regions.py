"""Into and out of a region of parallel work: four collectives, each with its true derivative.

A tensor-parallel block is a region that begins with `copy_region` or `gather_region` and ends with
`reduce_region` or `scatter_region`. Under `check_vma=True` types say what is replicated, and the
derivative of each is the one named here. Under `check_vma=False` nothing says so: JAX
differentiates the sum over all devices, in which each device's copy of a replicated value has a
gradient of its own, and what is named here holds once these are summed (by the psum that made the
value, as its derivative, or at the boundary of `shard_map`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped

from jaxpar.arguments.calls import public
from jaxpar.arguments.checks import PARTIAL_SUMS, check_dim, check_divides
from jaxpar.arguments.dtypes import check_wire
from jaxpar.arguments.trees import as_arrays, check_own_leaves
from jaxpar.arguments.types import Integer, Tree
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.varying import checks_varying, vary_on_wire, vary_over, varying_axes
from jaxpar.compiler.compat import all_gather


@public
def copy_region(x: Tree, axis: AxisLike) -> Tree:
    """Hands a replicated value to devices that will each do a part of the work with it.

    Args:
      x: pytree of local arrays of any shape, replicated over `axis`.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: here always by `lax.psum`, in the derivative; in its `wire_dtype`, where that
        is wider than a leaf's own dtype.

    Returns:
      `x`, typed as varying over `axis`. The derivative sums over it: each device's part has used
      the value. Over an axis over which `x` varies already there is nothing to sum.

    Raises:
      TypeError: an axis whose names are no strings; a wire dtype of another kind than a leaf.
      ValueError: an unknown axis name, a call outside shard_map.

    Cost: nothing forward; backward one psum a leaf. Under `check_vma=False` nothing either way,
    and the sum is where the value came from.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> loss = jax.shard_map(lambda x, w: reduce_region(jnp.vdot(copy_region(x, "tp"), w), "tp"),
      ...     mesh=mesh, in_specs=(P(), P(None, "tp")), out_specs=P())
      >>> jaxpar.jit(jax.grad(loss))(jnp.ones((2, 1)), jnp.ones((2, 8))).ravel()
      Array([8., 8.], dtype=float32)

    Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
    model parallelism" (2019), its operator f.
    """
    ring = bind(axis)

    def copy(x: Array) -> Array:
        return vary_on_wire(ring.names, x, ring.wire_dtype).astype(x.dtype)

    return jax.tree.map(copy, as_arrays("x", x))


@public
def reduce_region(x: Tree, axis: AxisLike) -> Tree:
    """Sums the parts that the devices of an axis have computed.

    Args:
      x: pytree of local arrays of any shape; each is this device's partial sum.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: here always by `lax.psum`, in its `wire_dtype`; None: each leaf's own dtype.

    Returns:
      The sum over `axis`, in the dtype of `x`; typed as replicated under `check_vma=True`, so that
      `out_specs=P()` holds. The derivative hands each device the cotangent as it is.

    Raises:
      TypeError: booleans, which have no sum; an axis whose names are no strings; a wire dtype of
        another kind than a leaf.
      ValueError: x that is typed as replicated over `axis`; an unknown axis name, a call outside
        shard_map.

    Cost: one psum a leaf forward; nothing backward, but a psum under `check_vma=False`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> total = jaxpar.jit(jax.shard_map(lambda x: reduce_region(x, "tp"),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> total(jnp.arange(8.0))
      Array([28.], dtype=float32)

    Source: as `copy_region`, its operator g.
    """
    ring = bind(axis)
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
    """Joins the blocks of all devices, so that each goes on with the whole.

    Args:
      x: pytree of local arrays; each device's block.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: here always by `lax.all_gather`.
      dim: the dimension along which the blocks are laid, in logical order.

    Returns:
      The whole, typed as replicated over `axis` under `check_vma=True`. The derivative keeps
      each device's own block of the cotangent.

    Raises:
      TypeError: a dim that is no integer.
      ValueError: x that is typed as replicated over `axis`; a dim out of range, an unknown axis
        name, a call outside shard_map.

    Cost: one all-gather a leaf forward, (n-1)/n of the whole; nothing backward, but a
    reduce-scatter under `check_vma=False`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> whole = jaxpar.jit(jax.shard_map(lambda x: gather_region(x, "tp"),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P()))
      >>> whole(jnp.arange(8.0))
      Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)

    Source: as `copy_region`.
    """
    ring = bind(axis)
    x = as_arrays("x", x)
    dims = jax.tree.map(lambda leaf: check_dim("dim", dim, leaf.shape), x)
    check_own_leaves("x", x, ring, "a block")
    return jax.tree.map(lambda along, leaf: _joined(ring, along, leaf), dims, x)


@public
def scatter_region(x: Tree, axis: AxisLike, *, dim: Integer = -1) -> Tree:
    """Cuts a replicated value into one block a device.

    Args:
      x: pytree of local arrays, replicated over `axis`.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: here always by `lax.all_gather`, in the derivative.
      dim: the dimension to cut, in logical order.

    Returns:
      This device's block, varying over `axis`. The derivative gathers the blocks of the
      cotangent; over an axis over which `x` varies already it is this device's block in zeros.

    Raises:
      TypeError: a dim that is no integer.
      ValueError: a dimension that the axis does not divide, or is out of range; an unknown axis
        name; a call outside shard_map.

    Cost: nothing forward; backward one all-gather a leaf, (n-1)/n of the whole. Under
    `check_vma=False` nothing either way, and blocks in zeros are summed where the value came from.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> blocks = jaxpar.jit(jax.shard_map(lambda x: 2 * scatter_region(x, "tp"),
      ...     mesh=mesh, in_specs=P(), out_specs=P("tp")))
      >>> blocks(jnp.arange(8.0))
      Array([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.], dtype=float32)

    Source: as `copy_region`.
    """
    ring = bind(axis)

    def scatter(x: Array) -> Array:
        along = check_dim("dim", dim, x.shape)
        check_divides("x", x.shape, along, ring)
        if not checks_varying(ring.names):
            return _own_block(x, ring.names, along)
        if not varying_axes(x) & set(ring.names):
            return _cut(ring.names, along, x)
        for name in ring.names:  # the major axis first: blocks of blocks are in logical order
            varies = name in varying_axes(x)
            x = _own_block(x, (name,), along) if varies else _cut((name,), along, x)
        return x

    return jax.tree.map(scatter, as_arrays("x", x))


def _joined(ring: Ring, dim: int, x: Shaped[Array, "*block"]) -> Shaped[Array, "*whole"]:
    if not x.size:  # XLA does not gather nothing
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
    # Without this rule JAX would sum arrays of the whole size that are zero but for one block.
    return (_joined(Ring(names, size=lax.axis_size(names)), dim, ct),)


_cut.defvjp(_cut_fwd, _cut_bwd)


def _own_block(
    x: Shaped[Array, "*whole"], names: tuple[str, ...], dim: int
) -> Shaped[Array, "*block"]:
    ring = Ring(names, size=lax.axis_size(names))
    length = x.shape[dim] // ring.size
    return lax.dynamic_slice_in_dim(x, ring.index() * length, length, dim)
