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
# # 7. Tensor parallelism
#
# The model is the language model of notebooks [5](05_data_parallel.ipynb) and [6](06_fsdp.ipynb).
# It now has attention, and eight devices share each layer's computation. FSDP shards what is
# *stored*, but every device still multiplies by all weights. With tensor parallelism each device
# has a part of the hidden features, heads and vocabulary. Activations travel instead of weights.

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
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import (
    column_parallel_linear,
    copy_region,
    mean_loss,
    parallel_attention,
    reduce_region,
    rms_norm,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# ## 1. The same model, and attention
#
# The parts for attention are marked as new. Without them, model and loss are those of notebooks 5
# and 6.

# %%
WORDS, BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS = 16, 32, 16, 64, 256, 4
HEADS = 8  # new
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


def attend(q, k, v):  # new; f32[b, s, heads, features of a head] each
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention(w, x):  # new
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = ((x @ w[name]).reshape(heads) for name in ("q", "k", "v"))
    return attend(q, k, v).reshape(x.shape) @ w["o"]


def block(w, x):
    if "q" in w:  # new
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


print(f"loss without attention {one_device_loss(params, batch):.4f}")

params["layers"]["attention_norm"] = jnp.ones((LAYERS, WIDTH))  # new
for name in ("q", "k", "v", "o"):
    params["layers"][name] = normal(LAYERS, WIDTH, WIDTH) / WIDTH**0.5
expected = jax.jit(jax.value_and_grad(one_device_loss))(params, batch)
print(f"loss with attention {expected[0]:.4f}")

# %% [markdown]
# ## 2. Columns, then rows
#
# The MLP's first weight is sharded by columns, so each device computes a part of the hidden
# features. The second weight is sharded by rows. It turns these features into a partial sum of the
# result:
#
# $$\mathrm{gelu}(x\,U)\,D = \sum_i \mathrm{gelu}(x\,U_{:,i})\,D_{i,:}$$

# %%
mesh = jaxpar.make_mesh("tp=8")
LAYER_SPECS = {
    "norm": P(),
    "up": P(None, "tp"),
    "down": P("tp"),
    "attention_norm": P(),
    "q": P(None, "tp"),
    "k": P(None, "tp"),
    "v": P(None, "tp"),
    "o": P("tp"),
}
layer = {name: w[0] for name, w in params["layers"].items()}  # the first layer
x = params["embed"][batch[0]]


def check(found, wanted):
    atol = 2 * LAYERS * tolerance("float32", HIDDEN) * np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def replicated_mlp(w, x):  # x: f32[b, s, d], the same on all devices; up: f32[d, f/8]
    x = copy_region(x, "tp")  # JAX would insert it if you left it out
    partial_sum = jax.nn.gelu(x @ w["up"]) @ w["down"]  # f32[b, s, d]
    return reduce_region(partial_sum, "tp")


program = jax.shard_map(replicated_mlp, mesh=mesh, in_specs=(LAYER_SPECS, P()), out_specs=P())
check(jaxpar.jit(program)(layer, x), mlp(layer, x))
replicated = count_collectives(program, layer, x)
assert replicated.forward == replicated.backward == {"psum": 1}
print(f"forward {dict(replicated.forward)}, backward {dict(replicated.backward)}")

# %% [markdown]
# The part between `copy_region` and `reduce_region` is a tensor-parallel *region*. `copy_region`
# sends nothing forward and sums over devices backward. `reduce_region` sums forward and sends
# nothing backward. Between regions every device has all activations and computes the same norms.
#
# ## 3. A sharded sequence between regions
#
# An all-reduce is a reduce-scatter followed by an all-gather. The gather can wait until the next
# region begins. Then each device holds an eighth of the positions between regions. A device sends
# as many bytes as before, and both transfers can overlap with a matmul.


# %%
def tp_mlp(w, x, axis="tp"):  # x: f32[b, s/8, d]
    hidden = column_parallel_linear(x, w["up"], axis)  # f32[b, s, f/8]
    return row_parallel_linear(jax.nn.gelu(hidden), w["down"], axis)  # f32[b, s/8, d]


POSITIONS = P(None, "tp")


def on_eight_devices(local):
    specs = {"in_specs": (LAYER_SPECS, POSITIONS), "out_specs": POSITIONS}
    return jax.shard_map(local, mesh=mesh, **specs)


program = on_eight_devices(tp_mlp)
check(jaxpar.jit(program)(layer, x), mlp(layer, x))
by_sequence = count_collectives(program, layer, x)
print(f"a device sends {by_sequence.forward_bytes} bytes forward, with {dict(by_sequence.forward)}")
assert by_sequence.forward_bytes == replicated.forward_bytes
assert by_sequence.residual_bytes == replicated.residual_bytes

# %% [markdown]
# With the default mode on CPU, both versions save the same bytes for the backward pass. With
# `Axis("tp", mode="bidirectional")` the second version saves only the shard of `x`. Between regions
# a sharded sequence needs less memory, and less work for norms.
#
# ## 4. Attention by heads
#
# A head is a set of columns of the `q`, `k` and `v` weights, and of rows of `o`.
# `parallel_attention` gathers the sequence once for all three. It calls your `attend` with the full
# sequences of this device's heads, and scatters the result. Several query heads may share a key and
# value head. If the heads cannot be split evenly, `jaxpar.layers.head_layout` pads them.


# %%
def tp_attention(w, x):  # x: f32[b, s/8, d]
    weights = w["q"], w["k"], w["v"], w["o"]
    # heads and kv_heads: of the full model
    return parallel_attention(x, *weights, "tp", attend, heads=HEADS, kv_heads=HEADS)


def tp_block(w, x):
    x = x + tp_attention(w, rms_norm(x, w["attention_norm"]))
    return x + tp_mlp(w, rms_norm(x, w["norm"]))


program = on_eight_devices(tp_attention)
check(jaxpar.jit(program)(layer, x), attention(layer, x))
program = on_eight_devices(tp_block)
check(jaxpar.jit(program)(layer, x), block(layer, x))
counts = count_collectives(program, layer, x)
print(f"forward {dict(counts.forward)}, {counts.forward_bytes} bytes")
assert counts.forward == {"all_gather": 2, "psum_scatter": 2}
assert counts.forward_bytes == 4 * 7 / 8 * x.nbytes

# %% [markdown]
# In the picture each colour is one device's part of a weight.

# %% jupyter={"source_hidden": true} tags=["drawing"]
PALETTE = plt.get_cmap("Set2").colors
figure, panels = plt.subplots(1, 4, figsize=(8, 2.2))
for panel, name in zip(panels, ("q", "o", "up", "down"), strict=True):
    rows, columns = layer[name].shape
    for device in range(8):
        if LAYER_SPECS[name] == P("tp"):
            corner, width, height = (0, device * rows / 8), columns, rows / 8
        else:
            corner, width, height = (device * columns / 8, 0), columns / 8, rows
        panel.add_patch(plt.Rectangle(corner, width, height, fc=PALETTE[device], ec="white"))
    panel.set(xlim=(0, columns), ylim=(rows, 0), xticks=(), yticks=())
    panel.set_title(f"{name} {LAYER_SPECS[name]}", size=8)
    panel.spines[:].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## 5. The vocabulary, and the full model
#
# The embedding is sharded by words. Each device looks up the words in its shard, and has zeros
# for all other words. A reduce-scatter adds the lookups and leaves each device its positions. The
# loss gathers `x`, but never the logits. For each position the devices exchange a maximum, a sum
# and the label's logit.


# %%
def tp_sum_and_count(params, batch):  # embed: f32[v/8, d]
    words, next_words, mask = batch  # words: i32[b, s]; next_words, mask: [b, s/8]
    x = vocab_parallel_embedding(words, params["embed"], "tp", sequence_dim=1)  # f32[b, s/8, d]
    x, _ = lax.scan(lambda x, w: (tp_block(w, x), None), x, params["layers"])
    logits_weight = params["embed"].T
    losses = vocab_parallel_cross_entropy(x, logits_weight, next_words, "tp", sequence_dim=1)
    return jnp.sum(losses * mask), jnp.sum(mask)


STACKED_SPECS = {name: P(None, *spec) for name, spec in LAYER_SPECS.items()}
SPECS = {"embed": P("tp"), "layers": STACKED_SPECS}
BATCH_SPECS = (P(), POSITIONS, POSITIONS)


@jax.shard_map(mesh=mesh, in_specs=(SPECS, BATCH_SPECS), out_specs=P())
def tp_loss(params, batch):
    return mean_loss(*tp_sum_and_count(params, batch), "tp")


loss, gradients = jaxpar.jit(jax.value_and_grad(tp_loss))(params, batch)
jax.tree.map(check, (loss, gradients), expected)
print(f"loss on eight devices {loss:.4f}, on one device {expected[0]:.4f}")

# %% [markdown]
# The norms are replicated, so JAX sums their gradients over the devices.
#
# ## 6. A prediction for TPU
#
# These times are predicted, not measured: the forward pass of an MLP with the sizes of Llama 3 8B
# on four v5p chips. The program by hand uses `lax` collectives. Both programs use the same compiler
# options.

# %% tags=["varies"]
chips = target("v5p:2x2x1", "tp=4")
D, F, ROWS = 4096, 14336, 8192
big_specs = {"up": P(None, "tp"), "down": P("tp")}
big_layer = {
    "up": jax.ShapeDtypeStruct((D, F), jnp.bfloat16, sharding=big_specs["up"]),
    "down": jax.ShapeDtypeStruct((F, D), jnp.bfloat16, sharding=big_specs["down"]),
}
big_x = jax.ShapeDtypeStruct((1, ROWS, D), jnp.bfloat16, sharding=POSITIONS)


def mlp_by_hand(w, x):
    x = lax.all_gather(x, "tp", axis=1, tiled=True)
    y = jax.nn.gelu(x @ w["up"]) @ w["down"]
    return lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)


