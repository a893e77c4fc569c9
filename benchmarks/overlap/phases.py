"""A scatter over a torus in both forms of disjoint rings, for `jaxpar predict`.

jaxpar predict overlap.phases:rings --targets v5p:8x8x4 --mesh dp=4,x=8,y=8
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import matmul_reduce_scatter

DEPTH = COLUMNS = 8192


def make_scatter(mesh, along, rows=16384):
    """The scatter and its operands: over all axes but dp, along one after the other or not."""
    axes = tuple(name for name in mesh.axis_names if name != "dp")
    sides = tuple(mesh.shape[name] for name in axes) if along else None

    def scatter(x, w):
        # In place of what the cost model decides.
        form = mock.patch(
            "jaxpar.collectives._choice.with_phases",
            lambda problem, way, flows: replace(way, sums_along=sides),
        )
        with form:
            return matmul_reduce_scatter(x, w, axes, mode="disjoint-rings")

    specs = P(None, axes), P(axes)
    step = jax.shard_map(scatter, mesh=mesh, in_specs=specs, out_specs=P(axes))
    shapes = (rows, DEPTH), (DEPTH, COLUMNS)
    return step, tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


rings = partial(make_scatter, along=False)
dimensions = partial(make_scatter, along=True)
rings_of_2048_rows = partial(make_scatter, along=False, rows=2048)
dimensions_of_2048_rows = partial(make_scatter, along=True, rows=2048)
rings_of_4096_rows = partial(make_scatter, along=False, rows=4096)
dimensions_of_4096_rows = partial(make_scatter, along=True, rows=4096)
rings_of_32768_rows = partial(make_scatter, along=False, rows=32768)
dimensions_of_32768_rows = partial(make_scatter, along=True, rows=32768)
