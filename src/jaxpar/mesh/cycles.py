"""Walks through all devices of a torus or a cube that share no link: each can be a ring's.

A torus of two closed dimensions has four links a device, of which one ring uses two. It splits into
two cycles that each go through all devices and together use every link once. Where one side divides
the other the cycles are "along one dimension all but one step, then one step along the other", and
the same with dimensions exchanged; places on them are computed, as looking one up in an array costs
a TPU a microsecond each time. Other tori split, too: their cycles are found by exchanging links of
rows for links of columns, and their places are looked up, in numbers that hold several.

A cube of two devices a side has three links a device, and no such cycles. There each hop is over
one dimension for all devices, and the walks differ in which one it is.

Nothing here needs JAX but to compute with traced numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd, prod
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from jaxpar.mesh.torus_split import split_torus
from jaxpar.mesh.walk import Place, Walk, moved_on


class Cycle(Walk):
    """A closed walk through all devices of a torus; steps are counted from device 0."""

    size: int

    def device(self, step: Place) -> Place:
        """The logical index of the device at a step, 0 <= step < size."""
        raise NotImplementedError

    def step(self, device: Place) -> Place:
        """The inverse of `device`."""
        raise NotImplementedError

    @cached_property
    def devices(self) -> list[int]:
        """The devices in the order of the walk."""
        return [int(self.device(step)) for step in range(self.size)]

    def behind(self, device: Place, distance: Any) -> Place:
        return self.device(moved_on(self.step(device), -distance, self.size))

    def next(self, device: int, direction: int, hops: Any) -> int:
        return int(self.device((self.step(device) + direction) % self.size))


@dataclass(frozen=True)
class AlongOne(Walk):
    """Round one dimension of a torus: a device comes past those alone that differ in its place."""

    sides: tuple[int, ...]
    dimension: int

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many devices there are."""
        return prod(self.sides)

    @property
    def around(self) -> int:
        return self.sides[self.dimension]

    def place(self, device: Place) -> Place:
        """Where a device is along the dimension."""
        return device // self._apart % self.around

    def behind(self, device: Place, distance: Any) -> Place:
        place = self.place(device)
        return device + (moved_on(place, -distance, self.around) - place) * self._apart

    def next(self, device: int, direction: int, hops: Any) -> int:
        return int(self.behind(device, -direction))

    @property
    def _apart(self) -> int:
        """The difference of the indices of neighbours."""
        return prod(self.sides[self.dimension + 1 :])


@dataclass(frozen=True)
class AcrossCube(Walk):
    """Exchanges between neighbours of a cube of two devices a side, all over one dimension a hop.

    Each hop sends on what the one before brought. Its dimension is that of the bit that changes as
    the Gray code counts, a b a c a b a c; walks that begin with another one are never at the same
    one, so that each has a third of all links in every hop, both ways.
    """

    exchanges: ClassVar[bool] = True
    dimensions: int
    first: int
    corners: tuple[int, ...] | None = None  # those of the devices; None: their indices

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many devices there are."""
        return 2**self.dimensions

    def behind(self, device: Place, distance: int) -> Place:
        return self._across(device, self._apart(distance))

    def next(self, device: int, direction: int, hops: int) -> int:
        return self._across(device, self._apart(hops) ^ self._apart(hops + 1))

    def _across(self, device: Place, bits: int) -> Place:
        """The device at the corner that differs in these bits."""
        if self.corners is None:
            return device ^ bits
        there = _looked_up(np.array(self.corners), device) ^ bits
        return _looked_up(np.argsort(self.corners), there)

    def _apart(self, hops: int) -> int:
        """The bits of the index in which two devices differ that so many hops are between."""
        count = hops % self.size
        bits = [bit for bit in range(self.dimensions) if (count ^ count >> 1) >> bit & 1]
        return sum(1 << (bit + self.first) % self.dimensions for bit in bits)


@dataclass(frozen=True)
class Straight(Cycle):
    """The walk in the order of the logical index."""

    size: int

    def device(self, step: Place) -> Place:
        return step

    def step(self, device: Place) -> Place:
        return device


@dataclass(frozen=True)
class _OfRectangle(Cycle):
    """On a torus of `long` x `short`, of which `short` divides `long`.

    Exchanged, the device counts the long dimension fastest.
    """

    long: int
    short: int
    exchanged: bool = False

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many devices there are."""
        return self.long * self.short


class AlongShort(_OfRectangle):
    """Short - 1 steps along the short dimension, one along the long one, and so on."""

    def device(self, step: Place) -> Place:
        row = step // self.short
        return _index(row, (step - row) % self.short, self.long, self.short, self.exchanged)

    def step(self, device: Place) -> Place:
        row, column = _coordinates(device, self.long, self.short, self.exchanged)
        return row * self.short + (row + column) % self.short


