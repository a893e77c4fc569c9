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
# The model is the language model of [notebook 7](07_tensor_parallel.ipynb), with attention. The
# mesh now has two axes. The `tp` axis shards the computation of a layer. The `fsdp` axis shards the
# batch, and the dimension of a matrix that `tp` does not shard.

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
    column_parallel_linear,
    fsdp_gather,
    fsdp_scan,
    mean_value_and_grad,
    parallel_attention,
    rms_norm,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. The same model

# %%
WORDS, BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS = 16, 32, 16, 64, 256, 4
HEADS = 8
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


def attend(q, k, v):  # f32[b, s, heads, features of a head] each
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention(w, x):
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = ((x @ w[name]).reshape(heads) for name in ("q", "k", "v"))
    return attend(q, k, v).reshape(x.shape) @ w["o"]


def block(w, x):
    if "q" in w:
        x = x + attention(w, rms_norm(x, w["attention_norm"]))
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


params["layers"]["attention_norm"] = jnp.ones((LAYERS, WIDTH))
for name in ("q", "k", "v", "o"):
    params["layers"][name] = normal(LAYERS, WIDTH, WIDTH) / WIDTH**0.5
expected = jax.jit(jax.value_and_grad(one_device_loss))(params, batch)
print(f"loss on one device {expected[0]:.4f}")

# %% [markdown]
# ## 2. Layouts of one weight
#
# In `P(None, "fsdp", "tp")` dimension 0 is the layers. The picture compares four layouts of one
# layer's `up`, with the devices that hold each block. This notebook uses the last layout.

# %%
mesh = jaxpar.make_mesh("fsdp=2,tp=4")
COLUMNS, ROWS = P(None, "fsdp", "tp"), P(None, "tp", "fsdp")
STACKED_SPECS = {
    "norm": P(),
    "up": COLUMNS,
    "down": ROWS,
    "attention_norm": P(),
    "q": COLUMNS,
    "k": COLUMNS,
    "v": COLUMNS,
    "o": ROWS,
}
SPECS = {"embed": P("tp", "fsdp"), "layers": STACKED_SPECS}  # embed: words over tp
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
placed = jax.device_put(params, shardings)
local_up = placed["layers"]["up"].addressable_shards[0].data
print(f"up {placed['layers']['up'].shape}, on each device {local_up.shape}")
assert local_up.shape == (LAYERS, WIDTH // 2, HIDDEN // 4)

# %% jupyter={"source_hidden": true} tags=["drawing"]
PALETTE = plt.get_cmap("Set2").colors
LAYOUTS = {
    "data parallel": ("dp=8", P()),
    "FSDP": ("fsdp=8", P("fsdp")),
    "tensor parallel": ("tp=8", P(None, "tp")),
    "both": ("fsdp=2,tp=4", P("fsdp", "tp")),
}
figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.2), sharey=True)
for panel, (title, (axes, spec)) in zip(panels, LAYOUTS.items(), strict=True):
    places = NamedSharding(jaxpar.make_mesh(axes), spec).devices_indices_map((WIDTH, HIDDEN))
    holders = {}
    for device, (rows, columns) in places.items():
        block_bounds = (*rows.indices(WIDTH)[:2], *columns.indices(HIDDEN)[:2])
        holders.setdefault(block_bounds, []).append(device.id)
    for (top, bottom, left, right), devices in holders.items():
        color = PALETTE[devices[0]]
        panel.add_patch(plt.Rectangle((left, top), right - left, bottom - top, fc=color, ec="w"))
        text = str(devices[0]) if len(devices) == 1 else f"{devices[0]} to {devices[-1]}"
        panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", size=8)
    panel.set(xlim=(0, HIDDEN), ylim=(WIDTH, 0), xticks=(0, HIDDEN), yticks=(0, WIDTH))
    panel.set_title(f"{title}\n{spec}", size=9)
    panel.set_xlabel("hidden")
    panel.spines[:].set_visible(False)
panels[0].set_ylabel("features")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## 3. The tensor-parallel block inside `fsdp_scan`
#
# The block is `tp_block` of notebook 7, with `tp` of size four. Tensor parallelism gives a device a
# quarter of each matrix, and the device stores half of that. `fsdp_scan` gathers the quarter before
# a layer uses it.

# %%
DIMS = {"norm": None, "attention_norm": None, "up": 0, "q": 0, "k": 0, "v": 0, "down": 1, "o": 1}


def tp_mlp(w, x):  # x: f32[b/2, s/4, d]
    hidden = column_parallel_linear(x, w["up"], "tp")  # f32[b/2, s, f/4]
    return row_parallel_linear(jax.nn.gelu(hidden), w["down"], "tp")


def tp_attention(w, x):
    weights = w["q"], w["k"], w["v"], w["o"]
    return parallel_attention(x, *weights, "tp", attend, heads=HEADS, kv_heads=HEADS)


def tp_block(w, x):
    x = x + tp_attention(w, rms_norm(x, w["attention_norm"]))
    return x + tp_mlp(w, rms_norm(x, w["norm"]))


def run_sharded_layers(layers, x):
    return fsdp_scan(tp_block, layers, x, "fsdp", dim=DIMS)


