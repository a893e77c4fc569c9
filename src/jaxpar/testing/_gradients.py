"""Gradients of a sharded function and what the reference says of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.testing._oracle import (
    Expected,
    Leaf,
    Leaves,
    directions,
    expected_projections,
    expected_values,
    is_float,
)


@dataclass(frozen=True)
class ExpectedGradient:
    """What the reference says of one argument's gradient.

    Attributes:
        at: the position of the argument among all leaves.
        along: the directions that the gradient is projected onto; None for its entries.
        expected: the projections, or the entries in the argument's shape.
    """

    at: int
    along: Sequence[Leaf] | None
    expected: Expected

    def place(self, index: tuple[int, ...]) -> str:
        """Where in the argument an entry of `expected` is."""
        if self.along is None:
            return f"entry {index}"
        entries = np.argwhere(self.along[index[0]])
        some = ", ".join(str(tuple(int(i) for i in entry)) for entry in entries[:3])
        return f"direction {index[0]}, over {len(entries)} random entries such as {some}"

    def project(self, gradient: Leaf) -> Leaf:
        """What of `gradient` compares with `expected`."""
        if self.along is None:
            return gradient
        wide = np.asarray(gradient, np.float64)
        # Only the entries that a direction moves: a NaN elsewhere is not its fault.
        return np.array([np.sum(wide[v != 0] * v[v != 0]) for v in self.along])


def pullback(function: Callable[..., Any], args: Any) -> Callable[[Leaves, Leaves], Any]:
    """`(leaves, cotangents) -> (outputs, gradients)`, for floats among leaves and outputs."""
    treedef = jax.tree.structure(args)

    def run(leaves: Leaves, cotangents: Leaves) -> tuple[Any, Leaves]:
        floats = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

        def of_floats(moving: Leaves) -> tuple[Leaves, Any]:
            merged = list(leaves)
            for i, leaf in zip(floats, moving, strict=True):
                merged[i] = leaf
            out = function(*treedef.unflatten(merged))
            return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

        _, pull, out = jax.vjp(of_floats, [leaves[i] for i in floats], has_aux=True)
        return out, pull(cotangents)[0]

    return run


def expected_gradients(
    reference: Callable[[Leaves], Leaves],
    leaves: Leaves,
    cotangents: Leaves,
    max_directions: int,
    rng: np.random.Generator,
) -> list[ExpectedGradient]:
    """Every float leaf's gradient, by central differences; integer outputs have cotangent 0."""
    found: list[ExpectedGradient] = []
    for at, leaf in enumerate(leaves):
        if not is_float(leaf):
            continue
        along = directions(leaf, max_directions, rng)
        expected = expected_projections(reference, leaves, cotangents, at, along, rng)
        if len(along) < leaf.size:
            found.append(ExpectedGradient(at, along, expected))
        else:
            found.append(ExpectedGradient(at, None, expected.reshape(leaf.shape)))
    return found


def gradients_of(
    vjp: Callable[[Leaves, Leaves], Leaves],
    leaves: Leaves,
    cotangents: Leaves,
    rng: np.random.Generator,
) -> list[ExpectedGradient]:
    """Every float leaf's gradient, by a given `(leaves, cotangents) -> gradients`."""
    count = len(leaves)
    wanted = expected_values(
        lambda both: vjp(both[:count], both[count:]), [*leaves, *cotangents], rng
    )
    return [
        ExpectedGradient(at, None, expected)
        for at, (leaf, expected) in enumerate(zip(leaves, wanted, strict=True))
        if is_float(leaf)
    ]


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a float of any width; NumPy alone does not know bfloat16 for one."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
