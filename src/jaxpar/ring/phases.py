"""The phases of a gather or a scatter: by which rings its shares go, at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from jaxpar.axis.axis import Ring
from jaxpar.mesh.cycles import AlongOne
from jaxpar.ring.order import Beside, Send, Work
from jaxpar.ring.parts import Slab, Span

Ordering = Callable[[Array, Any, Send, Work], Beside]  # as `Order.beside`


@dataclass(frozen=True)
class Phase:
    """The rings by which the shares of all blocks or sums go, at the same time.

    One phase is all there is where rings go through all devices. Over a torus whose sides are alike
    there can be one for each dimension, and each share goes along another one. The first phase of a
    scatter leaves each device the sums of a slab of owners, of which the next one deals out as many
    less; a gather's are the same, the last one first.

    Attributes:
      rings: of each share its own, or with `halves` two that are alike.
      dimensions: of each ring those of the torus over whose devices its sums are still of all, or
        its blocks will be.
      halves: a share's slab is two arrays, of the first half of its blocks and of the last.
    """

    rings: tuple[Ring, ...]
    dimensions: tuple[tuple[int, ...], ...] = ()
    halves: bool = False

    @property
    def around(self) -> int:
        """How many devices a sum goes past, its owner among them."""
        return self.rings[0].around

    def in_halves(self) -> Phase:
        """The same, with shares of which each is two arrays, one behind the other."""
        rings = tuple(ring for ring in self.rings for _ in (0, 1))
        return Phase(rings, tuple(of for of in self.dimensions for _ in (0, 1)), halves=True)

    def positions(self, owner: Array, ring: int, length: int, start: int, size: int) -> Span | Slab:
        """Where a piece of a ring's blocks is in the whole of all, for a turn's owner.

        Of each block of `length` the piece is `size` positions from `start` on.
        """
        if not self.dimensions:
            return Span(owner * length + start, size)
        walk, dimensions = self.rings[ring].walk, self.dimensions[ring]
        assert isinstance(walk, AlongOne)
        starts, sizes = [0 for _ in dimensions], [*self.sides(ring)]
        along = dimensions.index(walk.dimension)
        starts[along], sizes[along] = walk.place(owner), 1
        if self.halves:  # of the first of the other sides: each half is in one stretch of a slab
            other = 1 if along == 0 else 0
            sizes[other] //= 2
            starts[other] = ring % 2 * sizes[other]
        return Slab((*self.sides(ring), length), (*starts, start), (*sizes, size))

    def sides(self, ring: int) -> tuple[int, ...]:
        """Of the torus of a ring's dimensions."""
        walk = self.rings[ring].walk
        assert isinstance(walk, AlongOne)
        return tuple(walk.sides[dimension] for dimension in self.dimensions[ring])


def phases_over(ring: Ring, sides: tuple[int, ...], shares: int) -> list[Phase]:
    """The phases of a scatter whose shares take dimensions in turn, each from another one on.

    No two of them are at the same dimension at a time, and so share no link.
    """
    phases: list[Phase] = []
    for number in range(len(sides)):
        orders = [
            [(share + later) % len(sides) for later in range(number, len(sides))]
            for share in range(shares)
        ]
        rings = tuple(replace(ring, walk=AlongOne(sides, order[0])) for order in orders)
        phases.append(Phase(rings, tuple(tuple(sorted(order)) for order in orders)))
    return phases


def freely(index: Array, leaving: Any, send: Send, work: Work) -> Beside:
    """Leaves it to the compiler when what only adds or places is done: no matmul waits for it."""
    return index, work.compute(index, leaving, work.take(index)), send(leaving)
