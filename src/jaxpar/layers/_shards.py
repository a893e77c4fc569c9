"""Arrays that are cut over the FSDP axes: how each is gathered, and its gradient scattered."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._chips import traced_chip
from jaxpar._dtypes import addition_dtype, as_dtype, check_wire
from jaxpar._types import AxisName, Mode
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._checks import check_dim, check_mode
from jaxpar.collectives._fold import (
    UNROLLED_STEPS,
    Arrivals,
    gather_fold,
    place_block,
    scatter_fold,
)
from jaxpar.collectives._plan import Plan, make_plan
from jaxpar.collectives._ring import Ring, bind_ring

Leaves = list[Any]  # arrays


@dataclass(frozen=True)
class Group:
    """Leaves that travel as one array, joined along a dimension other than the one they are cut in.

    A transfer of each would wait for the same links, and a compiler that reckons with links of
    their own would start them too late.
    """

    members: tuple[int, ...]
    dim: int  # along which they are cut
    joined: int  # along which they are joined
    lengths: tuple[int, ...]  # of the members along it

    def join(self, parts: list[Array]) -> Array:
        """Returns one array of all members' parts."""
        return lax.concatenate(parts, self.joined) if len(parts) > 1 else parts[0]

    def split(self, x: Array) -> list[Array]:
        """The inverse of `join`."""
        return list(lax.split(x, self.lengths, self.joined)) if len(self.lengths) > 1 else [x]


@dataclass(frozen=True)
class Shards:
    """How the leaves of a pytree are sharded over one or several mesh axes.

    Attributes:
      stages: the rings to gather over, one after the other, each with its plan (None: the `lax`
        collectives). The last axis of a tuple is the innermost: its blocks are neighbours.
      dims: for each leaf the dimension along which it is cut, None for a leaf that is whole.
      groups: all leaves that are cut.
      wire_dtype: the dtype in which sums of gradients travel, None for that of the sums.
    """

    stages: tuple[tuple[Ring, Plan | None], ...]
    dims: tuple[int | None, ...]
    groups: tuple[Group, ...]
    wire_dtype: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_shards(shards: Shards, leaves: Leaves) -> Leaves:
    """Returns the whole leaves; None stays None."""
    whole = list(leaves)
    for group in shards.groups:
        parts = [leaves[n] for n in group.members]
        if parts[0] is None:
            continue
        for ring, plan in reversed(shards.stages):
            parts = _gather(group, parts, ring, plan)
        for number, part in zip(group.members, parts, strict=True):
            whole[number] = part
    return whole


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_gradients(shards: Shards, gradients: Leaves) -> Leaves:
    """Returns the shards of the sums over the devices of the gradients of whole leaves.

    None stands for those of a leaf of integers, which has none.
    """
    scattered = list(gradients)
    for group in shards.groups:
        parts = [gradients[n] for n in group.members]
        if parts[0] is None:
            continue
        dtype = parts[0].dtype
        if shards.wire_dtype is None:  # one rounding, after the last stage
            parts = [part.astype(addition_dtype(dtype)) for part in parts]
        for ring, plan in shards.stages:
            parts = _scatter(group, parts, ring, plan, shards.wire_dtype)
        for number, part in zip(group.members, parts, strict=True):
            scattered[number] = part.astype(dtype)
    return scattered


