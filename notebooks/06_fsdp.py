# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. FSDP and its residuals
#
# The model is the language model of [notebook 5](05_data_parallel.ipynb). Now each device stores
# an eighth of the layers' matrices. This is *fully sharded* data parallelism (FSDP): the devices
# that split the batch also shard the weights.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import (
    fsdp_gather,
    fsdp_linear,
    fsdp_scan,
    global_norm,
    mean_loss,
    mean_value_and_grad,
    rms_norm,
)
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. The same model, and shards between steps

# %%
WORDS, BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS = 16, 32, 16, 64, 256, 4
rng = np.random.default_rng(0)

start, stride = rng.integers(WORDS, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
texts = jnp.asarray((start + stride * np.arange(SEQUENCE + 1)) % WORDS, jnp.int32)
lengths = rng.integers(1, SEQUENCE + 1, size=(BATCH, 1))
mask = jnp.asarray(np.arange(SEQUENCE) < lengths, jnp.float32)
batch = texts[:, :-1], texts[:, 1:], mask  # words, next words, mask: [b, s] each


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


params = {
    "embed": normal(WORDS, WIDTH) / WIDTH**0.5,
    "layers": {
        "norm": jnp.ones((LAYERS, WIDTH)),
        "up": normal(LAYERS, WIDTH, HIDDEN) / WIDTH**0.5,
        "down": normal(LAYERS, HIDDEN, WIDTH) / HIDDEN**0.5,
    },
}


def mlp(w, x):  # x: f32[b, s, d]
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def block(w, x):
    return x + mlp(w, rms_norm(x, w["norm"]))


def run_layers(layers, x):
    return lax.scan(lambda x, w: (block(w, x), None), x, layers)[0]


def sum_and_count(params, batch, run_layers=run_layers):
    """Returns the sum of the losses of unmasked positions, and the number of these positions."""
    words, next_words, mask = batch
    x = run_layers(params["layers"], params["embed"][words])
    logits = x @ params["embed"].T  # f32[b, s, v]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, next_words)
    return jnp.sum(losses * mask), jnp.sum(mask)


def one_device_loss(params, batch):
    total, count = sum_and_count(params, batch)
    return total / count


expected = jax.jit(jax.value_and_grad(one_device_loss))(params, batch)
print(f"loss on one device {expected[0]:.4f}")

# rounding of one sum, times the number of layers, forward and backward
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)


def check(loss_and_gradients):
    """Compares a loss and its gradients with one device."""
    found = jax.tree.leaves(loss_and_gradients)
    for got, want in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.max(np.abs(want)))


# %% [markdown]
# The matrices of the layers are sharded by rows. In a stacked matrix, dimension 0 is the layers and
# dimension 1 the rows. The embedding and the norms are small and stay replicated.

# %%
mesh = jaxpar.make_mesh("fsdp=8")
BATCH_SPECS = (P("fsdp"), P("fsdp"), P("fsdp"))
SPECS = {
    "embed": P(),
    "layers": {"norm": P(), "up": P(None, "fsdp"), "down": P(None, "fsdp")},
}
placed = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS))
for name, w in placed["layers"].items():
    print(f"{name:>5} {w.shape!s:14} on each device {w.addressable_shards[0].data.shape}")


def fsdp_loss(run_layers):
    """Returns the loss function on eight devices."""

    @jax.shard_map(mesh=mesh, in_specs=(SPECS, BATCH_SPECS), out_specs=P())
    def loss(params, batch):
        return mean_loss(*sum_and_count(params, batch, run_layers), "fsdp")

    return loss


def check_and_count(run_layers):
    loss = fsdp_loss(run_layers)
    check(jaxpar.jit(jax.value_and_grad(loss))(placed, batch))
    counts = count_collectives(lambda params: loss(params, batch), placed)
    print(f"forward  {dict(counts.forward)}\nbackward {dict(counts.backward)}")
    return counts


# %% [markdown]
# ## 2. A gather by hand
#
# `fsdp_gather` gathers one layer's weights, here with one `lax.all_gather`. The derivative of a
# gather is a reduce-scatter, so each device receives the summed gradient of its own rows.

# %%
DIMS = {"norm": None, "up": 0, "down": 0}  # dimensions of one layer's weight; None: not sharded


def layers_by_hand(layers, x):
    def gather_and_run(x, w):
        return block(fsdp_gather(w, "fsdp", dim=DIMS), x), None

    return lax.scan(gather_and_run, x, layers)[0]


