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
# Each device has a share of the batch and all weights. Every device needs the gradients of the full
# batch. Most mistakes with gradients already appear here:
#
# 1. one device
# 2. eight devices: the sum and the count, not the mean
# 3. microbatches and one reduction
# 4. gradients inside and outside `shard_map`
# 5. training with clipping
#
# Every version is compared with one device. Eight CPU devices measure no speed.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import global_norm, mean_loss, mean_value_and_grad, rms_norm
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. One device
#
# The model is four residual blocks. Each kind of weight is one stacked array, so `lax.scan` can run
# over the layers. The model predicts vectors from vectors. `mask` excludes some positions.

# %%
BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS = 16, 8, 32, 128, 4
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


params = {
    "norm": jnp.ones((LAYERS, WIDTH)),
    "up": normal(LAYERS, WIDTH, HIDDEN) / WIDTH**0.5,
    "down": normal(LAYERS, HIDDEN, WIDTH) / HIDDEN**0.5,
}
x, target = normal(BATCH, SEQUENCE, WIDTH), normal(BATCH, SEQUENCE, WIDTH)
lengths = rng.integers(1, SEQUENCE + 1, BATCH)
mask = jnp.asarray(np.arange(SEQUENCE) < lengths[:, None], jnp.float32)  # f32[b, s]
batch = x, target, mask


def network(params, x):
    def block(x, w):
        return x + jax.nn.gelu(rms_norm(x, w["norm"]) @ w["up"]) @ w["down"], None

    return lax.scan(block, x, params)[0]


def sum_and_count(params, batch):
    """The sum of the errors that count, and their number."""
    x, target, mask = batch
    errors = jnp.sum((network(params, x) - target) ** 2, axis=-1)  # f32[b, s]
    return jnp.sum(errors * mask), jnp.sum(mask)


def mean_error(params, batch):
    total, count = sum_and_count(params, batch)
    return total / count


expected = jax.jit(jax.value_and_grad(mean_error))(params, batch)
print(f"loss {expected[0]:.4f}, {int(mask.sum())} of {mask.size} positions count")

# %% [markdown]
# All later versions must give this loss and these gradients up to rounding. `tolerance` bounds the
# error of a float32 sum with this many terms. The factor covers the layers, forward and backward.

# %%
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)


def largest_error(found, expected=expected):
    def error(got, want):
        return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(found), expected)))


# %% [markdown]
# ## 2. The sum and the count
#
# An obvious attempt averages the devices' mean losses and their gradients. But the devices have
# different numbers of unmasked positions, so the mean of means is a different number.

# %%
mesh = jaxpar.make_mesh("dp=8")
SPECS = {"mesh": mesh, "in_specs": (P(), P("dp")), "out_specs": (P(), P())}


def of_means(params, batch):
    return lax.pmean(mean_error(params, batch), "dp")


loss_of_means, _ = jax.jit(jax.shard_map(jax.value_and_grad(of_means), **SPECS))(params, batch)
print(f"mean of means {loss_of_means:.4f}, mean {expected[0]:.4f}")
assert abs(loss_of_means - expected[0]) > 0.01

# %% [markdown]
# Return the *sum* and the *count* from the local loss instead. `jaxpar.layers.mean_value_and_grad`
# adds both over the given axes and divides. It sums the gradients over devices once. `mean_loss`
# computes only the loss.

# %%
step = jaxpar.jit(jax.shard_map(mean_value_and_grad(sum_and_count, "dp"), **SPECS))
assert largest_error(step(params, batch)) < TOLERANCE
print(f"loss {step(params, batch)[0]:.4f}")

# %% [markdown]
# ## 3. Microbatches and one reduction
#
# Activations of a large batch may not fit into memory. `microbatches=4` computes a quarter at a
# time, accumulates gradients on each device, and reduces once at the end. `bucket_bytes` joins
# small gradients into one collective.


# %%
def variant(**options):
    return jaxpar.jit(jax.shard_map(mean_value_and_grad(sum_and_count, "dp", **options), **SPECS))


for options in ({}, {"microbatches": 2}, {"bucket_bytes": 2**20}):
    program = variant(**options)
    assert largest_error(program(params, batch)) < TOLERANCE
    counts = count_collectives(program, params, batch, grad=False)
    print(f"{options!s:25} {dict(counts.forward)}, {counts.forward_bytes} bytes")

# %% [markdown]
# There are five sums: three gradients, the loss and the count. In buckets there are three sums.
# Microbatches do not change the bytes. In a sum over eight devices, each device sends 2 x 7/8 of
# its operand.

