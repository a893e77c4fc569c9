"""Reusable property-testing tools for sharded JAX code."""

from ._collectives import CollectiveCounts, count_collectives
from ._meshes import axis_orders, meshes, specs
from ._shapes import dtypes, even_shapes, ragged_sizes, uneven_shapes

__all__ = [
    "CollectiveCounts",
    "axis_orders",
    "count_collectives",
    "dtypes",
    "even_shapes",
    "meshes",
    "ragged_sizes",
    "specs",
    "uneven_shapes",
]
