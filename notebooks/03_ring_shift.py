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
# # 3. A ring shift over one axis and over several
#
# Every overlapped collective in jaxpar repeats one operation: each device sends a block to the
# next device of a ring. Which device is "next" depends on the axes.
#
# 1. `ring_shift` on one axis
# 2. collectives from shifts
# 3. several axes and their order
# 4. links per step
#
# Bytes and orders are the same on any machine.

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
from jaxpar.testing import count_collectives

mesh = jaxpar.make_mesh("x=8")
PALETTE = plt.get_cmap("Set2").colors  # eight colours, one a block

# %% [markdown]
# ## 1. One axis
#
# `ring_shift(x, axis, offset=1)` gives device `i` the block of device `i - offset`. Below, each
# device sends its own number.


# %%
def shifted(offset):
    def local(number):  # i32[1]
        return jaxpar.ring_shift(number, "x", offset)

    return np.asarray(
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.arange(8))
    )


print(shifted(1), shifted(-1))
for step in range(8):
    assert shifted(step).tolist() == [(i - step) % 8 for i in range(8)]

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(5, 3))
for step in range(8):
    for device, block in enumerate(shifted(step)):
        panel.add_patch(plt.Rectangle((device, step), 0.94, 0.9, fc=PALETTE[block]))
        panel.text(device + 0.47, step + 0.45, block, ha="center", va="center", size=8)
panel.set(xlim=(0, 8), ylim=(8, 0), xlabel="device", ylabel="offset")
panel.set_xticks(np.arange(8) + 0.47, range(8))
panel.set_yticks(np.arange(8) + 0.45, range(8))
panel.tick_params(length=0)
panel.spines[:].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# After `s` shifts device `i` holds block `(i - s) % 8`.
#
# ## 2. Collectives from shifts
#
# An all-gather is seven shifts. Each block is written to its place:


# %%
def gather(x):  # x: f32[rows, k]
    i, rows = lax.axis_index("x"), x.shape[0]
    full = lax.pcast(jnp.zeros((8 * rows, x.shape[1])), "x", to="varying")  # f32[8 rows, k]
    for s in range(8):
        full = lax.dynamic_update_slice_in_dim(full, x, (i - s) % 8 * rows, 0)
        if s < 7:
            x = jaxpar.ring_shift(x, "x")
    return full


# %% [markdown]
# In a reduce-scatter, each sum travels to its owner, the device that keeps it. A sum that moves
# by +1 starts one device after its owner and passes all devices.


# %%
def scatter(x):  # x: f32[8 rows, k], a partial sum
    i, rows = lax.axis_index("x"), x.shape[0] // 8

    def block(owner):  # f32[rows, k]
        return lax.dynamic_slice_in_dim(x, owner % 8 * rows, rows)

    total = block(i - 1)
    for s in range(1, 8):
        total = jaxpar.ring_shift(total, "x") + block(i - 1 - s)
    return total


x = jax.random.normal(jax.random.key(0), (64, 8))


def compare(ours, theirs):
    """Checks that two local functions give the same result and send the same bytes."""
    results, sent = [], []
    for local in (ours, theirs):
        program = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        results.append(jax.jit(program)(x))
        counts = count_collectives(program, x)
        sent.append(counts.forward_bytes)
        print(f"{dict(counts.forward)}: {counts.forward_bytes} bytes")
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
    assert sent[0] == sent[1]


compare(gather, lambda x: lax.all_gather(x, "x", tiled=True))
compare(scatter, lambda x: lax.psum_scatter(x, "x", tiled=True))

# %% [markdown]
# The bytes are those of `lax`, but other work fits between the seven shifts. jaxpar's `all_gather`,
# `reduce_scatter` and `all_reduce` use such rings, in one direction or in both, over any axes. They
# are linear, so they save nothing for the backward pass.
#
# ## 3. Several axes and their order
#
# A ring may run over several mesh axes. The order of the axes in the tuple numbers the devices. The
# last axis counts fastest.

# %%
grid = jaxpar.make_mesh("x=2,y=4")
ORDERS = (("x", "y"), ("y", "x"))


def on_grid(local):
    """Runs `local()` on every device; returns its scalar results as the grid of devices."""

    def cell():
        return local()[None, None]  # i32[1, 1]

    program = jax.jit(jax.shard_map(cell, mesh=grid, in_specs=(), out_specs=P("x", "y")))
    return np.asarray(program())  # i32[2, 4]


for axes in ORDERS:
    index = on_grid(lambda axes=axes: lax.axis_index(axes))
    order = jaxpar.ring_order(grid, axes)
    print(f"{axes}\naxis_index:\n{index}\nring_order: {order}\n")
    assert index.reshape(-1)[order].tolist() == list(range(8))

