"""The blocks of a `Quantized`: how many entries of a dimension share a scale."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.arguments.calls import value_error
from jaxpar.axis.vma import checks_varying, varying_axes

if TYPE_CHECKING:
    from jaxpar.axis.axis import Ring
    from jaxpar.axis.quantized import Quantized

Shape = tuple[int, ...]
Block = int | Shape | None
# Sizes in published files, in which the last block of a dimension may be smaller.
PUBLISHED = (16, 32, 64, 128, 256)


def block_sizes(argument: str, shape: Shape, scales: Shape, block: Block) -> Shape:
    """Returns the block's size along each dimension; refuses shapes that leave it open."""
    told = f"{argument} have local shape {scales} for values of {shape}: "
    if len(scales) != len(shape):
        ranks = f"{len(scales)} dimensions for {len(shape)}"
        raise value_error(f"{told}{ranks}; {_with_rank(shape, scales)}")
    readings = _readings(shape, scales, block)
    if all(len(sizes) == 1 for sizes in readings):
        return tuple(size for (size,) in readings)
    texts: list[str] = []
    for dim, (size, count, fitting) in enumerate(zip(shape, scales, readings, strict=True)):
        along = f"{count} for {size} entries along dimension {dim} are"
        if not fitting:
            of = "" if block is None else f" of {block}"
            others = " or ".join(map(str, () if block is None else _along(size, count, None)))
            also = f", but of {others}, which `block` takes" if others else ""
            raise value_error(
                f"{told}{along} no blocks{of}{also}; give one scale, one for each entry, or one "
                "for each block, of these values: in jax.shard_map, of this device's"
            )
        blocks = [f"{n} (the last of {size % n})" if size % n else f"{n}" for n in fitting]
        texts += [f"{along} blocks of {', or of '.join(blocks)}"] if len(fitting) > 1 else []
    ways = [f"Quantized(..., block={_as_block(shape, scales, of)})" for of in product(*readings)]
    raise value_error(f"{told}{', and '.join(texts)}; say which, {' or '.join(ways)}")


def _readings(shape: Shape, scales: Shape, block: Block) -> list[Shape]:
    by_dim = [*block] if isinstance(block, tuple) else [block] * len(shape)
    by_dim = ([None] * len(shape) + by_dim)[-len(shape) :]  # stacks have more dimensions
    return [_along(*sizes) for sizes in zip(shape, scales, by_dim, strict=False)]


