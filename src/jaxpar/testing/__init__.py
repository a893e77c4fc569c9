"""Reusable property-testing tools for sharded JAX code."""

from jaxpar.testing._collectives import CollectiveCounts, count_collectives
from jaxpar.testing._compare import tolerance
from jaxpar.testing._meshes import axis_orders, meshes, specs
from jaxpar.testing._overlap import assert_overlapped
from jaxpar.testing._poison import poisoned_rows
from jaxpar.testing._reference import assert_matches_reference
from jaxpar.testing._shapes import dtypes, even_shapes, ragged_sizes, uneven_shapes

__all__ = [
    "CollectiveCounts",
    "assert_matches_reference",
    "assert_overlapped",
    "axis_orders",
    "count_collectives",
    "dtypes",
    "even_shapes",
    "meshes",
    "poisoned_rows",
    "ragged_sizes",
    "specs",
    "tolerance",
    "uneven_shapes",
]
