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
# Attention needs the full sequence, but the sequence does not fit on one device. Each device keeps
# its queries. Keys and values travel around a ring, and the softmax is computed block by block.
#
# 1. a softmax in blocks
# 2. the ring by hand
# 3. `ring_attention`
# 4. causal attention and load balance: zigzag
# 5. packed documents
# 6. bytes sent and saved
#
# Results are compared with one device. Eight CPU devices measure no speed.

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
q, k, v = (
    jax.random.normal(key, (BATCH, LENGTH, HEADS, SIZE))
    for key in jax.random.split(jax.random.key(0), 3)
)


def whole(q, k, v, mask=True):
    """Attention in one piece; `mask` [q, k] says which keys a query sees."""
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / SIZE**0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


# %% [markdown]
# ## 1. A softmax in blocks
#
# Process the keys block by block. For each query store three values: the largest score so far, the
# `total` of `exp(score - largest)`, and `out`, the sum of `exp(score - largest) v`. If a block has
# a larger maximum, scale `total` and `out` by `exp(old - new)`. The result is `out / total`. No
# score is stored.


# %%
def take_in(state, q, k, v):
    """One more block of keys and values."""
    largest, total, out = state  # f32[b, h, q], the same, f32[b, q, h, e]
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / SIZE**0.5
    larger = jnp.maximum(largest, scores.max(axis=-1))
    old, new = jnp.exp(largest - larger), jnp.exp(scores - larger[..., None])
    out = out * old.swapaxes(1, 2)[..., None] + jnp.einsum("bhqk,bkhe->bqhe", new, v)
    return larger, total * old + new.sum(axis=-1), out


def empty(q):
    start = jnp.zeros_like(q[..., 0]).swapaxes(1, 2)  # f32[b, h, q]
    return start - jnp.inf, start, jnp.zeros_like(q)


state = empty(q)
for block in range(4):
    keys = slice(16 * block, 16 * block + 16)
    state = take_in(state, q, k[:, keys], v[:, keys])
_, total, out = state
np.testing.assert_allclose(
    out / total.swapaxes(1, 2)[..., None], whole(q, k, v), rtol=1e-4, atol=1e-5
)
print("four blocks, one softmax")

# %% [markdown]
# ## 2. The ring by hand
#
# The blocks are now those of the other devices. The code requests the next block before it uses the
# current one, so the transfer can overlap.


# %%
def by_hand(q, k, v):  # f32[b, s/8, h, e] each
    state = empty(q)
    for step in range(8):
        if step < 7:
            coming = jaxpar.ring_shift(k, "cp"), jaxpar.ring_shift(v, "cp")
        state = take_in(state, q, k, v)
        k, v = coming
    _, total, out = state
    return out / total.swapaxes(1, 2)[..., None]


def on_devices(local):
    spec = P(None, "cp")
    return jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)