by_hand = check_and_count(layers_by_hand)
# backward psums: one for each of two uses of the embedding, and one for each layer's norm
assert by_hand.backward["psum"] == 2 + LAYERS
assert by_hand.backward["psum_scatter"] == LAYERS  # both matrices in one collective

# %% [markdown]
# The backward pass needs the gathered weights, so autodiff saves them as residuals for all layers.
#
# ## 3. `fsdp_linear`: gathers again in the backward pass
#
# `fsdp_linear` replaces a matmul. Its residuals are the input and the *shard*, so the backward pass
# gathers the weight again. With `Axis("fsdp", mode="bidirectional")` in place of `"fsdp"`, blocks
# of a weight travel while others are multiplied.


# %%
def layers_with_fsdp_linear(layers, x):
    def run(x, w):
        y = rms_norm(x, w["norm"])
        y = jax.nn.gelu(fsdp_linear(y, w["up"], "fsdp"))
        return x + fsdp_linear(y, w["down"], "fsdp"), None

    return lax.scan(run, x, layers)[0]


with_linear = check_and_count(layers_with_fsdp_linear)
MATRICES = params["layers"]["up"].nbytes + params["layers"]["down"].nbytes
saved_less = by_hand.residual_bytes - with_linear.residual_bytes
print(f"residuals shrink by {saved_less / MATRICES:.2f} of all matrices")
assert saved_less == 7 / 8 * MATRICES  # shards instead of gathered matrices
assert with_linear.backward["all_gather"] == 2 * LAYERS

# %% [markdown]
# ## 4. `fsdp_scan`: gathers again, for a stack of layers
#
# `fsdp_scan` replaces `lax.scan`. The block stays unchanged: it receives full weights. The scan
# gathers them in both passes. The residuals are only the shards and each layer's input, so the
# backward pass computes each layer's forward pass again.


# %%
def layers_with_fsdp_scan(layers, x):
    return fsdp_scan(block, layers, x, "fsdp", dim=DIMS)


with_scan = check_and_count(layers_with_fsdp_scan)
assert with_scan.backward["psum"] == 2 + 1  # one for the norms of all layers
assert with_scan.residual_bytes < with_linear.residual_bytes / 2

# %% [markdown]
# You can do the same by hand: put the gather into a block with `jax.checkpoint`. It sends and saves
# the same bytes. `fsdp_scan` is shorter, and sums the gradients of all norms in one collective.


# %%
def layers_with_checkpoint(layers, x):
    @jax.checkpoint
    def gather_and_run(x, w):
        return block(fsdp_gather(w, "fsdp", dim=DIMS), x), None

    return lax.scan(gather_and_run, x, layers)[0]


with_checkpoint = check_and_count(layers_with_checkpoint)
assert with_checkpoint.forward_bytes == with_scan.forward_bytes
assert with_checkpoint.backward_bytes == with_scan.backward_bytes
assert with_checkpoint.residual_bytes == with_scan.residual_bytes

# %% [markdown]
# ## 5. Bytes sent, and residual bytes


# %%
@jax.shard_map(mesh=mesh, in_specs=(P(), BATCH_SPECS), out_specs=P())
def data_parallel_loss(params, batch):
    return mean_loss(*sum_and_count(params, batch), "fsdp")


table = {
    "data parallel": count_collectives(lambda params: data_parallel_loss(params, batch), params),
    "by hand": by_hand,
    "fsdp_linear": with_linear,
    "fsdp_scan": with_scan,
}
sent = {name: counts.forward_bytes + counts.backward_bytes for name, counts in table.items()}
assert abs(sent["data parallel"] / (2 * 7 / 8 * MATRICES) - 1) < 0.02
assert abs(sent["fsdp_scan"] / (3 * 7 / 8 * MATRICES) - 1) < 0.02

# %% jupyter={"source_hidden": true} tags=["drawing", "varies"]
figure, panels = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True)
names = list(table)
forward = [counts.forward_bytes / 1024 for counts in table.values()]
backward = [counts.backward_bytes / 1024 for counts in table.values()]
residuals = [counts.residual_bytes / 1024 for counts in table.values()]
bars = [
    panels[0].barh(names, forward, color="C0", alpha=0.5, label="forward"),
    panels[0].barh(names, backward, left=forward, color="C1", alpha=0.5, label="backward"),
    panels[1].barh(names, residuals, color="C2", alpha=0.5),
]
for panel, bar in zip((panels[0], *panels), bars, strict=True):
    label = {"label_type": "center", "fontsize": 8}
    panel.bar_label(bar, fmt=lambda kib: f"{kib:.0f}" if kib > 1 else "", **label)
