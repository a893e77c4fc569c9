"""By which hops what a device holds comes past all others."""

from typing import Any, ClassVar

import numpy as np
from jax import Array, lax

Place = Any  # an integer, or an int32[]: counted over the dimensions, the last one fastest


class Walk:
    """By which hops what a device holds comes past all others, and back to it in the end."""

    size: int
    exchanges: ClassVar[bool] = False  # hops go both ways at once, over a dimension each

    @property
    def around(self) -> int:
        """How many devices that is."""
        return self.size

    def behind(self, device: Place, distance: Any) -> Place:
        """The logical index of the device from which so many hops lead to another one."""
        raise NotImplementedError

    def next(self, device: int, direction: int, hops: Any) -> int:
        """The device to which a device sends on what so many hops have brought to it."""
        raise NotImplementedError


def moved_on(place: Place, by: Any, size: int) -> Place:
    """Returns `(place + by) % size`, for a `place` and a `by` of less than `size` either way.

    `%` of arrays is nine equations, as its operands may be negative. Rings take it twice a block.
    """
    if not isinstance(place, Array):
        return (place + by) % size
    ahead = by % size if isinstance(by, int) else by + size
    if isinstance(ahead, int) and not ahead:
        return place
    return lax.rem(lax.add(place, as_int32(ahead)), np.int32(size))


def as_int32(x: Any) -> Any:
    """Returns an index as one of 32 bits, also where numbers have 64: no equation converts it."""
    return x if isinstance(x, Array) else np.int32(x)
