"""Splits a torus of any shape into Hamiltonian cycles, by exchanges of links."""

from __future__ import annotations

from math import prod
from random import Random

import numpy as np
from jaxtyping import Int

_Links = list[set[int]]  # for each device, the two devices at the other ends of its links


def split_torus(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Splits a torus into Hamiltonian cycles by exchanging links."""
    # Each factor begins with a dimension's links. Two with opposite sides of a square exchange
    # them, unless that makes more cycles.
    for seed in range(1000):
        factors = _exchanged(sizes, Random(seed))
        if factors is not None:
            return [_walk(links) for links in factors]
    raise AssertionError(f"no cycles were found of {sizes}")


def _exchanged(sizes: tuple[int, ...], random: Random) -> list[_Links] | None:
    grid = np.arange(prod(sizes)).reshape(sizes)
    factors: list[_Links] = []
    for dim in range(len(sizes)):
        ends = zip(np.roll(grid, 1, dim).flat, np.roll(grid, -1, dim).flat, strict=True)
        factors.append([{int(a), int(b)} for a, b in ends])
    squares = [
        tuple(int(x) for x in (grid[at], *corner))
        for at in np.ndindex(*sizes)
        for first in range(len(sizes))
        for second in range(first)
        for corner in [_corner(grid, at, first, second)]
    ]
    counts = [_count(links) for links in factors]
    for _ in range(60 * len(squares)):
        if max(counts) == 1:
            return factors
        a, b, c, d = random.choice(squares)
        # The factors of a-b and d-c, and of a-d and b-c.
        first = next(n for n, links in enumerate(factors) if b in links[a])
        second = next(n for n, links in enumerate(factors) if d in links[a])
        if first == second or c not in factors[first][d] or c not in factors[second][b]:
            continue
        _flip(factors[first], factors[second], a, b, c, d)
        new = list(counts)
        new[first], new[second] = _count(factors[first]), _count(factors[second])
        if sum(new) <= sum(counts) or random.random() < 0.02:
            counts = new
        else:
            _flip(factors[second], factors[first], a, b, c, d)
    return None


def _corner(
    grid: Int[np.ndarray, "..."], at: tuple[int, ...], first: int, second: int
) -> tuple[int, int, int]:
    """Returns the next devices along two dimensions, between them the next to both."""

    def moved(*dims: int) -> int:
        place = [
            (x + (n in dims)) % size for n, (x, size) in enumerate(zip(at, grid.shape, strict=True))
        ]
        return int(grid[tuple(place)])

    return moved(first), moved(first, second), moved(second)


def _flip(first: _Links, second: _Links, a: int, b: int, c: int, d: int) -> None:
    """Swaps a-b and d-c of the first factor with the second's a-d and b-c."""
    for x, y in ((a, b), (d, c)):
        first[x].remove(y)
        first[y].remove(x)
        second[x].add(y)
        second[y].add(x)
    for x, y in ((a, d), (b, c)):
        second[x].remove(y)
        second[y].remove(x)
        first[x].add(y)
        first[y].add(x)


def _count(links: _Links) -> int:
    left, count = set(range(len(links))), 0
    while left:
        count += 1
        left.difference_update(_around(links, min(left)))
    return count


def _walk(links: _Links) -> tuple[int, ...]:
    return tuple(_around(links, 0))


def _around(links: _Links, start: int) -> list[int]:
    cycle, before, here = [start], start, min(links[start])
    while here != start:
        cycle.append(here)
        left, right = links[here]
        before, here = here, right if left == before else left
    return cycle
