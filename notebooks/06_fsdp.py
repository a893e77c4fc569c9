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
# # 6. FSDP, and what is saved
#
# With data parallelism every device holds all weights, all gradients and all of the optimizer's
# state. *Fully sharded* data parallelism cuts each weight over the same devices, and puts it
# together where it is used.
#
# 1. shards between steps
# 2. a gather by hand, and what autodiff keeps
# 3. `fsdp_linear`: gathers again in the backward
# 4. `fsdp_scan`: the same for a stack of layers
# 5. what all of them send and keep
# 6. what a TPU's compiler makes of it
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_gather, fsdp_linear, fsdp_scan, mean_loss, rms_norm
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. Shards between steps
#
# Four residual blocks, stacked. Matrices are cut by rows, and the batch over the same axis. A norm
# is so small that it stays whole.

# %%
BATCH, WIDTH, HIDDEN, LAYERS = 64, 64, 256, 4
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


params = {
    "norm": jnp.ones((LAYERS, WIDTH)),
    "up": normal(LAYERS, WIDTH, HIDDEN) / WIDTH**0.5,
    "down": normal(LAYERS, HIDDEN, WIDTH) / HIDDEN**0.5,
}
x, wanted = normal(BATCH, WIDTH), normal(BATCH, WIDTH)

mesh = jaxpar.make_mesh("fsdp=8")
SPECS = {"norm": P(), "up": P(None, "fsdp"), "down": P(None, "fsdp")}  # dimension 0: layers
placed = {name: jax.device_put(w, NamedSharding(mesh, SPECS[name])) for name, w in params.items()}
for name, w in placed.items():
    print(f"{name:>5} {w.shape!s:14} on each device {w.addressable_shards[0].data.shape}")


def block(w, x, multiply=jnp.matmul):  # x: f32[b, d]
    y = rms_norm(x, w["norm"])
    return x + multiply(jax.nn.gelu(multiply(y, w["up"])), w["down"])


def scan(block, params, x):
    return lax.scan(lambda x, w: (block(w, x), None), x, params)[0]


def one_device(params):
    return jnp.mean((scan(block, params, x) - wanted) ** 2)


expected = jax.jit(jax.value_and_grad(one_device))(params)
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH)


def sharded(network):
    """The mean loss as a function of sharded parameters and global arrays."""

    def local(params, x, wanted):  # x, wanted: f32[b/8, d]
        return mean_loss(jnp.sum((network(params, x) - wanted) ** 2), wanted.size, "fsdp")

    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P("fsdp"), P("fsdp")), out_specs=P())


forms = {}


def check(name, network):
    loss = sharded(network)
    found = jaxpar.jit(jax.value_and_grad(loss))(placed, x, wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.max(np.abs(want)))
    forms[name] = count_collectives(lambda params: loss(params, x, wanted), placed)
    print(f"forward  {dict(forms[name].forward)}\nbackward {dict(forms[name].backward)}")
    return found


# %% [markdown]
# ## 2. A gather by hand
#
# The gradient goes the other way by itself: the derivative of a gather is a reduce-scatter, so that
# each device ends up with the summed gradient of its own rows.

# %%
DIMS = {"norm": None, "up": 0, "down": 0}  # of one layer's weight; None: not sharded


def by_hand(params, x):
    return scan(lambda w, x: block(fsdp_gather(w, "fsdp", dim=DIMS), x), params, x)


_, gradients = check("by hand", by_hand)
print("gradient of up:", gradients["up"].sharding.spec)
assert forms["by hand"].backward["psum_scatter"] == LAYERS  # of both matrices at once

# %% [markdown]
# Right, and yet it misses the point: the backward needs the gathered weights, and autodiff keeps
# them, all layers of them. Between steps a device stores an eighth; during a step it stores all.

# %%
WEIGHTS = sum(params[name].nbytes for name in ("up", "down"))
print(f"kept for the backward: {forms['by hand'].residual_bytes / WEIGHTS:.2f} of all weights")
assert forms["by hand"].residual_bytes > WEIGHTS

# %% [markdown]
# ## 3. `fsdp_linear`: gathers again in the backward
#
# It takes the place of a matmul. Residuals are the input and the *shard*; the backward gathers the
# weight a second time. With a mode that is named, blocks of a weight travel while others are
# multiplied.

# %%
check(
    "fsdp_linear",
    lambda params, x: scan(
        lambda w, x: block(w, x, multiply=lambda x, w: fsdp_linear(x, w, "fsdp")), params, x
    ),
)
assert forms["fsdp_linear"].residual_bytes < forms["by hand"].residual_bytes / 2
assert forms["fsdp_linear"].backward["all_gather"] == 2 * LAYERS

# %% [markdown]
# ## 4. `fsdp_scan`: the same for a stack of layers
#
# It takes the place of the scan. The block needs no change at all: it gets whole weights, gathered
# in front of the layer, forward and again in the backward. Residuals are the shards and the input
# of each layer, from which the layer is computed once more.

