"""The rings by which shares of blocks or sums go at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from jaxpar.axis.axis import Ring
from jaxpar.axis.ring_order import Index
from jaxpar.ring.cuts import Span
from jaxpar.ring.order import Beside, Send, Work

if TYPE_CHECKING:
    from jaxpar.ring.slab import Slab

Ordering = Callable[[Index, Any, Send, Work], Beside]  # as `Order.beside`


@dataclass(frozen=True)
class Phase:
    """The rings of all shares at one time; one phase, unless a torus has several."""

    rings: tuple[Ring, ...]
    halves = False

    @property
    def around(self) -> int:
        """Returns the number of devices on a sum's path."""
        return self.rings[0].around

    def positions(self, owner: Index, ring: int, length: int, start: int, size: int) -> Span | Slab:
        """Returns where an owner's piece lies in the full array.

        It is `size` positions from `start` on, in a block of `length`.
        """
        # The product comes last where it can: the compiler then sees that the start is a multiple
        # of `length`. By `lax`, because JAX does not convert its operands.
        first = lax.mul(owner, np.int32(length))
        return Span(lax.add(first, np.int32(start)) if start else first, size)

    def sides(self, ring: int) -> tuple[int, ...]:
        """Returns the sides of the torus of owners."""
        return (self.around,)


def freely(index: Index, leaving: Any, send: Send, work: Work) -> Beside:
    """Lets the compiler schedule work that only adds or places."""
    return index, work.compute(index, leaving, work.take(index)), send(leaving)
