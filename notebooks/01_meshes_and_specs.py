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
# A *mesh* gives devices names. A *spec* says which dimension of an array is cut along which name.
# Everything else in these notebooks is made of these two and of one question: over which axes does
# a value differ?
#
# 1. a mesh
# 2. specs: who has which block
# 3. three kinds of axes: auto, explicit, manual
# 4. inside `jax.shard_map`: local shapes, and values that vary
# 5. an axis that stays with the compiler
# 6. looking at a sharding, and changing it
#
# Everything runs on eight CPU devices in one process; a laptop will do. Claims are followed by
# `assert`, so the text cannot drift away from the code.

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
# Eight devices as two rows of four. The names are yours; these are the usual ones: `dp` for data
# parallel, `tp` for tensor parallel. A size of -1 takes what the others leave.

# %%
mesh = jaxpar.make_mesh("dp=2,tp=-1")
print(mesh)
print(np.vectorize(lambda device: device.id)(mesh.devices))
assert dict(mesh.shape) == {"dp": 2, "tp": 4}

# %% [markdown]
# On TPUs `make_mesh` does more than to number devices: it lays axes along the links of the slice,
# the last axis first. Put the axis with the most traffic last.
#
# ## 2. Specs: who has which block
#
# `P("dp", "tp")` cuts rows over `dp` and columns over `tp`. A dimension that is not named stays
# whole; an axis that is not named holds copies. Several axes may cut one dimension, and their order
# counts. One function draws it: each rectangle is a block, with the devices that hold it.

# %%
PALETTE = plt.get_cmap("Set2").colors
ROWS, COLUMNS = 8, 16


def draw(panel, spec):
    sharding = NamedSharding(mesh, spec)
    holders = {}  # of each block
    for device, place in sharding.devices_indices_map((ROWS, COLUMNS)).items():
        (top, bottom), (left, right) = (
            part.indices(size)[:2] for part, size in zip(place, (ROWS, COLUMNS), strict=True)
        )
        holders.setdefault((top, bottom, left, right), []).append(device.id)
    for (top, bottom, left, right), devices in holders.items():
        corner, size = (left, top), (right - left, bottom - top)
        panel.add_patch(plt.Rectangle(corner, *size, fc=PALETTE[min(devices)], ec="white", lw=2))
        text = ",".join(map(str, sorted(devices)))
        panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
    panel.set(xlim=(0, COLUMNS), ylim=(ROWS, 0), xticks=(), yticks=(), title=str(spec))
    panel.title.set_size(9)
    panel.spines[:].set_visible(False)
    return holders


SPECS = [P("dp", "tp"), P("dp"), P(None, "tp"), P(("dp", "tp")), P(("tp", "dp")), P()]
figure, panels = plt.subplots(2, 3, figsize=(9, 3.6))
holders = [draw(panel, spec) for panel, spec in zip(panels.flat, SPECS, strict=True)]
figure.tight_layout()
plt.show()

assert [len(blocks) for blocks in holders] == [8, 2, 4, 8, 8, 1]

# %% [markdown]
# `P(("dp", "tp"))` and `P(("tp", "dp"))` both cut rows into eight, and give device 1 different
# rows. Shapes are the same, so a program that mixes the two runs, and is wrong.
#
# ## 3. Three kinds of axes
#
# Who decides where an intermediate result lies?
#
# - **auto**: the compiler. You place the arguments, and it inserts collectives as it likes.
# - **explicit**: the types. Each array's type has its sharding, and an operation whose result could
#   lie in two ways is an error that asks you.
# - **manual**: you. Inside `jax.shard_map` an array is the device's own block, and nothing travels
#   unless you write it.

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
    except Exception as error:  # of a type that JAX does not export
        print(f"         {type(error).__name__}: {str(error)[:95]}...")
    y = jnp.einsum("mk,kn->mn", on_explicit, weight, out_sharding=P("dp"))
    print("         with out_sharding:", jax.typeof(y))
np.testing.assert_allclose(y, x @ w)

# %% [markdown]
# The contracted dimension is cut over `tp`, so that each device has a partial sum. Its sum could be
# kept by all (an all-reduce) or scattered (a reduce-scatter); `out_sharding` says which.
#
# ## 4. Inside `jax.shard_map`
#
# The same matmul by hand. A function of local blocks, `in_specs` that cut the arguments,
# `out_specs` that put results together. Shapes inside are those of a block: 8 x 16 over 2 x 4
# devices is 4 x 4.


