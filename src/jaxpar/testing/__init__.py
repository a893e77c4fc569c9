"""Reusable property-testing tools for sharded JAX code."""

from ._collectives import CollectiveCounts, count_collectives
from ._meshes import axis_orders, meshes, specs
from ._reference import assert_matches_reference
from ._shapes import dtypes, even_shapes, ragged_sizes, uneven_shapes
from ._tolerance import tolerance

__all__ = [
    "CollectiveCounts",
    "assert_matches_reference",
    "axis_orders",
    "count_collectives",
    "dtypes",
    "even_shapes",
    "meshes",
    "ragged_sizes",
    "specs",
    "tolerance",
    "uneven_shapes",
]
