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
# # 2. Collectives and their cost
#
# This notebook shows:
#
# 1. each collective: the data before and after it
# 2. the bytes that a device sends
# 3. the derivative of each collective
# 4. an all-to-all of equal blocks: from sharded sequences to sharded heads
# 5. when a transfer can hide behind a matmul: run during it, and take no extra time
#
# The bytes counted here are the same on any machine.

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
from jaxpar.schedule import target
from jaxpar.testing import count_collectives

mesh = jaxpar.make_mesh("x=8")

# %% [markdown]
# ## 1. Before and after each collective
#
# The pictures use four devices. Each device is a column with up to four numbered blocks.

# %%
four = jaxpar.make_mesh("x=4", devices=jax.devices()[:4])


def after(local, before):  # before: [4 devices, blocks]
    """Returns the blocks of each device after a collective."""
    program = jax.shard_map(local, mesh=four, in_specs=P("x"), out_specs=P("x"))
    return np.asarray(jax.jit(program)(before.reshape(-1))).reshape(4, -1)


def gather(x):
    return lax.all_gather(x, "x", tiled=True)


def scatter(x):
    return lax.psum_scatter(x, "x", tiled=True)


def reduce(x):
    return lax.pcast(lax.psum(x, "x"), "x", to="varying")  # equal; out_specs=P("x") wants varying


def exchange(x):
    return lax.all_to_all(x, "x", 0, 0, tiled=True)


def shift(x):
    return jaxpar.ring_shift(x, "x")


one, all_four = np.arange(4.0).reshape(4, 1), np.arange(16.0).reshape(4, 4)
CASES = [
    ("all-gather", gather, one),
    ("reduce-scatter", scatter, all_four),
    ("all-reduce", reduce, all_four),
    ("all-to-all", exchange, all_four),
    ("shift (permute)", shift, one),
]
np.testing.assert_array_equal(after(exchange, all_four), all_four.T)
np.testing.assert_array_equal(after(scatter, all_four)[:, 0], all_four.sum(axis=0))
np.testing.assert_array_equal(after(shift, one)[:, 0], [3, 0, 1, 2])

# %% jupyter={"source_hidden": true} tags=["drawing"]
PALETTE = plt.get_cmap("Set2").colors


def show(panel, blocks, before, title):
    """Draws blocks in the colour of the device that had them; sums are grey."""
    for (device, row), value in np.ndenumerate(blocks):
        corner = (device - 0.45, row - 0.45)
        colour = PALETTE[np.argwhere(before == value)[0][0]] if value in before else "0.88"
        panel.add_patch(plt.Rectangle(corner, 0.9, 0.9, fc=colour))
        panel.text(device, row, f"{value:.0f}", ha="center", va="center", size=8)
    panel.set(xlim=(-0.5, 3.5), ylim=(3.5, -0.5), yticks=(), xticks=range(4))
    panel.set_title(title, size=9)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


figure, panels = plt.subplots(2, len(CASES), figsize=(10, 4.2))
for column, (name, local, before) in zip(panels.T, CASES, strict=True):
    show(column[0], before, before, f"{name}\nbefore")
    show(column[1], after(local, before), before, "after")
figure.supxlabel("device")
bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*PALETTE[:4], "0.88")]
names = [*(f"from device {device}" for device in range(4)), "a sum"]
figure.legend(bars, names, ncols=5, frameon=False, loc="upper center", fontsize=8)
figure.tight_layout(rect=(0, 0, 1, 0.94))
plt.show()

# %% [markdown]
# In an all-to-all, block j of device i becomes block i of device j. An all-reduce is a
# reduce-scatter followed by an all-gather, so it costs both.
#
# ## 2. The bytes that a device sends
#
# With `n` devices and a full array of `B` bytes, each device sends at best:
#
# | collective | bytes of a device before | after | a device sends |
# |---|---|---|---|
# | all-gather | B/n | B | B (n-1)/n |
# | reduce-scatter | B, a partial sum | B/n | B (n-1)/n |
# | all-reduce | B, a partial sum | B | 2 B (n-1)/n |
# | all-to-all | B/n | B/n | B/n (n-1)/n |
# | permute | B/n | B/n | B/n |
#
# `count_collectives` counts these bytes in any program, without compiling it. It also counts the
# bytes that the derivative sends, and those saved for it.

# %%
B = 8 * 1024 * 4  # bytes
# Global arrays of f32: in `sharded` each device has B / 8 bytes, in `sums` each device has B bytes.
sharded, sums = jnp.ones(B // 4), jnp.ones(8 * B // 4)

PROGRAMS = {
    "all-gather": (gather, sharded, P("x")),
    "reduce-scatter": (scatter, sums, P("x")),
    "all-reduce": (lambda x: lax.psum(x, "x"), sums, P()),
    "all-to-all": (exchange, sharded, P("x")),
    "permute": (shift, sharded, P("x")),
}
EXPECTED = {
    "all-gather": B * 7 // 8,
    "reduce-scatter": B * 7 // 8,
    "all-reduce": 2 * B * 7 // 8,
    "all-to-all": B // 8 * 7 // 8,
    "permute": B // 8,
}
counted = {}
for name, (local, x, out) in PROGRAMS.items():
    program = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=out)
    counted[name] = count_collectives(program, x)
    print(f"{name:>15}: {counted[name].forward_bytes:6} bytes forward")
    assert counted[name].forward_bytes == EXPECTED[name]

