"""All-gather, reduce-scatter and all-reduce, by rings or by `jax.lax`."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.arguments.calls import public, type_error
from jaxpar.arguments.dtypes import WireLike, check_wire, summed_as
from jaxpar.arguments.types import Integer, Mode, Tree
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import PARTIAL_SUMS, check_dim, check_divides
from jaxpar.axis.rounding import scales_among
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import vary_alike
from jaxpar.choose.choice import choose_way
from jaxpar.choose.problem import Problem
from jaxpar.ring import blocks
from jaxpar.ring.cuts import Block, Whole
from jaxpar.ring.ways import Way


@public
def ring_shift(x: Tree, axis: AxisLike, offset: Integer = 1) -> Tree:
    """Moves every array of a pytree by `offset` devices along a ring.

    Args:
      x: pytree of local arrays of any shape and dtype.
      axis: mesh axes, or an `Axis`.
      offset: a static integer. Device `i` receives the arrays of device `i - offset`, in logical
        order.

    Returns:
      A pytree like `x`, varying over `axis`.

    Raises:
      ValueError: the axis is unknown, or the call is outside shard_map.

    Cost: a ppermute per leaf, or nothing if the ring's size divides `offset`. The derivative is the
    shift by `-offset`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> shift = jaxpar.jit(jax.shard_map(lambda x: ring_shift(x, "tp"), mesh=mesh,
      ...     in_specs=P("tp"), out_specs=P("tp")))
      >>> shift(jnp.arange(8))
      Array([7, 0, 1, 2, 3, 4, 5, 6], dtype=int32)
    """
    ring = bind(axis, takes=())
    number: Any = None if isinstance(offset, bool) else offset
    try:
        places = operator.index(number)
    except TypeError:
        raise type_error(
            f"offset must be an integer known while tracing, got {offset!r} of type "
            f"{type(offset).__name__}; for a shift that depends on data, gather and index instead"
        ) from None
    return ring.shift(as_arrays("x", x), places)


@public
def all_gather(
    x: Tree,
    axis: AxisLike,
    *,
    dim: Integer = 0,
    tiled: bool = False,
    mode: Mode | None = None,
    wire_dtype: WireLike = None,
) -> Tree:
    """All-gathers every array of a pytree, by a ring or by `jax.lax`.

    Args:
      x: pytree of local blocks, of any shape and dtype.
      axis: mesh axes, or an `Axis`.
      dim: the dimension along which blocks lie, in logical order.
      tiled: True concatenates along `dim`; False stacks along a new dimension.
      mode: as in `Axis`. `"auto"` is bidirectional or multi-ring on TPUs, naive on GPUs, and
        otherwise unidirectional. `"naive"` and `"stationary"` are `lax.all_gather`. Chunked modes
        call it for each chunk of a block.
      wire_dtype: as in `Axis`. Dtypes of more than 8 bits apply only to the sums of the derivative.

    Returns:
      The same as `lax.all_gather(x, axis, axis=dim, tiled=tiled)`, varying over `axis`.

    Raises:
      ValueError: x is typed as replicated over `axis`, the dimension, mode or axis does not exist,
        or the call is outside shard_map.

    Cost: each of n devices sends (n-1)/n of the result, in n-1 hops. A bidirectional ring takes
    n/2, with half the bytes on each link. The derivative is `reduce_scatter`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> gather = jaxpar.jit(jax.shard_map(lambda x: all_gather(x, "tp", tiled=True),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
      >>> gather(jnp.arange(16.0)).shape
      (128,)

    Source: the ring algorithm of Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations" (2009).
    """
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype)
    x = as_arrays("x", x)
    for leaf in jax.tree.leaves(x):
        check_dim("dim", dim, leaf.shape, stacked=not tiled)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):  # the derivative is a sum
            check_wire(ring.wire_dtype, leaf.dtype)
    check_own_leaves("x", x, ring, "a block")
    leaves, treedef = jax.tree.flatten(x)
    (varied,) = vary_alike(ring.names, leaves)
    from jaxpar.axis.scale_blocks import are_whole, told_blocks

    def gather(x: Block, leaf: Block, exact: bool) -> Whole:
        along = check_dim("dim", dim, x.shape, stacked=not tiled)
        if tiled and exact and are_whole(leaf, along, ring):
            return x
        over = replace(ring, wire_dtype=summed_as(ring.wire_dtype, x.dtype)) if exact else ring
        way = _way("all-gather", over, x)
        return blocks.gather_along(way, x if tiled else jnp.expand_dims(x, along), along)

    whole = treedef.unflatten(map(gather, varied, leaves, scales_among(x)))
    return told_blocks(x, whole) if tiled else whole


@public
def reduce_scatter(
    x: Tree,
    axis: AxisLike,
    *,
    dim: Integer = 0,
    tiled: bool = False,
    mode: Mode | None = None,
    wire_dtype: WireLike = None,
) -> Tree:
    """Reduce-scatters every array of a pytree, by a ring or by `jax.lax`.

    Args:
      x: pytree of local arrays, each device's partial sums.
      axis: mesh axes, or an `Axis`.
      dim: the dimension that is cut into a block for each device, in logical order.
      tiled: True divides the dimension by n; False removes it, and its size must be n.
      mode: as in `all_gather`, with `lax.psum_scatter` in place of `lax.all_gather`.
      wire_dtype: as in `Axis`. Rings add 16-bit floats in float32, and round at every hop.

    Returns:
      The same as `lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=tiled)`, in the dtypes of
      `x`, varying over `axis`.

    Raises:
      TypeError: x is of bools.
      ValueError: as `all_gather`, or n does not divide the dimension.

    Cost: as `all_gather`, for `x` in the wire's dtype. The derivative is `all_gather`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> scatter = jaxpar.jit(jax.shard_map(lambda x: reduce_scatter(x, "tp", tiled=True),
      ...     mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
      >>> scatter(jnp.arange(64.0))[:3]  # each device sums 8 numbers
      Array([224., 232., 240.], dtype=float32)
    """
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype)
    x = as_arrays("x", x, "sum")
    for leaf in jax.tree.leaves(x):
        along = check_dim("dim", dim, leaf.shape)
        check_divides("x", leaf.shape, along, ring, exactly=not tiled)
        check_wire(ring.wire_dtype, leaf.dtype)
    check_own_leaves("x", x, ring, "a partial sum", PARTIAL_SUMS)
    (x,) = vary_alike(ring.names, x)

    def scatter(x: Whole) -> Block:
        along = check_dim("dim", dim, x.shape)
        out = blocks.scatter_along(_way("reduce-scatter", ring, x), x, along)
        return out if tiled else lax.squeeze(out, [along])

    return jax.tree.map(scatter, x)


@public
def all_reduce(
    x: Tree, axis: AxisLike, *, mode: Mode | None = None, wire_dtype: WireLike = None
) -> Tree:
    """Sums every array of a pytree over devices, by rings or by `jax.lax`.

    Args:
      x: pytree of local arrays, each device's partial sums.
      axis: mesh axes, or an `Axis`.
      mode: as in `reduce_scatter`, with `lax.psum`.
      wire_dtype: as in `reduce_scatter`, for sums only.

    Returns:
      The same as `lax.psum(x, axis)`. Under `check_vma=True` it is typed as replicated over `axis`.

    Raises:
      TypeError: x is of bools.
      ValueError: as `all_gather`.

    Cost: each of n devices sends 2 (n-1)/n of `x`, padded to a multiple of n. Under
    `check_vma=True` the gather is `lax.all_gather`, and the derivative sends nothing. Under
    `check_vma=False` the derivative is an all-reduce, as for `lax.psum`.

    Example:
      >>> mesh = make_mesh("dp=8")
      >>> total = jaxpar.jit(jax.shard_map(lambda x: all_reduce(x, "dp"),
      ...     mesh=mesh, in_specs=P("dp"), out_specs=P()))
      >>> total(jnp.arange(8.0))
      Array([28.], dtype=float32)
    """
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype)
    x = as_arrays("x", x, "sum")
    for leaf in jax.tree.leaves(x):
        check_wire(ring.wire_dtype, leaf.dtype)
    check_own_leaves("x", x, ring, "a partial sum", PARTIAL_SUMS)
    (x,) = vary_alike(ring.names, x)

    return jax.tree.map(lambda x: blocks.all_reduce(_way("all-reduce", ring, x), x), x)


def _way(collective: str, ring: Ring, x: Block | Whole) -> Way:
    what = f"{collective} of {x.dtype}"
    return choose_way(Problem("collective", ring, (x.shape,), what=what))
