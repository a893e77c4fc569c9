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
# # 11. Ring attention
#
# Attention needs the full sequence, but the sequence does not fit on one device. Queries stay on
# their device. Keys and values travel around a ring, and the softmax is computed block by block.
#
# 1. a softmax in blocks
# 2. the ring by hand
# 3. `ring_attention`
# 4. causal attention and load balance: zigzag
# 5. packed documents
# 6. bytes sent, and bytes stored for the backward pass
#
# Results are compared with one device. Nothing here measures speed.

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
from jaxpar.layers import ring_attention, zigzag_order
from jaxpar.testing import count_collectives

mesh = jaxpar.make_mesh("cp=8")  # context parallel
BATCH, LENGTH, HEADS, SIZE = 2, 64, 4, 16
q, k, v = jax.random.normal(jax.random.key(0), (3, BATCH, LENGTH, HEADS, SIZE))


def attention_on_one_device(q, k, v, mask=True):
    """Returns the attention of full arrays; `mask` [q, k] says which keys a query sees."""
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / SIZE**0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


# %% [markdown]
# ## 1. A softmax in blocks
#
# Process the keys block by block. For each query and head keep the largest score so far, the
# `total` of `exp(score - largest)`, and a vector `out`, the sum of `exp(score - largest) v`. If a
# block has a larger maximum, scale `total` and `out` by `exp(old - new)`. The result is
# `out / total`. The forward pass keeps no scores of earlier blocks.


# %%
def add_block(state, q, k, v):
    """Updates the state with one more block of keys and values."""
    largest, total, out = state  # f32[b, h, q], the same, f32[b, q, h, e]
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / SIZE**0.5
    larger = jnp.maximum(largest, scores.max(axis=-1))
    old, new = jnp.exp(largest - larger), jnp.exp(scores - larger[..., None])
    out = out * old.swapaxes(1, 2)[..., None] + jnp.einsum("bhqk,bkhe->bqhe", new, v)
    return larger, total * old + new.sum(axis=-1), out


def without_blocks(q):
    zeros = jnp.zeros_like(q[..., 0]).swapaxes(1, 2)  # f32[b, h, q]
    return zeros - jnp.inf, zeros, jnp.zeros_like(q)


def divided(state):
    _, total, out = state
    return out / total.swapaxes(1, 2)[..., None]


state = without_blocks(q)
for block in range(4):
    keys = slice(16 * block, 16 * block + 16)
    state = add_block(state, q, k[:, keys], v[:, keys])

expected = attention_on_one_device(q, k, v)
np.testing.assert_allclose(divided(state), expected, rtol=1e-4, atol=1e-5)
print("four blocks give the softmax of all keys")

# %% [markdown]
# ## 2. The ring by hand
#
# Now the blocks travel from device to device. Each device sends its block before it computes with
# the block, so both can overlap.


# %%
def by_hand(q, k, v):  # f32[b, s/8, h, e] each
    state = without_blocks(q)
    for step in range(8):
        if step < 7:
            coming = jaxpar.ring_shift(k, "cp"), jaxpar.ring_shift(v, "cp")
        state = add_block(state, q, k, v)
        k, v = coming
    return divided(state)


def sharded(local):
    spec = P(None, "cp")
    return jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)


