"""Strategies for meshes, orders of their axes, and specs that fit a shape."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.testing._hypothesis import AxisOrder, AxisOrders, Meshes, Specs, strategies


def meshes(
    devices: Sequence[Any] | None = None,
    *,
    axis_names: Sequence[str] = ("x", "y", "z"),
    max_axes: int = 3,
    min_size: int = 1,
    max_size: int | None = None,
    shuffle: bool = True,
) -> Meshes:
    """Strategy for meshes of any size, odd ones and axes of size 1 included.

    A size is drawn first, then a factorisation of it over one to `max_axes` axes, so that every
    size is as likely as any other. All axes are `AxisType.Auto`. Shrinks towards one axis, few
    devices, and the order of `devices`.

    Args:
        devices: the `jax.Device`s at hand; a mesh uses a prefix of them. `jax.devices()` when None.
        axis_names: the names of the axes, in mesh order; a mesh uses a prefix of them.
        max_axes: largest number of axes, at most `len(axis_names)`.
        min_size: smallest number of devices in a mesh.
        max_size: largest number of devices in a mesh; all of them when None.
        shuffle: whether the order of the devices in the mesh may differ from `devices`.

    Returns:
        A Hypothesis strategy for `jax.sharding.Mesh`.

    Raises:
        ValueError: no mesh fits the limits.
        ImportError: Hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(meshes(max_axes=2))
        ... def test_sizes(mesh):
        ...     assert mesh.size <= jax.device_count()
        >>> test_sizes()
    """
    st = strategies("meshes")
    if not 1 <= max_axes <= len(axis_names):
        raise ValueError(
            f"meshes: max_axes={max_axes} must be from 1 to the number of axis names, "
            f"{len(axis_names)}"
        )
    if min_size < 1 or (max_size is not None and max_size < min_size):
        raise ValueError(f"meshes: no size is at least {min_size} (or 1) and at most {max_size}")

    @st.composite
    def draw_mesh(draw: Callable[[Any], Any]) -> Mesh:
        # The backend starts at the first draw, not at import, where @given stands.
        at_hand = list(jax.devices() if devices is None else devices)
        largest = len(at_hand) if max_size is None else min(max_size, len(at_hand))
        if largest < min_size:
            raise ValueError(f"meshes: min_size={min_size} but only {largest} devices are at hand")
        size = draw(st.integers(min_size, largest))
        count = draw(st.integers(1, max_axes))
        sizes: list[int] = []
        for _ in range(count - 1):
            left = size // math.prod(sizes)
            sizes.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        sizes.append(size // math.prod(sizes))
        order = draw(st.permutations(range(size))) if shuffle else range(size)
        grid = np.array([at_hand[i] for i in order]).reshape(sizes)
        return Mesh(grid, tuple(axis_names[:count]), axis_types=(AxisType.Auto,) * count)

    return draw_mesh()


def axis_orders(mesh: Mesh, *, min_axes: int = 1, max_axes: int | None = None) -> AxisOrders:
    """Strategy for the axis name arguments that a collective over `mesh` can be given.

    Args:
        mesh: the mesh whose axes are named.
        min_axes: smallest number of axes.
        max_axes: largest number of axes; all of them when None.

    Returns:
        A Hypothesis strategy for one name, `"x"`, or a tuple of distinct names in any order,
        `("y", "x")`; one axis comes both as a name and as a tuple of one.

    Raises:
        ValueError: the mesh has fewer than `min_axes` axes, or no number of axes is allowed.
        ImportError: Hypothesis is not installed.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
        >>> from hypothesis import given
        >>> @given(axis_orders(mesh, min_axes=2))
        ... def test_orders(axes):
        ...     assert axes in [("x", "y"), ("y", "x")]
        >>> test_orders()
    """
    st = strategies("axis_orders")
    names = tuple(str(name) for name in mesh.axis_names)
    largest = len(names) if max_axes is None else min(max_axes, len(names))
    if not 1 <= min_axes <= largest:
        raise ValueError(
            f"axis_orders: min_axes={min_axes} must be from 1 to {largest}, the largest number of "
            f"axes allowed on a mesh of {names}"
        )

    @st.composite
    def draw_axes(draw: Callable[[Any], Any]) -> AxisOrder:
        count = draw(st.integers(min_axes, largest))
        axes = tuple(draw(st.permutations(names))[:count])
        return axes[0] if count == 1 and draw(st.booleans()) else axes

    return draw_axes()


def specs(mesh: Mesh, shape: Sequence[int]) -> Specs:
    """Strategy for the PartitionSpecs that `shape` can have on `mesh`.

    Args:
        mesh: the mesh whose axes the specs name.
        shape: the global shape; a dimension is sharded only over axes that divide it.

    Returns:
        A Hypothesis strategy for `PartitionSpec`: each mesh axis at most once, several axes on
        one dimension in any order, trailing `None` present or left off. Shrinks to replicated.

    Raises:
        ImportError: Hypothesis is not installed.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> from hypothesis import given
        >>> @given(specs(mesh, (4, 6)))
        ... def test_specs(spec):
        ...     assert len(spec) <= 2
        >>> test_specs()
    """
    st = strategies("specs")

    @st.composite
    def draw_spec(draw: Callable[[Any], Any]) -> PartitionSpec:
        unused = [str(name) for name in mesh.axis_names]
        entries: list[str | tuple[str, ...] | None] = [None] * len(shape)
        for dim in draw(st.permutations(range(len(shape)))):
            axes: list[str] = []
            left = shape[dim]
            while fitting := [name for name in unused if left % mesh.shape[name] == 0]:
                name = draw(st.sampled_from([None, *fitting]))
                if name is None:
                    break
                axes.append(name)
                unused.remove(name)
                left //= mesh.shape[name]
            if axes:
                entries[dim] = axes[0] if len(axes) == 1 else tuple(axes)
        while entries and entries[-1] is None and draw(st.booleans()):
            entries.pop()
        return PartitionSpec(*entries)

    return draw_spec()
