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
# # 16. Testing a collective of your own
#
# jaxpar's own test tools work for your collectives too:
#
# 1. a collective of your own
# 2. comparison with NumPy, values and gradients
# 3. every mesh, with Hypothesis
# 4. the classic mistake, which two devices do not find
# 5. counts and bytes
#
# Eight CPU devices are enough for these tests.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import math

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.testing import (
    assert_matches_reference,
    axis_orders,
    count_collectives,
    even_shapes,
    meshes,
)

# %% [markdown]
# ## 1. A collective of your own
#
# With `ring_shift` you can write collectives that `jax.lax` lacks, such as a cumulative sum along a
# sharded sequence. Each device sums its local rows. Then the totals go round the ring, and each
# device adds those of earlier devices. `direction` lets us break the function later.


# %%
def ring_cumsum(x, axis, direction=1):  # x: f32[m/n, k]
    i, size = lax.axis_index(axis), lax.axis_size(axis)
    sums = jnp.cumsum(x, axis=0)  # sums: f32[m/n, k]
    total = sums[-1]  # total: f32[k]
    for s in range(1, size):
        total = jaxpar.ring_shift(total, axis, direction)  # now the total of device i - s
        sums = sums + jnp.where(s <= i, total, 0)
    return sums


# %% [markdown]
# ## 2. Comparison with NumPy
#
# `assert_matches_reference` takes the function of local blocks, a NumPy function of the global
# arrays, and the specs. It compares values *and* gradients, with `check_vma` on and off. The
# tolerance follows from the dtype and the number of terms in a sum.

# %%
tokens = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)


def cumsum_on(devices, direction=1):
    assert_matches_reference(
        lambda x: ring_cumsum(x, "tp", direction),
        lambda x: np.cumsum(x, axis=0),
        tokens[: 2 * devices],
        mesh=jaxpar.make_mesh({"tp": devices}, devices=jax.devices()[:devices]),
        in_specs=P("tp"),
        out_specs=P("tp"),
    )


cumsum_on(8)
print("values and gradients as in NumPy, check_vma on and off")

# %% [markdown]
# ## 3. Every mesh, with Hypothesis
#
# One mesh is one example. Bugs in collectives hide in rare cases: one device, odd rings, two axes
# in the unusual order, one row per device. Hypothesis generates such cases with the strategies of
# `jaxpar.testing`. Ten examples keep this page quick. A real test should use a hundred.
#
# The input is random, because with equal blocks a test cannot see which block arrived.


# %%
def property_of(collective):
    # A fixed seed and no explanations, so that the notebook is quick and prints the same each time.
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(data=st.data())
    def holds(data):
        mesh = data.draw(meshes(max_axes=2, shuffle=False), "mesh")
        axes = data.draw(axis_orders(mesh), "axes")
        names = (axes,) if isinstance(axes, str) else axes
        size = math.prod(mesh.shape[name] for name in names)
        shape = data.draw(even_shapes(size, max_size=4), "shape")
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        assert_matches_reference(
            lambda x: collective(x, axes),
            lambda x: np.cumsum(x, axis=0),
            x,
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(axes),
        )

    return holds


property_of(ring_cumsum)()
print("ten random cases hold")

# %% [markdown]
# ## 4. The classic mistake
#
# If a block moves in the wrong direction, the total of device `i + s` arrives in step `s`. On one
# or two devices nothing changes: the next device *is* the previous one. A test on two devices
# passes.

# %%
for devices in (1, 2):
    cumsum_on(devices, direction=-1)

try:
    cumsum_on(3, direction=-1)
except AssertionError as error:
    caught = str(error)
print(caught)
assert "6 of 6 comparisons fail" in caught
assert "mesh {'tp': 3}" in caught

# %% [markdown]
# Each line names the setting, the array and the number of wrong entries. It shows the worst entry
# with its error and the allowed error. The last line has the mesh and the specs.
#
# Hypothesis finds the bug, although nothing told it to try three devices:


# %% tags=["varies"]
def wrong_way(x, axis):
    return ring_cumsum(x, axis, direction=-1)


try:
    property_of(wrong_way)()
except AssertionError as error:
    caught, draws = str(error), "\n".join(error.__notes__)
print(caught.splitlines()[1], draws, sep="\n")
assert "axis_sizes=(3,)" in draws

# %% [markdown]
# Three devices with one row each are the smallest case that shows this bug. No test on two devices
# finds it.
#
# ## 5. Counts and bytes
#
# A test of a program's transfers is exact and needs no compilation. The picture compares our ring
# with a version that gathers all totals at once, for rings of several sizes. Both send the same
# bytes. The choice is between one collective that waits and n - 1 transfers that can overlap.


# %%
def gathered_cumsum(x, axis):  # x: f32[m/n, k]
    i, size = lax.axis_index(axis), lax.axis_size(axis)
    sums = jnp.cumsum(x, axis=0)
    totals = lax.all_gather(sums[-1], axis)  # f32[n, k]
    before = (jnp.arange(size) < i)[:, None]
    return sums + jnp.sum(jnp.where(before, totals, 0), axis=0)


def counted(collective, size):
    mesh = jaxpar.make_mesh({"tp": size}, devices=jax.devices()[:size])
    program = jax.shard_map(
        lambda x: collective(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P("tp")
    )
    np.testing.assert_allclose(
        jax.jit(program)(tokens), np.cumsum(tokens, axis=0), rtol=1e-5, atol=1e-5
    )
    return count_collectives(program, tokens)


SIZES = (1, 2, 4, 8)
counts = {
    collective.__name__: [counted(collective, size) for size in SIZES]
    for collective in (ring_cumsum, gathered_cumsum)
}
for name, of_sizes in counts.items():
    print(f"{name:>15} on 8: {dict(of_sizes[-1].forward)}, backward {dict(of_sizes[-1].backward)}")
for ring, gathered in zip(*counts.values(), strict=True):
    assert ring.forward_bytes == gathered.forward_bytes

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(4.6, 2.4))
for offset, (name, of_sizes) in zip((-0.2, 0.2), counts.items(), strict=True):
    heights = [count.forward_bytes for count in of_sizes]
    panel.bar(np.arange(len(SIZES)) + offset, heights, 0.4, label=name)
panel.set_xticks(range(len(SIZES)), SIZES)
panel.set(xlabel="devices", ylabel="bytes sent, forward")
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# The compiler decides whether transfers are hidden. `jaxpar.testing.assert_overlapped` compiles for
# a chip that need not be there. If too much time is exposed, it fails and lists the waits
# ([schedules](14_schedules.ipynb)).
#
# ## In short
#
# - One call compares with NumPy on random input: values and gradients, `check_vma` on and off.
# - Hypothesis draws meshes, most of three or more devices, and axes in any order.
# - Assert the bytes sent, so that a change fails the test.
#
# Next: [from a slow step to a fast one](17_explain.ipynb).
