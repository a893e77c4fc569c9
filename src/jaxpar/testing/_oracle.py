"""The NumPy reference's values and derivatives, and the size of their terms.

That size is measured: the root mean square of an entry's moves, if every argument entry moves by a
random relative unit. For a sum of products it is the root sum of squares, with which rounding
errors scale. It stays large where the sum cancels, and needs no dimensions of the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Leaf: TypeAlias = Any  # a NumPy array of any dtype
Leaves: TypeAlias = list[Any]

# The step at which a central difference loses least: the cube root of float64's roundoff.
_STEP = 2.0**-18


@dataclass(frozen=True)
class Expected:
    """A float64 reference's result for an array.

    Attributes:
        terms: size of the terms that each entry sums.
        slack: how far `value` itself may be off.
    """

    value: Leaf
    terms: Leaf
    slack: Leaf

    def reshape(self, shape: tuple[int, ...]) -> "Expected":
        return Expected(*(np.reshape(part, shape) for part in (self.value, self.terms, self.slack)))


def is_float(leaf: Leaf) -> bool:
    """Returns whether an array has NumPy's own floats."""
    return np.issubdtype(leaf.dtype, np.floating)


@np.errstate(all="ignore")  # infinities and unread NaNs are what the caller wants
def expected_values(
    reference: Callable[[Leaves], Leaves], leaves: Leaves, rng: np.random.Generator, draws: int = 16
) -> list[Expected]:
    """Returns the reference, with sizes of entries' terms."""
    values = reference(leaves)
    moved = [_moved(reference, leaves, rng) for _ in range(draws)]
    return [
        Expected(value, _terms(value, moves), np.zeros(np.shape(value)))
        for value, *moves in zip(values, *moved, strict=True)
    ]


def directions(leaf: Leaf, count: int, rng: np.random.Generator) -> list[Leaf]:
    """Returns at most `count` directions; each entry of `leaf` moves in exactly one.

    A small leaf gets its unit vectors, in order. Otherwise signs and sizes are random, so that
    errors of several entries cannot cancel.
    """
    groups = (
        np.arange(leaf.size)[:, None]
        if leaf.size <= count
        else np.array_split(rng.permutation(leaf.size), count)
    )
    vectors: list[Leaf] = []
    for group in groups:
        direction = np.zeros(leaf.size)
        direction[group] = 1.0
        if len(group) > 1:
            signs = rng.choice([-1.0, 1.0], len(group))
            direction[group] = signs * rng.uniform(0.5, 1.5, len(group))
        vectors.append(direction.reshape(leaf.shape))
    return vectors


@dataclass(frozen=True)
class _CentralPullback:
    """`<cotangents, derivative of reference in leaf at, along v>`, by a central difference."""

    reference: Callable[[Leaves], Leaves]
    cotangents: Leaves
    at: int

    def products(self, leaves: Leaves, v: Leaf, step: float) -> Leaves:
        before, after = (
            self.reference([*leaves[: self.at], moved, *leaves[self.at + 1 :]])
            for moved in (leaves[self.at] - step * v, leaves[self.at] + step * v)
        )
        return [
            _finite(ct * np.subtract(b, a, dtype=np.float64) / (2 * step))
            for ct, a, b in zip(self.cotangents, before, after, strict=True)
        ]

    def __call__(self, leaves: Leaves, v: Leaf, step: float) -> float:
        return sum(float(np.sum(p)) for p in self.products(leaves, v, step))


@np.errstate(all="ignore")
def expected_projections(
    reference: Callable[[Leaves], Leaves],
    leaves: Leaves,
    cotangents: Leaves,
    at: int,
    along: Sequence[Leaf],
    rng: np.random.Generator,
    draws: int = 4,
) -> Expected:
    """Returns `<gradient of leaf at, v>` for every v in `along`.

    Slack is the difference to a step of twice the length, and the rounding of both.
    """
    size = _root_mean_square(leaves[at]) or 1.0

    step = _STEP * size
    pull = _CentralPullback(reference, cotangents, at)
    values, terms, doubled = np.zeros((3, len(along)))
    for i, v in enumerate(along):
        products = pull.products(leaves, v, step)
        values[i] = sum(float(np.sum(p)) for p in products)
        terms[i] = sum(float(np.sum(p**2)) for p in products)
        doubled[i] = pull(leaves, v, 2 * step)
    outputs = zip(cotangents, reference(leaves), strict=True)
    noise = sum(float(np.sum(np.abs(_finite(ct * out)))) for ct, out in outputs)
    noise *= float(np.finfo(np.float64).eps) / step
    doubt = np.abs(values - doubled)
    _refuse_noise(doubt, 1e-3 * _root_mean_square(values) + 100 * noise)

    terms += values**2
    for _ in range(draws):
        ahead, behind = _neighbours(leaves, rng)
        moves = [pull(ahead, v, step) - pull(behind, v, step) for v in along]
        terms += (np.array(moves) / (2 * _STEP)) ** 2 / draws
    if len(along) < leaves[at].size:
        # Entries that share a direction may cancel each other, but their roundings do not.
        terms += np.mean(values**2)
    return Expected(values, np.sqrt(terms), doubt + noise)


def _refuse_noise(doubt: Leaf, limit: float) -> None:
    # A few directions may cross a kink. If many do, no derivative can be had.
    if np.size(doubt) and np.mean(doubt > limit) > 0.25:
        raise ValueError(
            "assert_matches_reference: central differences of the reference do not converge: "
            f"steps of one and two lengths differ by {np.max(doubt):.2g}; compute the reference in "
            "float64 throughout, keep it smooth near args, or pass reference_vjp"
        )


def _moved(
    reference: Callable[[Leaves], Leaves], leaves: Leaves, rng: np.random.Generator
) -> Leaves:
    ahead, behind = (reference(end) for end in _neighbours(leaves, rng))
    return [
        _finite(np.subtract(b, a, dtype=np.float64) / (2 * _STEP))
        for a, b in zip(behind, ahead, strict=True)
    ]


def _neighbours(leaves: Leaves, rng: np.random.Generator) -> tuple[Leaves, Leaves]:
    ahead, behind = list(leaves), list(leaves)
    for i, leaf in enumerate(leaves):
        if is_float(leaf):
            move = _STEP * leaf * rng.standard_normal(leaf.shape)
            ahead[i], behind[i] = leaf + move, leaf - move
    return ahead, behind


def _terms(value: Leaf, moves: Sequence[Leaf]) -> Leaf:
    """Returns the root sum of squares of entries and moves."""
    squares = [move**2 for move in moves]
    return np.sqrt(_finite(np.asarray(value, np.float64)) ** 2 + sum(squares) / len(squares))


def _root_mean_square(leaf: Leaf) -> float:
    finite = leaf[np.isfinite(leaf)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _finite(array: Leaf) -> Leaf:
    return np.where(np.isfinite(array), array, 0.0)
