"""Walks through all devices of a torus or a cube that share no link: a walk for each ring.

A torus of two closed dimensions splits into two cycles, which use every link once. If one side
divides the other, places are computed: a lookup costs a TPU a microsecond. Other tori need a search
and a lookup. A cube of two devices a side has no such cycles: there each hop is over one dimension,
which differs between walks.
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

from jaxpar.arguments.calls import value_error
from jaxpar.axis.ring_order import Place, Walk, moved_on
from jaxpar.mesh.disjoint_rings import split_torus


class Cycle(Walk):
    """A closed walk through all devices of a torus; steps count from device 0."""

    size: int

    def device(self, step: Place) -> Place:
        raise NotImplementedError

    def step(self, device: Place) -> Place:
        raise NotImplementedError

    @cached_property
    def devices(self) -> list[int]:
        return [int(self.device(step)) for step in range(self.size)]

    def behind(self, device: Place, distance: Any) -> Place:
        return self.device(moved_on(self.step(device), -distance, self.size))

    def next(self, device: int, direction: int, hops: Any) -> int:
        return int(self.device((self.step(device) + direction) % self.size))


@dataclass(frozen=True)
class AlongOne(Walk):
    """A walk through devices that differ in one dimension only."""

    sides: tuple[int, ...]
    dimension: int

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return prod(self.sides)

    @property
    def around(self) -> int:
        return self.sides[self.dimension]

    def place(self, device: Place) -> Place:
        return device // self._apart % self.around

    def behind(self, device: Place, distance: Any) -> Place:
        place = self.place(device)
        return device + (moved_on(place, -distance, self.around) - place) * self._apart

    def next(self, device: int, direction: int, hops: Any) -> int:
        return int(self.behind(device, -direction))

    @property
    def _apart(self) -> int:
        return prod(self.sides[self.dimension + 1 :])


@dataclass(frozen=True)
class AcrossCube(Walk):
    """Exchanges between neighbours of a cube with two devices a side."""

    # A hop's dimension is the bit that changes in the Gray code: a b a c a b a c. Walks begin with
    # different dimensions, and never share any.
    exchanges: ClassVar[bool] = True
    dimensions: int
    first: int
    corners: tuple[int, ...] | None = None  # the devices' corners; None: their indices

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2**self.dimensions

    def behind(self, device: Place, distance: int) -> Place:
        return self._across(device, self._apart(distance))

    def next(self, device: int, direction: int, hops: int) -> int:
        return self._across(device, self._apart(hops) ^ self._apart(hops + 1))

    def _across(self, device: Place, bits: int) -> Place:
        """Returns the device that differs in these bits."""
        if self.corners is None:
            return device ^ bits
        there = _looked_up(np.array(self.corners), device) ^ bits
        return _looked_up(np.argsort(self.corners), there)

    def _apart(self, hops: int) -> int:
        """Returns the bits that change over so many hops."""
        count = hops % self.size
        bits = [bit for bit in range(self.dimensions) if (count ^ count >> 1) >> bit & 1]
        return sum(1 << (bit + self.first) % self.dimensions for bit in bits)


@dataclass(frozen=True)
class Straight(Cycle):
    size: int

    def device(self, step: Place) -> Place:
        return step

    def step(self, device: Place) -> Place:
        return device


@dataclass(frozen=True)
class _OfRectangle(Cycle):
    """A cycle on a torus of `long` x `short`, where `short` divides `long`.

    If `exchanged`, device indices count the long dimension fastest.
    """

    long: int
    short: int
    exchanged: bool = False

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.long * self.short


class AlongShort(_OfRectangle):
    """Repeats short - 1 steps along the short dimension, and one along the long."""

    def device(self, step: Place) -> Place:
        row = step // self.short
        return _index(row, (step - row) % self.short, self.long, self.short, self.exchanged)

    def step(self, device: Place) -> Place:
        row, column = _coordinates(device, self.long, self.short, self.exchanged)
        return row * self.short + (row + column) % self.short


class AlongLong(_OfRectangle):
    """Repeats short - 1 steps along the long dimension, and one along the short."""

    # It takes the links that `AlongShort` leaves. long / short and short - 1 must be coprime.
    def device(self, step: Place) -> Place:
        leg = step // self.short  # a leg is `short` devices of a column
        row, column = (step - leg) % self.long, leg % self.short
        return _index(row, column, self.long, self.short, self.exchanged)

    def step(self, device: Place) -> Place:
        row, column = _coordinates(device, self.long, self.short, self.exchanged)
        within = (row + column) % self.short
        # A leg begins at the row leg * (short - 1). Solve this for leg = column + short * turn.
        times = self.long // self.short
        begins = (row - within) % self.long
        inverse = pow(self.short - 1, -1, times) if times > 1 else 0
        turn = ((begins + column) // self.short - column) * inverse % times
        return (column + self.short * turn) * self.short + within


@dataclass(frozen=True)
class Listed(Cycle):
    walk: tuple[int, ...]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.walk)

    def device(self, step: Place) -> Place:
        return _looked_up(np.array(self.walk), step)

    def step(self, device: Place) -> Place:
        return _looked_up(np.argsort(self.walk), device)


_MOST_WORDS = 64  # a larger table is indexed, not searched


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
    if len(words) == 1:
        return jnp.int32(words[0])
    half = len(words) // 2
    below = _chosen(words[:half], first, number)
    return jnp.where(number < first + half, below, _chosen(words[half:], first + half, number))


def _index(row: Place, column: Place, long: int, short: int, exchanged: bool) -> Place:
    return column * long + row if exchanged else row * short + column


def _coordinates(device: Place, long: int, short: int, exchanged: bool) -> tuple[Place, Place]:
    if exchanged:
        return device % long, device // long
    return device // short, device % short


@cache
def disjoint_walks(sizes: tuple[int, ...]) -> tuple[Walk, ...]:
    """Returns a walk through all devices for each dimension; walks share no link.

    All sizes are 2, or all dimensions are closed and of 3 or more.
    """
    if set(sizes) == {2}:
        return tuple(AcrossCube(len(sizes), first) for first in range(len(sizes)))
    return disjoint_cycles(sizes)


def walks_over(sizes: dict[str, int]) -> tuple[Walk, ...]:
    if min(sizes.values()) == 2 < max(sizes.values()):
        raise value_error(
            f"mode='multi-ring' over axes of sizes {sizes}: each must be 3 or more, as two "
            "devices have one link, or each be 2, a cube; leave out the axes of 2, or take "
            "mode='bidirectional'"
        )
    if len(sizes) > 4 and set(sizes.values()) == {2}:
        raise value_error(
            f"mode='multi-ring' over {len(sizes)} axes of 2: a cube has at most 4; leave some "
            "out, or take mode='bidirectional'"
        )
    return disjoint_walks(tuple(sizes.values()))


def disjoint_cycles(sizes: tuple[int, ...]) -> tuple[Cycle, ...]:
    """Returns cycles that share no link, a cycle for each closed dimension of 3 or more.

    Source: theorems of Kotzig (1973) for two dimensions, and of Aubert and Schneider (1982) for
    more.
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
    """Returns the walks of a torus or a cube; otherwise none.

    `around` has each dimension's length; open: 0.
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
    # A closed dimension of 4 is two dimensions of a cube: the Gray codes of neighbours differ in
    # one bit.
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
    """Returns places from the start of the shortest stretch with all."""
    if not around:
        return along - along.min()
    turned = [(along + by) % around for by in range(around)]
    return min(turned, key=lambda places: int(places.max()))
