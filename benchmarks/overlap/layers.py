"""Gradients of tensor-parallel layers over two axes, for `jaxpar predict`.

jaxpar predict overlap.layers:auto --target v5p:4x4x4 --mesh dp=4,x=4,y=4
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Axis
from jaxpar.layers import gated_mlp

LAYERS, FEATURES, HIDDEN = 3, 8192, 28672
FEW, MANY = 4096, 16384  # rows of the whole sequence


def make_step(mesh, mode, rows=MANY):
    """The gradients and their operands, columns and rows over the last two axes of the mesh."""
    axes = mesh.axis_names[-2:]
    columns, rows_of = P(None, axes), P(axes)
    specs = (((columns, columns, rows_of),) * LAYERS, rows_of)

    def loss(layers, x):
        for gate, up, down in layers:
            x = x + gated_mlp(x, gate, up, down, Axis(axes, mode), sequence_dim=0)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    step = jax.shard_map(jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)

    def operand(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    into, out = operand((FEATURES, HIDDEN), columns), operand((HIDDEN, FEATURES), rows_of)
    return step, (((into, into, out),) * LAYERS, operand((rows, FEATURES), rows_of))


auto = partial(make_step, mode="auto")
naive = partial(make_step, mode="naive")
disjoint_rings = partial(make_step, mode="multi-ring")
auto_with_few_rows = partial(make_step, mode="auto", rows=FEW)
naive_with_few_rows = partial(make_step, mode="naive", rows=FEW)
disjoint_rings_with_few_rows = partial(make_step, mode="multi-ring", rows=FEW)
