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
# # 1. Meshes, specs, and how values vary
#
# A *mesh* is a grid of devices with named axes. A *spec* says which mesh axis cuts which array
# dimension into blocks, or *shards* it. One question recurs: along which axes does a value differ?
#
# 1. a mesh
# 2. specs: who has which block
# 3. three kinds of axes: auto, explicit, manual
# 4. inside `jax.shard_map`: local shapes, and values that vary
# 5. an axis that stays with the compiler
# 6. inspecting and changing a sharding

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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar

# %% [markdown]
# ## 1. A mesh
#
# The mesh has eight devices in two rows of four. You name its axes. Usual names are `dp` for data
# parallelism and `tp` for tensor parallelism. A size of -1 takes the remaining devices.

# %%
mesh = jaxpar.make_mesh("dp=2,tp=-1")
print(mesh)
print(np.vectorize(lambda device: device.id)(mesh.devices))
assert dict(mesh.shape) == {"dp": 2, "tp": 4}

# %% [markdown]
# On TPU, `make_mesh` also maps axes to links between chips. It maps the last axis first. Put the
# axis with the most traffic last.
#
# ## 2. Specs: who has which block
#
# `P("dp", "tp")` shards rows over `dp` and columns over `tp`. A dimension without a name is not
# sharded. Along an axis that the spec does not name, devices hold copies. Several axes may shard
# one dimension, and their order matters. In the pictures each rectangle is a block, with the
# devices that hold it.

# %%
ROWS, COLUMNS = 8, 16


def devices_of_blocks(spec):
    """Returns the devices that hold each block, by its (top, bottom, left, right)."""
    blocks = {}
    sharding = NamedSharding(mesh, spec)
    for device, (rows, columns) in sharding.devices_indices_map((ROWS, COLUMNS)).items():
        top, bottom, _ = rows.indices(ROWS)
        left, right, _ = columns.indices(COLUMNS)
        blocks.setdefault((top, bottom, left, right), []).append(device.id)
    return blocks


SPECS = [P("dp", "tp"), P("dp"), P(None, "tp"), P(("dp", "tp")), P(("tp", "dp")), P()]
assert [len(devices_of_blocks(spec)) for spec in SPECS] == [8, 2, 4, 8, 8, 1]


# %% jupyter={"source_hidden": true} tags=["drawing"]
def draw(panel, spec):
    for (top, bottom, left, right), devices in devices_of_blocks(spec).items():
        corner, size = (left, top), (right - left, bottom - top)
        panel.add_patch(
            plt.Rectangle(corner, *size, fc=plt.get_cmap("Set2")(min(devices)), ec="white", lw=2)
        )
        text = ",".join(map(str, sorted(devices)))
        panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
    panel.set(xlim=(0, COLUMNS), ylim=(ROWS, 0), xticks=(), yticks=(), title=str(spec))
    panel.title.set_size(9)
    panel.spines[:].set_visible(False)


figure, panels = plt.subplots(2, 3, figsize=(9, 3.6))
for panel, spec in zip(panels.flat, SPECS, strict=True):
    draw(panel, spec)
figure.tight_layout()
plt.show()

# %% [markdown]
# `P(("dp", "tp"))` and `P(("tp", "dp"))` both shard rows over eight devices, but device 1 gets
# different rows. If a function's arguments are split by one order and its results joined by the
# other, nothing raises: the rows are shuffled.
#
# ## 3. Three kinds of axes
#
# Who chooses the sharding of an intermediate result?
#
# - **auto**: the compiler. You place the arguments, and it inserts the transfers ("collectives").
# - **explicit**: the types. An array's type contains its sharding. If two shardings are possible
#   for a result, JAX raises an error and you choose.
# - **manual**: you. Inside `jax.shard_map` an array is the local block. Nothing travels unless you
#   write a collective.

# %%
x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
w = np.ones((COLUMNS, 4), np.float32)

on_auto = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
print("auto:    ", jax.typeof(on_auto))

explicit = jaxpar.make_mesh("dp=2,tp=4", axis_types=AxisType.Explicit)
with jax.set_mesh(explicit):
    on_explicit = jax.device_put(x, P("dp", "tp"))
    weight = jax.device_put(w, P("tp"))
    print("explicit:", jax.typeof(on_explicit))
    try:
        on_explicit @ weight
    except Exception as error:  # JAX does not export the type
        raised = f"{type(error).__name__}: {str(error)[:95]}..."
    print("        ", raised)
    y = jnp.einsum("mk,kn->mn", on_explicit, weight, out_sharding=P("dp"))
    print("         with out_sharding:", jax.typeof(y))
np.testing.assert_allclose(y, x @ w)

# %% [markdown]
# The contracted dimension is sharded over `tp`, so each device has a partial sum. Each device along
# `tp` can get the total (an all-reduce, as here) or a part of it (a reduce-scatter).
#
# ## 4. Inside `jax.shard_map`
#
# This is the same matmul by hand. The function takes local blocks. `in_specs` split the
# arguments, and `out_specs` join the results. An 8 x 16 array on 2 x 4 devices has blocks of 4 x 4.


