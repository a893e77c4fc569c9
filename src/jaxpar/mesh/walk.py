"""By which hops what a device holds comes past all others."""

from typing import Any, ClassVar

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
