"""What the NumPy reference says: values, derivatives, and how large their terms are.

The size of the terms of an entry is read off the reference as a condition number: how far the
entry moves, in root mean square, when every entry of every argument moves by a random relative
unit. For a sum of products that is the root sum of squares of its terms, which is what rounding
errors scale with: it stays large where the sum itself cancels, and no dimension of the reference
need be known to find it.
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
    """What a float64 reference gives for one array.

    Attributes:
        value: the expected entries.
        terms: size of the terms that each entry sums.
        slack: how far `value` itself may be off.
    """

    value: Leaf
    terms: Leaf
    slack: Leaf

    def reshape(self, shape: tuple[int, ...]) -> "Expected":
        """The same entries in another shape."""
        return Expected(*(np.reshape(part, shape) for part in (self.value, self.terms, self.slack)))


def is_float(leaf: Leaf) -> bool:
    """Whether an array of the reference can move; all its floats are NumPy's own."""
    return np.issubdtype(leaf.dtype, np.floating)


@np.errstate(all="ignore")  # infinities and unread NaNs are the caller's intent
def expected_values(
    reference: Callable[[Leaves], Leaves], leaves: Leaves, rng: np.random.Generator, draws: int = 16
) -> list[Expected]:
    """The reference at `leaves`, with the size of the terms of each entry."""
    values = reference(leaves)
    moved = [_moved(reference, leaves, rng) for _ in range(draws)]
    return [
        Expected(value, _terms(value, moves), np.zeros(np.shape(value)))
        for value, *moves in zip(values, *moved, strict=True)
    ]


def directions(leaf: Leaf, count: int, rng: np.random.Generator) -> list[Leaf]:
    """At most `count` directions; each entry of `leaf` moves in exactly one of them.

    A leaf of at most `count` entries gets its unit vectors, in order. Entries that share a
    direction have random signs and sizes, so that errors in several of them cannot cancel.
    """
    groups = (
        np.arange(leaf.size)[:, None]
        if leaf.size <= count
        else np.array_split(rng.permutation(leaf.size), count)
    )
    found: list[Leaf] = []
    for group in groups:
        direction = np.zeros(leaf.size)
        direction[group] = 1.0
        if len(group) > 1:
            signs = rng.choice([-1.0, 1.0], len(group))
            direction[group] = signs * rng.uniform(0.5, 1.5, len(group))
        found.append(direction.reshape(leaf.shape))
    return found


@dataclass(frozen=True)
class _CentralPullback:
    """`<cotangents, derivative of reference in leaf at, along v>`, by a central difference."""

    reference: Callable[[Leaves], Leaves]
    cotangents: Leaves
    at: int

    def products(self, leaves: Leaves, v: Leaf, step: float) -> Leaves:
        """The products whose sum over all entries is the pullback."""
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
    """`<gradient of leaf at, v>` for every direction v in `along`, by central differences.

    The truth of a step is judged by a step of twice the length: what they disagree by, and the
    rounding of both, is slack.
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
        # Entries that share a direction may cancel each other, and their roundings do not.
        terms += np.mean(values**2)
    return Expected(values, np.sqrt(terms), doubt + noise)


def _refuse_noise(doubt: Leaf, limit: float) -> None:
    # A few directions may cross a kink; most of them mean that no derivative can be had.
    if np.size(doubt) and np.mean(doubt > limit) > 0.25:
        raise ValueError(
            "assert_matches_reference: central differences of the reference do not converge: "
            f"steps of one and two lengths differ by {np.max(doubt):.2g}; compute the reference in "
            "float64 throughout, keep it smooth near args, or pass reference_vjp"
        )


def _moved(
    reference: Callable[[Leaves], Leaves], leaves: Leaves, rng: np.random.Generator
) -> Leaves:
    """How far the outputs move for one random relative move of all float entries."""
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
    """The size of an entry itself and, in root mean square, of its moves."""
    squares = [move**2 for move in moves]
    return np.sqrt(_finite(np.asarray(value, np.float64)) ** 2 + sum(squares) / len(squares))


def _root_mean_square(leaf: Leaf) -> float:
    finite = leaf[np.isfinite(leaf)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _finite(array: Leaf) -> Leaf:
    return np.where(np.isfinite(array), array, 0.0)