# %% [markdown]
# `axis_index` gives each device's number. `ring_order` is the inverse: it gives the device (counted
# row by row) at each place of the ring. A dotted arrow leads from number 7 back to 0.

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(1, 2, figsize=(7, 2))
for panel, axes in zip(panels, ORDERS, strict=True):
    down, across = np.divmod(jaxpar.ring_order(grid, axes), 4)
    for p in range(8):
        q = (p + 1) % 8
        here, there = (across[p], down[p]), (across[q], down[q])
        arrow = {"arrowstyle": "->", "shrinkA": 9, "shrinkB": 9, "color": "0.35"}
        arrow["linestyle"] = ":" if q == 0 else "-"
        panel.annotate("", xytext=here, xy=there, arrowprops=arrow)
        panel.scatter(*here, s=260, color=PALETTE[p], zorder=2)
        panel.text(*here, p, ha="center", va="center", zorder=3)
    panel.set(title=str(axes), xlabel="y", ylabel="x", xlim=(-0.5, 3.5), ylim=(1.6, -0.6))
    panel.set_xticks(range(4))
    panel.set_yticks(range(2))
figure.tight_layout()
plt.show()

# %% [markdown]
# `ring_shift` follows the order of the tuple: number `i` receives from number `i - 1`. Up to jax
# 0.11.0, `lax.ppermute` with the pairs `(p, p + 1)` ignores this order. It silently counts in the
# order of the *mesh*. Later versions raise an error.

# %% tags=["varies"]
axes = ("y", "x")
pairs = [(p, (p + 1) % 8) for p in range(8)]
index = on_grid(lambda: lax.axis_index(axes))

got = on_grid(lambda: jaxpar.ring_shift(lax.axis_index(axes), axes))
print(f"ring_shift:\n{got}")
assert np.array_equal(got, (index - 1) % 8)

try:
    got = on_grid(lambda: lax.ppermute(lax.axis_index(axes), axes, pairs))
    print(f"ppermute, jax {jax.__version__}:\n{got}")
    assert not np.array_equal(got, (index - 1) % 8)  # silently something else
except (RuntimeError, ValueError) as error:
    print(f"ppermute, jax {jax.__version__}: {type(error).__name__}: {str(error).splitlines()[0]}")

# %% [markdown]
# First rule: **use the same order in the collective and in the spec.** Shard `x` as
# `P(("y", "x"))` and gather over `("y", "x")`. If the orders differ, nothing raises: all shapes
# fit, and the rows are shuffled.
#
# A gathered result is equal on all devices, but JAX types the result of a ring as varying, and
# `out_specs=P()` would raise. The code therefore stacks all copies and takes the first.


# %%
m, k, n = 64, 8, 16
w = jax.random.normal(jax.random.key(1), (k, n))


def gather_over(axes, layout):
    def local(x, w):  # x: f32[m/8, k], w: f32[k, n]
        y = jaxpar.all_gather_matmul(x, w, axes, mode="bidirectional")  # y: f32[m, n]
        return y[None]  # f32[1, m, n]

    program = jax.shard_map(local, mesh=grid, in_specs=(P(layout), P()), out_specs=P(layout))
    return jax.jit(program)(x, w)[0]  # the first device's copy


for axes in ORDERS:
    np.testing.assert_allclose(gather_over(axes, layout=axes), x @ w, rtol=1e-4, atol=1e-4)

shuffled = gather_over(("y", "x"), layout=("x", "y"))
blocks = (x @ w).reshape(8, m // 8, n)[jaxpar.ring_order(grid, ("y", "x"))]
np.testing.assert_allclose(shuffled, blocks.reshape(m, n), rtol=1e-4, atol=1e-4)
assert not np.allclose(shuffled, x @ w)

# %% [markdown]
# ## 4. Links per step
#
# Second rule: **neighbours in the ring should share a link.** A step lasts as long as its slowest
# transfer. A transfer to a distant chip occupies every link on its path. Assume 2 x 4 chips with
# links only between neighbours in the grid, and count the links of each transfer:


# %%
def links_of_transfers(order):
    """Returns the links between each device of a ring and the next one."""
    down, across = np.divmod(np.asarray(order), 4)
    return abs(down - np.roll(down, -1)) + abs(across - np.roll(across, -1))


for axes in ORDERS:
    print(f"{axes}: links of each transfer {links_of_transfers(jaxpar.ring_order(grid, axes))}")

snake = [0, 1, 2, 3, 7, 6, 5, 4]
print(f"out and back: links of each transfer {links_of_transfers(snake)}")
assert links_of_transfers(snake).max() == 1
assert links_of_transfers(jaxpar.ring_order(grid, ("y", "x"))).max() > 1

# %% [markdown]
# In both orders of the axes some transfers need several links. Another order of devices needs one
# link for each transfer: along one row, and back along the other.
#
# On TPU, `jaxpar.ring_hops(mesh, axes)` counts links, with the chips' real coordinates and
# wrap-around links. If a transfer needs several links, give `make_mesh` one axis in place of
# several, or `jax.sharding.Mesh` another order of devices. CPU devices, and GPUs behind a switch,
# have no coordinates, so every transfer counts as one hop.

# %%
print(jaxpar.ring_hops(grid, ("y", "x")))  # one row per ring
assert (jaxpar.ring_hops(grid, ("y", "x")) == 1).all()

# %% [markdown]
# ## In short
#
# - Use the same order in the collective and in the spec.
# - Check `ring_hops` before you use a ring over several axes.
#
# Next: [overlapped matmuls](04_overlapped_matmuls.ipynb).
