"""Arrays that are cut over the FSDP axes: how each is gathered, and its gradient scattered."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike

from jaxpar._chips import traced_chip
from jaxpar._dtypes import addition_dtype, as_dtype, check_wire
from jaxpar._types import AxisName, Mode
from jaxpar._varying import vary_over
from jaxpar.collectives._checks import check_dim, check_mode
from jaxpar.collectives._fold import UNROLLED_STEPS
from jaxpar.collectives._plan import Plan, make_plan
from jaxpar.collectives._primitive import gather_blocks, scatter_sums
from jaxpar.collectives._ring import Ring, bind_ring


@dataclass(frozen=True)
class Shards:
    """How the leaves of a pytree are sharded over one or several mesh axes.

    Attributes:
      stages: the rings to gather over, one after the other, each with its plan (None: the `lax`
        collectives). The last axis of a tuple is the innermost: its blocks are neighbours.
      dims: for each leaf the dimension along which it is cut, None for a leaf that is whole.
      wire_dtype: the dtype in which sums of gradients travel, None for that of the sums.
    """

    stages: tuple[tuple[Ring, Plan | None], ...]
    dims: tuple[int | None, ...]
    wire_dtype: Any

    @property
    def size(self) -> int:
        """The number of devices that share a leaf."""
        return prod(ring.size for ring, _ in self.stages)

    def gather(self, shards: list[Array]) -> list[Array]:
        """Returns the whole leaves."""
        return [self._gather(x, dim) for x, dim in zip(shards, self.dims, strict=True)]

    def scatter(self, gradients: list[Any]) -> list[Any]:
        """Returns the shards of the sums over the devices of the gradients of whole leaves."""
        return [self._scatter(x, dim) for x, dim in zip(gradients, self.dims, strict=True)]

    def _gather(self, x: Array, dim: int | None) -> Array:
        for ring, plan in () if dim is None else reversed(self.stages):
            x = gather_blocks(x, ring, plan, dim, self.wire_dtype)
        return x

    def _scatter(self, x: Any, dim: int | None) -> Any:
        if dim is None:
            return x
        dtype = x.dtype
        if self.wire_dtype is None:
            x = x.astype(addition_dtype(dtype))  # one rounding, after the last stage
        for ring, plan in self.stages:
            x = scatter_sums(x, ring, plan, dim, self.wire_dtype)
        return x.astype(dtype)


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
        if dim is not None:
            check_wire(function, wire, x.dtype)
    return Shards(_stages(function, whole, mode), tuple(counted), wire)


def broadcast_axis(function: str, axis: Any, tree: Any) -> list[Any]:
    """Returns the entry for each leaf of `axis`: an int, None, or a prefix of `tree` of those."""

    def is_entry(entry: Any) -> bool:
        return entry is None

    try:
        dims = jax.tree.broadcast(axis, tree, is_leaf=is_entry)
    except ValueError as reason:
        raise ValueError(
            f"{function}: axis={axis!r} is neither an integer, None nor a prefix of a pytree "
            f"{jax.tree.structure(tree)}: {reason}"
        ) from None
    return jax.tree.leaves(dims, is_leaf=is_entry)


def vary_sharded(shards: Shards, leaves: list[Array]) -> list[Array]:
    """Types the leaves that are cut as varying over the axes that they are cut over."""
    axes = [name for ring, _ in shards.stages for name in ring.axis_name]
    return [
        x if dim is None else vary_over(axes, x) for x, dim in zip(leaves, shards.dims, strict=True)
    ]


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