def _along(size: int, count: int, block: int | None) -> Shape:
    if count in (1, size):
        return (max(size, 1) if count == 1 else 1,)
    if not 1 < count < size:
        return ()
    if block is not None and -(-size // block) == count:
        return (block,)
    even = () if size % count else (size // count,)
    if block is not None:  # other scales than told, but for those that were repeated
        return even if even and block % even[0] == 0 else ()
    return tuple(dict.fromkeys((*even, *(n for n in PUBLISHED if -(-size // n) == count))))


def _as_block(shape: Shape, scales: Shape, sizes: Shape) -> Block:
    """Returns what tells these sizes: one of them where that is enough."""
    wanted = [(size,) for size in sizes]
    several = (n for n, count, size in zip(sizes, scales, shape, strict=True) if 1 < count < size)
    return next((n for n in several if _readings(shape, scales, n) == wanted), sizes)


def _with_rank(shape: Shape, scales: Shape) -> str:
    ones = (1,) * len(shape)
    if len(scales) > 1:
        return "give one scale, one for each entry, or one for each block along each dimension"
    count = scales[0] if scales else 1
    if count == 1:
        return f"reshape it to {ones}: one scale for all"
    fitting = [
        f"{(*ones[:dim], count, *ones[dim + 1 :])} if they are along dimension {dim}"
        for dim, size in enumerate(shape)
        if _along(size, count, None)
    ]
    return f"reshape them to {', or '.join(fitting) or 'the rank of the values'}"


def with_equal_blocks(argument: str, x: Quantized) -> Quantized:
    """Returns the same numbers, with scales for blocks of one size along each dimension."""
    scales: Array = x.scales
    sizes = block_sizes(argument, x.shape, scales.shape, x.block)
    for dim, (size, block) in enumerate(zip(x.shape, sizes, strict=True)):
        if size % block:
            part = gcd(size, block)
            scales = jnp.repeat(scales, block // part, axis=dim)
            scales = lax.slice_in_dim(scales, 0, size // part, axis=dim)
    return replace(x, scales=scales, block=None)


def with_one_for_each(names: tuple[str, ...], x: Quantized, dim: int) -> Quantized:
    """Repeats several scales along a dimension that is gathered, a scale for each entry."""
    count = x.scales.shape[dim]
    if count in (1, x.shape[dim]):
        return x
    if not checks_varying(names):
        raise value_error(
            f"scales have local shape {x.scales.shape} for values of {x.shape}, gathered along "
            f"dimension {dim}: only types tell {count} scales of this device from those of all "
            "devices; use check_vma=True"
        )
    return replace(x, scales=jnp.repeat(x.scales, x.shape[dim] // count, axis=dim))


def with_scales_of_layers(stacked: Any) -> Any:
    """Gives each layer of a stack scales of its own, where all have the same."""

    def of_layers(x: Any) -> Any:
        if not _is_quantized(x) or x.scales.shape[:1] != (1,):
            return x
        return replace(x, scales=jnp.repeat(x.scales, x.shape[0], axis=0))

    return jax.tree.map(of_layers, stacked, is_leaf=_is_quantized)


def in_parts(tree: Any) -> Any:
    """Returns a tree whose quantized arrays are tuples, which fit those of any dtype."""

    def of(x: Any) -> Any:
        return (x.values, x.scales, x.exact) if _is_quantized(x) else x

    return jax.tree.map(of, tree, is_leaf=_is_quantized)


def are_whole(scales: Array, dim: int, ring: Ring, *, refused: bool = False) -> bool:
    """Returns whether a type says that each device has all scales along a gathered dimension.

    Those of some devices are refused, and with `refused` those of all.
    """
    if not checks_varying(ring.names):
        return False
    names = [name for name in ring.names if lax.axis_size(name) > 1]
    shared = [name for name in names if name not in varying_axes(scales)]
    if shared and scales.shape[dim] > 1 and (refused or shared != names):
        raise value_error(
            f"scales have local shape {scales.shape} and are replicated over {shared}, so that "
            f"{scales.shape[dim]} along dimension {dim} are of several devices' values, which "
            f"{ring} gathers; shard them in in_specs as the values, or place both by Layout.place"
        )
    return shared == names


def told_blocks(local: Any, whole: Any) -> Any:
    """Returns a gathered tree; tells the blocks of scales that shapes alone would not."""
    return jax.tree.map(_told, local, whole, is_leaf=_is_quantized)


def _told(x: Any, whole: Any) -> Any:
    if not _is_quantized(x) or x.scales.shape == whole.scales.shape:
        return whole
    sizes = block_sizes("scales", x.shape, x.scales.shape, x.block)
    for dim, (part, size) in enumerate(zip(x.shape, sizes, strict=True)):
        if part % size and part != whole.shape[dim]:
            raise value_error(
                f"scales have local shape {x.scales.shape} for values of {x.shape}: a device's "
                f"{part} entries along dimension {dim}, which is gathered, are no whole blocks of "
                f"{size}; shard the array by Layout.place, which repeats scales at such edges"
            )
    ways = (x.block, None, _as_block(whole.shape, whole.scales.shape, sizes))
    wanted = [(size,) for size in sizes]
    shapes = whole.shape, whole.scales.shape
    return replace(whole, block=next(b for b in ways if _readings(*shapes, b) == wanted))


def _is_quantized(x: Any) -> bool:
    return hasattr(x, "dequantized")
