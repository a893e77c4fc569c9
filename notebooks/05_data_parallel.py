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
# Each device has a share of the batch and all weights. The gradients have to be those of the whole
# batch, on every device. Simple, and still most of what goes wrong with gradients goes wrong here:
#
# 1. one device
# 2. eight devices: the sum and the count, not the mean
# 3. microbatches, and one reduction
# 4. gradients inside and outside `shard_map`
# 5. training, with clipping
#
# Every form is compared with one device. Eight CPU devices, so nothing here measures speed.

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
# Four residual blocks, stacked: one array for each kind of weight, so that `lax.scan` can run over
# them. Vectors are predicted from vectors, and some positions do not count (`mask`).

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
# What follows must give this loss and these gradients up to rounding. `tolerance` bounds the error
# of a float32 sum of so many terms; the factor is for the layers, forward and backward.

# %%
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)


def largest_error(found, expected=expected):
    def error(got, want):
        return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(found), expected)))


# %% [markdown]
# ## 2. The sum and the count
#
# The obvious way: each device takes the mean loss of its share, and gradients are averaged. Here
# devices have different numbers of positions that count, so that a mean of means is another number.

# %%
mesh = jaxpar.make_mesh("dp=8")
SPECS = {"mesh": mesh, "in_specs": (P(), P("dp")), "out_specs": (P(), P())}


def of_means(params, batch):
    return lax.pmean(mean_error(params, batch), "dp")


loss_of_means, _ = jax.jit(jax.shard_map(jax.value_and_grad(of_means), **SPECS))(params, batch)
print(f"mean of means {loss_of_means:.4f}, mean {expected[0]:.4f}")
assert abs(loss_of_means - expected[0]) > 0.01

# %% [markdown]
# So a local loss returns the *sum* and the *count*. `jaxpar.layers.mean_value_and_grad` adds both
# up over the axes that it is told, divides, and sums gradients over devices once. `mean_loss` is
# the first half of it.

# %%
step = jaxpar.jit(jax.shard_map(mean_value_and_grad(sum_and_count, "dp"), **SPECS))
assert largest_error(step(params, batch)) < TOLERANCE
print(f"loss {step(params, batch)[0]:.4f}")

# %% [markdown]
# ## 3. Microbatches, and one reduction
#
# Activations of a large batch may not fit. `microbatches=4` computes a quarter at a time, adds
# gradients up on each device, and reduces once at the end. `bucket_bytes` puts small gradients into
# one collective.


# %%
def variant(**options):
    return jaxpar.jit(jax.shard_map(mean_value_and_grad(sum_and_count, "dp", **options), **SPECS))


for options in ({}, {"microbatches": 2}, {"bucket_bytes": 2**20}):
    program = variant(**options)
    assert largest_error(program(params, batch)) < TOLERANCE
    counts = count_collectives(program, params, batch, grad=False)
    print(f"{options!s:25} {dict(counts.forward)}, {counts.forward_bytes} bytes")

# %% [markdown]
# Three gradients, the loss and the count: five sums (three in buckets), of the same bytes however
# the batch is cut. A sum over eight devices sends 2 x 7/8 of its operand from each.

# %%
weights = sum(w.nbytes for w in params.values())
counts = count_collectives(step, params, batch, grad=False)
assert counts.forward == {"psum": 5}
assert counts.forward_bytes == 2 * 7 / 8 * (weights + 2 * 4)

# %% [markdown]
# ## 4. Gradients inside and outside `shard_map`
#
# There are two places to differentiate, and two settings of `check_vma`, which tracks over which
# axes values vary. One replicated weight, device `i` adding `weight * (i + 1)`: the gradient should
# be 1 + 2 + ... + 8 = 36.


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
        return finish(jax.grad(loss)(weight, x))[None]  # f32[1], to see each device's own

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
# One line is wrong, and nothing says so but the comparison: without `check_vma` every device asks
# for the gradient of its own copy of the sum (eight times too much), and nobody adds the parts up.
# So:
#
# - outside: `jax.grad` is right, whatever `check_vma` is
# - inside: `jaxpar.layers.mean_value_and_grad` is right, whatever `check_vma` is, and reduces once
# - inside with `jax.grad`: only with `check_vma=True`, the default
#
# ## 5. Training
#
# The update runs outside, on global arrays. Clipping needs the norm of *all* gradients; here they
# are replicated, and where they are sharded `global_norm` sums over the right axes by their types.


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
# - Return the sum and the count; `mean_value_and_grad` divides, and reduces once.
# - Microbatches cost no communication.
# - Differentiate outside, or inside with `mean_value_and_grad`.
#
# Next: [FSDP](06_fsdp.ipynb), where weights are sharded as well.