def local_sum_and_count(params, batch):
    words, next_words, mask = batch  # words: i32[b/2, s]; next_words, mask: [b/2, s/4]
    embed = fsdp_gather(params["embed"], "fsdp", dim=1)  # f32[v/4, d]
    x = vocab_parallel_embedding(words, embed, "tp", sequence_dim=1)
    x = run_sharded_layers(params["layers"], x)
    losses = vocab_parallel_cross_entropy(x, embed.T, next_words, "tp", sequence_dim=1)
    return jnp.sum(losses * mask), jnp.sum(mask)


DATA = P("fsdp", "tp")  # texts over fsdp, positions over tp
step = jaxpar.jit(
    jax.shard_map(
        mean_value_and_grad(local_sum_and_count, ("fsdp", "tp")),  # losses are spread over both
        mesh=mesh,
        in_specs=(SPECS, (P("fsdp"), DATA, DATA)),
        out_specs=(P(), SPECS),
    )
)


def check(found, wanted):
    atol = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE) * np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


loss, gradients = step(placed, batch)
print(f"loss on eight devices {loss:.4f}, on one device {expected[0]:.4f}")
jax.tree.map(check, (loss, gradients), expected)
for gradient, sharding in zip(jax.tree.leaves(gradients), jax.tree.leaves(shardings), strict=True):
    assert gradient.sharding.is_equivalent_to(sharding, gradient.ndim)

# %% [markdown]
# ## 4. Bytes per axis
#
# Weights travel over `fsdp`, and activations travel over `tp`. FSDP sends the same bytes for
# every batch size. Tensor parallelism sends the same bytes for every width of the MLP's hidden
# layer. So large batches favour `fsdp`, and wide hidden layers favour `tp`. These are the bytes of
# the layers' forward pass:

# %%
x = params["embed"][batch[0]]
matrices = sum(w.nbytes for name, w in params["layers"].items() if "norm" not in name)
for fsdp, tp in ((8, 1), (4, 2), (2, 4), (1, 8)):
    name = f"fsdp={fsdp},tp={tp}"
    program = jax.shard_map(
        run_sharded_layers,
        mesh=jaxpar.make_mesh(name),
        in_specs=(STACKED_SPECS, DATA),
        out_specs=DATA,
    )
    counted = count_collectives(program, params["layers"], x, grad=False).forward_bytes
    over_fsdp = (fsdp - 1) / fsdp * matrices / tp
    over_tp = 4 * LAYERS * (tp - 1) / tp * x.nbytes / fsdp  # two gathers, two scatters a layer
    assert counted == over_fsdp + over_tp
    print(f"{name}: {over_fsdp / 1024:.0f} KiB of weights, {over_tp / 1024:.0f} KiB of activations")

# %% [markdown]
# Here `fsdp=4,tp=2` sends the fewest bytes forward, not the `fsdp=2,tp=4` of this notebook.
#
# ## 5. Without a stack of layers
#
# If layers are not stacked, each can gather its own weights over `fsdp`. Give
# `column_parallel_linear` or `row_parallel_linear` `fsdp_axis=` and `fsdp_dim=`, the dimension that
# `fsdp` shards. With `fsdp_axis=Axis("fsdp", mode="bidirectional")`, blocks of a weight travel
# while others are multiplied.

# %%
layer = {name: params["layers"][name][0] for name in ("up", "down")}
specs = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}


def gathering_mlp(w, x):
    hidden = column_parallel_linear(x, w["up"], "tp", fsdp_axis="fsdp", fsdp_dim=0)
    hidden = jax.nn.gelu(hidden)
    return row_parallel_linear(hidden, w["down"], "tp", fsdp_axis="fsdp", fsdp_dim=1)


program = jax.shard_map(gathering_mlp, mesh=mesh, in_specs=(specs, DATA), out_specs=DATA)
check(jaxpar.jit(program)(layer, x), mlp(layer, x))
print(dict(count_collectives(program, layer, x).forward))  # x over tp, two weights over fsdp

# %% [markdown]
# ## 6. Training
#
# Adam's state is sharded like the weights.

# %%
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
both, trained = train(step, placed)
np.testing.assert_allclose(both, one_device, rtol=1e-4)
assert trained["layers"]["up"].sharding.is_equivalent_to(shardings["layers"]["up"], 3)
print("loss after 0, 10, 20, 30 steps:", " ".join(f"{loss:.3f}" for loss in both[::10]))
assert both[-1] < 0.2

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(5, 2.6))
panel.plot(one_device, lw=6, color=PALETTE[0], label="one device")
panel.plot(both, lw=1.5, color="black", label="fsdp=2, tp=4")
panel.axhline(np.log(3), lw=1, ls=":", color="grey")
panel.text(30, np.log(3) + 0.1, "log 3: no attention", ha="right", color="grey")
panel.set(xlabel="step", ylabel="loss", ylim=(0, None))
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# With attention the model sees the stride of a text.
#
# ## In short
#
# - Use specs with both axes, put the tensor-parallel block into `fsdp_scan`, and give both axes to
#   `mean_value_and_grad`.
# - Count the bytes over both axes before you choose the sizes.
# - Put `tp` last in the mesh: on TPU its devices are then neighbours. This matters more for `tp`: a
#   layer waits for activations, but weights can be gathered earlier.
#
# Next: [experts](09_expert_dispatch.ipynb). [Notebook 13](13_layouts.ipynb) states all specs of a
# model in one place.