def _gather(group: Group, parts: list[Array], ring: Ring, plan: Plan | None) -> list[Array]:
    if plan is None:
        return [lax.all_gather(x, ring.axis_name, axis=group.dim, tiled=True) for x in parts]

    def place(wholes: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        wholes = [None] * len(parts) if wholes is None else wholes
        for block, source in arrivals:
            wholes = [
                place_block(whole, part, group.dim, source, ring.size)
                for whole, part in zip(wholes, group.split(block), strict=True)
            ]
        return wholes

    return gather_fold(group.join(parts), place, ring, plan, sums=lambda _: ())


def _scatter(
    group: Group, parts: list[Array], ring: Ring, plan: Plan | None, wire_dtype: Any
) -> list[Array]:
    dtype, dim = parts[0].dtype, group.dim
    wide = addition_dtype(dtype)
    if plan is None:
        sums = [x.astype(wire_dtype or wide) for x in parts]
        blocks = [
            lax.psum_scatter(x, ring.axis_name, scatter_dimension=dim, tiled=True) for x in sums
        ]
        return [x.astype(dtype) for x in blocks]

    def take(start: Array, size: int) -> Array:
        return group.join([lax.dynamic_slice_in_dim(x, start, size, dim) for x in parts])

    def produce(block: Array) -> Array:
        return block.astype(wide)

    length = parts[0].shape[dim] // ring.size
    return group.split(scatter_fold(produce, ring, plan, dim, length, take, wire_dtype, dtype))


def _differentiable(cts: Leaves) -> Leaves:
    return [None if ct is None or ct.dtype == jax.dtypes.float0 else ct for ct in cts]


gather_shards.defvjp(
    lambda shards, leaves: (gather_shards(shards, leaves), None),
    lambda shards, _, cts: (scatter_gradients(shards, _differentiable(cts)),),
)
scatter_gradients.defvjp(
    lambda shards, gradients: (scatter_gradients(shards, gradients), None),
    lambda shards, _, cts: (gather_shards(shards, cts),),
)


def bind_shards(
    function: str,
    leaves: list[Any],
    dims: list[Any],
    axis_name: AxisName,
    mode: Mode,
    wire_dtype: DTypeLike | None,
) -> Shards:
    """Checks the arguments that describe how `leaves` are sharded; a dim counts within its leaf."""
    check_mode(function, mode)
    wire = as_dtype(function, "wire_dtype", wire_dtype)
    whole = bind_ring(function, axis_name)
    counted: list[int | None] = []
    for x, dim in zip(leaves, dims, strict=True):
        counted.append(None if dim is None else check_dim(function, "axis", dim, x.shape))
        if dim is not None and jnp.issubdtype(x.dtype, jnp.inexact):
            check_wire(function, wire, x.dtype)
    stages = _stages(function, whole, mode)
    return Shards(stages, tuple(counted), _groups(leaves, counted), wire)


_WHOLE = object()


def broadcast_axis(function: str, axis: Any, tree: Any) -> list[Any]:
    """Returns the entry for each leaf of `tree` in `axis`: an int, None, or a prefix of those."""
    # None is an entry of axis, but in the tree it is a place without a leaf.
    marked = jax.tree.map(
        lambda entry: _WHOLE if entry is None else entry, axis, is_leaf=lambda entry: entry is None
    )
    try:
        dims = jax.tree.broadcast(marked, tree)
    except ValueError as reason:
        raise ValueError(
            f"{function}: axis={axis!r} is neither an integer, None nor a prefix of a pytree "
            f"{jax.tree.structure(tree)}: {reason}"
        ) from None
    return [None if dim is _WHOLE else dim for dim in jax.tree.leaves(dims)]


def vary_sharded(shards: Shards, leaves: list[Array]) -> list[Array]:
    """Types the leaves that are cut as varying over the axes that they are cut over."""
    axes = [name for ring, _ in shards.stages for name in ring.axis_name]
    return [
        x if dim is None else vary_over(axes, x) for x, dim in zip(leaves, shards.dims, strict=True)
    ]


def _groups(leaves: list[Any], dims: list[int | None]) -> tuple[Group, ...]:
    """Joins leaves of one dtype that differ in one dimension, not the one they are cut in."""
    cut = [n for n, dim in enumerate(dims) if dim is not None]
    groups: list[Group] = []
    while cut:
        first = cut[0]
        x, dim = leaves[first], dims[first]
        fitting: list[tuple[int, list[int]]] = [(0, [first])]
        for joined in range(x.ndim):
            same = [n for n in cut if dims[n] == dim and _fits(leaves[n], x, joined)]
            if joined != dim:
                fitting.append((joined, same))
        joined, members = max(fitting, key=lambda fit: len(fit[1]))
        lengths = tuple(leaves[n].shape[joined] for n in members)
        assert dim is not None
        groups.append(Group(tuple(members), dim, joined, lengths))
        cut = [n for n in cut if n not in members]
    return tuple(groups)


def _fits(x: Any, other: Any, joined: int) -> bool:
    def rest(x: Any) -> tuple[Any, ...]:
        return x.dtype, x.ndim, x.shape[:joined], x.shape[joined + 1 :], varying_axes(x)

    return rest(x) == rest(other)


def _stages(function: str, whole: Ring, mode: Mode) -> tuple[tuple[Ring, Plan | None], ...]:
    """The rings and plans of a mode.

    `auto` takes rings where `lax`'s collectives would be waited for: on TPU, whose compiler makes
    them synchronous, but runs a chain of permutes beside what does not need it. That of GPUs makes
    collectives asynchronous itself; on CPU devices nothing is hidden.
    """
    rings = [bind_ring(function, name) for name in whole.axis_name]
    rings = [ring for ring in rings if ring.size > 1]
    chip = traced_chip()
    if mode == "auto":
        asynchronous = chip is not None and (
            chip.synchronous_from is None
            or jax.sharding.get_abstract_mesh().size < chip.synchronous_from
        )
        mode = "bidirectional" if chip is not None and chip.torus and asynchronous else "naive"
        # A longer ring would run in a loop, beside which nothing else runs.
        longest = max((ring.size for ring in rings), default=1)
        mode = mode if longest <= 2 * UNROLLED_STEPS else "naive"
    if mode == "naive":
        return ((whole, None),) if rings else ()
    # The last block travels whole: cutting it costs two passes over memory, and it is prefetched.
    return tuple((ring, make_plan(ring.size, mode, whole_opposite=True)) for ring in rings)
