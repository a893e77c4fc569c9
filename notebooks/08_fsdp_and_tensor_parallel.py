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
# # 8. FSDP and tensor parallelism at once
#
# The mesh has two axes. A group of `tp` devices shares the computation of a layer. The `fsdp` axis
# shards the batch, and shards each weight once more. This notebook combines the two before it:
#
# 1. layouts of one weight
# 2. the tensor-parallel block inside `fsdp_scan`
# 3. bytes per axis
# 4. without a stack of layers
# 5. training
#
# Results are compared with one device. Eight CPU devices measure no speed.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
from functools import partial

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import (
    fsdp_scan,
    gated_mlp,
    mean_value_and_grad,
    parallel_attention,
    rms_norm,
)
from jaxpar.testing import count_collectives, tolerance

BATCH, SEQUENCE, FEATURES, HIDDEN, HEADS, LAYERS = 8, 16, 64, 192, 8, 4
SHAPES = {
    "norm_1": (FEATURES,),
    "q": (FEATURES, FEATURES),
    "k": (FEATURES, FEATURES),
    "v": (FEATURES, FEATURES),
    "o": (FEATURES, FEATURES),
    "norm_2": (FEATURES,),
    "gate": (FEATURES, HIDDEN),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
}
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


params = {name: normal(LAYERS, *shape) / shape[0] ** 0.5 for name, shape in SHAPES.items()}
params |= {name: jnp.ones_like(params[name]) for name in ("norm_1", "norm_2")}
x, target = normal(BATCH, SEQUENCE, FEATURES), normal(BATCH, SEQUENCE, FEATURES)

# %% [markdown]
# ## 1. Layouts of one weight
#
# In `P(None, "fsdp", "tp")` dimension 0 is the layers. Rows are sharded over `fsdp`, columns over
# `tp`. Each block of one layer's `up` below shows the numbers of the devices that hold it.

# %%
PALETTE = plt.get_cmap("Set2").colors


def draw(panel, title, axes, spec):
    shape = SHAPES["up"]
    sharding = NamedSharding(jaxpar.make_mesh(axes), spec)
    holders = {}
    for device, place in sharding.devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(place, shape, strict=True))
        holders.setdefault(bounds, []).append(device.id)
    for ((top, bottom), (left, right)), devices in holders.items():
        corner, size = (left, top), (right - left, bottom - top)
        panel.add_patch(plt.Rectangle(corner, *size, fc=PALETTE[min(devices)], ec="white"))
        text = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else str(devices[0])
        panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", size=8)
    panel.set(xlim=(0, shape[1]), ylim=(shape[0], 0), title=f"{title}\n{spec}")
    panel.set(xlabel="hidden", xticks=(0, shape[1]), yticks=(0, shape[0]))
    panel.title.set_size(9)
    panel.spines[:].set_visible(False)
    return holders


figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.2), sharey=True)
draw(panels[0], "data parallel", "dp=8", P())
draw(panels[1], "FSDP", "fsdp=8", P("fsdp"))
draw(panels[2], "tensor parallel", "tp=8", P(None, "tp"))
holders = draw(panels[3], "both", "fsdp=2,tp=4", P("fsdp", "tp"))
panels[0].set_ylabel("features")
figure.tight_layout()
plt.show()
assert all(len(devices) == 1 for devices in holders.values())

# %% [markdown]
# ## 2. The tensor-parallel block inside `fsdp_scan`
#
# The block sees the same weights as on four devices. `fsdp_scan` gathers the two halves of each
# weight before a layer uses it. `dim` names the dimension of one layer's weight that `fsdp` shards.
# `tp` shards the other dimension.

# %%
mesh = jaxpar.make_mesh("fsdp=2,tp=4")
ROWS, COLUMNS = P(None, "tp", "fsdp"), P(None, "fsdp", "tp")
SPECS = dict.fromkeys(SHAPES, COLUMNS) | {"norm_1": P(), "norm_2": P(), "o": ROWS, "down": ROWS}
DIMS = dict.fromkeys(SHAPES, 0) | {"norm_1": None, "norm_2": None, "o": 1, "down": 1}
DATA = P("fsdp", "tp")  # sequences over fsdp, positions over tp


def attend(q, k, v):  # f32[b, s, heads, e] each
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def block(w, x):  # x: f32[b/2, s/4, d]
    y = rms_norm(x, w["norm_1"])
    qkvo = (w[name] for name in "qkvo")
    x = x + parallel_attention(y, *qkvo, "tp", attend, heads=HEADS, kv_heads=HEADS)
    y = rms_norm(x, w["norm_2"])
    return x + gated_mlp(y, w["gate"], w["up"], w["down"], "tp")


def sum_and_count(params, x, target):  # x, target: f32[b/2, s/4, d]
    y = fsdp_scan(block, params, x, "fsdp", dim=DIMS)
    return jnp.sum((y - target) ** 2), y.size


step = jaxpar.jit(
    jax.shard_map(
        mean_value_and_grad(sum_and_count, ("fsdp", "tp")),
        mesh=mesh,
        in_specs=(SPECS, DATA, DATA),
        out_specs=(P(), SPECS),
    )
)
shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
placed = jax.device_put(params, shardings)
loss, grads = step(placed, x, target)

# %% [markdown]
# For comparison, the same on one device in plain JAX:


