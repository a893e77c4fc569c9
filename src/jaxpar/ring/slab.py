"""Positions in the full array that are a box of a torus' blocks."""

from dataclasses import dataclass
from math import prod
from typing import Any

from jax import Array, lax

from jaxpar.axis.ring_order import as_int32
from jaxpar.ring.cuts import Block, Span, Whole, unwritten


@dataclass(frozen=True)
class Slab:
    """A box of a torus' blocks, with the same positions of each block.

    The full array has the `shape` of the torus, last side fastest, and of a block. `starts` are
    integers or int32[].
    """

    shape: tuple[int, ...]
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return prod(self.sizes[:-1])

    def cut(self, x: Whole, dim: int) -> Block:
        if (span := self._span) is not None:
            return span.cut(x, dim)
        apart, starts, sizes = self._apart(x, dim)
        cut = lax.dynamic_slice(apart, starts, sizes, allow_negative_indices=False)
        return cut.reshape((*x.shape[:dim], prod(self.sizes), *x.shape[dim + 1 :]))

    def of_blocks(self, x: Whole, dim: int, length: int) -> Block:
        shape, starts, sizes = (of[:-1] for of in (self.shape, self.starts, self.sizes))
        return Slab((*shape, 1), (*starts, 0), (*sizes, 1)).cut(x, dim)

    def place(self, whole: Whole | None, part: Block, dim: int, length: int) -> Whole:
        if part.shape[dim] == length:
            return part
        if (span := self._span) is not None:
            return span.place(whole, part, dim, length)
        into = unwritten(whole, part, dim, length)
        apart, starts, sizes = self._apart(into, dim)
        placed = lax.dynamic_update_slice(
            apart, part.reshape(sizes), starts, allow_negative_indices=False
        )
        return placed.reshape(into.shape)

    @property
    def _span(self) -> Span | None:
        first, *others = range(len(self.shape))
        if self.sizes[first] > 1 or any(self.sizes[d] < self.shape[d] for d in others):
            return None
        size = prod(self.sizes)
        return Span(self.starts[first] * size, size)

    def _apart(self, x: Array, dim: int) -> tuple[Array, list[Any], list[int]]:
        """Splits `dim` into torus dimensions; returns starts and sizes too."""
        before, behind = x.shape[:dim], x.shape[dim + 1 :]
        # All of one dtype, also if integers have 64 bits.
        starts = [*map(as_int32, (*[0] * len(before), *self.starts, *[0] * len(behind)))]
        return x.reshape(*before, *self.shape, *behind), starts, [*before, *self.sizes, *behind]
