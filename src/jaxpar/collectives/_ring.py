"""A ring: mesh axes bound to the program being traced, and the one place that moves a block."""

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax

from jaxpar._calls import public, type_error, value_error
from jaxpar._types import AxisName, Integer, Tree
from jaxpar._varying import vary_alike
from jaxpar.mesh import axis_names, ring_order


@dataclass(frozen=True)
class Ring:
    """The devices along `axis_name`, in logical order."""

    axis_name: tuple[str, ...]
    size: int

    def __str__(self) -> str:
        name = self.axis_name[0] if len(self.axis_name) == 1 else self.axis_name
        return f"axis {name!r} ({self.size})"

    def index(self) -> jax.Array:
        """The logical index of the device that runs the program."""
        return lax.axis_index(self.axis_name)

    def shift(self, tree: Any, offset: int) -> Any:
        """Moves every leaf `offset` devices on: device `i` receives what `i - offset` held."""
        (tree,) = vary_alike(self.axis_name, tree)
        if offset % self.size == 0:
            return tree
        axes, order = self.axis_name, range(self.size)
        if len(axes) > 1:
            # Given a tuple, ppermute has counted its indices in mesh order, not in the order of the
            # tuple (silently up to jax 0.11.0): naming the axes in mesh order leaves one reading.
            mesh = jax.sharding.get_abstract_mesh()
            axes = tuple(name for name in mesh.axis_names if name in self.axis_name)
            order = ring_order(mesh, self.axis_name).tolist()
        pairs = [(order[p], order[(p + offset) % self.size]) for p in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def bind_ring(axis_name: AxisName) -> Ring:
    """Returns the ring over `axis_name`, or says why `function` cannot have it here."""
    names = axis_names(axis_name)
    sizes: dict[str, int] = {}
    for name in names:
        try:
            sizes[name] = lax.axis_size(name)
        except NameError:
            mesh = jax.sharding.get_abstract_mesh()
            bound = {axis: mesh.shape[axis] for axis in mesh.manual_axes}
            found = f"the axes bound here are {bound}" if bound else "no mesh axis is bound here"
            raise value_error(
                f"axis_name {name!r} is not bound: {found}. Call it inside "
                f"jax.shard_map over a mesh with an axis {name!r}"
            ) from None
    mesh = jax.sharding.get_abstract_mesh()
    if len(names) > 1 and not set(names) <= set(mesh.axis_names):
        raise value_error(
            f"axis_name {names!r} has axes that the mesh lacks, which has "
            f"{dict(mesh.shape)}; a ring over several axes needs mesh axes, whose order is known"
        )
    return Ring(names, prod(sizes.values()))


@public
def ring_shift(x: Tree, axis_name: AxisName, offset: Integer = 1) -> Tree:
    """Moves every array of a pytree `offset` devices along a ring.

    Args:
      x: pytree of local arrays of any shape and dtype.
      axis_name: one mesh axis, or a tuple of them in any order; the logical index counts in the
        order of the tuple, as in `lax.axis_index`.
      offset: any integer, known while tracing. Device `i` receives what device `i - offset` held.

    Returns:
      A pytree like `x`, varying over `axis_name`.

    Raises:
      TypeError: `offset` is no integer.
      ValueError: an unknown axis name, or a call outside `jax.shard_map`.

    Cost: one ppermute a leaf; a device sends each leaf once, and nothing if the ring's size divides
    `offset`. The derivative is the shift by `-offset`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> shift = jax.jit(jax.shard_map(lambda x: ring_shift(x, "tp"), mesh=mesh,
      ...     in_specs=P("tp"), out_specs=P("tp")))
      >>> shift(jnp.arange(8))
      Array([7, 0, 1, 2, 3, 4, 5, 6], dtype=int32)
    """
    ring = bind_ring(axis_name)
    given: Any = None if isinstance(offset, bool) else offset
    try:
        places = operator.index(given)
    except TypeError:
        raise type_error(
            f"offset must be an integer known while tracing, got {offset!r} of type "
            f"{type(offset).__name__}; for a shift that depends on data, gather and index instead"
        ) from None
    return ring.shift(x, places)
