"""Sums of gradients in 8 bits. The next step adds what rounding lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import LowBit, addition_dtype, gathered_by
from jaxpar.arguments.types import Tree
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.quantized import read_as
from jaxpar.axis.rounding import check_chance, codes_of
from jaxpar.axis.trees import as_arrays
from jaxpar.axis.vma import checks_varying, vary_over, varying_axes
from jaxpar.compiler.compat import optimization_barrier
from jaxpar.layers._reduction import spec_axes, sum_leaves

# Leaves with fewer numbers are not compressed: scales and latency would cost more.
SMALL = 2**14
COLUMNS = 256  # that share a scale, unless the wire says otherwise


@public
def reduce_compressed_gradients(
    grads: Tree,
    axis: AxisLike,
    error: Tree | None = None,
    *,
    specs: Any = None,
    key: Array | None = None,
) -> tuple[Tree, Tree]:
    """Sums gradients over devices in 8 bits, and returns rounding errors for the next step.

    Use it over slow links: between hosts, or behind a switch.

    Args:
      grads: pytree of partial sums.
      axis: mesh axes, or an `Axis` with an 8-bit `wire_dtype`. Otherwise: `"int8"`, with a scale
        for 256 numbers.
      error: this device's error of the previous step. None: the first step.
      specs: as in `reduce_gradients`.
      key: a new `jax.random` key each step, for stochastic rounding. int8 only.

    Returns:
      `(sums, error)`, pytrees like `grads`. Sums are typed as replicated under `check_vma=True`;
      leaves already typed so stay as they are. Errors have their leaf's shape, in float32 or wider,
      and vary over `axis`: keep them sharded. The sums of all steps so far, plus all devices'
      current errors, equal the exact sums.

      Integers, and leaves of fewer than 2^14 numbers, take a psum. Their error has shape [0]; that
      of floats below 32 bits has the leaf's shape.

      If a gradient is not finite, all sums that share its scale are NaN, and all errors stay as
      before. Skip such a step.

    Raises:
      TypeError: a leaf is of bools, or the wire has more than 8 bits.
      ValueError: `specs` is no prefix of `grads`, or the error does not fit.

    Cost: a device sends (n-1)/n of the leaves in 8 bits in an all-to-all, and as much to gather
    sums. Behind a switch this is half of a bfloat16 psum. Do not use it on a ring of 8 or more
    devices: there the all-to-all alone loads links more than a bfloat16 reduce-scatter. Errors take
    4 bytes a parameter, and 8 while sums are computed.

    Example:
      >>> mesh = make_mesh("dp=8")
      >>> step = jaxpar.jit(jax.shard_map(lambda g: reduce_compressed_gradients(g, "dp"),
      ...     mesh=mesh, in_specs=P("dp"), out_specs=(P(), P("dp"))))
      >>> rows = jnp.arange(8.0 * 128)[:, None] + jnp.zeros(128)
      >>> sums, error = step(rows)
      >>> float(sums[1, 0]), float(rows[1::128, 0].sum()), error.shape
      (3592.0, 3592.0, (1024, 128))

    Source: Seide et al., "1-bit stochastic gradient descent" (2014); Karimireddy et al., "Error
    feedback fixes SignSGD" (2019); Wang et al., "ZeRO++" (2023).
    """
    ring = bind(axis, takes=("wire_dtype",))
    wire = ring.wire_dtype
    low_bit = LowBit("int8", COLUMNS) if wire is None else gathered_by(wire, "float32")
    if low_bit is None:
        raise type_error(
            f"wire_dtype={wire} is none of 8 bits; choose 'int8' or a LowBit, or call "
            "reduce_gradients"
        )
    check_chance(low_bit, key)
    paths, treedef = jax.tree_util.tree_flatten_with_path(as_arrays("grads", grads, "sum"))
    errors = [None] * len(paths) if error is None else treedef.flatten_up_to(error)
    sharded = spec_axes(grads, PartitionSpec() if specs is None else specs)
    sums: list[Array] = []
    past: list[Array] = []
    lost: list[Array] = []
    for number, ((path, leaf), before, axes) in enumerate(zip(paths, errors, sharded, strict=True)):
        summed = set(ring.names) - axes
        if checks_varying(ring.names):  # JAX has already summed it over other axes
            summed &= varying_axes(leaf)
        over = ring.over(tuple(name for name in ring.names if name in summed))
        before = _before(over, path, leaf, before)
        if not before.size:
            sums.extend(sum_leaves([leaf], [set(over.names)], None, [leaf.dtype]))
            lost.append(before)
        else:
            sum_of = partial(_sum_rounded, low_bit, _key_of(key, number, ring))
            total, rest = (_sum_wide if leaf.size < SMALL else sum_of)(over, leaf, before)
            sums.append(total)
            lost.append(rest)
        past.append(before)
    past, lost = vary_over(ring.names, (past, lost))
    finite = _all_finite(sums, lost, set[str]().union(*sharded))
    lost = [jnp.where(finite, new, old) for new, old in zip(lost, past, strict=True)]
    return treedef.unflatten(sums), treedef.unflatten(lost)


def _before(ring: Ring, path: Any, leaf: Array, error: Any) -> Float[Array, "..."]:
    """Returns a leaf's last error, [0] if its sum is exact."""
    is_exact = leaf.size < SMALL and leaf.dtype.itemsize >= 4
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or is_exact or ring.size == 1:
        return jnp.zeros(0)
    if error is None:
        return jnp.zeros(leaf.shape, addition_dtype(leaf.dtype))
    error = jnp.asarray(error)
    if error.shape != leaf.shape:
        raise value_error(
            f"error{jax.tree_util.keystr(path)} has local shape {error.shape}, but the gradient "
            f"{leaf.shape}; give what the step before returned"
        )
    return error


