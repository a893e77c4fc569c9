"""Matmuls over a torus in both forms of disjoint rings, for `jaxpar predict`.

jaxpar predict overlap.phases:scatter_by_rings --target v5p:8x8x4 --mesh dp=4,x=8,y=8
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather_matmul, matmul_reduce_scatter
from jaxpar.ring.hierarchical import along_dimensions

DEPTH = COLUMNS = 8192


def make_matmul(mesh, op, along, rows=16384):
    """A matmul and its operands: over all axes but dp, along one after the other or not."""
    axes = tuple(name for name in mesh.axis_names if name != "dp")
    sides = tuple(mesh.shape[name] for name in axes)

    def matmul(x, w):
        # In place of what the cost model decides.
        form = mock.patch(
            "jaxpar.ring.of_mode.with_phases",
            lambda problem, way, flows: along_dimensions(way, sides) if along else way,
        )
        with form:
            return op(x, w, axes, mode="multi-ring")

    specs = (P(axes), P(None, axes)) if op is all_gather_matmul else (P(None, axes), P(axes))
    out = specs[1]
    step = jax.shard_map(matmul, mesh=mesh, in_specs=specs, out_specs=out)
    shapes = (rows, DEPTH), (DEPTH, COLUMNS)
    return step, tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


make_scatter = partial(make_matmul, op=matmul_reduce_scatter)
make_gather = partial(make_matmul, op=all_gather_matmul)

scatter_by_rings = partial(make_scatter, along=False)
scatter_by_dimensions = partial(make_scatter, along=True)
scatter_of_2048_rows_by_rings = partial(make_scatter, along=False, rows=2048)
scatter_of_2048_rows_by_dimensions = partial(make_scatter, along=True, rows=2048)
scatter_of_4096_rows_by_rings = partial(make_scatter, along=False, rows=4096)
scatter_of_4096_rows_by_dimensions = partial(make_scatter, along=True, rows=4096)
scatter_of_32768_rows_by_rings = partial(make_scatter, along=False, rows=32768)
scatter_of_32768_rows_by_dimensions = partial(make_scatter, along=True, rows=32768)
gather_by_rings = partial(make_gather, along=False)
gather_by_dimensions = partial(make_gather, along=True)
gather_of_2048_rows_by_rings = partial(make_gather, along=False, rows=2048)
gather_of_2048_rows_by_dimensions = partial(make_gather, along=True, rows=2048)
gather_of_4096_rows_by_rings = partial(make_gather, along=False, rows=4096)
gather_of_4096_rows_by_dimensions = partial(make_gather, along=True, rows=4096)
