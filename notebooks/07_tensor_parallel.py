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
# FSDP shards what is *stored*, but every device still multiplies by all weights. Tensor parallelism
# shards what is *computed*. Each device has its own hidden features and attention heads.
# Activations travel instead of weights.
#
# 1. columns, then rows
# 2. a sharded sequence between regions
# 3. attention by heads
# 4. a block
# 5. a vocabulary
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

mesh = jaxpar.make_mesh("tp=8")
BATCH, SEQUENCE, WIDTH, HIDDEN, HEADS = 2, 16, 64, 256, 8
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)


weights = {
    "norm_1": jnp.ones(WIDTH),
    **{name: normal(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
    "norm_2": jnp.ones(WIDTH),
    "up": normal(WIDTH, HIDDEN),
    "down": normal(HIDDEN, WIDTH),
}
x = jnp.asarray(rng.standard_normal((BATCH, SEQUENCE, WIDTH)), jnp.float32)

# %% [markdown]
# ## 1. Columns, then rows
#
# A weight sharded by columns takes the full input and computes a part of the output. An elementwise
# function, such as an activation, works on that part. The next weight is sharded by rows. It takes
# the part and computes a partial sum of the full result:
#
# $$\mathrm{gelu}(x\,U)\,D = \sum_i \mathrm{gelu}(x\,U_{:,i})\,D_{i,:}$$


# %%
def plain_mlp(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def replicated_mlp(w, x):  # x: f32[b, s, d], the same on all devices; up: f32[d, f/8]
    x = copy_region(x, "tp")
    partial_sum = jax.nn.gelu(x @ w["up"]) @ w["down"]  # f32[b, s, d]
    return reduce_region(partial_sum, "tp")


MLP = {"up": P(None, "tp"), "down": P("tp")}
mlp_weights = {name: weights[name] for name in MLP}


def on_devices(local, specs, data=P()):  # noqa: B008
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, data), out_specs=data)


def check(found, wanted, terms=HIDDEN):
    atol = 4 * tolerance("float32", terms) * np.max(np.abs(wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


program = on_devices(replicated_mlp, MLP)
check(jaxpar.jit(program)(mlp_weights, x), plain_mlp(weights, x))
counts = {"replicated": count_collectives(program, mlp_weights, x)}
print(counts["replicated"])
assert counts["replicated"].forward == counts["replicated"].backward == {"psum": 1}

# %% [markdown]
# `copy_region` and `reduce_region` begin and end a tensor-parallel *region*. `copy_region` sums in
# its derivative, `reduce_region` in its value. A region costs one all-reduce forward and one
# backward. Between regions every device has all activations and computes the same norms.
#
# ## 2. A sharded sequence between regions
#
# An all-reduce is a reduce-scatter and an all-gather. Delay the gather until the next region.
# Between regions each device then holds an eighth of the positions and computes an eighth of each
# norm. The bytes stay the same. A gather before a matmul can overlap with it, and so can a scatter
# after it.
#
# Here both versions save the same bytes for the backward pass, because the gathered `x` is an
# operand of a matmul. The second version needs an eighth of the memory for everything between
# regions: the residual stream and the norms.


# %%
def mlp(w, x):  # x: f32[b, s/8, d]
    hidden = column_parallel_linear(x, w["up"], "tp")  # f32[b, s, f/8]
    return row_parallel_linear(jax.nn.gelu(hidden), w["down"], "tp")  # f32[b, s/8, d]


program = on_devices(mlp, MLP, P(None, "tp"))
check(jaxpar.jit(program)(mlp_weights, x), plain_mlp(weights, x))
counts["by sequence"] = count_collectives(program, mlp_weights, x)
for name, count in counts.items():
    print(f"{name:>12}: sends {count.forward_bytes} bytes, keeps {count.residual_bytes}")
assert counts["by sequence"].forward_bytes == counts["replicated"].forward_bytes

# %% [markdown]
# ## 3. Attention by heads
#
# A head is a set of columns of query, key and value, and a set of rows of the output projection.
# `parallel_attention` gathers the sequence once for all three. It calls your `attend` with full
# sequences of some heads, and scatters the result. Several query heads may share a key and value
# head. The devices need not divide the heads evenly: `head_layout` shows which device has which
# head.


# %%
def attend(q, k, v):  # f32[b, s, heads of this device, e] each
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def plain_attention(w, x):
    heads = (BATCH, SEQUENCE, HEADS, WIDTH // HEADS)
    q, k, v = ((x @ w[name]).reshape(heads) for name in "qkv")
    return attend(q, k, v).reshape(x.shape) @ w["o"]


def attention(w, x):  # x: f32[b, s/8, d]
    qkvo = (w[name] for name in "qkvo")
    return parallel_attention(x, *qkvo, "tp", attend, heads=HEADS, kv_heads=HEADS)


ATTENTION = {name: P(None, "tp") for name in "qkv"} | {"o": P("tp")}
attention_weights = {name: weights[name] for name in ATTENTION}
program = on_devices(attention, ATTENTION, P(None, "tp"))
check(jaxpar.jit(program)(attention_weights, x), plain_attention(weights, x))
print(count_collectives(program, attention_weights, x))

# %% [markdown]
# ## 4. A block
#
# A block has two gathers and two scatters. Norms run on the local positions. A norm's scale is
# replicated, so its gradient is a sum over devices. The types insert this sum.


# %%
def plain_block(w, x):
    x = x + plain_attention(w, rms_norm(x, w["norm_1"]))
    return x + plain_mlp(w, rms_norm(x, w["norm_2"]))


def block(w, x):  # x: f32[b, s/8, d]
    x = x + attention(w, rms_norm(x, w["norm_1"]))
    return x + mlp(w, rms_norm(x, w["norm_2"]))


SPECS = {"norm_1": P(), **ATTENTION, "norm_2": P(), **MLP}
program = on_devices(block, SPECS, P(None, "tp"))
found = jaxpar.jit(jax.grad(lambda w: jnp.mean(jnp.sin(program(w, x)))))(weights)
wanted = jax.grad(lambda w: jnp.mean(jnp.sin(plain_block(w, x))))(weights)
for name in weights:
    check(found[name], wanted[name])
counts = count_collectives(program, weights, x)
print(dict(counts.forward), f"{counts.forward_bytes} bytes forward")
assert counts.forward == {"all_gather": 2, "psum_scatter": 2}
assert counts.forward_bytes == 4 * 7 / 8 * x.nbytes

# %% [markdown]
# The picture shows the weights of each device. `q` and `up` are sharded by columns, `o` and `down`
# by rows.

# %%
PALETTE = plt.get_cmap("Set2").colors
figure, panels = plt.subplots(1, 4, figsize=(8, 2.2))
for panel, name in zip(panels, ("q", "o", "up", "down"), strict=True):
    rows, columns = weights[name].shape
    down = SPECS[name] == P("tp")
    for device in range(8):
        step = (rows if down else columns) / 8
        corner = (0, device * step) if down else (device * step, 0)
        size = (columns, step) if down else (step, rows)
        panel.add_patch(plt.Rectangle(corner, *size, fc=PALETTE[device], ec="white"))
    panel.set(xlim=(0, columns), ylim=(rows, 0), xticks=(), yticks=())
    panel.set_title(f"{name} {SPECS[name]}", size=8)
    panel.spines[:].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## 5. A vocabulary
#
# The vocabulary has the largest weights of a small model. The embedding is sharded by words. Each
# device looks up the tokens in its shard, and the sums are scattered over positions. The loss never
# gathers the logits. For each token the devices exchange a maximum, a sum and the label's logit.

# %%
WORDS = 96
table = normal(WORDS, WIDTH)
tokens = jnp.asarray(rng.integers(0, WORDS, (BATCH, SEQUENCE)), jnp.int32)
labels = jnp.roll(tokens, -1, axis=1)


def local_loss(table, tokens, labels):  # table: f32[v/8, d]; tokens: i32[b, s]; labels: [b, s/8]
    x = vocab_parallel_embedding(tokens, table, "tp", sequence_dim=1)  # f32[b, s/8, d]
    losses = vocab_parallel_cross_entropy(x, table.T, labels, "tp", sequence_dim=1)
    return mean_loss(jnp.sum(losses), losses.size, "tp")


def plain_loss(table):
    scores = table[tokens] @ table.T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1))


loss = jax.shard_map(local_loss, mesh=mesh, in_specs=(P("tp"), P(), P(None, "tp")), out_specs=P())
value, gradient = jaxpar.jit(jax.value_and_grad(loss))(table, tokens, labels)
wanted, wanted_gradient = jax.value_and_grad(plain_loss)(table)
print(f"loss {value:.4f}, on one device {wanted:.4f}")
check(gradient, wanted_gradient, WORDS)

# %% [markdown]
# ## 6. A prediction for TPU
#
# The example is an MLP with the sizes of Llama 3 8B on four v5p chips, forward. It compares three
# programs: the layers' default, naive ones, and rings in both directions. If the compiler makes
# collectives asynchronous, layers by default gather rows around a ring and scatter sums in chunks.
#
# The stored output is from jax 0.10.2, whose scheduler hides less. With 0.12.0.1 the three take
# 1279, 1758 and 1333 us.

# %% tags=["varies"]
chips = target("v5p:2x2x1", "tp=4")
D, F, ROWS = 4096, 14336, 8192
big = {
    "up": jax.ShapeDtypeStruct((D, F), jnp.bfloat16, sharding=P(None, "tp")),
    "down": jax.ShapeDtypeStruct((F, D), jnp.bfloat16, sharding=P("tp")),
}
positions = jax.ShapeDtypeStruct((1, ROWS, D), jnp.bfloat16, sharding=P(None, "tp"))


def mlp_in(mode):
    def local(w, x):
        ring = jaxpar.Axis("tp", mode=mode)
        hidden = column_parallel_linear(x, w["up"], ring)
        return row_parallel_linear(jax.nn.gelu(hidden), w["down"], ring)

    return local


for mode in ("auto", "naive", "bidirectional"):
    data = P(None, "tp")
    program = jax.shard_map(mlp_in(mode), in_specs=(MLP, data), out_specs=data)
    line = timeline(compile_for(program, chips, big, positions))
    print(f"{mode:>13}: {1e6 * line.total:.0f} us, {line.exposed / line.total:3.0%} waits")

# %% [markdown]
# ## In short
#
# - Shard the first weight by columns and the second by rows. Put a gather before and a
#   reduce-scatter after, and shard the sequence between regions.
# - Heads are columns of q, k, v and rows of o.
# - A vocabulary is sharded by words, and the logits are never gathered.
#
# Next: [FSDP and tensor parallelism](08_fsdp_and_tensor_parallel.ipynb) at once.
