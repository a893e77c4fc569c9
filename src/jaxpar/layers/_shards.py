"""Arrays that are cut over the FSDP axes: how each is gathered, and its gradient scattered."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar._axis import Ring
from jaxpar._calls import value_error
from jaxpar._checks import check_dim
from jaxpar._dtypes import check_wire
from jaxpar._varying import vary_over
from jaxpar.collectives._blocks import Blocks, gather_blocks, group_leaves, scatter_sums
from jaxpar.collectives._choice import Problem, choose_stages

Leaves = list[Any]  # arrays


@dataclass(frozen=True)
class Shards(Blocks):
    """How the leaves of a pytree are sharded over one or several mesh axes.

    Attributes:
      dims: for each leaf the dimension along which it is cut, None for a leaf that is whole.
    """

    dims: tuple[int | None, ...] = ()


def gather_shards(shards: Shards, leaves: Leaves) -> Leaves:
    """Returns the whole leaves; None stays None."""
    return gather_blocks(shards, None, leaves)


def scatter_gradients(shards: Shards, gradients: Leaves) -> Leaves:
    """Returns the shards of the sums over the devices of the gradients of whole leaves.

    None stands for those of a leaf of integers, which has none.
    """
    return scatter_sums(shards, None, gradients)


def bind_shards(leaves: list[Any], dims: list[Any], ring: Ring) -> Shards:
    """Checks the arguments that describe how `leaves` are sharded; a dim counts within its leaf."""
    counted: list[int | None] = []
    for x, dim in zip(leaves, dims, strict=True):
        counted.append(None if dim is None else check_dim("dim", dim, x.shape))
        if dim is not None and jnp.issubdtype(x.dtype, jnp.inexact):
            check_wire(ring.wire_dtype, x.dtype)
    stages = choose_stages(Problem("weights", ring))
    groups = group_leaves(leaves, counted, join=all(way.joins for way in stages))
    return Shards(stages, groups, dims=tuple(counted))


_WHOLE = object()


def broadcast_dim(dim: Any, tree: Any) -> list[Any]:
    """Returns the entry for each leaf of `tree` in `dim`: an int, None, or a prefix of those."""
    # None is an entry of dim, but in the tree it is a place without a leaf.
    marked = jax.tree.map(
        lambda entry: _WHOLE if entry is None else entry, dim, is_leaf=lambda entry: entry is None
    )
    try:
        dims = jax.tree.broadcast(marked, tree)
    except ValueError as reason:
        raise value_error(
            f"dim={dim!r} is neither an integer, None nor a prefix of a pytree "
            f"{jax.tree.structure(tree)}: {reason}"
        ) from None
    return [None if entry is _WHOLE else entry for entry in jax.tree.leaves(dims)]


def vary_sharded(shards: Shards, leaves: list[Array]) -> list[Array]:
    """Types the leaves that are cut as varying over the axes that they are cut over."""
    axes = [name for way in shards.stages for name in way.ring.names]
    return [
        x if dim is None else vary_over(axes, x) for x, dim in zip(leaves, shards.dims, strict=True)
    ]
