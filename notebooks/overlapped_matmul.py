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
# # Overlapped matmuls
#
# You write `jax.shard_map` by hand because you want to know what your program sends, and when.
# This notebook starts at the two lines everybody writes first, an `all_gather` and a matmul, and
# takes them apart until the transfer runs beside the arithmetic instead of before it:
#
# 1. gather, then multiply
# 2. the ring, one way
# 3. the ring, both ways
# 4. the mirror image: multiply, then reduce-scatter
# 5. gradients, and what is kept for them
# 6. several mesh axes, and why their order matters
# 7. how to test a collective of your own
#
# Everything runs on eight CPU devices in one process. They share the same few cores, so **nothing
# is hidden here and nothing below is a speed measurement**. What a laptop can show exactly is the
# program: which blocks are sent, how many bytes, in which order, and how much memory it holds.
# Each claim is followed by an `assert`, so the text cannot drift away from the code.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import math
from collections import Counter

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

assert jax.device_count() == 8

# %% [markdown]
# ## 1. Gather, then multiply
#
# The first half of a tensor-parallel MLP. The activations `x` are sharded by rows, the weight `w`
# by columns, both over the mesh axis `tp`. Each device needs *all* rows for *its* columns.

# %%
mesh = jaxpar.make_mesh("tp=8")
m, k, n = 64, 128, 32

key_x, key_w = jax.random.split(jax.random.key(0))
x = jax.random.normal(key_x, (m, k))
w = jax.random.normal(key_w, (k, n))


