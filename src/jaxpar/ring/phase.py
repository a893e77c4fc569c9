"""The rings by which the shares of blocks or sums go at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from jaxpar.axis.axis import Ring
from jaxpar.mesh.walk import Index
from jaxpar.ring.order import Beside, Send, Work
from jaxpar.ring.parts import Span

if TYPE_CHECKING:
    from jaxpar.ring.slab import Slab

Ordering = Callable[[Index, Any, Send, Work], Beside]  # as `Order.beside`


@dataclass(frozen=True)
class Phase:
    """The rings by which the shares of all blocks or sums go, at the same time.

    One phase is all there is where rings go through all devices; `hierarchical.py` has others.

    Attributes:
      rings: of each share its own.
      halves: whether a share is two arrays.
    """

    rings: tuple[Ring, ...]
    halves = False

    @property
    def around(self) -> int:
        """How many devices a sum goes past, its owner among them."""
        return self.rings[0].around

    def positions(self, owner: Index, ring: int, length: int, start: int, size: int) -> Span | Slab:
        """Where a piece of a ring's blocks is in the whole of all, for a step's owner.

        Of each block of `length` the piece is `size` positions from `start` on.
        """
        # The product as the last operation, or the compiler does not see of what the start is a
        # multiple; and in `lax`, whose operands JAX does not convert.
        first = lax.mul(owner, np.int32(length))
        return Span(lax.add(first, np.int32(start)) if start else first, size)

    def sides(self, ring: int) -> tuple[int, ...]:
        """Of the torus of whose devices a ring's blocks or sums are."""
        return (self.around,)


def freely(index: Index, leaving: Any, send: Send, work: Work) -> Beside:
    """Leaves it to the compiler when what only adds or places is done: no matmul waits for it."""
    return index, work.compute(index, leaving, work.take(index)), send(leaving)
