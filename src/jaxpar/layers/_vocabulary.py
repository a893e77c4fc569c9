"""The embedding of tokens from a table whose rows are sharded: each device looks up its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar._axis import bind
from jaxpar._calls import public, value_error
from jaxpar._checks import (
    as_signed,
    check_divides,
    check_replicated,
    check_sequence_dim,
    check_sharded,
    check_tokens,
)
from jaxpar._dtypes import addition_dtype
from jaxpar._types import AxisLike, Integer
from jaxpar._varying import checks_varying, vary_alike, vary_over, varying_axes
from jaxpar.layers._regions import reduce_region


@public
def vocabulary_parallel_embedding(
    tokens: Array, table: Array, axis: AxisLike, *, sequence_dim: Integer | None = None
) -> Array:
    """Looks tokens up in a table whose rows, one for each token, are sharded.

    Args:
      tokens: local integers `[..., s]`, replicated over `axis`.
      table: local `[v/n, d]`, this device's rows, in logical order. Rows that pad the table to a
        multiple of n are never read and have zero gradients.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: here always by `lax.psum` or `lax.psum_scatter`.
      sequence_dim: None for a whole result on each device. Otherwise the dimension of the result
        along which it is scattered, such as -2: each device keeps one block.

    Returns:
      `[..., s, d]`, typed as replicated over `axis` under `check_vma=True`; or this device's block
      of it, `[..., s/n, d]`. A token outside `[0, v)`, such as -1 for padding, gives zeros and no
      gradient.

    Raises:
      TypeError: tokens that are no integers, a `sequence_dim` that is none.
      ValueError: a table of another rank, tokens that are typed as varying over `axis`, or a
        table that is not; a sequence that the axis does not divide, an unknown axis name, a call
        outside shard_map.

    Cost: an all-reduce of the result, or a reduce-scatter of it, which sends half as much, in the
    dtype of the table: each sum has one addend that is not zero, and is exact. The derivative
    all-gathers the cotangent if it was scattered, and adds its rows up in float32 or wider.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> embed = jax.jit(jax.shard_map(
      ...     lambda tokens, table: vocabulary_parallel_embedding(tokens, table, "tp"),
      ...     mesh=mesh, in_specs=(P(), P("tp")), out_specs=P()))
      >>> embed(jnp.array([2, 15, -1]), jnp.arange(16.0)[:, None]).ravel()
      Array([ 2., 15.,  0.], dtype=float32)

    Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
    model parallelism" (2019).
    """
    ring = bind(axis)
    tokens, table = jnp.asarray(tokens), jnp.asarray(table)
    check_tokens("tokens", tokens)
    check_replicated("tokens", tokens, ring)
    if table.ndim != 2:
        raise value_error(f"table must be [v/n, d], got local shape {table.shape}")
    shape = (*tokens.shape, table.shape[1])
    dim = check_sequence_dim("the result", sequence_dim, shape)
    if dim is not None:
        check_divides("the result", shape, dim, ring)
    check_sharded("table", table, "rows", ring)

    tokens, table = vary_alike(ring.names, tokens, table)
    first = ring.index() * table.shape[0]
    places = as_signed(tokens) - first.astype(as_signed(tokens).dtype)
    rows: Any = _lookup(table.shape[0], table.dtype, places, table)
    if dim is None:
        return _sum_of_one(ring.names, rows)
    if not rows.size:  # XLA does not scatter nothing
        return lax.slice_in_dim(rows, 0, shape[dim] // ring.size, axis=dim)
    return lax.psum_scatter(rows, ring.names, scatter_dimension=dim, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(rows: int, dtype: Any, places: Array, table: Array) -> Array:
    """The rows of `table` at `places`, zeros at places that it does not have."""
    found = (places >= 0) & (places < rows)
    return jnp.where(found[..., None], jnp.take(table, places, axis=0, mode="clip"), 0)


def _lookup_fwd(rows: int, dtype: Any, places: Array, table: Array) -> tuple[Array, Array]:
    return _lookup(rows, dtype, places, table), places


def _lookup_bwd(rows: int, dtype: Any, places: Array, ct: Array) -> tuple[None, Array]:
    wide = addition_dtype(dtype)
    zeros = vary_over(varying_axes(ct), jnp.zeros((rows, ct.shape[-1]), wide))
    # Places that are not there go past the end: negative ones would count from it.
    places = jnp.where(places < 0, rows, places)
    return None, zeros.at[places].add(ct.astype(wide), mode="drop").astype(dtype)


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_one(names: tuple[str, ...], x: Array) -> Array:
    """A sum over devices of which at most one has something: exact in any dtype."""
    return lax.psum(x, names)


def _sum_of_one_fwd(names: tuple[str, ...], x: Array) -> tuple[Array, None]:
    return _sum_of_one(names, x), None


def _sum_of_one_bwd(names: tuple[str, ...], _: None, ct: Array) -> tuple[Array]:
    # Without types the cotangents of all devices count, and this sum is one of many addends.
    return (vary_over(names, ct) if checks_varying(names) else reduce_region(ct, names),)


_sum_of_one.defvjp(_sum_of_one_fwd, _sum_of_one_bwd)
