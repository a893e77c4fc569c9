"""Parts of arrays: positions in a whole, the two pieces of a sum, the two halves of a block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jaxpar.axis.varying import vary_over, varying_axes
from jaxpar.compiler.compat import empty_like_blocks
from jaxpar.mesh.walk import as_int32
from jaxpar.ring.order import spec_of


@dataclass(frozen=True)
class Span:
    """Positions of a whole that follow one another: `size` of them from `start` on.

    `start` is an integer or an int32[].
    """

    start: Any
    size: int

    def cut(self, x: Array, dim: int) -> Array:
        """Returns these positions of `dim` of the whole `x`."""
        if self.size == x.shape[dim]:
            return x
        return _cut_at(x, self.start, self.size, dim)

    def of_blocks(self, x: Array, dim: int, length: int) -> Array:
        """Returns what `x` has one of along `dim` for each block of `length` positions."""
        if self.size == x.shape[dim] * length:
            return x
        is_known = isinstance(self.start, int)
        block = self.start // length if is_known else lax.div(self.start, np.int32(length))
        return _cut_at(x, block, 1, dim)

    @property
    def blocks(self) -> int:
        """How many blocks positions lie in, apart from one another in the whole."""
        return 1

    def place(self, whole: Array | None, part: Array, dim: int, length: int) -> Array:
        """Writes `part` at these positions of `dim`, of `length`; None: a whole yet unwritten."""
        if part.shape[dim] == length:
            return part
        into = _unwritten(whole, part, dim, length)
        # No position is negative, which JAX would ask of each by three equations.
        return lax.dynamic_update_slice_in_dim(
            into, part, self.start, dim, allow_negative_indices=False
        )


@dataclass(frozen=True)
class Comb:
    """The same positions of each of the `blocks` of a whole: `size` of each from `start` on.

    Where they are cut, multiplied and placed, blocks are a dimension of their own, as positions are
    neighbours within a block alone. Flattened, what a matmul makes would be placed in a pass of its
    own:

        convolution.1 = bf16[n*size, cols] fusion(chunk, rhs); fusion.2 = dynamic-update-slice(...)
    """

    start: int
    size: int
    blocks: int

    def cut(self, x: Array, dim: int) -> Array:
        """As that of a span."""
        if self.size * self.blocks == x.shape[dim]:
            return x
        apart = split_dim(x, dim, self.blocks)
        cut = lax.slice_in_dim(apart, self.start, self.start + self.size, axis=dim + 1)
        return join_dims(cut, dim)

    def of_blocks(self, x: Array, dim: int, length: int) -> Array:
        """As that of a span."""
        return x

    def place(self, whole: Array | None, part: Array, dim: int, length: int) -> Array:
        """As that of a span."""
        if part.shape[dim] == length:
            return part
        into = split_dim(_unwritten(whole, part, dim, length), dim, self.blocks)
        start = [0] * into.ndim
        start[dim + 1] = self.start
        return join_dims(
            lax.dynamic_update_slice(into, split_dim(part, dim, self.blocks), start), dim
        )


@dataclass(frozen=True)
class Slab:
    """A box of the blocks of a torus' devices, and of each of them the same positions.

    The whole has the `shape` of the torus, the last side fastest, and of a block. The slab is
    `sizes` of it from `starts` on, integers or int32[].
    """

    shape: tuple[int, ...]
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """As that of a span."""
        return prod(self.sizes[:-1])

    def cut(self, x: Array, dim: int) -> Array:
        """As that of a span."""
        if (span := self._span) is not None:
            return span.cut(x, dim)
        apart, starts, sizes = self._apart(x, dim)
        cut = lax.dynamic_slice(apart, starts, sizes, allow_negative_indices=False)
        return cut.reshape((*x.shape[:dim], prod(self.sizes), *x.shape[dim + 1 :]))

    def of_blocks(self, x: Array, dim: int, length: int) -> Array:
        """As that of a span."""
        shape, starts, sizes = (of[:-1] for of in (self.shape, self.starts, self.sizes))
        return Slab((*shape, 1), (*starts, 0), (*sizes, 1)).cut(x, dim)

    def place(self, whole: Array | None, part: Array, dim: int, length: int) -> Array:
        """As that of a span."""
        if part.shape[dim] == length:
            return part
        if (span := self._span) is not None:
            return span.place(whole, part, dim, length)
        into = _unwritten(whole, part, dim, length)
        apart, starts, sizes = self._apart(into, dim)
        placed = lax.dynamic_update_slice(
            apart, part.reshape(sizes), starts, allow_negative_indices=False
        )
        return placed.reshape(into.shape)

    @property
    def _span(self) -> Span | None:
        """The same positions where they follow one another."""
        first, *others = range(len(self.shape))
        if self.sizes[first] > 1 or any(self.sizes[d] < self.shape[d] for d in others):
            return None
        size = prod(self.sizes)
        return Span(self.starts[first] * size, size)

    def _apart(self, x: Array, dim: int) -> tuple[Array, list[Any], list[int]]:
        """`x` with `dim` as all dimensions of the whole; in it, starts and sizes."""
        before, behind = x.shape[:dim], x.shape[dim + 1 :]
        # All of one dtype, also where numbers have 64 bits.
        starts = [*map(as_int32, (*[0] * len(before), *self.starts, *[0] * len(behind)))]
        return x.reshape(*before, *self.shape, *behind), starts, [*before, *self.sizes, *behind]


def _cut_at(x: Array, start: Any, size: int, dim: int) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def split_dim(x: Array, dim: int, parts: int) -> Array:
    """Returns `x` with `dim` as two dimensions, the first of them of so many `parts`."""
    return x.reshape((*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]))


def join_dims(x: Array, dim: int) -> Array:
    """Returns `x` with `dim` and the one behind it as one."""
    return x.reshape((*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def _unwritten(whole: Array | None, part: Array, dim: int, length: int) -> Array:
    """Returns the whole; if there is none yet, memory for one, of which all will be written."""
    if whole is None:
        # Not zeros: filling what every turn overwrites would be one more pass over the result.
        return empty_result(part, dim, length)
    return vary_over(varying_axes(part), whole)


def cut_out(tree: Any, start: int, size: int, dim: int) -> Any:
    """Returns these positions of `dim` of every leaf."""
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + size, axis=dim), tree)


def even_cuts(length: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of as many equal parts of `length` as there can be, at `most` so many."""
    parts = next(parts for parts in range(most, 0, -1) if length % parts == 0)
    return [(number * (length // parts), length // parts) for number in range(parts)]


def empty_result(piece: Array, dim: int, length: int) -> Array:
    """Unwritten memory of a `length` along `dim`, of which this is one piece of several."""
    pieces = -(-length // piece.shape[dim])
    whole = vary_over(varying_axes(piece), empty_like_blocks(piece, dim, pieces))
    return lax.slice_in_dim(whole, 0, length, axis=dim)


TILE = 8  # rows of a TPU's; what begins or ends within one is shifted


def shares_of(length: int, shares: int) -> list[tuple[int, int]]:
    """Starts and sizes of parts of `length` as equal as can be, the longest first.

    None of them is empty. They are whole tiles where there are enough.
    """
    unit = TILE if length % TILE == 0 and length >= 5 * TILE * shares else 1
    units = length // unit
    shares = max(1, min(shares, units))
    ends = [-(-units * number // shares) * unit for number in range(shares + 1)]
    return [(start, end - start) for start, end in pairwise(ends)]


def equal_pieces(length: int, pieces: int) -> list[tuple[int, int]]:
    """Starts and sizes of pieces of one size that cover `length`: the last ones may overlap.

    The TPU compiler delays transfers of sums where they are of several sizes, and a matmul waits
    for them: 16392x8192x8192 over a ring of 8 v5p took 1694 us in pieces of 1025 and 1024 rows, and
    takes 1536 in two of 1032. They are whole tiles where that is at most a hundredth more.
    """
    size = -(-length // pieces)
    tiles = -(-size // TILE) * TILE
    if tiles * pieces <= 1.01 * length:
        size = min(tiles, length)  # of one piece it is all
    return [(min(number * size, length - size), size) for number in range(pieces)]


def half_of(block: Array, half: int) -> Array:
    """Returns the first or the second half of a block, along a dimension that has two if any has.

    Not along one that explicit mesh axes shard: a half of it would be resharded.
    """
    dim = _halved_dim(block)
    size = block.shape[dim]
    middle = -(-size // 2)
    start, stop = ((0, middle), (middle, size))[half]
    return lax.slice_in_dim(block, start, stop, axis=dim)


def join_halves(halves: Sequence[Array], like: Array) -> Array:
    """Returns the block, like another one, that was cut into these halves."""
    return lax.concatenate(halves, _halved_dim(like))


def of_types(types: Any, tree: Any) -> Any:
    """Returns a pytree in the dtypes of another one."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), types, tree)


def like_finished(finish: Callable[[Any], Any], carry: Any) -> Any:
    """Returns arrays of the types of `finish(carry)`, of any values."""

    def empty(x: Array, finished: Any) -> Array:
        if x.dtype == finished.dtype or not x.ndim:
            return x.astype(finished.dtype)
        return vary_over(varying_axes(x), empty_like_blocks(x, 0, 1, finished.dtype))

    return jax.tree.map(empty, carry, jax.eval_shape(finish, carry))


def _halved_dim(x: Array) -> int:
    spec = spec_of(x)
    whole = [dim for dim, axes in enumerate(spec) if axes is None] or list(range(x.ndim))
    even = [dim for dim in whole if x.shape[dim] % 2 == 0 and x.shape[dim]]
    return even[0] if even else max(whole, key=lambda dim: x.shape[dim])
