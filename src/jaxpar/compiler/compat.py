"""What differs between the supported versions of jax."""

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
    """Returns unwritten memory for `count` of `block` along `dim`, not yet varying over any axis.

    Up to jax 0.11 `lax.empty` calls itself batched under any vmap, so that a custom_vjp which
    returns such an array as the gradient of an unbatched operand gets it summed over the batch:
    too large by the batch's size. There, whether `block` is batched decides.
    """
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
    """As in lax, each leaf typed as it was.

    On jax 0.10 all leaves vary over whatever one of them varies over. One that is typed so is
    given back as it came: the others still wait for it.
    """
    tied = lax.optimization_barrier(tree)
    return jax.tree.map(lambda x, y: y if jax.typeof(y) == jax.typeof(x) else x, tree, tied)


def _empty(block: Array, dim: int, count: int, dtype: Any) -> Array:
    shape = (*block.shape[:dim], block.shape[dim] * count, *block.shape[dim + 1 :])
    sharding = jax.typeof(block).sharding  # over axes that are explicit, and not manual
    return lax.empty(shape, dtype or block.dtype, out_sharding=sharding)


def all_gather(x: Array, axes: tuple[str, ...], dim: int | None = None) -> Array:
    """As in lax, joined along `dim`; None: the blocks along a new first dimension.

    Its derivative is `lax.psum_scatter`, which fails beside explicit axes: see `psum_scatter`.
    """
    if not _beside_explicit_axes():
        return lax.all_gather(x, axes, axis=dim or 0, tiled=dim is not None)
    blocks = lax.all_to_all(jnp.stack([x] * lax.axis_size(axes)), axes, 0, 0)
    if dim is None:
        return blocks
    return lax.concatenate(list(blocks), dim)


def psum_scatter(x: Array, axes: tuple[str, ...], dim: int | None = None) -> Array:
    """As in lax, cut along `dim`; None: along the first dimension, which is removed.

    Beside explicit axes of a `shard_map`, JAX cannot lower `lax.psum_scatter` (0.12), or not of an
    array that is sharded over them (0.10). An exchange and a sum send as much.
    """
    if not _beside_explicit_axes():
        return lax.psum_scatter(x, axes, scatter_dimension=dim or 0, tiled=dim is not None)
    if dim is not None:
        x = jnp.stack(jnp.split(x, lax.axis_size(axes), dim))
    return jnp.sum(lax.all_to_all(x, axes, 0, 0), axis=0, dtype=x.dtype)


def _beside_explicit_axes() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def cuts_within_matmuls() -> bool:
    """Whether the TPU compiler that came with jax reads an operand that it cuts within at speed.

    Before 0.12 (libtpu 0.0.42) all sums of 8192x14336x4096 over 8 v5p take 480 us so, and 455 where
    they are cut first.
    """
    return jax.__version_info__ >= (0, 12)


def manual_axes(params: Mapping[str, Any]) -> Collection[str]:
    """Returns the axes that a `shard_map` makes manual, from the parameters of its equation.

    Before jax 0.12 the parameter has another name.
    """
    return params["manual_axes" if "manual_axes" in params else "newly_manual_axes"]


@contextmanager
def reading_profiles() -> Generator[None, None, None]:
    """Lets `jax.profiler.ProfileData` be read where warnings are errors.

    jaxlib makes its classes when they are first used, without a module, of which Python warns; and
    an error there ends the process.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        yield
