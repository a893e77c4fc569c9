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
# The tools with which jaxpar tests itself, for yours:
#
# 1. a collective of your own
# 2. against NumPy, values and gradients
# 3. on every mesh, by Hypothesis
# 4. the classic mistake, and why two devices do not find it
# 5. how often, how many bytes, and what hides
#
# Eight CPU devices; these tests need no others.

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
# With `ring_shift` you can write what `jax.lax` does not have. Say a cumulative sum along
# a sharded sequence: sum locally, then let each device's total travel, and add those that come from
# devices before you. `direction` is there so that we can break it.


# %%
def ring_cumsum(x, axis, direction=1):  # x: f32[m/n, k]
    i, size = lax.axis_index(axis), lax.axis_size(axis)
    sums = jnp.cumsum(x, axis=0)  # sums: f32[m/n, k]
    total = sums[-1]  # total: f32[k]
    for s in range(1, size):
        total = jaxpar.ring_shift(total, axis, direction)  # now that of device i - s
        sums = sums + jnp.where(s <= i, total, 0)
    return sums


# %% [markdown]
# ## 2. Against NumPy
#
# `assert_matches_reference` wants the function of local blocks, the same function of global arrays
# in plain NumPy, and the specs. It compares values *and* gradients, with `check_vma` on and off.
# The tolerance follows from the dtype and the number of terms; there is nothing to tune.

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
# ## 3. On every mesh
#
# One mesh is one example. Bugs in collectives love the cases nobody tries: one device, odd rings,
# two axes in the unusual order, one row a device. Hypothesis tries them for you; `jaxpar.testing`
# has the strategies. Ten examples keep this page quick; give a real test a hundred. The input is
# random on purpose: a block of ones looks like every other block.


# %%
def property_of(collective):
    # A fixed seed and no explanations, so that a notebook says the same each time and soon.
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
# The block moves the other way, so in step `s` what arrives is that of
# device `i + s`. On one device, and on two, there is no difference: the next device *is* the
# previous one. A test on two devices passes.

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
# Each line names the setting, the array, how many entries are wrong and the worst of them, with the
# error it has and the error it may have. The last line is enough to run the case again.
#
# Hypothesis finds it without being told that three is the magic number:


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
# Three devices and one row each: nothing smaller can show this bug, and no test on two devices ever
# will.
#
# ## 5. How often, how many bytes
#
# A test of what a program sends is exact, and costs no compilation. Here is what ours sends on
# rings of several sizes beside a version that gathers all totals at once: the same bytes, and a
# choice to make, between one collective that waits and n - 1 that can travel beside something.


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
figure, panel = plt.subplots(figsize=(4.6, 2.4))
for offset, (name, of_sizes) in zip((-0.2, 0.2), counts.items(), strict=True):
    print(f"{name:>15} on 8: {dict(of_sizes[-1].forward)}, backward {dict(of_sizes[-1].backward)}")
    heights = [count.forward_bytes for count in of_sizes]
    panel.bar(np.arange(len(SIZES)) + offset, heights, 0.4, label=name)
panel.set_xticks(range(len(SIZES)), SIZES)
panel.set(xlabel="devices", ylabel="bytes sent, forward")
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

for ring, gathered in zip(*counts.values(), strict=True):
    assert ring.forward_bytes == gathered.forward_bytes

# %% [markdown]
# Whether what travels is hidden is the compiler's business: `jaxpar.testing.assert_overlapped`
# compiles for a chip that is not there, and fails with the transfers that are waited for
# ([schedules](14_schedules.ipynb)).
#
# ## In short
#
# - A NumPy reference, random input, gradients, `check_vma` on and off: one call.
# - Three devices and more, several axes in every order: Hypothesis draws them.
# - Count what is sent; a number that moves is a test that fails.
#
# Next: [from a slow step to a fast one](17_explain.ipynb).
