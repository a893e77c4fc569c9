"""Scales of 8-bit blocks: all devices' scales are gathered before the values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.arguments.types import Leaf
from jaxpar.axis.quantized import Quantized, read_as, spread
from jaxpar.compiler.compat import optimization_barrier


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["whole"],
    meta_fields=["dim", "length", "apart", "dtype"],
)
@dataclass(frozen=True)
class Scales:
    """The scales of all devices' blocks, gathered along `dim`."""

    whole: Leaf
    dim: int
    length: int  # of a block's values along it
    apart: bool  # whether each position has a scale, not only each block
    dtype: Any  # of the dequantized values

    def at(self, positions: Any) -> Array:
        if self.apart:
            return positions.cut(self.whole, self.dim)
        return positions.of_blocks(self.whole, self.dim, self.length)

    def read(self, values: Array, scales: Array) -> Array:
        return read_as(Quantized(values, scales), self.dtype)


def gather_scales(
    names: tuple[str, ...], blocks: Sequence[Quantized], dim: int
) -> tuple[list[Array], list[Scales]]:
    """Gathers scales of blocks that will be gathered; returns values and scales."""
    # Scales arrive before values leave. Otherwise they, and the first matmul, wait for the links.
    if any(x.scales.shape[dim] not in (1, x.shape[dim]) for x in blocks):
        from jaxpar.axis.scale_blocks import with_one_for_each

        blocks = [with_one_for_each(names, x, dim) for x in blocks]
    if any(any(jax.typeof(x.scales).sharding.spec) for x in blocks):
        # Explicit axes shard another dimension: flat rows would be resharded.
        wholes = [lax.all_gather(x.scales, names, axis=dim, tiled=True) for x in blocks]
    else:
        flat = [x.scales.reshape(-1) for x in blocks]
        rows = lax.all_gather(lax.concatenate(flat, 0) if len(flat) > 1 else flat[0], names)
        parts = lax.split(rows, [x.size for x in flat], 1)
        wholes = [_joined_along(dim, y, x.scales.shape) for x, y in zip(blocks, parts, strict=True)]
    values, wholes = optimization_barrier(([x.values for x in blocks], wholes))
    return values, [
        Scales(whole, dim, x.shape[dim], x.scales.shape[dim] == x.shape[dim], x.dtype)
        for x, whole in zip(blocks, wholes, strict=True)
    ]


def _joined_along(dim: int, rows: Array, shape: tuple[int, ...]) -> Array:
    apart = jnp.moveaxis(rows.reshape(-1, *shape), 0, dim)
    return apart.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def join(blocks: Sequence[Quantized], dim: int) -> Quantized:
    def of_each(x: Quantized) -> Array:
        shape = (*x.scales.shape[:dim], x.shape[dim], *x.scales.shape[dim + 1 :])
        return jnp.broadcast_to(spread(x.scales, shape), shape)

    scales = [of_each(x) for x in blocks]
    values = lax.concatenate([x.values for x in blocks], dim)
    return replace(blocks[0], values=values, scales=lax.concatenate(scales, dim))