def _all_finite(sums: list[Array], lost: list[Array], axes: set[str]) -> Bool[Array, ""]:
    floats = [x for x in sums if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = sum((jnp.any(~jnp.isfinite(x)).astype("int32") for x in floats), start=jnp.int32(0))
    # If an error does not vary over an axis, its condition must not vary over it either.
    every = frozenset[str].intersection(*map(varying_axes, lost)) if lost else frozenset[str]()
    names = tuple(sorted(axes | (varying_axes(bad) - every)))
    return (lax.psum(vary_over(names, bad), names) if names else bad) == 0


def _key_of(key: Array | None, number: int, ring: Ring) -> Array | None:
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, number), ring.index())


def _sum_wide(
    ring: Ring, leaf: Float[Array, "*shape"], before: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    wide = vary_over(ring.names, leaf.astype(before.dtype) + before)
    total = lax.psum(wide, ring.names)
    rounded = optimization_barrier(total.astype(leaf.dtype))
    # All devices know what was lost. Only one device saves it, so that it counts once.
    return rounded, jnp.where(ring.index() == 0, total - rounded.astype(total.dtype), 0)


def _sum_rounded(
    low_bit: LowBit,
    key: Array | None,
    ring: Ring,
    leaf: Float[Array, "*shape"],
    before: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Returns the 8-bit sum, and what this device lost."""
    n, dtype = ring.size, leaf.dtype
    summand = vary_over(ring.names, leaf.astype(before.dtype) + before)
    columns = low_bit.columns or summand.shape[-1]
    # [n, rows, columns]: a block for each device. The padding is zeros, which lose nothing.
    blocks = jnp.pad(summand.reshape(-1), (0, -leaf.size % (n * columns))).reshape(n, -1, columns)
    first, second = (None, None) if key is None else jax.random.split(key)
    codes = codes_of(low_bit, blocks, 2, first)
    # [n, rows, columns]: the partial sums of all devices for this device's block.
    partial_sums = jax.tree.map(lambda x: lax.all_to_all(x, ring.names, 0, 0, tiled=True), codes)
    total = jnp.sum(read_as(partial_sums, partial_sums.dtype), axis=0)
    rounded = codes_of(low_bit, total, 1, second)
    whole = read_as(jax.tree.map(lambda x: _gathered(ring, x), rounded), dtype)
    # The device that rounds a block saves what was lost, to 8 bits and to the leaf's dtype. The
    # barrier is needed: compilers may compute in more bits than the program says.
    kept = optimization_barrier(read_as(rounded, dtype)).astype(total.dtype)
    lost = (blocks - read_as(codes, codes.dtype)).at[ring.index()].add(total - kept)

    def cut(x: Array) -> Array:
        return x.reshape(-1)[: leaf.size].reshape(leaf.shape)

    return cut(whole), cut(lost)


def _gathered(ring: Ring, x: Array) -> Array:
    if checks_varying(ring.names):
        whole: Any = lax.all_gather(x, ring.names, tiled=True, to="invarying")
        return whole
    return lax.all_gather(x, ring.names, tiled=True)
