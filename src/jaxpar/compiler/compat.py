"""Hides differences between the supported versions of jax."""

import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType


def empty_like_blocks(block: Array, dim: int, count: int, dtype: Any = None) -> Array:
    """Returns unwritten memory for `count` of `block` along `dim`."""
    # It varies over no axis yet. It is batched only if `block` is. Up to jax 0.11, `lax.empty` is
    # always batched under vmap, and the gradient of an unbatched operand would be summed over the
    # batch.
    if jax.__version_info__ >= (0, 12):
        return _empty(block, dim, count, dtype)

    @custom_vmap
    def empty(block: Array) -> Array:
        return _empty(block, dim, count, dtype)

    @empty.def_vmap
    def empty_of_batch(_: int, in_batched: list[bool], block: Array) -> tuple[Any, bool]:
        batched = in_batched[0]
        return empty_like_blocks(block, dim + batched, count, dtype), batched

    return empty(block)


def optimization_barrier(tree: Any) -> Any:
    """Applies the barrier of lax, with each leaf typed as before."""
    # On jax 0.10, a leaf that would vary over more axes skips it; others wait for it.
    tied = lax.optimization_barrier(tree)
    return jax.tree.map(lambda x, y: y if jax.typeof(y) == jax.typeof(x) else x, tree, tied)


def _empty(block: Array, dim: int, count: int, dtype: Any) -> Array:
    shape = (*block.shape[:dim], block.shape[dim] * count, *block.shape[dim + 1 :])
    sharding = jax.typeof(block).sharding  # over explicit axes that are not manual
    return lax.empty(shape, dtype or block.dtype, out_sharding=sharding)


def all_gather(x: Array, axes: tuple[str, ...], dim: int | None = None) -> Array:
    """Gathers like lax, joined along `dim`; None: along a new first dimension."""
    # With explicit axes, its derivative `lax.psum_scatter` fails: see `psum_scatter`.
    if not _beside_explicit_axes():
        return lax.all_gather(x, axes, axis=dim or 0, tiled=dim is not None)
    blocks = lax.all_to_all(jnp.stack([x] * lax.axis_size(axes)), axes, 0, 0)
    if dim is None:
        return blocks
    return lax.concatenate(list(blocks), dim)


def psum_scatter(x: Array, axes: tuple[str, ...], dim: int | None = None) -> Array:
    """Scatters like lax, cut along `dim`; None: along the first dimension, which is removed."""
    # With explicit axes, JAX cannot lower `lax.psum_scatter` (0.12), or not of an array sharded
    # over them (0.10). An exchange and a sum send as much.
    if not _beside_explicit_axes():
        return lax.psum_scatter(x, axes, scatter_dimension=dim or 0, tiled=dim is not None)
    if dim is not None:
        x = jnp.stack(jnp.split(x, lax.axis_size(axes), dim))
    return jnp.sum(lax.all_to_all(x, axes, 0, 0), axis=0, dtype=x.dtype)


def _beside_explicit_axes() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def cuts_within_matmuls() -> bool:
    """Returns whether the TPU compiler cuts operands within matmuls at full speed."""
    # Before 0.12 (libtpu 0.0.42), all sums of 8192x14336x4096 over 8 v5p take 480 us so, and 455 us
    # if they are cut first.
    return jax.__version_info__ >= (0, 12)


def manual_axes(params: Mapping[str, Any]) -> Collection[str]:
    # Before jax 0.12 the parameter has another name.
    return params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]


@contextmanager
def reading_profiles() -> Generator[None, None, None]:
    """Allows `jax.profiler.ProfileData` where warnings are errors."""
    # jaxlib's classes have no module. Python's warning would end the process.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        yield