def naive(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    x = lax.all_gather(x, "tp", tiled=True)  # x: f32[m, k]
    return x @ w  # f32[m, n/8]


def by_columns(fn):
    """The global function: rows of x and columns of w over tp, columns of the result too."""
    program = jax.shard_map(
        fn, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    )
    return jax.jit(program)


np.testing.assert_allclose(by_columns(naive)(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# Two questions come up all the time, so let us make them cheap to ask. *How often and how many
# bytes* is `count_collectives`: it reads the jaxpr, forward and backward, and compiles nothing.
# Of the bytes, those of XLA's own collectives are what the best ring algorithm would send.

# %%
X_BLOCK = x.nbytes // 8  # one device's rows of x
W_BLOCK = w.nbytes // 8  # one device's columns of w

counts = count_collectives(by_columns(naive), x, w)
print(counts)
assert counts.forward == {"all_gather": 1}
assert counts.forward_bytes == 7 * X_BLOCK

# %% [markdown]
# *In which order* is a walk over the jaxpr that prints one mark for each thing we care about:
# `G` an all-gather, `S` a reduce-scatter, `#` a matmul, `>` and `<` a block that leaves for the
# next or for the previous device.


# %%
def written(fn, *args):
    """What one device does, in the order in which the program is written."""
    marks, sent = [], Counter()

    def read(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == "ppermute":
                source, target = eqn.params["perm"][0]
                marks.append(">" if (target - source) % 8 == 1 else "<")
                sent[marks[-1]] += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
            elif name in ("all_gather", "reduce_scatter", "dot_general"):
                marks.append({"all_gather": "G", "reduce_scatter": "S", "dot_general": "#"}[name])
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    read(inner)

    read(jax.make_jaxpr(fn)(*args).jaxpr)
    return " ".join(marks), dict(sent)


print(written(by_columns(naive), x, w)[0])
assert written(by_columns(naive), x, w)[0] == "G #"

# %% [markdown]
# `G #`: the matmul needs its whole operand, so it waits for the last byte. While the links work,
# the matrix unit idles; then the links idle. The gathered `x` also has to live somewhere: eight
# times the memory of the shard, and the compiler tells us so.

# %%
BIG = (jax.ShapeDtypeStruct((2048, 2048), jnp.float32),) * 2  # compiled, never run
MIB = 2**20


def temporary_mib(fn, *args):
    """Memory per device for everything that is neither an argument nor a result."""
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes / MIB


memory = {"naive": temporary_mib(by_columns(naive), *BIG)}
print(f"naive: {memory['naive']:.1f} MiB, of a shard of {2048 * 2048 * 4 / 8 / MIB:.0f} MiB")
assert memory["naive"] >= 16  # all of x, on every device

# %% [markdown]
# ## 2. The ring, one way
#
# The matmul does not need all of `x` at once. Rows of the result depend on the same rows of `x`
# only:
#
# $$y = \begin{pmatrix} x_0 \\ \vdots \\ x_7 \end{pmatrix} w
#     = \begin{pmatrix} x_0 w \\ \vdots \\ x_7 w \end{pmatrix}$$
#
# so a device can multiply whichever block it has while the next one is on its way. Arrange the
# devices in a ring and let every block visit all of them.
#
# One primitive moves a block: `ring_shift(x, axis)` gives device `i` what device `i - 1` held.


# %%
def arrival(number, offset=1):
    """Shifts a global `number`, one entry a device, by `offset` devices."""

    def local(number):  # number: i32[1]
        return jaxpar.ring_shift(number, "tp", offset)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))(number)


NUMBERS = jnp.arange(8)
print(arrival(NUMBERS))
assert arrival(NUMBERS).tolist() == [7, 0, 1, 2, 3, 4, 5, 6]

# %% [markdown]
# Shift it seven times and everybody has seen everything. Instead of block contents, let us send
# each block's *number* and write down who holds what. Colours are blocks.


# %%
PALETTE = plt.get_cmap("Set2").colors  # eight colours, one a block


def draw(rows, title, last_height=1):
    """Draws one row a step; each entry of a row is an array of block numbers, one a device."""
    heights = [1] * (len(rows) - 1) + [last_height]
    tops = np.cumsum([0, *heights])
    figure, panel = plt.subplots(figsize=(5.2, 0.34 * tops[-1] + 0.9))
    for row, top, height in zip(rows, tops, heights, strict=False):
        width = 1 / len(row)
        for part, numbers in enumerate(row):
            for device, number in enumerate(np.asarray(numbers)):
                left, colour = device + part * width, PALETTE[number]
                panel.add_patch(plt.Rectangle((left, top), width, height, fc=colour, ec="white"))
                centre = (left + width / 2, top + height / 2)
                panel.text(*centre, number, ha="center", va="center", size=8)
    panel.set(xlim=(0, 8), ylim=(tops[-1], 0), xlabel="device", ylabel="step", title=title)
    panel.set_xticks(np.arange(8) + 0.5, range(8))
    panel.set_yticks((tops[:-1] + tops[1:]) / 2, range(len(rows)))
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    panel.vlines(range(1, 8), 0, tops[-1], color="white", lw=3)
    figure.tight_layout()
    plt.show()


one_way = [[arrival(NUMBERS, step)] for step in range(8)]
draw(one_way, "one way: the block that each device multiplies")

for step, (row,) in enumerate(one_way):
    assert row.tolist() == [(i - step) % 8 for i in range(8)]

# %% [markdown]
# Read a colour down its diagonal to follow a block; read a column to see a device's work. In step
# `s` device `i` holds block `(i - s) % 8`. That one formula is most of the program. Write it
# wrong and shapes still match, which is why section 7 exists.


# %%
def hand_ring(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    i, rows = lax.axis_index("tp"), x.shape[0]
    y = jnp.zeros((8 * rows, w.shape[1]))  # y: f32[m, n/8]
    y = lax.pcast(y, "tp", to="varying")  # each device will fill it differently
    for s in range(8):
        if s < 7:
            coming = jaxpar.ring_shift(x, "tp")  # sent first, so that it travels ...
        part = x @ w  # ... during this: f32[m/8, n/8]
        y = lax.dynamic_update_slice_in_dim(y, part, (i - s) % 8 * rows, 0)
        x = coming
    return y


np.testing.assert_allclose(by_columns(hand_ring)(x, w), x @ w, rtol=1e-4, atol=1e-4)

order, sent = written(by_columns(hand_ring), x, w)
print(order)
print(sent)
assert order == "> # > # > # > # > # > # > # #"
assert sent == {">": 7 * X_BLOCK}  # to the byte what the all-gather sent

# %% [markdown]
# Seven sends, each written in front of the matmul that it can hide behind. A send and the matmul
# next to it do not depend on each other: both read the block at hand. That is what allows overlap.
#
# *Allows*. A compiler honours dependencies, not the order of your lines. Left alone, XLA for TPU
# has started three sends in a row before any matmul, and XLA for GPU has merged the small matmuls
# back into two large ones. To pin a step together, tie both of its results into one knot:
#
# ```python
# coming, part = lax.optimization_barrier((coming, part))
# ```
#
# Nothing that uses either can now start before both are there. jaxpar's rings have such a knot in
# every step. From here on let the library do the writing. `mode` says which ring; by default it is
# `"auto"`, which asks a roofline model of the chip and, on CPU, rightly answers `"naive"`.


# %%
def with_mode(mode):
    return by_columns(lambda x, w: jaxpar.all_gather_matmul(x, w, "tp", mode=mode))


for mode in ("naive", "unidirectional", "auto"):
    order, sent = written(with_mode(mode), x, w)
    print(f"{mode:>14}: {order}   {sent or ''}")

assert written(with_mode("unidirectional"), x, w) == written(by_columns(hand_ring), x, w)
assert written(with_mode("auto"), x, w) == written(with_mode("naive"), x, w)

# %% [markdown]
# Two forms you will meet soon. With several weights, one trip of the blocks feeds them all
# (query, key and value; gate and up). And when the *weight* is the sharded operand, as in FSDP,
# gather that one; sharded over the contracting dimension, its blocks meet column slices of `x`
# and their products are added up.


# %%
def qkv(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    return jaxpar.all_gather_matmul(x, (w, w, w), "tp", mode="unidirectional")


def fsdp(x, w):  # x: f32[m/8, k], w: f32[k/8, n]; gather="rhs" along its dimension 0
    return jaxpar.all_gather_matmul(x, w, "tp", gather="rhs", dim=0, mode="unidirectional")


order, sent = written(by_columns(qkv), x, w)
print("qkv: ", order, sent)
assert sent == {">": 7 * X_BLOCK}  # once, not three times

fsdp = jax.jit(jax.shard_map(fsdp, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P("tp")))
order, sent = written(fsdp, x, w)
print("fsdp:", order, sent)
assert sent == {">": 7 * W_BLOCK}
np.testing.assert_allclose(fsdp(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## 3. The ring, both ways
#
# On a torus every link carries traffic in both directions at once, and the one-way ring leaves half
# of that idle. So send whole blocks both ways: in each step one arrives from either side, and seven
# foreign blocks take about half as many steps.
#
# Not quite half: seven is odd. After three steps each device has six foreign blocks and misses only
# the opposite one, `i + 4`, which is equally far either way. Sending it around one side would leave
# the other side idle for that step. Instead it is cut in two: one half arrives from the left, the
# other from the right, and both directions carry exactly three and a half blocks.

# %%
both_ways = [[NUMBERS]]  # step 0: everybody's own block
for step in (1, 2, 3, 4):
    both_ways.append([arrival(NUMBERS, step), arrival(NUMBERS, -step)])
draw(both_ways, "both ways: arrived from the left | from the right", last_height=0.5)

assert both_ways[4][0].tolist() == both_ways[4][1].tolist() == [(i + 4) % 8 for i in range(8)]

# %% [markdown]
# The last row is half as high because it is half as much: both parts of a cell have one colour, and
# are the two halves of one block. Here is the same thing as marks, and as bytes per direction.

# %%
order, sent = written(with_mode("bidirectional"), x, w)
print(order)
print({direction: f"{bytes_ / X_BLOCK} blocks" for direction, bytes_ in sent.items()})

assert order == "> < # > < # # > < # # > < # # #"
assert sent == {">": 3.5 * X_BLOCK, "<": 3.5 * X_BLOCK}
np.testing.assert_allclose(with_mode("bidirectional")(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The matmuls are whole: always eight of `f32[m/8, k] @ f32[k, n/8]`, the last one on the rejoined
# opposite block. The tempting alternative, cutting every block in two and sending the halves apart,
# balances the links as well, but makes sixteen matmuls of half the size, which can fill a matrix
# unit badly. Rings of odd size have no opposite block and no halves.
#
# What is it worth? A picture of a *model*: a matmul takes 1, a block takes 1.5 over one direction
# of a link, and a step lasts as long as the longer of what it computes and what it sends. The
# all-gather is granted both directions.

# %%
MATMUL, TRANSFER = 1.0, 1.5
# Each step: (blocks per direction sent during it, matmuls done during it).
schedules = {
    "gather, then multiply": [(3.5, 0), (0, 8)],
    "one way": [(1, 1)] * 7 + [(0, 1)],
    "both ways": [(1, 1), (1, 2), (1, 2), (0.5, 2), (0, 1)],
}

figure, panel = plt.subplots(figsize=(7, 2.2))
totals = {}
for place, (name, steps) in enumerate(schedules.items()):
    time = 0.0
    for blocks, matmuls in steps:
        if blocks:
            panel.barh(place - 0.17, blocks * TRANSFER, 0.3, time, color=PALETTE[1], ec="white")
        for one in range(matmuls):
            panel.barh(place + 0.17, MATMUL, 0.3, time + one * MATMUL, color=PALETTE[2], ec="white")
        time += max(blocks * TRANSFER, matmuls * MATMUL)
    panel.text(time + 0.1, place, f"{time:g}", va="center")
    totals[name] = time
panel.set_yticks(range(3), schedules)
panel.set(xlim=(0, 14.5), ylim=(2.5, -0.5), xlabel="time (model)")
panel.spines[["top", "right"]].set_visible(False)
bars = [plt.Rectangle((0, 0), 1, 1, color=PALETTE[part]) for part in (1, 2)]
figure.legend(bars, ["links", "matmuls"], ncols=2, frameon=False, loc="upper right")
figure.tight_layout(rect=(0, 0, 1, 0.92))
plt.show()

assert totals == {"gather, then multiply": 13.25, "one way": 11.5, "both ways": 8.5}

# %% [markdown]
# Eight is the floor: that is the arithmetic alone. With a transfer of at most 1 the one-way ring
# would reach it too. Behind a switch (NVLink) there is no second direction to win: one way already
# fills the port. On CPU devices a transfer is a copy on the same cores, and no form wins.
#
# Memory is exact here as elsewhere. Neither ring ever holds all of `x`.

# %%
memory["hand-written ring"] = temporary_mib(by_columns(hand_ring), *BIG)
memory["one way"] = temporary_mib(with_mode("unidirectional"), *BIG)
memory["both ways"] = temporary_mib(with_mode("bidirectional"), *BIG)
for name, mib in memory.items():
    print(f"{name:>18}: {mib:4.1f} MiB")

assert memory["one way"] < memory["naive"] / 2
assert memory["both ways"] < memory["naive"] / 2

# %% [markdown]
# ## 4. The mirror image: multiply, then reduce-scatter
#
# The second half of the MLP contracts over the sharded dimension. Every device has an addend of the
# *whole* result and should keep the sum of *its* rows. `psum_scatter` after the matmul waits again,
# this time for the last product before the first byte.


# %%
def naive_scatter(y, v):  # y: f32[m, n/8], v: f32[n/8, k]
    z = y @ v  # z: f32[m, k], an addend
    return lax.psum_scatter(z, "tp", tiled=True)  # f32[m/8, k], a sum


# %% [markdown]
# Before, blocks travelled and results stayed. Now partial sums travel towards their owner and
# collect one product at each stop, and that product can be computed while the sum is on its way.
# A sum that moves by +1 and must end at its owner has to start at the device just after it: at step
# `s`, device `i` holds the sum that belongs to `(i - 1 - s) % 8`.


# %%
def hand_scatter(y, v):  # y: f32[m, n/8], v: f32[n/8, k]
    i, rows = lax.axis_index("tp"), y.shape[0] // 8

    def product(owner):  # f32[m/8, k]
        return lax.dynamic_slice_in_dim(y, owner * rows, rows) @ v

    total = product((i - 1) % 8)  # total: f32[m/8, k]
    for s in range(1, 8):
        coming = jaxpar.ring_shift(total, "tp")  # travels ...
        total = coming + product((i - 1 - s) % 8)  # ... during this product
    return total


def by_rows(fn):
    """The global function: columns of y and rows of v over tp, rows of the result."""
    program = jax.shard_map(fn, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
    return jax.jit(program)


def scatter_with(mode):
    return by_rows(lambda y, v: jaxpar.matmul_reduce_scatter(y, v, "tp", mode=mode))


y, v = x @ w, w.T  # y: f32[m, n], v: f32[n, k]
programs = {
    "naive": by_rows(naive_scatter),
    "hand-written": by_rows(hand_scatter),
    "one way": scatter_with("unidirectional"),
    "both ways": scatter_with("bidirectional"),
}
for name, program in programs.items():
    order, sent = written(program, y, v)
    print(f"{name:>12}: {order}   {sent or ''}")
    np.testing.assert_allclose(program(y, v), y @ v, rtol=1e-3, atol=1e-3)
    assert count_collectives(program, y, v).forward_bytes == 7 * (m // 8 * k * 4)

# %% [markdown]
# The library's own scatter moves its sums by -1 instead: the gather's film run backwards, which
# will matter in a moment. Both ways it starts with the opposite block (on TPU cut in two) and
# ends with its own. The bytes are again those of the collective it replaces.
#
# The knot matters even more here. A compiler likes to fuse the addition into the matmul next to it,
# and the product then waits for the very arrival it was to hide. jaxpar ties `coming` and the
# product together *before* it adds them.
#
# Sums are also where rounding lives. With bf16 operands jaxpar adds them in f32 and sends them in
# bf16, as the collective would, which rounds once a hop. `wire_dtype="float32"` keeps them wide,
# for twice the bytes. It is your choice to make.

# %%
halved = [a.astype(jnp.bfloat16) for a in (y, v)]
exact = np.asarray(halved[0], np.float64) @ np.asarray(halved[1], np.float64)
wires = {}
for wire in ("float32", "bfloat16"):
    program = by_rows(
        lambda y, v, wire=wire: jaxpar.matmul_reduce_scatter(
            y, v, "tp", mode="unidirectional", wire_dtype=wire
        )
    )
    error = np.abs(np.asarray(program(*halved), np.float64) - exact).max() / np.abs(exact).max()
    bytes_ = count_collectives(program, *halved).forward_bytes
    wires[wire] = bytes_, error
    print(f"{wire:>8} on the wire: {bytes_} bytes, largest error {error:.4f} of the largest entry")

assert wires["float32"][0] == 2 * wires["bfloat16"][0]
assert wires["float32"][1] < wires["bfloat16"][1]

# %% [markdown]
# ## 5. Gradients, and what is kept for them
#
# Take $y = \mathrm{gather}(x)\,w$ and a cotangent $\bar y$. Row block $x_j$ was used by every
# device, so its gradient is a sum over devices of what each has to say about rows $j$, delivered to
# device $j$. That is a reduce-scatter:
#
# $$\bar x = \mathrm{scatter}(\bar y\, w^{\top}), \qquad
#   \bar w = \mathrm{gather}(x)^{\top}\, \bar y .$$
#
# A gather's derivative is a scatter, a scatter's a gather, and both are matmuls with a collective
# beside them: the same kind of thing we just overlapped. But look at the second formula. It wants
# the *gathered* `x` again. Who kept it?

# %%
rings = {
    "naive": by_columns(naive),
    "hand-written ring": by_columns(hand_ring),
    "one way": with_mode("unidirectional"),
    "both ways": with_mode("bidirectional"),
}
kept = {}
for name, program in rings.items():
    counts = count_collectives(program, x, w)
    kept[name] = counts.residual_bytes
    print(f"{name:>18}: forward {dict(counts.forward)}, backward {dict(counts.backward)}")
    print(f"{'':>20}keeps {kept[name]} bytes = {kept[name] / X_BLOCK:.2f} blocks of x")

assert kept["naive"] == 8 * X_BLOCK + W_BLOCK  # the gathered x
assert 8 * X_BLOCK < kept["hand-written ring"] < 10 * X_BLOCK  # every block it saw
assert kept["one way"] == kept["both ways"] == X_BLOCK + W_BLOCK  # what came in

# %% [markdown]
# Autodiff kept it. Differentiating through the unrolled ring saves the operand of each of its eight
# matmuls: every block that passed by, 8 to 10 times the shard in all. The forward held two blocks
# at a time, and all of that was given back.
#
# The way out is to keep the shard and send the blocks around once more. In the backward the links
# are free to do so, for that gather hides behind a matmul too. As a `custom_vjp` it is the two
# formulas above, and fits in a few lines:


# %%
@jax.custom_vjp
def gather_matmul(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    return jaxpar.all_gather_matmul(x, w, "tp", mode="unidirectional")  # f32[m, n/8]


def forward(x, w):
    return gather_matmul(x, w), (x, w)  # the shards, and nothing else


def backward(residuals, dy):  # dy: f32[m, n/8]
    x, w = residuals
    dx = jaxpar.matmul_reduce_scatter(dy, w.T, "tp", mode="unidirectional")  # f32[m/8, k]
    dw = jaxpar.ring_einsum("mk,mn->kn", x, dy, "tp", gather="m", mode="unidirectional")
    return dx, dw  # dw: f32[k, n/8]


gather_matmul.defvjp(forward, backward)


def loss_of(program):
    return lambda x, w: jnp.sum(jnp.sin(program(x, w)))


wanted = jax.grad(loss_of(jnp.matmul), (0, 1))(x, w)
for program in (by_columns(gather_matmul), with_mode("unidirectional")):
    for got, want in zip(jax.jit(jax.grad(loss_of(program), (0, 1)))(x, w), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)

ours = count_collectives(by_columns(gather_matmul), x, w)
theirs = count_collectives(with_mode("unidirectional"), x, w)
print(theirs)
assert ours == theirs

# %% [markdown]
# jaxpar does just this inside `all_gather_matmul` and `matmul_reduce_scatter`; you need not write
# it. The price is in plain sight: 14 sends in the backward where autodiff of the hand-written ring
# makes 7. It buys the memory of seven blocks *per layer*, and the sends are overlapped.
#
# The derivative of a scatter is cheaper. Its cotangent is sharded, so *one* trip of the cotangent
# around the ring feeds the gradients of both operands.

# %%
counts = count_collectives(scatter_with("unidirectional"), y, v)
print(counts)
assert counts.forward == counts.backward == {"ppermute": 7}
assert counts.residual_bytes == (y.nbytes + v.nbytes) // 8

# %% [markdown]
# ### Inside or outside `shard_map`?
#
# Two lines to remember, for a loss that is `psum`med over devices:
#
# - `jax.grad` **outside** `shard_map` is the true gradient, whatever `check_vma` is.
# - `jax.grad` **inside** is it too with `check_vma=True`; with `check_vma=False`, differentiate the
#   *local* loss and `psum` the gradients of replicated parameters yourself.
#
# Here is one replicated weight, device `i` adding `weight * (i + 1)`: the gradient should be
# 1 + 2 + ... + 8 = 36.


# %%
def local_loss(weight, x):  # weight: f32[], x: f32[1]
    return weight * x[0]


def total_loss(weight, x):
    return lax.psum(local_loss(weight, x), "tp")


def outside(check_vma):
    specs = {"in_specs": (P(), P("tp")), "out_specs": P()}
    program = jax.shard_map(total_loss, mesh=mesh, **specs, check_vma=check_vma)
    return jax.jit(jax.grad(program))


def inside(loss, check_vma, finish=lambda gradient: gradient):
    def local(weight, x):
        return finish(jax.grad(loss)(weight, x))[None]  # f32[1], so that we see each device's own

    specs = {"in_specs": (P(), P("tp")), "out_specs": P("tp")}
    return jax.jit(jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma))


weight, ones_to_eight = jnp.float32(1), jnp.arange(1.0, 9.0)
for setting in (True, False):
    assert outside(setting)(weight, ones_to_eight) == 36


def psum(gradient):
    return lax.psum(gradient, "tp")


right = inside(total_loss, True)(weight, ones_to_eight)
wrong = inside(total_loss, False)(weight, ones_to_eight)
mended = inside(local_loss, False, finish=psum)(weight, ones_to_eight)
print("check_vma=True:                  ", right)
print("check_vma=False, the same code:  ", wrong)
print("check_vma=False, by hand:        ", mended)
assert right.tolist() == mended.tolist() == [36.0] * 8
assert wrong.tolist() == [8.0 * i for i in range(1, 9)]  # 8x the local one, and never summed

# %% [markdown]
# ## 6. Several axes, and why their order matters
#
# A ring may run over more than one mesh axis: gather over `("x", "y")`, say, all 2 x 4 devices.
# A tuple of axes has an order, the first one being the major, and it decides which device is
# number 0, 1, 2, ... of the ring.

# %%
grid = jaxpar.make_mesh("x=2,y=4")
ORDERS = (("x", "y"), ("y", "x"))


def on_grid(local):
    """Runs `local`, without arguments, and shows its scalar result where each device stands."""

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
# `axis_index` says which number a place has; `ring_order` is its inverse, which place a number has,
# counting places row by row. On the grid, the two rings walk like this (dotted: from number 7
# back to 0):

# %%
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
# `ring_shift` follows the tuple, and so does everything built on it: number `i` receives from
# number `i - 1`. `lax.ppermute`, given the tuple and the pairs `(p, p + 1)`, does not: up to
# jax 0.11.0 it counts in the order of the *mesh* and says nothing; later versions refuse.

# %%
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
# So the first rule: **the order in the collective is the order in the spec**. Lay `x` out as
# `P(("y", "x"))` and gather over `("y", "x")`. If they disagree no one complains: all shapes fit,
# and the rows come out shuffled. (A gathered result is equal on all devices, but JAX types what
# came around a ring as varying and would refuse `out_specs=P()`: stack the copies and look at one.)


# %%
def gather_over(axes, layout):
    def local(x, w):  # x: f32[m/8, k], w: f32[k, n]
        y = jaxpar.all_gather_matmul(x, w, axes, mode="bidirectional")  # y: f32[m, n]
        return y[None]  # f32[1, m, n]

    program = jax.shard_map(local, mesh=grid, in_specs=(P(layout), P()), out_specs=P(layout))
    return jax.jit(program)(x, w)[0]  # what the first device has


for axes in ORDERS:
    np.testing.assert_allclose(gather_over(axes, layout=axes), x @ w, rtol=1e-4, atol=1e-4)

shuffled = gather_over(("y", "x"), layout=("x", "y"))
blocks = (x @ w).reshape(8, m // 8, n)[jaxpar.ring_order(grid, ("y", "x"))]
np.testing.assert_allclose(shuffled, blocks.reshape(m, n), rtol=1e-4, atol=1e-4)
assert not np.allclose(shuffled, x @ w)

# %% [markdown]
# The second rule is about time. A step of the ring ends when its slowest transfer does, and
# a transfer to a chip that is not a neighbour occupies every link on its way. Suppose the mesh lies
# on 2 x 4 chips just as drawn, without wrap-around links, and count links:


# %%
def links(order):
    down, across = np.divmod(np.asarray(order), 4)
    return abs(down - np.roll(down, -1)) + abs(across - np.roll(across, -1))


for axes in ORDERS:
    print(axes, links(jaxpar.ring_order(grid, axes)))

snake = [0, 1, 2, 3, 7, 6, 5, 4]
print("out and back", links(snake))
assert links(snake).max() == 1 < links(jaxpar.ring_order(grid, ("y", "x"))).max()

# %% [markdown]
# Neither order is a chain of neighbours, though one exists: out along one row and back along the
# other. On TPU `jaxpar.ring_hops(mesh, axes)` does this count with the chips' coordinates and the
# wrap-around links that they really have. Look at it before you trust a ring over several axes, and
# hand `make_mesh` or `jax.sharding.Mesh` another order of devices if you do not like what you see.
# CPU devices and GPUs behind a switch have no coordinates: everything is one hop.

# %%
print(jaxpar.ring_hops(grid, ("y", "x")))
assert (jaxpar.ring_hops(grid, ("y", "x")) == 1).all()

# %% [markdown]
# ## 7. Testing a collective of your own
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

# %% [markdown]
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

# %% [markdown]
# Now the classic mistake: the block moves the other way, so in step `s` what arrives is that of
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


# %%
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
# ## In short
#
# - A gather feeds a matmul block by block; a scatter is fed by one block by block. Send first, then
#   multiply what you have, and tie the two together so that the compiler leaves them so.
# - Both ways, whole blocks, the last in halves where it pays: n/2 steps and half the bytes a link.
# - The derivative of each is the other. Keep shards and gather again; autodiff of an unrolled ring
#   keeps every block.
# - Several axes: the same order in the collective and in the spec, and a look at the hops.
# - Test against NumPy, with gradients, on three devices and more.
#
# None of this makes eight CPU devices faster. On the machine that it is meant for,
# `python -m jaxpar bench` times every form beside the plain collective.