def check(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


check(jaxpar.jit(on_devices(by_hand))(q, k, v), whole(q, k, v))
print(count_collectives(on_devices(by_hand), q, k, v))

# %% [markdown]
# The result is right. But autodiff of an unrolled ring saves every received block and every score.
#
# ## 3. `ring_attention`
#
# `ring_attention` saves q, k, v, the result and two numbers per query. In the backward pass, keys
# and values travel around the ring again. Their gradients follow one step behind.


# %%
def attend(q, k, v, **options):
    options = {"causal": False} | options
    return ring_attention(q, k, v, "cp", **options)


check(jaxpar.jit(on_devices(attend))(q, k, v), whole(q, k, v))
kept = {}
for name, local in {"by hand": by_hand, "ring_attention": attend}.items():
    kept[name] = count_collectives(on_devices(local), q, k, v).residual_bytes
    print(f"{name:>14} keeps {kept[name] / q.nbytes * 8:5.1f} blocks")
assert kept["ring_attention"] < kept["by hand"] / 4

# %% [markdown]
# ## 4. Causal attention and load balance: zigzag
#
# In causal attention a query sees only earlier positions. The device with the first positions has
# almost no work, and the device with the last positions has the most. In each step all devices wait
# for the slowest. The *zigzag* order gives each device two chunks, one from the front and one from
# the back. All devices then have the same work.

# %%
order = np.asarray(zigzag_order(LENGTH, 8))  # the position at each place
SEES = np.tri(LENGTH, dtype=bool)  # [q, k]


def work(order):
    """The scores that device i computes in step s, of [8, 8] squares of positions."""
    blocks = order.reshape(8, -1)
    return np.array(
        [[SEES[np.ix_(blocks[i], blocks[(i - s) % 8])].sum() for i in range(8)] for s in range(8)]
    )


computed = {"contiguous": work(np.arange(LENGTH)), "zigzag": work(order)}
for name, scores in computed.items():
    slowest = scores.max(axis=1).sum()
    print(f"{name:>10}: the slowest devices of all steps compute {slowest} scores")
assert computed["zigzag"].max(axis=1).sum() < computed["contiguous"].max(axis=1).sum() / 1.6

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(1, 2, figsize=(8, 2.8))
for panel, (name, scores) in zip(panels, computed.items(), strict=True):
    panel.imshow(scores, cmap="Blues", vmin=0, vmax=80)
    for (step, device), count in np.ndenumerate(scores):
        panel.text(device, step, count, ha="center", va="center", size=7)
    time = scores.max(axis=1).sum()
    panel.set(xlabel="device", ylabel="step", title=f"{name}: {time} of {scores.sum() // 8} needed")
    panel.title.set_size(9)
figure.tight_layout()
plt.show()

# %% [markdown]
# `order="zigzag"` is the default. Reorder the sequence by `zigzag_order` first, including positions
# and labels. Nothing else changes. `np.argsort` of the order reverses it.


# %%
back = np.argsort(order)
causal = jaxpar.jit(on_devices(lambda q, k, v: attend(q, k, v, causal=True)))
found = causal(q[:, order], k[:, order], v[:, order])[:, back]
check(found, whole(q, k, v, SEES))

contiguous = on_devices(lambda q, k, v: attend(q, k, v, causal=True, order="contiguous"))
check(jaxpar.jit(contiguous)(q, k, v), whole(q, k, v, SEES))
print("both orders agree with one device")

# %% [markdown]
# ## 5. Packed documents
#
# One sequence can hold several documents. `segments` gives the document of each position, and
# queries see only keys of their own document.

# %%
segments = np.repeat([0, 1, 2, 3], [10, 25, 5, 24])[None].repeat(BATCH, 0).astype(np.int32)
alike = segments[0][:, None] == segments[0]

packed = jax.shard_map(
    lambda q, k, v, segments: ring_attention(q, k, v, "cp", segments=segments),
    mesh=mesh,
    in_specs=(P(None, "cp"),) * 4,
    out_specs=P(None, "cp"),
)
found = jaxpar.jit(packed)(*(x[:, order] for x in (q, k, v, segments)))[:, back]
check(found, whole(q, k, v, SEES & alike))
print(f"{SEES.sum()} pairs of a query and a key, {(SEES & alike).sum()} within documents")

# %% [markdown]
# Gradients equal those of one device, too:


# %%
def loss(attention):
    return lambda q, k, v: jnp.sum(jnp.sin(attention(q, k, v)))


ringed = on_devices(lambda q, k, v: attend(q, k, v, causal=True, order="contiguous"))
wanted = jax.grad(loss(lambda q, k, v: whole(q, k, v, SEES)), argnums=(0, 1, 2))(q, k, v)
found = jaxpar.jit(jax.grad(loss(ringed), argnums=(0, 1, 2)))(q, k, v)
for got, want in zip(found, wanted, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## 6. Bytes sent and saved
#
# There are three ways to attend to a sharded sequence. A gather sends as much as the ring, and
# holds all keys at once. An [all-to-all of heads](02_collectives.ipynb) sends far less, but needs
# at least as many heads as devices.


# %%
def gathered(q, k, v):
    k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
    return whole(q, k, v)


table = {"gather": gathered}
for name, mode in (("ring, one way", "unidirectional"), ("ring, both ways", "bidirectional")):
    ring = jaxpar.Axis("cp", mode=mode)
    table[name] = lambda q, k, v, ring=ring: ring_attention(q, k, v, ring, causal=False)
for name, local in table.items():
    counts = count_collectives(on_devices(local), q, k, v)
    block = q.nbytes / 8
    print(
        f"{name:>16}: forward {counts.forward_bytes / block:4.0f} blocks, backward "
        f"{counts.backward_bytes / block:4.0f}, keeps {counts.residual_bytes / block:4.1f}"
    )

# %% [markdown]
# ## In short
#
# - A softmax can be computed block by block, with a maximum and a sum per query.
# - Zigzag gives all devices the same work in every step.
# - Use `segments` for packed documents. Key and value heads may be fewer than query heads.
#
# Next: [distillation](12_distillation.ipynb), with two meshes at once.