both_directions = jaxpar.Axis("tp", mode="bidirectional")
programs = {
    "by hand": mlp_by_hand,
    "bidirectional": partial(tp_mlp, axis=both_directions),
}
times = {}
for name, local in programs.items():
    program = jax.shard_map(local, in_specs=(big_specs, POSITIONS), out_specs=POSITIONS)
    line = timeline(compile_for(program, chips, big_layer, big_x))
    times[name] = line.total
    waiting = 1e6 * line.exposed
    print(f"{name:>13}: {1e6 * line.total:.0f} us, {waiting:.0f} us of them waiting for transfers")
saved = times["by hand"] - times["bidirectional"]
print(f"bidirectional saves {1e6 * saved:.0f} us, {saved / times['by hand']:.0%}")
assert saved > 0.2 * times["by hand"]

# %% [markdown]
# With `mode="bidirectional"`, `column_parallel_linear` and `row_parallel_linear` send blocks around
# a ring while others are multiplied. The default, `tp_mlp` as it is, scatters in four chunks here.
# The compiler of jax 0.10.2, which made the output above, joins them into one all-reduce after the
# last matmul. So name a mode with jax 0.10.2: `Axis("tp", mode="bidirectional")`. With jax 0.12.0.1
# the default overlaps, so keep it:
#
# | predicted us | by hand | default | bidirectional |
# |---|---|---|---|
# | jax 0.10.2 | 2215 | 1958 | 1356 |
# | jax 0.12.0.1 | 1758 | 1279 | 1333 |
#
# Inside a model, neighbouring work can hide collectives too, so expect a smaller gain for a
# training step.
#
# ## In short
#
# Shard the first weight by columns and the second by rows. Gather before the first matmul,
# reduce-scatter after the second, and shard the sequence between regions.
#
# Next: [FSDP and tensor parallelism](08_fsdp_and_tensor_parallel.ipynb) at once.
