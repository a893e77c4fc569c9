"""The blocks of a `Quantized`: how many entries of a dimension share a scale."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jaxpar.arguments.calls import value_error

if TYPE_CHECKING:
    from jaxpar.axis.quantized import Quantized

Shape = tuple[int, ...]
# Sizes in published files, in which the last block of a dimension may be smaller.
PUBLISHED = (16, 32, 64, 128, 256)


def block_sizes(argument: str, shape: Shape, scales: Shape, block: int | None) -> Shape:
    """Returns the block's size along each dimension; refuses shapes that leave it open."""
    told = f"{argument} have local shape {scales} for values of {shape}"
    if len(scales) != len(shape):
        ranks = f"{len(scales)} dimensions for {len(shape)}"
        raise value_error(f"{told}: {ranks}; {_with_rank(shape, scales)}")
    return tuple(
        _block_size(told, dim, size, count, block)
        for dim, (size, count) in enumerate(zip(shape, scales, strict=True))
    )


def _block_size(told: str, dim: int, size: int, count: int, block: int | None) -> int:
    readings = _readings(size, count, block)
    if len(readings) == 1:
        return readings[0]
    along = f"{told}: {count} for {size} entries along dimension {dim}"
    if readings:
        even, partial = readings
        raise value_error(
            f"{along} are blocks of {even}, or of {partial}, the last of {size % partial}; say "
            f"which, Quantized(..., block={even}) or Quantized(..., block={partial})"
        )
    of = f" of {block}, which are {-(-size // block)}" if block else ""
    raise value_error(
        f"{along} are no blocks{of}; give one scale, one for each entry, or one for each block, of "
        "these values: in jax.shard_map, of this device's"
    )


def _readings(size: int, count: int, block: int | None) -> Shape:
    if count in (1, size):
        return (max(size, 1) if count == 1 else 1,)
    if not 1 < count < size:
        return ()
    even = () if size % count else (size // count,)
    if block is None:
        partial = (b for b in PUBLISHED if -(-size // b) == count)
        return tuple(dict.fromkeys((*even, *partial)))
    if -(-size // block) == count:
        return (block,)
    return even if even and block % even[0] == 0 else ()  # scales that were repeated


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
        if _readings(size, count, None)
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
