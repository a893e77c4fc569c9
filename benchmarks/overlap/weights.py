"""Gradients of layers whose weights are gathered over two axes, for `jaxpar predict`.

jaxpar predict overlap.weights:disjoint_rings --target v5p:4x4x4 --mesh dp=4,x=4,y=4
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Axis
from jaxpar.layers import fsdp_scan

LAYERS, FEATURES, HIDDEN = 4, 8192, 28672
FEW, MANY = 512, 2048  # rows of a device


def make_step(mesh, mode, rows=MANY):
    """The gradients and their operands, weights and rows over the last two axes of the mesh."""
    axes = mesh.axis_names[-2:]
    devices = mesh.shape[axes[0]] * mesh.shape[axes[1]]

    def layer(weights, x):  # up [features, hidden], down [hidden, features], x [rows, features]
        up, down = weights
        return x + jax.nn.silu(x @ up) @ down

    def gradients(weights, x):  # of shards
        def loss(weights):
            out = fsdp_scan(layer, weights, x, Axis(axes, mode))
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        return jax.grad(loss)(weights)

    sharded, rows_of = P(None, axes), P(axes)
    step = jax.shard_map(
        gradients, mesh=mesh, in_specs=((sharded, sharded), rows_of), out_specs=(sharded, sharded)
    )

    def operand(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    up, down = (LAYERS, FEATURES, HIDDEN), (LAYERS, HIDDEN, FEATURES)
    weights = operand(up, sharded), operand(down, sharded)
    return step, (weights, operand((rows * devices, FEATURES), rows_of))


naive = partial(make_step, mode="naive")
disjoint_rings = partial(make_step, mode="multi-ring")
naive_with_few_rows = partial(make_step, mode="naive", rows=FEW)
disjoint_rings_with_few_rows = partial(make_step, mode="multi-ring", rows=FEW)
