"""Property-testing tools for sharded JAX code."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.testing._collectives import CollectiveCounts, count_collectives
    from jaxpar.testing._compare import tolerance
    from jaxpar.testing._poison import poisoned_rows
    from jaxpar.testing._reference import assert_matches_reference
    from jaxpar.testing._strategies import (
        axis_orders,
        dtypes,
        even_shapes,
        meshes,
        ragged_sizes,
        specs,
        uneven_shapes,
    )
    from jaxpar.tools.explain.assertions import (
        assert_collectives,
        assert_no_resharding,
        assert_overlapped,
        assert_peak_memory,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "CollectiveCounts",
    "assert_collectives",
    "assert_matches_reference",
    "assert_no_resharding",
    "assert_overlapped",
    "assert_peak_memory",
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