# %%
check("fsdp_scan", lambda params, x: fsdp_scan(block, params, x, "fsdp", dim=DIMS))
assert forms["fsdp_scan"].residual_bytes < forms["fsdp_linear"].residual_bytes

# %% [markdown]
# By hand, the gather goes into a checkpointed block, so that nothing gathered is kept. It sends and
# keeps as many bytes; the difference is that `fsdp_scan` does so without a word in the layer.


# %%
def rematerialized(params, x):
    @jax.checkpoint
    def gathered(w, x):
        return block(fsdp_gather(w, "fsdp", dim=DIMS), x)

    return scan(gathered, params, x)


loss = sharded(rematerialized)
again = count_collectives(lambda params: loss(params, x, wanted), placed)
print(f"backward {dict(again.backward)}")
for counted in ("forward_bytes", "backward_bytes", "residual_bytes"):
    assert getattr(again, counted) == getattr(forms["fsdp_scan"], counted), counted

# %% [markdown]
# ## 5. What they send and keep


# %%
def data_parallel(params, x):
    return scan(block, params, x)


whole = jax.shard_map(
    lambda params, x, wanted: mean_loss(
        jnp.sum((data_parallel(params, x) - wanted) ** 2), wanted.size, "fsdp"
    ),
    mesh=mesh,
    in_specs=(P(), P("fsdp"), P("fsdp")),
    out_specs=P(),
)
table = {"data parallel": count_collectives(lambda params: whole(params, x, wanted), params)}
table |= forms
stored = {name: WEIGHTS / (1 if name == "data parallel" else 8) for name in table}

print(f"{'KiB on each device':>20} stored  sent forward  sent backward  kept")
for name, counts in table.items():
    numbers = counts.forward_bytes, counts.backward_bytes, counts.residual_bytes
    forward, backward, kept = (number / 1024 for number in numbers)
    print(f"{name:>20} {stored[name] / 1024:6.0f} {forward:13.0f} {backward:14.0f} {kept:5.0f}")

figure, panels = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True)
names = list(table)
sent = [
    [getattr(table[name], f"{way}_bytes") / 1024 for name in names]
    for way in ("forward", "backward")
]
panels[0].barh(names, sent[0], label="forward")
panels[0].barh(names, sent[1], left=sent[0], label="backward")
panels[0].set(xlabel="KiB sent by a device")
panels[0].legend(frameon=False, fontsize=8)
panels[1].barh(names, [table[name].residual_bytes / 1024 for name in names], color="C2")
panels[1].set(xlabel="KiB kept from forward to backward")
panels[0].invert_yaxis()
for panel in panels:
    panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

sent = {name: counts.forward_bytes + counts.backward_bytes for name, counts in table.items()}
assert abs(sent["fsdp_scan"] / (3 * 7 / 8 * WEIGHTS) - 1) < 0.01
assert abs(sent["data parallel"] / (2 * 7 / 8 * WEIGHTS) - 1) < 0.01

# %% [markdown]
# Gathering twice has its price: FSDP sends 3 x 7/8 of the weights in a step, data parallelism
# 2 x 7/8. For it, weights, gradients and optimizer state are an eighth, and what a step keeps is
# activations alone. (`data parallel` keeps the weights too; they are there anyway.)
#
# ## 6. What a TPU's compiler makes of it
#
# Whether gathers run beside a layer is for a compiler to say. Four v5p chips, rows enough to hide
# behind, forward and backward.

# %% tags=["varies"]
chips = target("v5p:2x2x1", "fsdp=4")
D, F, ROWS = 512, 2048, 4 * 2048
big = {
    "norm": jax.ShapeDtypeStruct((2, D), jnp.bfloat16, sharding=P()),
    "up": jax.ShapeDtypeStruct((2, D, F), jnp.bfloat16, sharding=P(None, "fsdp")),
    "down": jax.ShapeDtypeStruct((2, F, D), jnp.bfloat16, sharding=P(None, "fsdp")),
}
rows = jax.ShapeDtypeStruct((ROWS, D), jnp.bfloat16, sharding=P("fsdp"))


def gradients(params, x):
    def loss(params, x):
        y = fsdp_scan(block, params, x, "fsdp", dim=DIMS).astype(jnp.float32)
        return mean_loss(jnp.sum(y**2), y.size, "fsdp")

    return jax.grad(jax.shard_map(loss, in_specs=(SPECS, P("fsdp")), out_specs=P()))(params, x)


line = timeline(compile_for(gradients, chips, big, rows))
print(f"{1e6 * line.total:.0f} us, {line.exposed / line.total:.0%} waits for transfers")

# %% [markdown]
# ## In short
#
# - Gathering by hand makes autodiff keep what was gathered; `fsdp_linear` and `fsdp_scan` gather
#   again.
# - `fsdp_scan` needs no change of the layer; the compiler runs its gathers beside the layer's work
#   where it makes collectives asynchronous.
# - 3 x 7/8 of the weights are sent instead of 2 x 7/8; all that is stored is an eighth.
#
# Next: [tensor parallelism](07_tensor_parallel.ipynb), which cuts the computation.