# %%
def local_matmul(x, w):  # x: f32[m/2, k/4], w: f32[k/4, n]
    print("x:          ", jax.typeof(x))
    print("w:          ", jax.typeof(w))
    partial_sum = x @ w  # f32[m/2, n]
    print("partial sum:", jax.typeof(partial_sum))
    total = lax.psum(partial_sum, "tp")  # f32[m/2, n]
    print("total:      ", jax.typeof(total))
    return total


matmul = jax.shard_map(
    local_matmul, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp")
)
np.testing.assert_allclose(jax.jit(matmul)(x, w), x @ w)

# %% [markdown]
# After each shape the type shows the axes over which the value *varies*. A value of type `{V:tp}`
# differs only along `tp`. A product varies over every mesh axis over which an operand varies.
# `psum` sums over the devices along `tp`. All of them then have the same value, so `tp` leaves the
# type. `out_specs=P("dp")` says that the result is equal along `tp`, and JAX checks this.
#
# Without the sum, the types raise an error before anything runs:

# %%
forgotten = jax.shard_map(
    lambda x, w: x @ w, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp")
)
try:
    jax.jit(forgotten)(x, w)
except ValueError as error:
    caught = str(error)
print(caught.splitlines()[4])
assert "replicated across mesh axis 'tp'" in caught
assert "check_vma=False" in caught

# %% [markdown]
# The rest of the message suggests `check_vma=False`, which turns the check off. The forgotten sum
# then gives a wrong number: the partial sum of the first device along `tp`.

# %%
unchecked = jax.shard_map(
    lambda x, w: x @ w,
    mesh=mesh,
    in_specs=(P("dp", "tp"), P("tp")),
    out_specs=P("dp"),
    check_vma=False,
)
wrong = jax.jit(unchecked)(x, w)
print("right:", (x @ w)[0, 0], " unchecked:", wrong[0, 0])
assert not np.allclose(wrong, x @ w)

# %% [markdown]
# With these types JAX also sums gradients where it must. A *replicated* value is equal on all
# devices. If a replicated weight meets a varying value, JAX inserts `lax.pcast`, which makes the
# weight varying. The derivative of `lax.pcast` is a `psum`. So the weight's gradient is summed:

# %%
scale = jnp.float32(3)


def total(scale, x):  # scale: f32[]; x: f32[m/8, k]
    return lax.psum(jnp.sum(scale * x), ("dp", "tp"))


total = jax.shard_map(total, mesh=mesh, in_specs=(P(), P(("dp", "tp"))), out_specs=P())
gradient = jax.jit(jax.grad(total))(scale, x)
print("gradient:", gradient, " sum of x:", x.sum())
assert gradient == x.sum()

# %% [markdown]
# ## 5. An axis that stays with the compiler
#
# `axis_names` makes some axes manual and leaves the others to the compiler. Here `tp` is manual,
# and the compiler shards rows over `dp`. Local shapes therefore have all eight rows. The function
# multiplies, adds the partial sums over `tp`, and scatters the total by columns ([notebook
# 4](04_overlapped_matmuls.ipynb)).


# %%
def local_matmul_scatter(x, w):  # x: f32[m, k/4], w: f32[k/4, n]
    assert x.shape == (ROWS, COLUMNS // 4)
    return jaxpar.matmul_reduce_scatter(x, w, "tp", dim=1)  # f32[m, n/4]


placed = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
program = jax.shard_map(
    local_matmul_scatter,
    mesh=mesh,
    in_specs=(P(None, "tp"), P("tp")),
    out_specs=P(None, "tp"),
    axis_names={"tp"},
)
result = jax.jit(program)(placed, w)
np.testing.assert_allclose(result, x @ w)
print("tp by hand, dp by the compiler:", result.sharding.spec)

# %% [markdown]
# ## 6. Inspecting and changing a sharding
#
# With `jax.set_mesh`, functions that take a sharding accept a spec alone. `x.sharding` shows how
# a global array is sharded. `x.addressable_shards` holds the blocks, and
# `jax.debug.visualize_array_sharding` draws them. `jax.sharding.reshard` moves an array to
# another spec. Here each device holds one row, sends 12 of its 16 entries, and receives as many.

# %%
with jax.set_mesh(explicit):
    rows = jax.device_put(x, P(("dp", "tp")))
    columns = jax.jit(lambda x: jax.sharding.reshard(x, P("dp", "tp")))(rows)
for array in (rows, columns):
    first, last = array.addressable_shards[0], array.addressable_shards[-1]
    print(array.sharding.spec, "device", first.device.id, first.data.shape, first.index)
    print(" " * 8, "device", last.device.id, last.data.shape, last.index)
np.testing.assert_array_equal(rows, columns)

# %% [markdown]
# Inside `jax.shard_map` there is no `reshard`. You write the collective, for this change
# `lax.all_to_all`.
#
# ## In short
#
# - A mesh has named axes, and a spec names the axes that shard each dimension. The order of several
#   axes matters.
# - Inside `jax.shard_map`, look at `{V:...}`. It shows the axes over which a value differs.
#   `out_specs` must name these axes. Leave `check_vma` on.
#
# Next: [collectives and their cost](02_collectives.ipynb).