panels[0].set(xlabel="KiB sent by a device")
panels[0].legend(frameon=False, fontsize=8)
panels[1].set(xlabel="KiB of residuals on a device")
panels[0].invert_yaxis()
for panel in panels:
    panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# A second gather sends more bytes. `fsdp_linear` and `fsdp_scan` gather twice and scatter
# gradients: 3 x 7/8 of the matrices' bytes. The other two send 2 x 7/8. With FSDP, matrices,
# gradients and optimizer state take an eighth of the memory. The residuals of `data parallel`
# include the weights, which are in memory anyway.
#
# ## 6. Training
#
# The losses are those of notebook 5. Adam is elementwise, so its state is sharded like the weights
# and an update sends nothing.


# %%
@jaxpar.jit
@jax.shard_map(mesh=mesh, in_specs=(SPECS, BATCH_SPECS), out_specs=(P(), SPECS))
def fsdp_step(params, batch):
    def local_sum_and_count(params, batch):
        return sum_and_count(params, batch, layers_with_fsdp_scan)

    return mean_value_and_grad(local_sum_and_count, "fsdp")(params, batch)


check(fsdp_step(placed, batch))
optimizer = optax.adam(3e-3)


def train(step, params):
    losses, state = [], jax.jit(optimizer.init)(params)
    for _ in range(31):
        loss, gradients = step(params, batch)
        losses.append(float(loss))
        updates, state = jax.jit(optimizer.update)(gradients, state)
        params = optax.apply_updates(params, updates)
    return losses, params


one_device, _ = train(jax.jit(jax.value_and_grad(one_device_loss)), params)
sharded, trained = train(fsdp_step, placed)
np.testing.assert_allclose(sharded, one_device, rtol=1e-3)
assert trained["layers"]["up"].addressable_shards[0].data.shape == (LAYERS, WIDTH // 8, HIDDEN)
print("loss after 0, 10, 20, 30 steps:", " ".join(f"{loss:.3f}" for loss in sharded[::10]))

# %% [markdown]
# Gradient clipping needs the norm of *all* gradients. `global_norm` sums squares over the axes that
# shard each gradient.

# %%
_, gradients = fsdp_step(placed, batch)
norm = jax.jit(jax.shard_map(global_norm, mesh=mesh, in_specs=(SPECS,), out_specs=P()))(gradients)
print(f"norm of the gradients {norm:.4f}")
np.testing.assert_allclose(norm, optax.global_norm(expected[1]), rtol=1e-4)

# %% [markdown]
# ## 7. A prediction for TPU
#
# These times are predicted, not measured. The program is two layers, forward and backward, compiled
# by jax 0.10.2 for four v5p chips.

# %% tags=["varies"]
chips = target("v5p:2x2x1", "fsdp=4")
D, F, ROWS = 512, 2048, 4 * 512
big_specs = SPECS["layers"]
big_shapes = {"norm": (2, D), "up": (2, D, F), "down": (2, F, D)}
big_layers = {
    name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=big_specs[name])
    for name, shape in big_shapes.items()
}
big_x = jax.ShapeDtypeStruct((ROWS, D), jnp.bfloat16, sharding=P("fsdp"))


def predict(run_layers):
    @jax.shard_map(in_specs=(big_specs, P("fsdp")), out_specs=P())
    def loss(layers, x):
        y = run_layers(layers, x).astype(jnp.float32)
        return mean_loss(jnp.sum(y**2), y.size, "fsdp")

    line = timeline(compile_for(jax.grad(loss), chips, big_layers, big_x))
    waiting = line.exposed / line.total
    print(
        f"{run_layers.__name__:>22}: {1e6 * line.total:.0f} us, {waiting:.0%} waiting for transfers"
    )
    return line.total


scan_time, checkpoint_time = predict(layers_with_fsdp_scan), predict(layers_with_checkpoint)
assert abs(scan_time / checkpoint_time - 1) < 0.1

# %% [markdown]
# ## In short
#
# - Use `fsdp_linear` or `fsdp_scan`: they gather again instead of saving weights.
# - `fsdp_scan` needs no change in the layer. A checkpointed scan by hand sends and saves the same
#   bytes.
# - Each device stores an eighth of the matrices. With the second gather it sends 1.5 times the
#   bytes of data parallelism.
#
# Next: [tensor parallelism](07_tensor_parallel.ipynb).
