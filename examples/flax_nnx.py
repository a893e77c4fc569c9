"""Layers of jaxpar in a Flax NNX model: data parallelism, FSDP and tensor parallelism at once."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_linear, gated_mlp, mean_loss, rms_norm

BATCH = P(("dp", "fsdp"), "tp")  # of [batch, sequence, features]


class Network(nnx.Module):
    def __init__(self, features, hidden, outputs, *, rngs):
        init, key = nnx.initializers.lecun_normal(), rngs.params
        self.scale = nnx.Param(jnp.ones(features), out_sharding=P())
        self.gate = nnx.Param(init(key(), (features, hidden)), out_sharding=P("fsdp", "tp"))
        self.up = nnx.Param(init(key(), (features, hidden)), out_sharding=P("fsdp", "tp"))
        self.down = nnx.Param(init(key(), (hidden, features)), out_sharding=P("tp", "fsdp"))
        self.head = nnx.Param(init(key(), (features, outputs)), out_sharding=P("fsdp"))

    def __call__(self, x):  # x and weights: the blocks of one device
        weights = self.gate[...], self.up[...], self.down[...]
        how = {"activation": nnx.silu, "fsdp_axis": "fsdp", "fsdp_dim": (0, 1)}
        x += gated_mlp(rms_norm(x, self.scale[...]), *weights, "tp", **how)
        return fsdp_linear(x, self.head[...], "fsdp")


def loss_fn(model, x, y):
    return mean_loss(jnp.sum((model(x) - y) ** 2), y.size, ("dp", "fsdp", "tp"))


def loss_and_gradients(model, x, y):  # global arrays, within jax.set_mesh(mesh)
    return _loss_and_gradients(*nnx.split(model), x, y)


@partial(jaxpar.jit, static_argnums=0)  # nnx.jit takes no compiler options
def _loss_and_gradients(graph, params, x, y):
    specs = nnx.get_partition_spec(params)

    @jax.shard_map(in_specs=(specs, BATCH, BATCH), out_specs=(P(), specs))
    def step(params, x, y):
        return nnx.value_and_grad(loss_fn)(nnx.merge(graph, params), x, y)

    return step(params, x, y)