# %% [markdown]
# ## 3. Derivatives
#
# The derivative of a gather is a reduce-scatter. The derivative of a reduce-scatter is a gather.
# The derivative of an all-to-all or a shift is the reverse transfer. An all-reduce gives all
# devices the same sum. Its derivative sends nothing, because every device has the sum's gradient
# already:

# %%
for name, counts in counted.items():
    print(f"{name:>15}: forward {dict(counts.forward)}, backward {dict(counts.backward)}")
assert counted["all-gather"].backward == {"psum_scatter": 1}
assert counted["reduce-scatter"].backward == {"all_gather": 1}
assert counted["all-reduce"].backward == {}

# %% [markdown]
# With `check_vma=True` the all-reduce sends nothing backward.
#
# JAX types a gathered array as varying, so `out_specs=P()` raises an error.
# `jaxpar.layers.gather_region` gathers and types the result as replicated. Its derivative takes the
# local block and sends nothing. Use it if `jax.shard_map` returns the full array with
# `out_specs=P()`. Before a matmul with a sharded weight, use `lax.all_gather`: after
# `gather_region` the gradient needs an all-reduce, which sends more than the reduce-scatter of
# `lax.all_gather`.

# %%
gathered = jax.shard_map(
    lambda x: jaxpar.layers.gather_region(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
)
counts = count_collectives(gathered, sharded)
print(f"gather_region: forward {dict(counts.forward)}, backward {dict(counts.backward)}")
assert counts.backward_bytes == 0

# %% [markdown]
# ## 4. An all-to-all of equal blocks
#
# A sequence is sharded over devices. For each head, attention needs the full sequence. An
# all-to-all splits the heads and joins the positions. Per array it sends 7/8 of a block. A gather
# sends seven blocks.


# %%
def heads_for_positions(x):  # x: f32[s/8, heads, e]
    return lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True)  # f32[s, heads/8, e]


def positions_for_heads(x):  # the reverse
    return lax.all_to_all(x, "x", split_axis=0, concat_axis=1, tiled=True)


def attend(q, k, v):  # f32[s/8, heads, e] each
    q, k, v = (heads_for_positions(x)[None] for x in (q, k, v))  # f32[1, s, heads/8, e]
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)[0]
    return positions_for_heads(y)  # f32[s/8, heads, e]


q, k, v = (jax.random.normal(key, (64, 16, 32)) for key in jax.random.split(jax.random.key(0), 3))
attention = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
expected = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
np.testing.assert_allclose(jax.jit(attention)(q, k, v), expected, rtol=1e-4, atol=1e-5)

counts = count_collectives(attention, q, k, v)
block = q.nbytes // 8
print(f"all-to-alls: {counts.forward['all_to_all']}, {counts.forward_bytes} bytes")
print(f"gathers of k and v: {2 * 7 * block} bytes")
assert counts.forward_bytes == 4 * 7 / 8 * block

# %% [markdown]
# The number of heads must be a multiple of the number of devices. With fewer heads, or if the full
# sequence does not fit on a device, use [ring attention](11_ring_attention.ipynb). If the number of
# rows sent to each device is known only at run time, blocks differ in size (a *ragged* exchange)
# ([experts](09_expert_dispatch.ipynb)).
#
# ## 5. When can a transfer hide?
#
# Take an all-gather matmul: rows of `f[m, k]` are sharded, and a device has `c` columns of the
# weight. Each device sends and receives nearly `m k` numbers, and computes `2 m k c` FLOPs. Both
# times grow with `m k`, so their ratio depends only on `c`. For bfloat16 (two bytes) it is
#
# $$\frac{\text{compute}}{\text{send}} \approx \frac{2\, c / F}{2 / W}$$
#
# where a chip computes `F` FLOP/s and sends `W` bytes/s over its two links of the ring together. A
# transfer can hide behind `F / W` or more *local columns*. `F / W` is the chip's FLOPs per byte.


# %%
def compute_over_send(name, columns):
    """Returns the time of the matmul, divided by the time of its transfer."""
    chip = target(name).chip
    compute = 2 * columns / chip.flops  # seconds for one number of the gathered rows
    send = 2 / (2 * chip.link)  # seconds for its two bytes over both links of a ring
    return compute / send


needed = {}  # columns, by chips
for name in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4"):  # chip and topology, e.g. 2 x 4 chips
    needed[name] = 1 / compute_over_send(name, 1)
    print(f"{name}: a transfer of bfloat16 hides behind {needed[name]:.0f} local columns or more")

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(5.6, 3))
columns = np.geomspace(128, 32768, 100)
for colour, (name, found) in zip(PALETTE, needed.items(), strict=False):
    label = f"{name.split(':')[0]}: {found:.0f}"
    panel.loglog(columns, compute_over_send(name, columns), color=colour, label=label)
panel.axhline(1, color="0.4", lw=0.8, ls=":")
panel.set(xlabel="local columns", ylabel="compute / send")
panel.legend(frameon=False, fontsize=8, title="columns that suffice", title_fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Above the dotted line a transfer *can* be hidden completely. One large gather before a matmul is
# never hidden, because the matmul waits for all of it. [Overlapped
# matmuls](04_overlapped_matmuls.ipynb) shows how to split it.
#
# ## In short
#
# - Count before you measure: `count_collectives(fn, *args)`.
# - Compare local columns with FLOPs per byte to see which transfers can hide.
#
# Next: [a ring over several axes](03_ring_shift.ipynb).
