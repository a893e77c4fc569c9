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
# # 5. Data parallelism
#
# The model is a tiny language model. It predicts the next word from the current one. Eight
# devices share its batch. Nothing here measures speed.

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
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import mean_loss, mean_value_and_grad, rms_norm
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. One device
#
# Words are numbers. Each text counts with a stride of 1, 2 or 3: for example 5, 7, 9. Texts have
# different lengths, and `mask` excludes the positions after the end.

# %%
WORDS, BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS = 16, 32, 16, 64, 256, 4
rng = np.random.default_rng(0)

start, stride = rng.integers(WORDS, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
texts = jnp.asarray((start + stride * np.arange(SEQUENCE + 1)) % WORDS, jnp.int32)
lengths = rng.integers(1, SEQUENCE + 1, size=(BATCH, 1))
mask = jnp.asarray(np.arange(SEQUENCE) < lengths, jnp.float32)
batch = texts[:, :-1], texts[:, 1:], mask  # words, next words, mask: [b, s] each

# %% [markdown]
# The model is an embedding and four residual blocks. The embedding is also the output matrix.
# Weights of one kind are stacked, so `lax.scan` can run over the layers.


# %%
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
print(f"{int(mask.sum())} of {mask.size} positions count")

# %% [markdown]
# Every version must give this loss and these gradients up to rounding.

# %%
# rounding of one sum, times the number of layers, forward and backward
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)


def check(loss_and_gradients):
    """Compares a loss and its gradients with one device."""
    found = jax.tree.leaves(loss_and_gradients)
    for got, want in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.max(np.abs(want)))


# %% [markdown]
# ## 2. The sum and the count
#
# An obvious attempt averages the devices' mean losses. But their numbers of unmasked positions
# differ, so this is not the mean over all positions.

# %%
mesh = jaxpar.make_mesh("dp=8")
BATCH_SPECS = (P("dp"), P("dp"), P("dp"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), BATCH_SPECS), out_specs=P())
def mean_of_means(params, batch):
    return lax.pmean(one_device_loss(params, batch), "dp")


print(f"mean of means {mean_of_means(params, batch):.4f}, mean {expected[0]:.4f}")
assert abs(mean_of_means(params, batch) - expected[0]) > 0.01

# %% [markdown]
# Return the *sum* and the *count* from the local loss instead. `mean_value_and_grad` adds both over
# the axis and divides. After the backward pass it sums over the devices, with one collective for
# each gradient.


# %%
def data_parallel_step(**options):
    local = mean_value_and_grad(sum_and_count, "dp", **options)
    specs = {"in_specs": (P(), BATCH_SPECS), "out_specs": (P(), P())}
    return jaxpar.jit(jax.shard_map(local, mesh=mesh, **specs))


step = data_parallel_step()
check(step(params, batch))
print(f"loss on eight devices {step(params, batch)[0]:.4f}")

# %% [markdown]
# ## 3. Microbatches and buckets
#
# Activations of a large batch may not fit into memory. `microbatches=2` computes one half at a
# time, accumulates gradients on each device, and sums them over the devices at the end.
# `bucket_bytes` joins small gradients into collectives of at most this size.

# %%
for options in ({}, {"microbatches": 2}, {"bucket_bytes": 2**20}):
    program = data_parallel_step(**options)
    check(program(params, batch))
    counts = count_collectives(program, params, batch, grad=False)
    print(f"{options!s:25} {dict(counts.forward)}, {counts.forward_bytes} bytes")

# %% [markdown]
# There are six sums: four gradients, the loss and the count. With buckets all gradients take one.
# Microbatches do not change the bytes. In a sum over eight devices, each device sends 2 x 7/8 of
# its operand.

# %%
weights = sum(w.nbytes for w in jax.tree.leaves(params))
counts = count_collectives(step, params, batch, grad=False)
assert counts.forward == {"psum": 6}
assert counts.forward_bytes == 2 * 7 / 8 * (weights + 2 * 4)

# %% [markdown]
# ## 4. Gradients inside and outside `shard_map`
#
# Take one replicated weight, with the loss `weight * (i + 1)` on device `i`. The gradient of the
# summed loss is 1 + 2 + ... + 8 = 36. With a count of 1 on each device, `mean_value_and_grad`
# returns 36 / 8.


