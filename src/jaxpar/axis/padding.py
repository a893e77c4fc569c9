"""A dimension in blocks, one a device, with padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

AnyArray = Array | np.ndarray


@dataclass(frozen=True)
class PaddedDim:
    """A dimension in blocks of one size, whose last entries may be padding.

    The first `full` blocks have none, the next have `rest` entries each.
    """

    size: int  # without padding
    block: int  # a device's entries, with padding
    parts: int
    full: int
    rest: int

    @classmethod
    def at_the_end(cls, size: int, parts: int, block: int) -> PaddedDim:
        full = size // block if block else parts
        return cls(size, block, parts, full, size - full * block)

    @classmethod
    def evenly(cls, size: int, parts: int) -> PaddedDim:
        """Puts the remainder in the first blocks, one entry each."""
        rest, more = divmod(size, parts)
        return cls(size, rest + bool(more), parts, more or parts, rest)

    @property
    def padded(self) -> int:
        return self.block * self.parts

    @property
    def sizes(self) -> tuple[int, ...]:
        left = self.size - self.full * self.block
        found = [self.block] * self.full
        for _ in range(self.full, self.parts):
            found.append(min(self.rest, left))
            left -= found[-1]
        return tuple(found)

    def pad(self, array: AnyArray, dim: int) -> AnyArray:
        if self.size == self.padded:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        shape, later = array.shape, self.parts - self.full
        start = self.full * self.block
        tail = _part(array, dim, start, self.size)
        if later and self.size - start == later * self.rest:  # later blocks are alike
            rows = (*shape[:dim], later, self.rest, *shape[dim + 1 :])
            tail = _zeros_behind(xp, tail.reshape(rows), dim + 1, self.block)
            tail = tail.reshape(*shape[:dim], later * self.block, *shape[dim + 1 :])
        else:
            tail = _zeros_behind(xp, tail, dim, later * self.block)
        return xp.concatenate([_part(array, dim, 0, start), tail], axis=dim)

    def unpad(self, array: AnyArray, dim: int) -> AnyArray:
        if self.size == self.padded:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        shape, later = array.shape, self.parts - self.full
        start = self.full * self.block
        tail = _part(array, dim, start, self.padded)
        if later and self.size - start == later * self.rest:
            rows = tail.reshape(*shape[:dim], later, self.block, *shape[dim + 1 :])
            tail = _part(rows, dim + 1, 0, self.rest)
            tail = tail.reshape(*shape[:dim], later * self.rest, *shape[dim + 1 :])
        else:
            tail = _part(tail, dim, 0, self.size - start)
        return xp.concatenate([_part(array, dim, 0, start), tail], axis=dim)

    def places(self) -> np.ndarray:
        """Returns each entry's padded index, `[size]`."""
        starts = np.arange(self.parts) * self.block
        return np.concatenate(
            [start + np.arange(size) for start, size in zip(starts, self.sizes, strict=True)]
        )


def _part(array: Any, dim: int, start: int, end: int) -> Any:
    return array[(slice(None),) * dim + (slice(start, end),)]


def _zeros_behind(xp: Any, array: Any, dim: int, size: int) -> Any:
    missing = size - array.shape[dim]
    return xp.pad(array, [(0, missing if d == dim else 0) for d in range(array.ndim)])