# %%
def local_matmul(x, w):  # x: f32[m/2, k/4], w: f32[k/4, n]
    print("x:      ", jax.typeof(x))
    print("w:      ", jax.typeof(w))
    partial_sum = x @ w  # f32[m/2, n]
    print("partial sum: ", jax.typeof(partial_sum))
    total = lax.psum(partial_sum, "tp")  # f32[m/2, n]
    print("total:  ", jax.typeof(total))
    return total


matmul = jax.shard_map(
    local_matmul, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp")
)
np.testing.assert_allclose(jax.jit(matmul)(x, w), x @ w)

# %% [markdown]
# Behind each shape stands over which axes the value *varies*: `{V:(dp,tp)}` differs between all
# devices, `{V:tp}` only along `tp`. The product varies over everything that an operand varies over;
# `psum` makes one value for all of `tp`, and `tp` is gone from the type. `out_specs=P("dp")` says
# that the result is the same along `tp`, and JAX knows that it is.
#
# Forget the sum, and the types say so before anything runs:

# %%
forgotten = jax.shard_map(
    lambda x, w: x @ w, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp")
)
try:
    jax.jit(forgotten)(x, w)
except ValueError as error:
    caught = str(error)
print("\n".join(caught.splitlines()[4:5]))
assert "replicated across mesh axis 'tp'" in caught

# %% [markdown]
# The message ends by offering `check_vma=False`. That turns the types off, and the forgotten sum
# gives a wrong number: what device 0 of each row happens to have.

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
# Types also carry gradients. A replicated weight that meets a varying value is varied first
# (`lax.pcast`, which JAX inserts), and the derivative of that is a `psum`: its gradient is summed
# over the devices that used it. Nothing to write, and nothing to forget:

# %%
scale = jnp.float32(3)


def total(scale, x):  # scale: f32[], the same everywhere; x: f32[m/8, k]
    return lax.psum(jnp.sum(scale * x), ("dp", "tp"))


total = jax.shard_map(total, mesh=mesh, in_specs=(P(), P(("dp", "tp"))), out_specs=P())
gradient = jax.jit(jax.grad(total))(scale, x)
print("gradient:", gradient, " sum of x:", x.sum())
assert gradient == x.sum()

# %% [markdown]
# ## 5. An axis that stays with the compiler
#
# `axis_names` makes some axes manual, and leaves the others as they were. Here `tp` is ours, and
# rows are cut over `dp` by whoever owns that axis: local shapes have all eight rows. The function
# is a matmul and a `psum_scatter` of its partial sums over columns in one, of which
# [notebook 4](04_overlapped_matmuls.ipynb) has more.


# %%
def partly(x, w):  # x: f32[m, k/4], w: f32[k/4, n]
    assert x.shape == (ROWS, COLUMNS // 4)
    return jaxpar.matmul_reduce_scatter(x, w, "tp", dim=1)  # f32[m, n/4]


placed = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
program = jax.shard_map(
    partly,
    mesh=mesh,
    in_specs=(P(None, "tp"), P("tp")),
    out_specs=P(None, "tp"),
    axis_names={"tp"},
)
result = jax.jit(program)(placed, w)
np.testing.assert_allclose(result, x @ w)
print("tp by hand, dp by the compiler:", result.sharding.spec)

# %% [markdown]
# ## 6. Looking at a sharding, and changing it
#
# `jax.set_mesh` names the mesh once. Specs alone are enough then. `x.sharding` says how a global
# array is cut, and `x.addressable_shards` has the blocks (`jax.debug.visualize_array_sharding`
# draws them). `jax.sharding.reshard` moves an array to another spec; here each device sends most of
# its columns to its neighbours of `tp`, and receives rows.

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
# Inside `jax.shard_map` there is no `reshard`: you write the collective, `lax.all_to_all` here.
#
# ## In short
#
# - A mesh names devices, a spec names what cuts a dimension; the order of several axes counts.
# - Auto: the compiler decides. Explicit: types decide, and ask. Manual: you decide.
# - Inside `jax.shard_map`, look at `{V:...}`: what differs between devices, and what may therefore
#   leave through which `out_specs`. Leave `check_vma` on.
#
# Next: [collectives, and what they cost](02_collectives.ipynb).
