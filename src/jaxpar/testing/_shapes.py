"""Strategies for shapes that a ring divides or does not, dtypes, and ragged sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.testing._hypothesis import Dtypes, Shape, Shapes, strategies

_KINDS: dict[str, tuple[str, ...]] = {
    "float": ("float32", "bfloat16", "float16", "float64"),
    "int": ("int32", "int8", "int16", "int64"),
    "uint": ("uint32", "uint8", "uint16", "uint64"),
    "bool": ("bool",),
}


def _position(name: str, ring_size: int, rank: int, dim: int) -> int:
    if ring_size < 1:
        raise ValueError(f"{name}: ring_size={ring_size} must be at least 1")
    if not -rank <= dim < rank:
        raise ValueError(f"{name}: dim={dim} is not a dimension of a shape of rank {rank}")
    return dim % rank


def even_shapes(ring_size: int, *, rank: int = 2, dim: int = 0, max_size: int = 16) -> Shapes:
    """Strategy for shapes whose dimension `dim` is a positive multiple of `ring_size`.

    Args:
        ring_size: the number of devices that the dimension is split over.
        rank: the number of dimensions.
        dim: the dimension that the ring divides; negative counts from the end.
        max_size: largest size of a dimension; `dim` has `ring_size` where that is larger.

    Returns:
        A Hypothesis strategy for tuples of `rank` positive ints.

    Raises:
        ValueError: `ring_size` is not positive, or `dim` is out of range.
        ImportError: Hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(even_shapes(3, rank=2, dim=1))
        ... def test_shape(shape):
        ...     assert shape[1] % 3 == 0
        >>> test_shape()
    """
    st = strategies("even_shapes")
    dim = _position("even_shapes", ring_size, rank, dim)
    sides = [st.integers(1, max_size)] * rank
    sides[dim] = st.integers(1, max(1, max_size // ring_size)).map(
        lambda blocks: blocks * ring_size
    )
    return st.tuples(*sides)


def uneven_shapes(ring_size: int, *, rank: int = 2, dim: int = 0, max_size: int = 16) -> Shapes:
    """Strategy for shapes whose dimension `dim` is no multiple of `ring_size`.

    Args:
        ring_size: the number of devices that the dimension cannot be split over; at least 2.
        rank: the number of dimensions.
        dim: the dimension that the ring does not divide; negative counts from the end.
        max_size: largest size of a dimension.

    Returns:
        A Hypothesis strategy for tuples of `rank` positive ints; sizes below `ring_size` too.

    Raises:
        ValueError: `ring_size` is 1, which divides everything, or `dim` is out of range.
        ImportError: Hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(uneven_shapes(4, rank=1))
        ... def test_shape(shape):
        ...     assert shape[0] % 4
        >>> test_shape()
    """
    st = strategies("uneven_shapes")
    dim = _position("uneven_shapes", ring_size, rank, dim)
    if ring_size == 1:
        raise ValueError("uneven_shapes: ring_size=1 divides every size; draw it from 2 up")
    sides = [st.integers(1, max_size)] * rank
    sides[dim] = st.sampled_from([n for n in range(1, max_size + 1) if n % ring_size])
    return st.tuples(*sides)


def dtypes(kinds: Sequence[str] = ("float",)) -> Dtypes:
    """Strategy for the dtypes that arrays can have in this process.

    Args:
        kinds: of "float" (float32, bfloat16, float16, float64), "int", "uint" (8 to 64 bits) and
            "bool". The 64-bit ones are drawn only when `jax_enable_x64` is on.

    Returns:
        A Hypothesis strategy for NumPy dtypes. Shrinks towards 32 bits.

    Raises:
        ValueError: a kind is not one of those, or none is given.
        ImportError: Hypothesis is not installed.

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


def ragged_sizes(count: int, total: int, *, exact: bool = False) -> Shapes:
    """Strategy for the sizes of `count` groups that share `total` rows, many of them empty.

    Args:
        count: the number of groups.
        total: the rows there are.
        exact: whether the sizes sum to `total`, and not to `total` or less.

    Returns:
        A Hypothesis strategy for tuples of `count` non-negative ints. All rows in one group and,
        unless `exact`, no rows at all are drawn too.

    Raises:
        ValueError: `count` or `total` is negative, or `exact` rows have no group to be in.
        ImportError: Hypothesis is not installed.

    Example:
        >>> from hypothesis import given
        >>> @given(ragged_sizes(4, 10, exact=True))
        ... def test_sizes(sizes):
        ...     assert len(sizes) == 4 and sum(sizes) == 10
        >>> test_sizes()
    """
    st = strategies("ragged_sizes")
    if count < 0 or total < 0 or (exact and total and not count):
        raise ValueError(f"ragged_sizes: no {count} sizes can share {total} rows")

    @st.composite
    def draw_sizes(draw: Callable[[Any], Any]) -> Shape:
        sizes = [0] * count
        if not count:
            return ()
        rows = total if exact else draw(st.integers(0, total))
        # Cutting the rows among a few groups, and not among all, is what makes zeros common.
        used = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
        cuts = draw(st.lists(st.integers(0, rows), min_size=len(used) - 1, max_size=len(used) - 1))
        edges = [0, *sorted(cuts), rows]
        for group, low, high in zip(used, edges, edges[1:], strict=False):
            sizes[group] = high - low
        return tuple(sizes)

    return draw_sizes()