# %%
def plain_block(x, w):
    y = rms_norm(x, w["norm_1"])
    q, k, v = ((y @ w[name]).reshape(*y.shape[:2], HEADS, -1) for name in "qkv")
    x = x + attend(q, k, v).reshape(y.shape) @ w["o"]
    y = rms_norm(x, w["norm_2"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None


def plain_loss(params, x, target):
    return jnp.mean((lax.scan(plain_block, x, params)[0] - target) ** 2)


expected, expected_grads = jax.jit(jax.value_and_grad(plain_loss))(params, x, target)
print(f"loss {loss:.4f}, on one device {expected:.4f}")
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)
for name, want in expected_grads.items():
    atol = TOLERANCE * np.max(np.abs(want))
    np.testing.assert_allclose(grads[name], want, rtol=0, atol=atol)
    assert grads[name].sharding.is_equivalent_to(shardings[name], 3)

# %% [markdown]
# ## 3. Bytes per axis
#
# Weights travel over `fsdp`, and activations travel over `tp`. FSDP sends the same bytes for every
# batch size. Tensor parallelism sends the same bytes for every hidden size. The best mesh therefore
# depends on the sizes. Here are the bytes of a forward pass on every two-axis mesh of eight:


# %%
def sends(mesh):
    def local(params, x):
        return fsdp_scan(block, params, x, "fsdp", dim=DIMS)

    program = jax.shard_map(local, mesh=mesh, in_specs=(SPECS, DATA), out_specs=DATA)
    return count_collectives(program, params, x, grad=False).forward_bytes / 1024


def by_rule(fsdp, tp):
    weights = sum(w.nbytes for name, w in params.items() if "norm" not in name)
    over_fsdp = (fsdp - 1) / fsdp * weights / tp
    over_tp = 4 * LAYERS * (tp - 1) / tp * x.nbytes / fsdp
    return over_fsdp / 1024, over_tp / 1024


figure, panel = plt.subplots(figsize=(5, 2.2))
for place, (fsdp, tp) in enumerate([(8, 1), (4, 2), (2, 4), (1, 8)]):
    name = f"fsdp={fsdp},tp={tp}"
    weights, activations = by_rule(fsdp, tp)
    assert abs(sends(jaxpar.make_mesh(name)) - weights - activations) < 1
    print(f"{name}: {weights:4.0f} KiB of weights, {activations:4.0f} KiB of activations")
    panel.barh(name, weights, color=PALETTE[1], label="weights" if not place else None)
    panel.barh(
        name, activations, left=weights, color=PALETTE[2], label=None if place else "activations"
    )
panel.set(xlabel="KiB sent by a device, forward")
panel.invert_yaxis()
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## 4. Without a stack of layers
#
# A layer can gather its own weights over `fsdp`. Give it `fsdp_axis=` and the dimensions that
# `fsdp` shards. With an explicit mode, such as `Axis("fsdp", mode="bidirectional")`, the blocks of
# a weight travel while their matmul computes.

# %%
LAYER = {name: params[name][0] for name in ("gate", "up", "down")}
LAYER_SPECS = {name: P(*SPECS[name][1:]) for name in LAYER}


def alone(w, x):
    weights = w["gate"], w["up"], w["down"]
    return gated_mlp(x, *weights, "tp", fsdp_axis="fsdp", fsdp_dim=(0, 1))


program = jax.shard_map(alone, mesh=mesh, in_specs=(LAYER_SPECS, DATA), out_specs=DATA)
wanted = (jax.nn.silu(x @ LAYER["gate"]) * (x @ LAYER["up"])) @ LAYER["down"]
atol = TOLERANCE * np.max(np.abs(wanted))
np.testing.assert_allclose(jaxpar.jit(program)(LAYER, x), wanted, rtol=0, atol=atol)
print(dict(count_collectives(program, LAYER, x).forward))

# %% [markdown]
# ## 5. Training
#
# Adam is elementwise. Its state is sharded like the weights, and an update sends nothing.

# %%
optimizer = optax.adam(3e-3)


@partial(jaxpar.jit, mesh=mesh)
def update(params, state, grads):
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state


def train(step, params):
    losses, state = [], jax.jit(optimizer.init)(params)
    for _ in range(15):
        loss, grads = step(params, x, target)
        losses.append(float(loss))
        params, state = update(params, state, grads)
    return losses, params


one_device, _ = train(jax.jit(jax.value_and_grad(plain_loss)), params)
both, trained = train(step, placed)
figure, panel = plt.subplots(figsize=(4.6, 2.4))
panel.plot(one_device, lw=6, color=PALETTE[0], label="one device")
panel.plot(both, lw=1.5, color="black", label="fsdp=2, tp=4")
panel.set(xlabel="step", ylabel="loss")
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

np.testing.assert_allclose(both, one_device, rtol=1e-3)
print(" ".join(f"{loss:.3f}" for loss in both[::3]))
assert trained["up"].addressable_shards[0].data.shape == (LAYERS, FEATURES // 2, HIDDEN // 4)

# %% [markdown]
# ## In short
#
# - Use specs with both axes, put the tensor-parallel block into `fsdp_scan`, and give both axes to
#   `mean_value_and_grad`.
# - Weights travel over `fsdp`, activations over `tp`. Count both before you choose the sizes.
# - Put `tp` last in the mesh. It has the most traffic, and the last axis gets the nearest
#   neighbours.
#
# Next: [experts](09_expert_dispatch.ipynb). [Layouts](13_layouts.ipynb) state all specs of a model
# once.
