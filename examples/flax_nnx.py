"""A Flax NNX model with layers of jaxpar: data parallelism, FSDP and tensor parallelism at once.

python examples/flax_nnx.py    # trains on 8 CPU devices, or on the chips that are there
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_linear, gated_mlp, mean_loss, rms_norm
from jaxpar.layout import REPLICATED, LayoutMap

RULES = LayoutMap(
    {
        "scale": REPLICATED,
        "gate|up": "features hidden",
        "down": "hidden features",
        "head": "features outputs",
    },
    axes={"features": "fsdp", "hidden": "tp", "outputs": None},
    batch=P(("dp", "fsdp"), "tp"),  # of [batch, sequence, features]
)
BATCH = RULES.batch.layout


class Network(nnx.Module):
    def __init__(self, features, hidden, outputs, *, rngs):
        init, key = nnx.initializers.lecun_normal(), rngs.params
        self.scale = nnx.Param(jnp.ones(features))
        self.gate = nnx.Param(init(key(), (features, hidden)))
        self.up = nnx.Param(init(key(), (features, hidden)))
        self.down = nnx.Param(init(key(), (hidden, features)))
        self.head = nnx.Param(init(key(), (features, outputs)))

    def __call__(self, x):  # x and weights: the blocks of one device
        weights = self.gate[...], self.up[...], self.down[...]
        how = {"activation": nnx.silu, "fsdp_axis": "fsdp", "fsdp_dim": (0, 1)}
        x += gated_mlp(rms_norm(x, self.scale[...]), *weights, "tp", **how)
        return fsdp_linear(x, self.head[...], "fsdp")


def loss_fn(model, x, y):
    return mean_loss(jnp.sum((model(x) - y) ** 2), y.size, ("dp", "fsdp", "tp"))


def loss_and_gradients(layout, graph, params, x, y):  # of global arrays
    @jax.shard_map(
        mesh=layout.mesh, in_specs=(layout.specs, BATCH, BATCH), out_specs=(P(), layout.specs)
    )
    def step(params, x, y):
        return nnx.value_and_grad(loss_fn)(nnx.merge(graph, params), x, y)

    return step(params, x, y)


def train(mesh, steps=200):
    graph, params = nnx.split(Network(32, 64, 8, rngs=nnx.Rngs(0)))
    layout, optimizer = RULES.layout(params, mesh), optax.adam(1e-2)
    print(layout)
    params = layout.place(params)
    states = layout.like(jax.eval_shape(optimizer.init, params))
    state = jax.jit(optimizer.init, out_shardings=states.shardings)(params)

    @partial(jaxpar.jit, mesh=mesh)  # nnx.jit takes no compiler options
    def step(params, state, x, y):
        loss, grads = loss_and_gradients(layout, graph, params, x, y)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(0)
    target, losses = rng.normal(size=(32, 8)), []
    for number in range(steps):
        x = rng.normal(size=(16, 8, 32)).astype("float32")
        batch = layout.place_batch((x, np.tanh(x @ target).astype("float32")))
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
        if number % 50 == 49:
            print(f"step {number + 1}: loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no chips
    train(jaxpar.make_mesh("dp=-1,fsdp=2,tp=2"))
