"""Strategies of Hypothesis, which is optional: meshes, specs, shapes, dtypes and ragged sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.arguments.calls import readable
from jaxpar.arguments.optional_packages import require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    AxisOrder = str | tuple[str, ...]
    Shape = tuple[int, ...]

    AxisOrders = SearchStrategy[AxisOrder]
    Dtypes = SearchStrategy[np.dtype[Any]]
    Meshes = SearchStrategy[Mesh]
    Shapes = SearchStrategy[Shape]
    Specs = SearchStrategy[PartitionSpec]
else:  # run-time type checkers must not need Hypothesis, nor check random tuple items in tests
    AxisOrder = Shape = Any
    AxisOrders = Dtypes = Meshes = Shapes = Specs = Any


def strategies(name: str) -> ModuleType:
    return require("hypothesis.strategies", "testing", name)


@readable
def meshes(
    devices: Sequence[Any] | None = None,
    *,
    axis_names: Sequence[str] = ("x", "y", "z"),
    max_axes: int = 3,
    min_size: int = 1,
    max_size: int | None = None,
    shuffle: bool = True,
) -> Meshes:
    """Returns a strategy for meshes, odd sizes and axes of size 1 included.

    All sizes are equally likely, over one to `max_axes` axes of `AxisType.Auto`. Shrinks towards
    one axis, few devices, and the order of `devices`.

    Args:
      devices: `jax.Device`s; a mesh uses a prefix. None: `jax.devices()`.
      axis_names: in mesh order; a mesh uses a prefix.
      max_axes: most axes, at most `len(axis_names)`.
      min_size: fewest devices.
      max_size: most devices. None: all.
      shuffle: whether the order may differ from `devices`.

    Returns:
      A strategy for `jax.sharding.Mesh`.

    Raises:
      ValueError: no mesh fits the limits.
      ImportError: Hypothesis is not installed (all strategies need it).

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
        raise ValueError(
            f"meshes: min_size={min_size} must be at least 1, and at most max_size={max_size}"
        )

    @st.composite
    def draw_mesh(draw: Callable[[Any], Any]) -> Mesh:
        # The backend starts at the first draw, not at import, where @given stands.
        at_hand = list(jax.devices() if devices is None else devices)
        largest = len(at_hand) if max_size is None else min(max_size, len(at_hand))
        if largest < min_size:
            raise ValueError(
                f"meshes: min_size={min_size} must be at most the {largest} devices at hand"
            )
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


@readable
def axis_orders(mesh: Mesh, *, min_axes: int = 1, max_axes: int | None = None) -> AxisOrders:
    """Returns a strategy for the axis names of a collective over `mesh`.

    Args:
      min_axes: fewest axes.
      max_axes: most axes. None: all.

    Returns:
      A strategy for a name, `"x"`, or a tuple of one or more distinct names in any order.

    Raises:
      ValueError: no number of axes fits the limits.

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


@readable
def specs(mesh: Mesh, shape: Sequence[int]) -> Specs:
    """Returns a strategy for the PartitionSpecs that `shape` can have on `mesh`.

    Args:
      shape: the global shape. Only axes that divide a dimension shard it.

    Returns:
      A strategy for `PartitionSpec`. A dimension may have several axes in any order, and a trailing
      `None` may be absent. Shrinks to replicated.

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


_KINDS: dict[str, tuple[str, ...]] = {
    "float": ("float32", "bfloat16", "float16", "float64"),
    "int": ("int32", "int8", "int16", "int64"),
    "uint": ("uint32", "uint8", "uint16", "uint64"),
    "bool": ("bool",),
}


def _position(name: str, shards: int, rank: int, dim: int) -> int:
    if shards < 1:
        raise ValueError(f"{name}: shards={shards} must be at least 1")
    if not -rank <= dim < rank:
        raise ValueError(f"{name}: dim={dim} is not a dimension of a shape of rank {rank}")
    return dim % rank


