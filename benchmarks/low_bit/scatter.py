"""A scattered matmul whose sums travel in bfloat16 and in 8 bits, for `jaxpar predict`.

jaxpar predict low_bit.scatter:ring_in_8_bits --target v6e:16x16 --mesh dp=16,tp=16
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import LowBit, matmul_reduce_scatter

ROWS, TERMS, COLUMNS = 16384, 28672, 8192
IN_8_BITS = LowBit("int8", sums="int8")


def make_step(mesh, mode, wire_dtype=None):
    """The matmul and its operands, its terms over the last axis of the mesh."""
    axis = mesh.axis_names[-1]

    def local(x, w):  # x [rows, terms/n], w [terms/n, columns]
        return matmul_reduce_scatter(x, w, axis, mode=mode, wire_dtype=wire_dtype)

    specs = P(None, axis), P(axis)
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(axis))
    shapes = (ROWS, TERMS), (TERMS, COLUMNS)
    return step, tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )


ring = partial(make_step, mode="bidirectional")
ring_in_8_bits = partial(make_step, mode="bidirectional", wire_dtype=IN_8_BITS)
rings = partial(make_step, mode="multi-ring")
rings_in_8_bits = partial(make_step, mode="multi-ring", wire_dtype=IN_8_BITS)
