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
# In data parallelism every device holds all weights, gradients and optimizer state. *Fully sharded*
# data parallelism (FSDP) shards each weight over the same devices. It gathers a weight only where a
# layer uses it.
#
# 1. shards between steps
# 2. a gather by hand, and what autodiff saves
# 3. `fsdp_linear`: gathers again in the backward pass
# 4. `fsdp_scan`: the same for a stack of layers
# 5. bytes sent and saved
# 6. a prediction for TPU
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_gather, fsdp_linear, fsdp_scan, mean_loss, rms_norm
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. Shards between steps
#
# The model is four residual blocks, stacked along dimension 0. Matrices are sharded by rows, and
# the batch is sharded over the same axis. The norm's weights are small and stay replicated.

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
# `fsdp_gather` gathers one layer's weights. The derivative of a gather is a reduce-scatter, so each
# device receives the summed gradient of its own rows.

# %%
DIMS = {"norm": None, "up": 0, "down": 0}  # dimensions of one layer's weight; None: not sharded


def by_hand(params, x):
    return scan(lambda w, x: block(fsdp_gather(w, "fsdp", dim=DIMS), x), params, x)


_, gradients = check("by hand", by_hand)
print("gradient of up:", gradients["up"].sharding.spec)
assert forms["by hand"].backward["psum_scatter"] == LAYERS  # both matrices in one collective

# %% [markdown]
# The gradients are right, but the memory is not. The backward pass needs the gathered weights, so
# autodiff saves them for all layers. Values saved for the backward pass are called *residuals*.
# Between steps a device stores an eighth of the weights. During a step it stores all of them.

# %%
WEIGHTS = sum(params[name].nbytes for name in ("up", "down"))
print(f"kept for the backward: {forms['by hand'].residual_bytes / WEIGHTS:.2f} of all weights")
assert forms["by hand"].residual_bytes > WEIGHTS

# %% [markdown]
# ## 3. `fsdp_linear`: gathers again in the backward pass
#
# `fsdp_linear` replaces a matmul. Its residuals are the input and the *shard*, so the backward pass
# gathers the weight again. With an explicit mode such as `"bidirectional"`, the blocks of a weight
# travel while other blocks are multiplied.

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
# `fsdp_scan` replaces `lax.scan`. The block stays unchanged: it receives full weights. The scan
# gathers them before each layer, in the forward pass and again in the backward pass. The residuals
# are the shards and each layer's input. The backward pass computes the layer again from them.

# %%
check("fsdp_scan", lambda params, x: fsdp_scan(block, params, x, "fsdp", dim=DIMS))
assert forms["fsdp_scan"].residual_bytes < forms["fsdp_linear"].residual_bytes

# %% [markdown]
# By hand, put the gather into a checkpointed block, so that no gathered weight is saved. This sends
# and saves as many bytes as `fsdp_scan`, but the layer needs extra code.


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
# ## 5. Bytes sent and saved


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
# The second gather has a price. FSDP sends 3 x 7/8 of the weights in a step, and data parallelism
# sends 2 x 7/8. In return, weights, gradients and optimizer state take an eighth of the memory. A
# step saves only activations and shards. (The column `kept` counts the weights for `data parallel`
# too, although they are in memory anyway.)
#
# ## 6. A prediction for TPU
#
# The compiler decides whether gathers overlap with a layer. `compile_for` compiles for chips that
# this machine does not have. `timeline` simulates the compiled schedule. Here: four v5p chips, with
# enough rows to hide the gathers, forward and backward.

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
# - With a gather by hand, autodiff saves the gathered weights. `fsdp_linear` and `fsdp_scan` gather
#   again instead.
# - `fsdp_scan` needs no change in the layer. Its gathers overlap with the layer where the compiler
#   makes collectives asynchronous.
# - FSDP sends 3 x 7/8 of the weights instead of 2 x 7/8, and stores an eighth of them.
#
# Next: [tensor parallelism](07_tensor_parallel.ipynb), which shards the computation.