class AlongLong(_OfRectangle):
    """What `AlongShort` leaves: short - 1 steps along the long dimension, one along the short.

    long / short and short - 1 have no common factor: else it would be several cycles.
    """

    def device(self, step: Place) -> Place:
        leg = step // self.short  # of `short` devices of one column
        row, column = (step - leg) % self.long, leg % self.short
        return _index(row, column, self.long, self.short, self.exchanged)

    def step(self, device: Place) -> Place:
        row, column = _coordinates(device, self.long, self.short, self.exchanged)
        within = (row + column) % self.short
        # Leg column + short * turn begins at the row leg * (short - 1), and that is known, too.
        times = self.long // self.short
        begins = (row - within) % self.long
        inverse = pow(self.short - 1, -1, times) if times > 1 else 0
        turn = ((begins + column) // self.short - column) * inverse % times
        return (column + self.short * turn) * self.short + within


@dataclass(frozen=True)
class Listed(Cycle):
    """A walk whose places are looked up."""

    walk: tuple[int, ...]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many devices there are."""
        return len(self.walk)

    def device(self, step: Place) -> Place:
        return _looked_up(np.array(self.walk), step)

    def step(self, device: Place) -> Place:
        return _looked_up(np.argsort(self.walk), device)


_MOST_WORDS = 64  # of a table that is looked up by choosing among them


def _looked_up(table: Int[np.ndarray, " size"], place: Place) -> Place:
    if isinstance(place, int | np.integer):
        return int(table[place])
    bits = int(len(table) - 1).bit_length()
    each = 31 // bits  # places in an int32
    words = [
        sum(int(entry) << (bits * n) for n, entry in enumerate(table[start : start + each]))
        for start in range(0, len(table), each)
    ]
    if len(words) > _MOST_WORDS:
        return jnp.asarray(table, "int32")[place]
    word = _chosen(words, 0, lax.div(place, jnp.int32(each)))
    return (word >> (lax.rem(place, jnp.int32(each)) * bits)) & (2**bits - 1)


def _chosen(words: list[int], first: int, number: Place) -> Place:
    """The word of a number; the first of these has the number `first`."""
    if len(words) == 1:
        return jnp.int32(words[0])
    half = len(words) // 2
    below = _chosen(words[:half], first, number)
    return jnp.where(number < first + half, below, _chosen(words[half:], first + half, number))


def _index(row: Place, column: Place, long: int, short: int, exchanged: bool) -> Place:
    return column * long + row if exchanged else row * short + column


def _coordinates(device: Place, long: int, short: int, exchanged: bool) -> tuple[Place, Place]:
    """The place along the long dimension, and along the short one."""
    if exchanged:
        return device % long, device // long
    return device // short, device % short


@cache
def disjoint_walks(sizes: tuple[int, ...]) -> tuple[Walk, ...]:
    """As many walks through all devices as there are dimensions, which share no link.

    Args:
      sizes: of the dimensions: each of 3 or more and closed, or each of 2.
    """
    if set(sizes) == {2}:
        return tuple(AcrossCube(len(sizes), first) for first in range(len(sizes)))
    return disjoint_cycles(sizes)


def disjoint_cycles(sizes: tuple[int, ...]) -> tuple[Cycle, ...]:
    """As many cycles of a torus, whose dimensions close, as it has dimensions; they share no link.

    Args:
      sizes: of its dimensions, each of 3 or more: two of 2 have no second link.

    Raises:
      ValueError: a size below 3.

    Source: that every product of cycles splits so is a theorem of Kotzig (1973) for two of them,
    and of Aubert and Schneider (1982) for more.
    """
    if any(size < 3 for size in sizes):
        raise ValueError(f"disjoint_cycles: sizes {sizes} must be 3 or more each")
    if len(sizes) == 1:
        return (Straight(sizes[0]),)
    if len(sizes) == 2:
        rows, columns = sizes
        long, short = max(sizes), min(sizes)
        if long % short == 0 and gcd(long // short, short - 1) == 1:
            exchanged = rows < columns
            return AlongShort(long, short, exchanged), AlongLong(long, short, exchanged)
    return tuple(map(Listed, split_torus(sizes)))


def walks_of_places(
    places: Int[np.ndarray, "size dims"], around: Int[np.ndarray, " dims"]
) -> tuple[Walk, ...]:
    """Walks of devices at these places of a torus, if they are one themselves, or a cube.

    Args:
      places: of the devices, by their logical index.
      around: the length of each dimension, 0 where it has no link from its end to its beginning.
    """
    places = np.stack(
        [_from_zero(along, n) for along, n in zip(places.T, around.tolist(), strict=True)], axis=1
    )
    sides = places.max(axis=0) + 1
    cells = np.asarray(np.ravel_multi_index(tuple(places.T), tuple(sides)))
    if np.sort(cells).tolist() != list(range(prod(sides.tolist()))):
        return ()
    places, around, sides = (x[..., sides > 1] for x in (places, around, sides))
    closed = sides == around
    if len(sides) > 1 and (closed & (sides > 2)).all():
        index = np.argsort(cells)
        cycles = disjoint_cycles(tuple(map(int, sides)))
        return tuple(Listed(tuple(map(int, index[cycle.devices]))) for cycle in cycles)
    # A closed dimension of four is two of a cube: neighbours differ in one bit of the Gray code.
    if not ((sides == 2) | (sides == 4) & closed).all():
        return ()
    corners, bits = np.zeros(len(places), int), 0
    for along, side in zip(places.T, sides, strict=True):
        corners |= (along ^ along >> 1) << bits
        bits += 1 if side == 2 else 2
    if not 3 <= bits <= 4:
        return ()
    return tuple(AcrossCube(bits, first, tuple(map(int, corners))) for first in range(bits))


def _from_zero(along: Int[np.ndarray, " size"], around: int) -> Int[np.ndarray, " size"]:
    """Places along a dimension from 0 on, in the shortest stretch of it that has all."""
    if not around:
        return along - along.min()
    turned = [(along + by) % around for by in range(around)]
    return min(turned, key=lambda places: int(places.max()))
