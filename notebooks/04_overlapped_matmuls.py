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
# # 4. Overlapped matmuls
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
# 6. the timelines that a compiler makes of it
#
# Everything runs on eight CPU devices in one process. They share the same few cores, so **nothing
# is hidden here and nothing below is a speed measurement**. What a laptop can show exactly is the
# program: which blocks are sent, how many bytes, in which order, how much memory it holds, and what
# the compiler of a chip that is not here would make of it.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
from collections import Counter

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives

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
# wrong and shapes still match, which is why there is
# [a notebook on testing](16_testing.ipynb).


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
# The second half of the MLP contracts over the sharded dimension. Every device has a partial sum of
# the *whole* result and should keep the sum of *its* rows. `psum_scatter` after the matmul waits
# again, this time for the last product before the first byte.


# %%
def naive_scatter(y, v):  # y: f32[m, n/8], v: f32[n/8, k]
    z = y @ v  # z: f32[m, k], a partial sum
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
    dw = jaxpar.collective_einsum("mk,mn->kn", x, dy, "tp", gather="m", mode="unidirectional")
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
# ## 6. The timelines that a compiler makes of it
#
# The TPU compiler runs on any machine (`pip install 'jax[tpu]'`). `compile_for` compiles for chips
# that are not here, and `timeline` plays the compiler's own order of instructions on a model of the
# chip. It is no measurement, and it shows what no laptop can: what waits for what.
#
# Eight v5p chips, one projection of a large model in bfloat16. Blue computes, orange travels, red
# waits.

# %% tags=["varies"]
chips = target("v5p:2x2x2", "tp=8")
M, K, COLUMNS = 8192, 8192, 28672
operands = (
    jax.ShapeDtypeStruct((M, K), jnp.bfloat16, sharding=P("tp")),
    jax.ShapeDtypeStruct((K, COLUMNS), jnp.bfloat16, sharding=P(None, "tp")),
)


def simulated(mode):
    def local(x, w):  # x: bf16[m/8, k], w: bf16[k, n/8]
        return jaxpar.all_gather_matmul(x, w, "tp", mode=mode)

    program = jax.shard_map(local, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    return timeline(compile_for(program, chips, *operands))


COLOURS = {"compute": "#0072B2", "transfer": "#E69F00", "wait": "#D0021B"}
lines = {mode: simulated(mode) for mode in ("naive", "unidirectional", "bidirectional")}
figure, panels = plt.subplots(3, 1, figsize=(8, 4.2), sharex=True)
for panel, (mode, line) in zip(panels, lines.items(), strict=True):
    rows = {"compute": 1}  # then a row for each link
    for event in line.events:
        if event.kind in COLOURS and event.row != "memory":
            row = rows.setdefault(event.row, len(rows) + 1)
            panel.barh(
                row, 1e3 * event.seconds, 0.8, 1e3 * event.start, color=COLOURS[event.kind], ec="w"
            )
    panel.set_yticks(list(rows.values()), list(rows), size=7)
    panel.invert_yaxis()
    panel.set_title(f"{mode}: {1e3 * line.total:.2f} ms, {line.exposed / line.total:.0%} exposed")
    panel.title.set_size(9)
    panel.spines[["top", "right"]].set_visible(False)
panels[-1].set_xlabel("milliseconds (predicted)")
bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
figure.legend(bars, COLOURS, ncols=3, frameon=False, loc="upper right", fontsize=8)
figure.tight_layout()
plt.show()

assert lines["bidirectional"].exposed < lines["unidirectional"].exposed < lines["naive"].exposed
assert lines["bidirectional"].total < 0.8 * lines["naive"].total

# %% [markdown]
# From the terminal, with a table and all events: `jaxpar predict --target v5p:2x2x2 --ops
# gather-lhs-rows --plot timeline.png`. How to read such pictures is the subject of
# [schedules](14_schedules.ipynb).
#
# ## In short
#
# - A gather feeds a matmul block by block; a scatter is fed by one block by block. Send first, then
#   multiply what you have, and tie the two together so that the compiler leaves them so.
# - Both ways, whole blocks, the last in halves where it pays: n/2 steps and half the bytes a link.
# - The derivative of each is the other. Keep shards and gather again; autodiff of an unrolled ring
#   keeps every block.
# - Write `mode="auto"`, the default, and compile with `jaxpar.jit`.
#
# Next: [data parallelism](05_data_parallel.ipynb).
