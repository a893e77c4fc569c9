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
# A matmul after an all-gather waits for the full transfer. This notebook rewrites both so that the
# transfer can overlap with the arithmetic:
#
# 1. gather, then multiply
# 2. the ring in one direction
# 3. the ring in both directions
# 4. the mirror image: multiply, then reduce-scatter
# 5. gradients, and the values saved for them
# 6. predicted timelines
#
# Everything runs on eight CPU devices in one process, which share a few cores. **Nothing overlaps
# here, and nothing below measures speed** ([notebook 15](15_processes.ipynb) measures, with several
# processes). CPUs show the program that they run: its transfers, their bytes and order, and its
# memory.

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
# This is the first matmul of an MLP whose weights are sharded ("tensor-parallel"). The activations
# `x` are sharded by rows and the weight `w` by columns. Both are sharded over the mesh axis `tp`.
# Each device needs *all* rows for *its* columns.

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
    """Shards rows of x, columns of w and columns of the result over tp."""
    program = jax.shard_map(
        fn, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    )
    return jax.jit(program)


np.testing.assert_allclose(by_columns(naive)(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# For XLA's own collectives `count_collectives` assumes the best ring algorithm. Section 5 explains
# residuals.

# %%
X_BLOCK = x.nbytes // 8  # one device's rows of x
W_BLOCK = w.nbytes // 8  # one device's columns of w

counts = count_collectives(by_columns(naive), x, w)
print(counts)
assert counts.forward == {"all_gather": 1}
assert counts.forward_bytes == 7 * X_BLOCK

# %% [markdown]
# `marks_and_bytes` shows the *order* of a program. It walks over the jaxpr and returns one mark per
# operation: `G` an all-gather, `S` a reduce-scatter, `#` a matmul. `>` is a send to the next
# device, `<` to the previous one. It also returns the bytes sent in each direction.


# %%
MARKS = {"all_gather": "G", "reduce_scatter": "S", "dot_general": "#"}


def marks_and_bytes(fn, *args):
    marks, sent = [], Counter()

    def read(jaxpr):
        for operation in jaxpr.eqns:
            name = operation.primitive.name
            if name == "ppermute":
                source, target = operation.params["perm"][0]
                direction = ">" if (target - source) % 8 == 1 else "<"
                marks.append(direction)
                for block in operation.invars:
                    sent[direction] += block.aval.size * block.aval.dtype.itemsize
            elif name in MARKS:
                marks.append(MARKS[name])
            for value in operation.params.values():  # the body of a jit or shard_map
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    read(inner)

    read(jax.make_jaxpr(fn)(*args).jaxpr)
    return " ".join(marks), dict(sent)


marks, _ = marks_and_bytes(by_columns(naive), x, w)
print(marks)
assert marks == "G #"

# %% [markdown]
# `G #`: the matmul needs all of its operand, so it waits for the last byte. The gathered `x` also
# takes eight times the memory of the shard:

# %%
BIG = (jax.ShapeDtypeStruct((2048, 2048), jnp.float32),) * 2  # compiled, never run
MIB = 2**20


def temporary_mib(fn, *args):
    """Returns the memory per device for values that are neither arguments nor results."""
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes / MIB


memory = {"naive": temporary_mib(by_columns(naive), *BIG)}
print(f"naive: {memory['naive']:.1f} MiB; the shard of x: {2048 * 2048 * 4 / 8 / MIB:.0f} MiB")
assert memory["naive"] >= 16  # the full x, on every device

# %% [markdown]
# ## 2. The ring in one direction
#
# The matmul does not need all of `x` at once. Rows of the result depend only on the same rows of
# `x`:
#
# $$y = \begin{pmatrix} x_0 \\ \vdots \\ x_7 \end{pmatrix} w
#     = \begin{pmatrix} x_0 w \\ \vdots \\ x_7 w \end{pmatrix}$$
#
# So a device can multiply one block while the next block travels around a ring ([notebook
# 3](03_ring_shift.ipynb)). In step `s` device `i` has block `(i - s) % 8`. A wrong formula still
# gives the right shapes, so a ring [needs tests](16_testing.ipynb).


# %%
def hand_ring(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    i, rows = lax.axis_index("tp"), x.shape[0]
    y = jnp.zeros((8 * rows, w.shape[1]))  # y: f32[m, n/8]
    y = lax.pcast(y, "tp", to="varying")  # each device will fill it differently
    for s in range(8):
        if s < 7:
            coming = jaxpar.ring_shift(x, "tp")  # this transfer can overlap ...
        part = x @ w  # ... with this matmul: f32[m/8, n/8]
        y = lax.dynamic_update_slice_in_dim(y, part, (i - s) % 8 * rows, 0)
        x = coming
    return y


np.testing.assert_allclose(by_columns(hand_ring)(x, w), x @ w, rtol=1e-4, atol=1e-4)

marks, sent = marks_and_bytes(by_columns(hand_ring), x, w)
print(marks)
print("bytes sent:", sent)
assert marks == "> # > # > # > # > # > # > # #"
assert sent == {">": 7 * X_BLOCK}  # exactly the all-gather's bytes

# %% [markdown]
# A send and the next matmul both read the current block. Neither depends on the other, so they
# *can* overlap. But the compiler follows dependencies, not the order of your lines. XLA for TPU has
# sent several blocks before the first matmul. XLA for GPU has merged the small matmuls into large
# ones. A barrier keeps a step together:
#
# ```python
# coming, part = lax.optimization_barrier((coming, part))
# ```
#
# Whatever uses one result waits for both. jaxpar's rings have such a barrier in every step. On TPU
# and GPU, use them in `jaxpar.jit`: `jax.jit` with the compiler options that let the chip send and
# compute at the same time.
#
# From here on we use `jaxpar.all_gather_matmul`. Its `mode` chooses the algorithm. The default
# `"auto"` predicts each algorithm's time on the target chip, and takes the fastest. On CPU it takes
# `"naive"`: gather, then multiply.


# %%
def with_mode(mode):
    return by_columns(lambda x, w: jaxpar.all_gather_matmul(x, w, "tp", mode=mode))


found = {}
for mode in ("naive", "unidirectional", "auto"):
    found[mode] = marks_and_bytes(with_mode(mode), x, w)
    print(f"{mode:>14}: {found[mode][0]}")

assert found["unidirectional"] == marks_and_bytes(by_columns(hand_ring), x, w)
assert found["auto"] == found["naive"]

# %% [markdown]
# Two variants are common:
#
# - Several weights share one gather, for example query, key and value.
# - With fully sharded weights (FSDP, [notebook 6](06_fsdp.ipynb)) the *weight* is gathered. Below,
#   it is sharded along the contracted dimension. Each weight block multiplies a column slice of
#   `x`, and the products are accumulated.


# %%
def qkv(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    return jaxpar.all_gather_matmul(x, (w, w, w), "tp", mode="unidirectional")


def fsdp(x, w):  # x: f32[m/8, k], w: f32[k/8, n]; gathers w ("rhs") along k
    return jaxpar.all_gather_matmul(x, w, "tp", gather="rhs", dim=0, mode="unidirectional")


marks, sent = marks_and_bytes(by_columns(qkv), x, w)
print(f"qkv:  {marks}, bytes sent: {sent}")
assert sent == {">": 7 * X_BLOCK}  # once, not three times

fsdp = jax.jit(jax.shard_map(fsdp, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P("tp")))
marks, sent = marks_and_bytes(fsdp, x, w)
print(f"fsdp: {marks}, bytes sent: {sent}")
assert sent == {">": 7 * W_BLOCK}
np.testing.assert_allclose(fsdp(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## 3. The ring in both directions
#
# On TPU every link carries traffic in both directions at once. The ring in one direction leaves
# half of that capacity idle. With both directions, a device receives two blocks a step.
#
# A device receives seven blocks, an odd number. After three steps it has received six and misses
# only the opposite one, `i + 4`. This block is equally far in both directions. On CPU it is cut in
# two, and one half arrives from each side. Each direction then carries exactly three and a half
# blocks. On TPU it is cut only if matmuls cannot hide its transfer.


# %%
def numbers_received(offset):
    """Sends each device's number `offset` devices on; returns the number that each one receives."""

    def local(number):  # number: i32[1]
        return jaxpar.ring_shift(number, "tp", offset)

    shift = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
    return np.asarray(shift(jnp.arange(8)))


for step in range(8):
    assert numbers_received(step).tolist() == [(i - step) % 8 for i in range(8)]

rows = [[numbers_received(0)]]  # step 0: the local block
for step in (1, 2, 3, 4):
    rows.append([numbers_received(step), numbers_received(-step)])

opposite = [(i + 4) % 8 for i in range(8)]
assert numbers_received(4).tolist() == numbers_received(-4).tolist() == opposite

# %% jupyter={"source_hidden": true} tags=["drawing"]
PALETTE = plt.get_cmap("Set2").colors  # eight colours, one a block
heights = [1, 1, 1, 1, 0.5]  # of steps
tops = np.cumsum([0, *heights])
figure, panel = plt.subplots(figsize=(5.2, 2.43))
for row, top, height in zip(rows, tops, heights, strict=False):
    width = 1 / len(row)
    for part, numbers in enumerate(row):
        for device, number in enumerate(numbers):
            left, colour = device + part * width, PALETTE[number]
            panel.add_patch(plt.Rectangle((left, top), width, height, fc=colour, ec="white"))
            centre = (left + width / 2, top + height / 2)
            panel.text(*centre, number, ha="center", va="center", size=8)
panel.set(xlim=(0, 8), ylim=(tops[-1], 0), xlabel="device", ylabel="step")
panel.set_title("both directions: from the previous | from the next device")
panel.set_xticks(np.arange(8) + 0.5, range(8))
panel.set_yticks((tops[:-1] + tops[1:]) / 2, range(len(rows)))
panel.tick_params(length=0)
panel.spines[:].set_visible(False)
panel.vlines(range(1, 8), 0, tops[-1], color="white", lw=3)
figure.tight_layout()
plt.show()

# %% [markdown]
# In the last row both parts of a cell are halves of one block.

# %%
marks, sent = marks_and_bytes(with_mode("bidirectional"), x, w)
print(marks)
for direction, sent_bytes in sent.items():
    print(f"{direction} {sent_bytes / X_BLOCK} blocks")

assert marks == "> < # > < # # > < # # > < # # #"
assert sent == {">": 3.5 * X_BLOCK, "<": 3.5 * X_BLOCK}
np.testing.assert_allclose(with_mode("bidirectional")(x, w), x @ w, rtol=1e-4, atol=1e-4)

# %% [markdown]
# The ring still computes eight full matmuls of `f32[m/8, k] @ f32[k, n/8]`. Cutting every block in
# two would balance the links as well, but it needs sixteen matmuls of half the size, which can be
# slower. A ring of odd size has no opposite block and no halves.
#
# The next picture is a *model*. A matmul takes 1, and a block takes 1.5 over one direction of a
# link. A step lasts as long as the longer of its computation and its transfer. The all-gather of
# the first row uses both directions, too.

# %%
MATMUL, TRANSFER = 1.0, 1.5
# Each step: (blocks per direction sent during it, matmuls done during it).
schedules = {
    "gather, then multiply": [(3.5, 0), (0, 8)],
    "one direction": [(1, 1)] * 7 + [(0, 1)],
    "both directions": [(1, 1), (1, 2), (1, 2), (0.5, 2), (0, 1)],
}
totals = {}
for name, steps in schedules.items():
    totals[name] = sum(max(blocks * TRANSFER, matmuls * MATMUL) for blocks, matmuls in steps)
print(totals)
assert totals == {"gather, then multiply": 13.25, "one direction": 11.5, "both directions": 8.5}

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(7, 2.2))
for place, steps in enumerate(schedules.values()):
    time = 0.0
    for blocks, matmuls in steps:
        if blocks:
            panel.barh(place - 0.17, blocks * TRANSFER, 0.3, time, color=PALETTE[1], ec="white")
        for one in range(matmuls):
            panel.barh(place + 0.17, MATMUL, 0.3, time + one * MATMUL, color=PALETTE[2], ec="white")
        time += max(blocks * TRANSFER, matmuls * MATMUL)
    panel.text(time + 0.1, place, f"{time:g}", va="center")
panel.set_yticks(range(3), schedules)
panel.set(xlim=(0, 14.5), ylim=(2.5, -0.5), xlabel="time (model)")
panel.spines[["top", "right"]].set_visible(False)
bars = [plt.Rectangle((0, 0), 1, 1, color=PALETTE[part]) for part in (1, 2)]
figure.legend(bars, ["links", "matmuls"], ncols=2, frameon=False, loc="upper right")
figure.tight_layout(rect=(0, 0, 1, 0.92))
plt.show()

# %% [markdown]
# The arithmetic alone takes 8. If a block's transfer took at most 1, one direction would also take
# 8. On GPUs behind a switch (NVLink) the second direction gains nothing, because one direction
# already uses the full bandwidth of the port.
#
# In the forward pass no ring holds the full `x`:

# %% tags=["varies"]
memory["hand-written ring"] = temporary_mib(by_columns(hand_ring), *BIG)
memory["one direction"] = temporary_mib(with_mode("unidirectional"), *BIG)
memory["both directions"] = temporary_mib(with_mode("bidirectional"), *BIG)
for name, mib in memory.items():
    print(f"{name:>18}: {mib:4.1f} MiB")

assert memory["one direction"] < memory["naive"] / 2
assert memory["both directions"] < memory["naive"] / 2

# %% [markdown]
# ## 4. The mirror image: multiply, then reduce-scatter
#
# The second matmul of the MLP contracts over the sharded dimension. Every device has a partial sum
# of the *full* result and needs the total of its own rows. A `psum_scatter` after the matmul cannot
# send its first byte before the last product.


# %%
def naive_scatter(y, v):  # y: f32[m, n/8], v: f32[n/8, k]
    z = y @ v  # z: f32[m, k], a partial sum
    return lax.psum_scatter(z, "tp", tiled=True)  # f32[m/8, k], a sum


# %% [markdown]
# In the gather, blocks travel. In the scatter, partial sums travel towards their owner. While a sum
# travels to a device, the device computes the product to add. In step `s`, device `i` adds to the
# sum of device `(i - 1 - s) % 8`.


# %%
def hand_scatter(y, v):  # y: f32[m, n/8], v: f32[n/8, k]
    i, rows = lax.axis_index("tp"), y.shape[0] // 8

    def product(owner):  # f32[m/8, k]
        return lax.dynamic_slice_in_dim(y, owner * rows, rows) @ v

    total = product((i - 1) % 8)  # total: f32[m/8, k]
    for s in range(1, 8):
        coming = jaxpar.ring_shift(total, "tp")  # this transfer can overlap ...
        total = coming + product((i - 1 - s) % 8)  # ... with this product
    return total


def by_rows(fn):
    """Shards columns of y, rows of v and rows of the result over tp."""
    program = jax.shard_map(fn, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
    return jax.jit(program)


def scatter_with(mode):
    return by_rows(lambda y, v: jaxpar.matmul_reduce_scatter(y, v, "tp", mode=mode))


y, v = x @ w, w.T  # y: f32[m, n], v: f32[n, k]
programs = {
    "naive": by_rows(naive_scatter),
    "hand-written": by_rows(hand_scatter),
    "one direction": scatter_with("unidirectional"),
    "both directions": scatter_with("bidirectional"),
}
for name, program in programs.items():
    marks, _ = marks_and_bytes(program, y, v)
    print(f"{name:>15}: {marks}")
    np.testing.assert_allclose(program(y, v), y @ v, rtol=1e-3, atol=1e-3)
    assert count_collectives(program, y, v).forward_bytes == 7 * (m // 8 * k * 4)

# %% [markdown]
# The library's scatter moves its sums by -1, because it is the gather in reverse. The ring in both
# directions starts with the opposite block and ends with the local block. On TPU every sum travels
# in two halves: one is added while the other travels.
#
# The barrier matters even more here. A compiler likes to fuse the addition into the matmul. The
# product then waits for the transfer that it should hide. jaxpar puts the barrier around `coming`
# and the product *before* it adds them.
#
# With bf16 operands jaxpar adds in f32 and sends bf16. Each hop rounds once. `wire_dtype="float32"`
# sends f32 instead, for twice the bytes.

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
    sent_bytes = count_collectives(program, *halved).forward_bytes
    wires[wire] = sent_bytes, error
    print(f"{wire:>8} sent: {sent_bytes} bytes, largest error {error:.4f} of the largest entry")

assert wires["float32"][0] == 2 * wires["bfloat16"][0]
assert wires["float32"][1] < wires["bfloat16"][1]

# %% [markdown]
# ## 5. Gradients, and the values saved for them
#
# Take $y = \mathrm{gather}(x)\,w$ and a cotangent $\bar y$. Every device used row block $x_j$, so
# its gradient is a sum over devices, which device $j$ needs. That is a reduce-scatter:
#
# $$\bar x = \mathrm{scatter}(\bar y\, w^{\top}), \qquad
#   \bar w = \mathrm{gather}(x)^{\top}\, \bar y .$$
#
# Both formulas are matmuls with a collective, so both can overlap. The second formula needs the
# *gathered* `x` again. Was it saved? A value that the forward pass saves for the backward pass is a
# **residual**.

# %%
rings = {
    "naive": by_columns(naive),
    "hand-written ring": by_columns(hand_ring),
    "one direction": with_mode("unidirectional"),
    "both directions": with_mode("bidirectional"),
}
saved = {}
for name, program in rings.items():
    counts = count_collectives(program, x, w)
    saved[name] = counts.residual_bytes
    print(f"{name}: forward {dict(counts.forward)}, backward {dict(counts.backward)},")
    print(f"    {saved[name] / X_BLOCK:.2f} blocks of x saved for the backward pass")

assert saved["naive"] == 8 * X_BLOCK + W_BLOCK  # the gathered x
assert 8 * X_BLOCK < saved["hand-written ring"] < 10 * X_BLOCK  # every received block
assert saved["one direction"] == saved["both directions"] == X_BLOCK + W_BLOCK  # two shards

# %% [markdown]
# Autodiff saves the gathered `x`, or in the hand-written ring each of the eight matmuls' operands.
# The hand-written forward pass alone needs only two blocks at a time.
#
# Instead, save only the shard, and gather again in the backward pass, during a matmul. The two
# formulas above become a `custom_vjp`:


# %%
@jax.custom_vjp
def gather_matmul(x, w):  # x: f32[m/8, k], w: f32[k, n/8]
    return jaxpar.all_gather_matmul(x, w, "tp", mode="unidirectional")  # f32[m, n/8]


def forward(x, w):
    return gather_matmul(x, w), (x, w)  # the shards, and nothing else


def backward(residuals, dy):  # dy: f32[m, n/8]
    x, w = residuals
    dx = jaxpar.matmul_reduce_scatter(dy, w.T, "tp", mode="unidirectional")  # f32[m/8, k]
    # Gathers x along m, and contracts it with dy.
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
# `all_gather_matmul` does this inside. In one direction its backward pass has 14 sends, and that of
# the hand-written ring has 7. In exchange it stores about seven blocks fewer for each *layer*.
#
# The derivative of a scatter is cheaper. Its cotangent is sharded, so *one* gather of the cotangent
# feeds the gradients of both operands.

# %%
counts = count_collectives(scatter_with("unidirectional"), y, v)
print(counts)
assert counts.forward == counts.backward == {"ppermute": 7}
assert counts.residual_bytes == (y.nbytes + v.nbytes) // 8

# %% [markdown]
# ## 6. Predicted timelines
#
# The TPU compiler runs on any machine (`pip install 'jax[tpu]'`). `compile_for` compiles for chips
# that this machine does not have. `timeline` simulates the compiler's order of instructions on a
# model of the chip. The times are predicted, not measured.
#
# The example is one projection of a large model in bfloat16 on eight v5p chips. "Exposed" time is
# time in which the chip only waits.

# %% tags=["varies"]
chips = target("v5p:2x2x2", "tp=8")
M, K, COLUMNS = 8192, 8192, 28672
operands = (
    jax.ShapeDtypeStruct((M, K), jnp.bfloat16, sharding=P("tp")),
    jax.ShapeDtypeStruct((K, COLUMNS), jnp.bfloat16, sharding=P(None, "tp")),
)


def predicted_timeline(mode):
    def local(x, w):  # x: bf16[m/8, k], w: bf16[k, n/8]
        return jaxpar.all_gather_matmul(x, w, "tp", mode=mode)

    program = jax.shard_map(local, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    return timeline(compile_for(program, chips, *operands))  # on the mesh of `chips`


lines = {}
for mode in ("naive", "unidirectional", "bidirectional"):
    lines[mode] = line = predicted_timeline(mode)
    print(f"{mode}: {1e3 * line.total:.2f} ms, {line.exposed / line.total:.0%} exposed")
assert lines["bidirectional"].exposed < lines["unidirectional"].exposed < lines["naive"].exposed
assert lines["bidirectional"].total < 0.8 * lines["naive"].total

# %% jupyter={"source_hidden": true} tags=["drawing", "varies"]
COLOURS = {"compute": "#0072B2", "transfer": "#E69F00", "wait": "#D0021B"}
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

# %% [markdown]
# In the terminal, `jaxpar predict --target v5p:2x2x2 --ops gather-lhs-rows --plot timeline.png`
# prints a table and draws all events ([schedules](14_schedules.ipynb)).
#
# ## In short
#
# - A gather feeds a matmul block by block, and a matmul feeds a scatter block by block. Send first,
#   multiply the current block, and put a barrier around both.
# - The ring in both directions needs n/2 steps and sends about half the bytes per direction.
# - Save shards and gather again: autodiff of an unrolled ring saves every block.
# - Use `mode="auto"`, the default, and compile with `jaxpar.jit`.
#
# Next: [data parallelism](05_data_parallel.ipynb).