def check(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


check(jaxpar.jit(sharded(by_hand))(q, k, v), expected)
print(count_collectives(sharded(by_hand), q, k, v))

# %% [markdown]
# The result is right. But autodiff of an unrolled ring saves every received block and every score.
#
# ## 3. `ring_attention`
#
# `ring_attention` saves q, k, v, the result and two numbers per query and head. In the backward
# pass, keys and values travel around the ring again. Their gradients follow one step behind.
# `ring_attention` also takes fewer key and value heads than query heads.


# %%
def attend(q, k, v):
    return ring_attention(q, k, v, "cp", causal=False)


check(jaxpar.jit(sharded(attend))(q, k, v), expected)
BLOCK = q.nbytes // 8  # bytes of one device's queries
saved = {}
for name, local in {"by hand": by_hand, "ring_attention": attend}.items():
    saved[name] = count_collectives(sharded(local), q, k, v).residual_bytes
    print(f"{name:>14}: {saved[name] / BLOCK:.1f} blocks saved for the backward pass")
assert saved["ring_attention"] < saved["by hand"] / 4

# %% [markdown]
# ## 4. Causal attention and load balance: zigzag
#
# In causal attention a query sees no later positions. The device with the first positions has
# almost no work, and the device with the last positions has the most. In each step all devices wait
# for the slowest. The *zigzag* order gives each device two chunks, one from the front and one from
# the back. All devices then have the same work. The picture shows the scores that each device
# computes in each step.

# %%
order = np.asarray(zigzag_order(LENGTH, 8))  # the original position of each reordered element
SEES = np.tri(LENGTH, dtype=bool)  # [q, k]


def scores_of_steps(order):
    """Returns how many scores each device computes in each step: [step, device]."""
    positions = order.reshape(8, -1)  # of each device
    scores = np.zeros((8, 8), int)
    for step in range(8):
        for device in range(8):
            queries, keys = positions[device], positions[(device - step) % 8]
            scores[step, device] = SEES[np.ix_(queries, keys)].sum()
    return scores


computed = {
    "contiguous": scores_of_steps(np.arange(LENGTH)),
    "zigzag": scores_of_steps(order),
}
for name, scores in computed.items():
    slowest = scores.max(axis=1).sum()
    print(f"{name:>10}: scores of each step's slowest device, summed: {slowest}")
assert computed["zigzag"].max(axis=1).sum() < computed["contiguous"].max(axis=1).sum() / 1.6

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(1, 2, figsize=(8, 2.8))
for panel, (name, scores) in zip(panels, computed.items(), strict=True):
    panel.imshow(scores, cmap="Blues", vmin=0, vmax=80)
    for (step, device), count in np.ndenumerate(scores):
        panel.text(device, step, count, ha="center", va="center", size=7)
    slowest, mean = scores.max(axis=1).sum(), scores.sum() // 8
    panel.set(xlabel="device", ylabel="step", title=f"{name}: slowest {slowest}, mean {mean}")
    panel.title.set_size(9)
figure.tight_layout()
plt.show()

# %% [markdown]
# `order="zigzag"` is the default. It matters only for causal attention, and for the options
# `window` and `lengths`. Reorder the sequence by `zigzag_order` first, including positions, labels
# and segments. Nothing else changes. `np.argsort` of the order reverses it.


# %%
back = np.argsort(order)
zigzag = sharded(lambda q, k, v: ring_attention(q, k, v, "cp"))  # causal by default
contiguous = sharded(lambda q, k, v: ring_attention(q, k, v, "cp", order="contiguous"))
expected = attention_on_one_device(q, k, v, SEES)

found = jaxpar.jit(zigzag)(q[:, order], k[:, order], v[:, order])[:, back]
check(found, expected)
check(jaxpar.jit(contiguous)(q, k, v), expected)
print("both orders agree with one device")

# %% [markdown]
# ## 5. Packed documents
#
# One sequence can hold several documents. `segments` gives the document of each position, and
# queries see only keys of their own document.

# %%
segments = np.repeat([0, 1, 2, 3], [10, 25, 5, 24])[None].repeat(BATCH, 0).astype(np.int32)
same_document = segments[0][:, None] == segments[0]  # [q, k]

packed = jax.shard_map(
    lambda q, k, v, segments: ring_attention(q, k, v, "cp", segments=segments),
    mesh=mesh,
    in_specs=(P(None, "cp"),) * 4,
    out_specs=P(None, "cp"),
)
in_zigzag = [x[:, order] for x in (q, k, v, segments)]
found = jaxpar.jit(packed)(*in_zigzag)[:, back]
check(found, attention_on_one_device(q, k, v, SEES & same_document))
print(f"{SEES.sum()} pairs of a query and a key, {(SEES & same_document).sum()} within documents")

# %% [markdown]
# Gradients equal those of one device, too:


# %%
def packed_attention(q, k, v):
    return packed(*(x[:, order] for x in (q, k, v, segments)))[:, back]


def on_one_device(q, k, v):
    return attention_on_one_device(q, k, v, SEES & same_document)


def loss(attention):
    return lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v)))


wanted = jax.grad(loss(on_one_device), argnums=(0, 1, 2))(q, k, v)
found = jaxpar.jit(jax.grad(loss(packed_attention), argnums=(0, 1, 2)))(q, k, v)
for got, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## 6. Bytes sent, and bytes stored for the backward pass
#
# A gather of all keys and values is the simplest algorithm. It sends as much as the ring forward
# and less backward, but stores far more. A ring in both directions sends the same bytes, half
# each way. An [all-to-all of heads](02_collectives.ipynb) would send 3.5 blocks forward (7/8 of q,
# k, v and the result), but needs at least as many heads as devices.


# %%
def gathered(q, k, v):
    k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
    return attention_on_one_device(q, k, v)


def ring_in_mode(mode):
    axis = jaxpar.Axis("cp", mode=mode)
    return lambda q, k, v: ring_attention(q, k, v, axis, causal=False)


algorithms = {
    "gather": gathered,
    "ring, one direction": ring_in_mode("unidirectional"),
    "ring, both directions": ring_in_mode("bidirectional"),
}
print(f"{'in blocks of q':>21}  sent forward  sent backward  saved for the backward pass")
for name, local in algorithms.items():
    counts = count_collectives(sharded(local), q, k, v)
    forward, backward = counts.forward_bytes / BLOCK, counts.backward_bytes / BLOCK
    saved = counts.residual_bytes / BLOCK
    print(f"{name:>21}  {forward:12.0f}  {backward:13.0f}  {saved:27.1f}")

# %% [markdown]
# ## In short
#
# - A softmax can be computed block by block, with a maximum and a sum per query and head.
# - Zigzag gives all devices the same work in every step.
# - Use `segments` for packed documents.
#
# Next: [distillation](12_distillation.ipynb), with two meshes at once.
