"""A dimension in blocks, one a device, with padding."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

AnyArray = Array | np.ndarray
Entries = range | np.ndarray  # places in a dimension


@dataclass(frozen=True)
class PaddedDim:
    """A dimension in blocks of one size, whose last entries may be padding.

    The first `full` blocks have none, the next have `rest` entries each. Entries may be in the
    order of a pipeline's devices: those of device 0 come first, then those of device 1.
    """

    size: int  # without padding
    block: int  # a device's entries, with padding
    parts: int
    full: int
    rest: int
    order: tuple[int, int] = (1, 1)  # the pipeline's devices and virtual stages

    @classmethod
    def at_the_end(
        cls, size: int, parts: int, block: int, order: tuple[int, int] = (1, 1)
    ) -> PaddedDim:
        full = size // block if block else parts
        return cls(size, block, parts, full, size - full * block, (1, 1) if 1 in order else order)

    @classmethod
    def evenly(cls, size: int, parts: int) -> PaddedDim:
        """Puts the remainder in the first blocks, an entry each."""
        rest, more = divmod(size, parts)
        return cls(size, rest + bool(more), parts, more or parts, rest)

    @property
    def padded(self) -> int:
        return self.block * self.parts

    @property
    def is_plain(self) -> bool:
        return self.size == self.padded and self.order == (1, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        left = self.size - self.full * self.block
        sizes = [self.block] * self.full
        for _ in range(self.full, self.parts):
            sizes.append(min(self.rest, left))
            left -= sizes[-1]
        return tuple(sizes)

    def pad(self, array: AnyArray, dim: int) -> AnyArray:
        devices, stages = self.order
        return self._resized(_exchanged(array, dim, (stages, devices)), dim, padded=True)

    def unpad(self, array: AnyArray, dim: int) -> AnyArray:
        return _exchanged(self._resized(array, dim, padded=False), dim, self.order)

    def within(self, block: slice) -> tuple[Entries, int]:
        """Returns which entries lie in a block, and the size of the padding after them."""
        start, stop, _ = block.indices(self.padded)
        if self.is_plain:
            return range(start, stop), 0
        numbers = np.asarray(self.pad(np.arange(1, self.size + 1), 0))[start:stop]
        numbers = numbers[numbers > 0] - 1
        in_a_row = len(numbers) > 0 and (np.diff(numbers) == 1).all()
        entries = range(numbers[0], numbers[-1] + 1) if in_a_row else numbers
        return entries, stop - start - len(numbers)

    def _resized(self, array: AnyArray, dim: int, *, padded: bool) -> AnyArray:
        if self.size == self.padded:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        start, count = self.full * self.block, self.parts - self.full
        few, many = self.rest, self.block
        if self.size - start != count * few:  # the later blocks are not alike
            count, few, many = 1, self.size - start, count * many
        old, new = (few, many) if padded else (many, few)
        before, after = array.shape[:dim], array.shape[dim + 1 :]
        tail = _part(array, dim, start, start + count * old)
        tail = _part(tail.reshape(*before, count, old, *after), dim + 1, 0, new)
        widths = [(0, max(new - old, 0) if d == dim + 1 else 0) for d in range(tail.ndim)]
        tail = xp.pad(tail, widths).reshape(*before, count * new, *after)
        return xp.concatenate([_part(array, dim, 0, start), tail], axis=dim)


def _part(array: Any, dim: int, start: int, end: int) -> Any:
    return array[(slice(None),) * dim + (slice(start, end),)]


def _exchanged(array: AnyArray, dim: int, counts: tuple[int, int]) -> AnyArray:
    """Exchanges the two major parts of a dimension, of these sizes."""
    if counts == (1, 1):
        return array
    before, size, after = array.shape[:dim], array.shape[dim], array.shape[dim + 1 :]
    apart = array.reshape(*before, *counts, size // prod(counts), *after)
    return apart.swapaxes(dim, dim + 1).reshape(array.shape)