# %%
def local_loss(weight, x):  # weight: f32[], x: f32[1]
    return weight * x[0]


def summed_loss(weight, x):
    return lax.psum(local_loss(weight, x), "dp")


def inside(weight, x):
    return jax.grad(summed_loss)(weight, x)[None]  # f32[1], one entry of each device


def inside_with_jaxpar(weight, x):
    # specs: the PartitionSpecs of the parameters; check_vma=False needs them
    with_count = mean_value_and_grad(lambda weight, x: (local_loss(weight, x), 1), "dp", specs=P())
    return with_count(weight, x)[1][None]


weight, one_to_eight = jnp.float32(1), jnp.arange(1.0, 9.0)
for check_vma in (True, False):
    options = {"mesh": mesh, "in_specs": (P(), P("dp")), "check_vma": check_vma}
    outside = jax.grad(jax.shard_map(summed_loss, out_specs=P(), **options))
    programs = {
        "jax.grad outside": outside,
        "jax.grad inside": jax.shard_map(inside, out_specs=P("dp"), **options),
        "mean_value_and_grad inside": jax.shard_map(
            inside_with_jaxpar, out_specs=P("dp"), **options
        ),
    }
    for name, program in programs.items():
        gradient = jax.jit(program)(weight, one_to_eight)
        print(f"check_vma={check_vma!s:5} {name:>26}: {gradient}")
        if name == "jax.grad inside" and not check_vma:
            assert gradient.tolist() == [8, 16, 24, 32, 40, 48, 56, 64]  # wrong
        elif name == "mean_value_and_grad inside":
            assert np.all(gradient == 36 / 8)
        else:
            assert np.all(gradient == 36)

# %% [markdown]
# `jax.grad` inside with `check_vma=False` is wrong, and nothing raises an error. Each device has
# eight times its own gradient, and nothing sums over devices.
#
# - outside: `jax.grad` is right with any `check_vma`
# - inside: `mean_value_and_grad` is right with any `check_vma`, but `False` needs `specs=`
# - inside with `jax.grad`: right only with `check_vma=True`, the default
#
# ## 5. Training
#
# The gradients are global arrays, so the optimizer can run outside `shard_map`.

# %%
optimizer = optax.adam(3e-3)


def train(step, params):
    losses, state = [], optimizer.init(params)
    for _ in range(31):
        loss, gradients = step(params, batch)
        losses.append(float(loss))
        updates, state = jax.jit(optimizer.update)(gradients, state)
        params = optax.apply_updates(params, updates)
    return losses


@jaxpar.jit
def step_outside(params, batch):  # differentiates outside, for comparison
    @jax.shard_map(mesh=mesh, in_specs=(P(), BATCH_SPECS), out_specs=P())
    def loss(params, batch):
        # mean_loss adds sum and count over the axis, and divides
        return mean_loss(*sum_and_count(params, batch), "dp")

    return jax.value_and_grad(loss)(params, batch)


one_device = train(jax.jit(jax.value_and_grad(one_device_loss)), params)
eight_devices = train(step, params)
np.testing.assert_allclose(eight_devices, one_device, rtol=1e-3)
np.testing.assert_allclose(train(step_outside, params), one_device, rtol=1e-3)
print("loss after 0, 10, 20, 30 steps:", " ".join(f"{loss:.3f}" for loss in eight_devices[::10]))
assert 1.0 < eight_devices[-1] < 1.1

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(5, 2.6))
panel.plot(one_device, lw=6, color="C1", label="one device")
panel.plot(eight_devices, lw=1.5, color="black", label="dp=8")
panel.axhline(np.log(3), lw=1, ls=":", color="grey")
panel.text(30, np.log(3) + 0.1, "log 3", ha="right", color="grey")
panel.set(xlabel="step", ylabel="loss", ylim=(0, None))
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# The loss stays near log 3 (1.099). One word does not show which of the three strides its text has.
# The loss ends a little lower, because after a word the strides are not equally frequent in these
# few texts. Attention will look at earlier words, in [notebook 7](07_tensor_parallel.ipynb).
#
# ## In short
#
# Return the sum and the count. `mean_value_and_grad` divides, and sums each gradient once.
#
# Next: [FSDP](06_fsdp.ipynb).
