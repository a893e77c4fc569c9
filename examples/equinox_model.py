"""Layers of jaxpar in an Equinox model: data parallelism, FSDP and tensor parallelism at once."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_linear, gated_mlp, mean_loss, rms_norm

BATCH = P(("dp", "fsdp"), "tp")  # of [batch, sequence, features]
OPTIONS = jaxpar.compiler_options()  # for the compiler, and for mode="auto" while it traces


class Weight(eqx.Module):
    value: jax.Array
    spec: P = eqx.field(static=True)

    def __init__(self, value, spec):
        self.value, self.spec = jax.device_put(value, spec), spec


class Network(eqx.Module):
    scale: Weight
    gate: Weight
    up: Weight
    down: Weight
    head: Weight
    activation: Callable

    def __init__(self, features, hidden, outputs, *, key):
        keys, init = jax.random.split(key, 4), jax.nn.initializers.lecun_normal()
        self.scale = Weight(jnp.ones(features), P())
        self.gate = Weight(init(keys[0], (features, hidden)), P("fsdp", "tp"))
        self.up = Weight(init(keys[1], (features, hidden)), P("fsdp", "tp"))
        self.down = Weight(init(keys[2], (hidden, features)), P("tp", "fsdp"))
        self.head = Weight(init(keys[3], (features, outputs)), P("fsdp"))
        self.activation = jax.nn.silu

    def __call__(self, x):  # x and weights: the blocks of one device
        weights = self.gate.value, self.up.value, self.down.value
        how = {"activation": self.activation, "fsdp_axis": "fsdp", "fsdp_dim": (0, 1)}
        x += gated_mlp(rms_norm(x, self.scale.value), *weights, "tp", **how)
        return fsdp_linear(x, self.head.value, "fsdp")


def loss_fn(model, x, y):
    return mean_loss(jnp.sum((model(x) - y) ** 2), y.size, ("dp", "fsdp", "tp"))


@partial(eqx.filter_jit, compiler_options=OPTIONS)
@jaxpar.compiled_with(OPTIONS)
def loss_and_gradients(model, x, y):  # global arrays, within jax.set_mesh(mesh)
    params, static = eqx.partition(model, eqx.is_array)
    specs = jax.tree.map(lambda w: w.spec, params, is_leaf=lambda w: isinstance(w, Weight))

    @jax.shard_map(in_specs=(specs, BATCH, BATCH), out_specs=(P(), specs))
    def step(params, x, y):
        return eqx.filter_value_and_grad(loss_fn)(eqx.combine(params, static), x, y)

    return step(params, x, y)
