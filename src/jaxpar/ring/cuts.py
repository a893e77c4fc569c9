"""Positions of blocks in the full array: how they are cut out and placed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jaxtyping import Shaped

from jaxpar.axis.vma import vary_over, varying_axes
from jaxpar.compiler.compat import empty_like_blocks

Block = Shaped[Array, "*block"]  # a device's part of an array
Whole = Shaped[Array, "*whole"]  # the full array, of all blocks


@dataclass(frozen=True)
class Span:
    """Consecutive positions: `size` from `start` on, an integer or an int32[]."""

    start: Any
    size: int

    def cut(self, x: Whole, dim: int) -> Block:
        if self.size == x.shape[dim]:
            return x
        return _cut_at(x, self.start, self.size, dim)

    def of_blocks(self, x: Whole, dim: int, length: int) -> Block:
        """Returns these positions' entry, where `x` has an entry for each block."""
        if self.size == x.shape[dim] * length:
            return x
        is_known = isinstance(self.start, int)
        block = self.start // length if is_known else lax.div(self.start, np.int32(length))
        return _cut_at(x, block, 1, dim)

    @property
    def blocks(self) -> int:
        """Returns the number of separate blocks with these positions."""
        return 1

    def place(self, whole: Whole | None, part: Block, dim: int, length: int) -> Whole:
        """Writes `part` at these positions; None: into unwritten memory."""
        if part.shape[dim] == length:
            return part
        into = unwritten(whole, part, dim, length)
        # No position is negative. Otherwise JAX adds three equations for each to check it.
        return lax.dynamic_update_slice_in_dim(
            into, part, self.start, dim, allow_negative_indices=False
        )


def _cut_at(x: Whole, start: Any, size: int, dim: int) -> Block:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def split_dim(x: Array, dim: int, parts: int) -> Array:
    return x.reshape((*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]))


def join_dims(x: Array, dim: int) -> Array:
    return x.reshape((*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def unwritten(whole: Whole | None, part: Block, dim: int, length: int) -> Whole:
    """Returns `whole`, or memory that later steps write completely."""
    if whole is None:
        # Not zeros: every step overwrites them, and filling is another pass over the result.
        return empty_result(part, dim, length)
    return vary_over(varying_axes(part), whole)


def cut_out(tree: Any, start: int, size: int, dim: int) -> Any:
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + size, axis=dim), tree)


def even_cuts(length: int, most: int) -> list[tuple[int, int]]:
    """Returns equal parts, as many as possible up to `most`."""
    parts = next(parts for parts in range(most, 0, -1) if length % parts == 0)
    return [(number * (length // parts), length // parts) for number in range(parts)]


def empty_result(piece: Block, dim: int, length: int) -> Whole:
    """Returns unwritten memory of `length` along `dim`, for pieces like this."""
    pieces = -(-length // piece.shape[dim])
    whole = vary_over(varying_axes(piece), empty_like_blocks(piece, dim, pieces))
    return lax.slice_in_dim(whole, 0, length, axis=dim)


def of_types(types: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x, y: y.astype(x.dtype), types, tree)


def like_finished(finish: Callable[[Any], Any], carry: Any) -> Any:
    """Returns arrays of any values, in the types of `finish(carry)`."""

    def empty(x: Array, finished: Any) -> Array:
        if x.dtype == finished.dtype or not x.ndim:
            return x.astype(finished.dtype)
        return vary_over(varying_axes(x), empty_like_blocks(x, 0, 1, finished.dtype))

    return jax.tree.map(empty, carry, jax.eval_shape(finish, carry))