@readable
def even_shapes(shards: int, *, rank: int = 2, dim: int = 0, max_size: int = 16) -> Shapes:
    """Returns a strategy for shapes whose `dim` is a positive multiple of `shards`.

    Args:
      shards: devices that share the dimension.
      rank: the number of dimensions.
      dim: the sharded dimension.
      max_size: the largest size; `dim` has size `shards` if that is larger.

    Returns:
      A strategy for tuples of `rank` positive ints.

    Raises:
      ValueError: `shards` is not positive, or `dim` is out of range.

    Example:
      >>> from hypothesis import given
      >>> @given(even_shapes(3, rank=2, dim=1))
      ... def test_shape(shape):
      ...     assert shape[1] % 3 == 0
      >>> test_shape()
    """
    st = strategies("even_shapes")
    dim = _position("even_shapes", shards, rank, dim)
    sides = [st.integers(1, max_size)] * rank
    sides[dim] = st.integers(1, max(1, max_size // shards)).map(lambda blocks: blocks * shards)
    return st.tuples(*sides)


@readable
def uneven_shapes(shards: int, *, rank: int = 2, dim: int = 0, max_size: int = 16) -> Shapes:
    """Returns a strategy for shapes whose `dim` is no multiple of `shards`.

    Arguments are as for `even_shapes`, with at least 2 `shards`.

    Returns:
      A strategy for tuples of `rank` positive ints, sizes below `shards` too.

    Raises:
      ValueError: `shards` is below 2, or `dim` is out of range.

    Example:
      >>> from hypothesis import given
      >>> @given(uneven_shapes(4, rank=1))
      ... def test_shape(shape):
      ...     assert shape[0] % 4
      >>> test_shape()
    """
    st = strategies("uneven_shapes")
    dim = _position("uneven_shapes", shards, rank, dim)
    if shards == 1:
        raise ValueError("uneven_shapes: shards=1 divides every size; draw it from 2 up")
    sides = [st.integers(1, max_size)] * rank
    sides[dim] = st.sampled_from([n for n in range(1, max_size + 1) if n % shards])
    return st.tuples(*sides)


@readable
def dtypes(kinds: Sequence[str] = ("float",)) -> Dtypes:
    """Returns a strategy for the dtypes that arrays can have in this process.

    Args:
      kinds: some of "float" (float32, bfloat16, float16, float64), "int", "uint" (8 to 64 bits) and
        "bool". 64 bits need `jax_enable_x64`.

    Returns:
      A strategy for NumPy dtypes. Shrinks towards 32 bits.

    Raises:
      ValueError: a kind is unknown, or there is none.

    Example:
      >>> from hypothesis import given
      >>> @given(dtypes(["float", "int"]))
      ... def test_zeros(dtype):
      ...     assert jnp.zeros(3, dtype).dtype == dtype
      >>> test_zeros()
    """
    st = strategies("dtypes")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown or not kinds:
        raise ValueError(f"dtypes: kinds={tuple(kinds)} must be some of {tuple(_KINDS)}")
    names = [name for kind in kinds for name in _KINDS[kind]]

    @st.composite
    def draw_dtype(draw: Callable[[Any], Any]) -> np.dtype[Any]:
        # x64 may be switched on after the strategy is made.
        usable = [name for name in names if jax.dtypes.canonicalize_dtype(name) == name]
        return jnp.dtype(draw(st.sampled_from(usable)))

    return draw_dtype()


@readable
def ragged_sizes(count: int, total: int, *, exact: bool = False) -> Shapes:
    """Returns a strategy for sizes of groups that share rows, many of them empty.

    Args:
      count: groups.
      total: rows.
      exact: whether sizes sum to `total`, not to less.

    Returns:
      A strategy for tuples of `count` non-negative ints. One group may have all rows; unless
      `exact`, all may be empty.

    Raises:
      ValueError: `count` or `total` is negative, or `count` is 0 with `exact` and rows.

    Example:
      >>> from hypothesis import given
      >>> @given(ragged_sizes(4, 10, exact=True))
      ... def test_sizes(sizes):
      ...     assert len(sizes) == 4 and sum(sizes) == 10
      >>> test_sizes()
    """
    st = strategies("ragged_sizes")
    if count < 0 or total < 0 or (exact and total and not count):
        raise ValueError(
            f"ragged_sizes: no {count} sizes can share {total} rows; neither may be negative, and "
            "rows need a size to be in"
        )

    @st.composite
    def draw_sizes(draw: Callable[[Any], Any]) -> Shape:
        sizes = [0] * count
        if not count:
            return ()
        rows = total if exact else draw(st.integers(0, total))
        # Cutting the rows among a few groups, and not among all, makes zeros common.
        used = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
        cuts = draw(st.lists(st.integers(0, rows), min_size=len(used) - 1, max_size=len(used) - 1))
        edges = [0, *sorted(cuts), rows]
        for group, low, high in zip(used, edges, edges[1:], strict=False):
            sizes[group] = high - low
        return tuple(sizes)

    return draw_sizes()
