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
# FSDP cuts what is *stored*; every device still multiplies by all weights. Tensor parallelism cuts
# what is *computed*: a device has its own hidden features and its own attention heads, and
# activations travel in place of weights.
#
# 1. columns, then rows
# 2. the sequence in between
# 3. attention by heads
# 4. a block
# 5. a vocabulary
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
# A weight cut by columns takes the whole input and makes a share of the output. Everything
# elementwise, such as an activation, works on that share. The next weight, cut by rows, takes the
# share and makes a partial sum of the whole:
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
# `copy_region` and `reduce_region` are the two ends of a tensor-parallel region: one sums in its
# derivative, the other in its value. A region costs an all-reduce each way. Between regions every
# device has all activations, and computes the same norms.
#
# ## 2. The sequence in between
#
# An all-reduce is a reduce-scatter and an all-gather. Do the gather later. Then each device has an
# eighth of the positions between regions. It computes an eighth of each norm, and sends the same
# bytes. A gather in front of a matmul can overlap with it, and so can a scatter behind one.
#
# Both forms save equally much for the backward pass here, because the gathered `x` is an operand of
# a matmul. What is between regions, the residual stream and the norms, is an eighth in the second.


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
# Heads are columns of query, key and value and rows of the output projection. `parallel_attention`
# gathers the sequence once for all three, hands your `attend` whole sequences of some heads, and
# scatters what comes back. Several query heads may share a key and value head, and heads need not
# divide among devices: `head_layout` says who has which.


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
# Two gathers and two scatters, and norms on a device's own positions. A norm's scale is replicated,
# so its gradient is summed over devices, which types see to.


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
# What each device has of the weights: columns of one, rows of the next.

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
# The largest weights of a small model. The embedding is cut by words: each device looks up the
# tokens that it has, and sums are scattered over positions. The loss never puts logits together:
# devices exchange a maximum, a sum and the label's logit of each token.

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
# ## 6. What a TPU's compiler makes of it
#
# An MLP of the sizes of Llama 3 8B over four v5p chips, forward. Three programs: the layers as they
# are, naive ones, and rings both ways. By default layers gather rows around a ring and scatter sums
# in chunks, if the compiler runs collectives beside other work. What is stored here is of jax
# 0.10.2, whose scheduler hides less: with 0.12.0.1 the three take 1279, 1758 and 1333 us.

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
# - Columns, then rows; a gather before, a reduce-scatter after, the sequence sharded in between.
# - Heads are columns of q, k, v and rows of o.
# - A vocabulary is cut by words, and logits never meet.
#
# Next: [FSDP and tensor parallelism](08_fsdp_and_tensor_parallel.ipynb) at once.