# %%
weights = sum(w.nbytes for w in params.values())
counts = count_collectives(step, params, batch, grad=False)
assert counts.forward == {"psum": 5}
assert counts.forward_bytes == 2 * 7 / 8 * (weights + 2 * 4)

# %% [markdown]
# ## 4. Gradients inside and outside `shard_map`
#
# You can differentiate inside or outside `shard_map`. `check_vma` can be on or off. It tracks over
# which axes values vary. Take one replicated weight, with the loss `weight * (i + 1)` on device
# `i`. The gradient must be 1 + 2 + ... + 8 = 36.


# %%
def local_loss(weight, x):  # weight: f32[], x: f32[1]
    return weight * x[0]


def total_loss(weight, x):
    return lax.psum(local_loss(weight, x), "dp")


def outside(check_vma):
    specs = {"in_specs": (P(), P("dp")), "out_specs": P()}
    program = jax.shard_map(total_loss, mesh=mesh, **specs, check_vma=check_vma)
    return jax.jit(jax.grad(program))(weight, one_to_eight)


def inside(loss, check_vma, finish=lambda gradient: gradient):
    def local(weight, x):
        return finish(jax.grad(loss)(weight, x))[None]  # f32[1], one entry a device

    specs = {"in_specs": (P(), P("dp")), "out_specs": P("dp")}
    program = jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma)
    return jax.jit(program)(weight, one_to_eight)


weight, one_to_eight = jnp.float32(1), jnp.arange(1.0, 9.0)
found = {
    "outside, check_vma=True": outside(True),
    "outside, check_vma=False": outside(False),
    "inside, check_vma=True": inside(total_loss, True),
    "inside, check_vma=False": inside(total_loss, False),
    "inside, check_vma=False, by hand": inside(
        local_loss, False, finish=lambda gradient: lax.psum(gradient, "dp")
    ),
}
for name, gradient in found.items():
    print(f"{name:>32}: {gradient}")
wrong = found.pop("inside, check_vma=False")
assert wrong.tolist() == [8.0 * i for i in range(1, 9)]
assert all(np.all(gradient == 36) for gradient in found.values())

# %% [markdown]
# One version is wrong, and only the comparison shows it. Without `check_vma` every device
# differentiates its own copy of the sum, which gives eight times too much. Nothing adds the
# devices' parts.
#
# - outside: `jax.grad` is right with any `check_vma`
# - inside: `jaxpar.layers.mean_value_and_grad` is right with any `check_vma`, and reduces once
# - inside with `jax.grad`: right only with `check_vma=True`, the default
#
# ## 5. Training
#
# The update runs outside `shard_map`, on global arrays. Clipping needs the norm of *all* gradients.
# Here the gradients are replicated. For sharded gradients, `global_norm` takes the axes of the sum
# from the types.


# %%
@jax.jit
def update(params, grads):
    @jax.shard_map(mesh=mesh, in_specs=P(), out_specs=P())
    def norm(grads):
        return global_norm(grads)

    clip = jnp.minimum(1.0, 1.0 / norm(grads))
    return jax.tree.map(lambda w, g: w - 0.3 * clip * g, params, grads)


def train(step, params, steps=20):
    losses = []
    for _ in range(steps):
        loss, grads = step(params, batch)
        losses.append(float(loss))
        params = update(params, grads)
    return losses


def outside_step(params, batch):
    """The same by `jax.grad` outside."""
    loss = jax.shard_map(
        lambda params, batch: mean_loss(*sum_and_count(params, batch), "dp"),
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=P(),
    )
    return jax.value_and_grad(loss)(params, batch)


curves = {
    "one device": train(jax.jit(jax.value_and_grad(mean_error)), params),
    "mean_value_and_grad inside": train(step, params),
    "jax.grad outside": train(jaxpar.jit(outside_step), params),
}
figure, panel = plt.subplots(figsize=(5, 2.6))
for width, (name, losses) in zip((8, 4, 1.5), curves.items(), strict=True):
    panel.plot(losses, lw=width, label=name)
    np.testing.assert_allclose(losses, curves["one device"], rtol=1e-3)
panel.set(xlabel="step", ylabel="loss")
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

print(" ".join(f"{loss:.2f}" for loss in losses[::4]))
assert losses[-1] < 0.8 * losses[0]

# %% [markdown]
# ## In short
#
# - Return the sum and the count. `mean_value_and_grad` divides, and reduces once.
# - Microbatches cost no communication.
# - Differentiate outside, or inside with `mean_value_and_grad`.
#
# Next: [FSDP](06_fsdp.ipynb), which shards the weights as well.
