"""Hypothesis as an optional dependency: imported when a strategy is made, not with jaxpar."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from hypothesis.strategies import SearchStrategy
    from jax.sharding import Mesh, PartitionSpec

    AxisOrder = str | tuple[str, ...]
    Shape = tuple[int, ...]

    AxisOrders = SearchStrategy[AxisOrder]
    Dtypes = SearchStrategy[np.dtype[Any]]
    Meshes = SearchStrategy[Mesh]
    Shapes = SearchStrategy[Shape]
    Specs = SearchStrategy[PartitionSpec]
else:  # run-time type checkers must not need hypothesis, nor draw random items of a tuple in it
    AxisOrder = Shape = Any
    AxisOrders = Dtypes = Meshes = Shapes = Specs = Any


def strategies(name: str) -> ModuleType:
    """`hypothesis.strategies`, or an ImportError that says what `name` needs."""
    try:
        import hypothesis.strategies as st
    except ImportError as error:
        raise ImportError(
            f"{name} needs hypothesis, which is not installed; pip install 'jaxpar[test]'"
        ) from error
    return st
