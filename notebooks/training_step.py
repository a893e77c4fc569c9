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
# # A training step, from one device to FSDP and tensor parallelism
#
# A small transformer, its loss and its gradients, five times over:
#
# 1. one device
# 2. data parallel: each device has a share of the batch
# 3. FSDP: each device also has only a share of the weights
# 4. tensor parallel: each device computes a share of every layer
# 5. FSDP and tensor parallel at once
# 6. gradients inside and outside `shard_map`
# 7. training
#
# Every form is compared with the first one. For each we count what a device sends and what it
# keeps. Everything runs on eight CPU devices in one process, so **nothing below is a measurement of
# speed**; counts and bytes are those of any machine.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
from functools import partial

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import make_mesh
from jaxpar.layers import (
    column_parallel_linear,
    fsdp_gather,
    fsdp_linear,
    fsdp_scan,
    gated_mlp,
    mean_loss,
    parallel_attention,
    rms_norm,
    row_parallel_linear,
    value_and_grad,
)
from jaxpar.testing import count_collectives, tolerance

assert jax.device_count() == 8

# %% [markdown]
# ## 1. One device
#
# Four blocks, each of attention and a gated MLP. The weights of all blocks are stacked, one array
# for each kind, so that `lax.scan` can run over them. The task is to predict vectors from vectors.
# (A vocabulary would add `vocabulary_parallel_embedding` and `vocabulary_parallel_cross_entropy`.)

# %%
BATCH, SEQUENCE, FEATURES, HIDDEN = 16, 16, 64, 192
HEADS, LAYERS = 8, 4

SHAPES = {
    "norm_1": (FEATURES,),
    "q": (FEATURES, FEATURES),
    "k": (FEATURES, FEATURES),
    "v": (FEATURES, FEATURES),
    "o": (FEATURES, FEATURES),
    "norm_2": (FEATURES,),
    "gate": (FEATURES, HIDDEN),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
}
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


params = {name: normal(LAYERS, *shape) / shape[0] ** 0.5 for name, shape in SHAPES.items()}
params |= {name: jnp.ones_like(params[name]) for name in ("norm_1", "norm_2")}
x, target = normal(BATCH, SEQUENCE, FEATURES), normal(BATCH, SEQUENCE, FEATURES)


# %% [markdown]
# The block takes the function that multiplies by a weight, so that we can exchange it later.


# %%
def attend(q, k, v):  # f32[b, s, heads, e] each
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def block(w, x, multiply=jnp.matmul):  # x: f32[b, s, d]
    y = rms_norm(x, w["norm_1"])
    q, k, v = (multiply(y, w[name]).reshape(*y.shape[:2], HEADS, -1) for name in "qkv")
    x = x + multiply(attend(q, k, v).reshape(y.shape), w["o"])
    y = rms_norm(x, w["norm_2"])
    hidden = jax.nn.silu(multiply(y, w["gate"])) * multiply(y, w["up"])
    return x + multiply(hidden, w["down"])


def scan(block, params, x):
    return lax.scan(lambda x, w: (block(w, x), None), x, params)[0]


def squared_error(y, target):
    """The sum of all errors, and how many there are."""
    return jnp.sum((y - target) ** 2), y.size


@jax.jit
@jax.value_and_grad
def one_device(params, x, target):
    total, count = squared_error(scan(block, params, x), target)
    return total / count


expected = one_device(params, x, target)
print(f"loss {expected[0]:.4f}")

# %% [markdown]
# What follows must give this loss and these gradients, up to rounding: a sharded sum adds the same
# terms in another order. `tolerance` bounds the error of one float32 sum of so many terms; between
# the input and a gradient lie the forward and the backward of four blocks, hence the factor. It is
# relative to the largest entry of each gradient.

# %%
TOLERANCE = 2 * LAYERS * tolerance("float32", BATCH * SEQUENCE)


def largest_error(found, expected=expected):
    def error(got, want):
        return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(found), expected)))


print(f"tolerance {TOLERANCE:.1e}")

# %% [markdown]
# ## 2. Data parallel
#
# Each device has two of the sixteen sequences, and all weights. Inside `shard_map` a function sees
# its own share only, so it returns the *sum* of its losses and their number.
# `jaxpar.layers.value_and_grad` adds up both over the axes that it is told, divides, and sums the
# gradients over devices once:

# %%
mesh = make_mesh("dp=8")


def local_loss(params, x, target):  # x, target: f32[b/8, s, d]
    return squared_error(scan(block, params, x), target)


data_parallel = jaxpar.jit(
    jax.shard_map(
        value_and_grad(local_loss, "dp"),
        mesh=mesh,
        in_specs=(P(), P("dp"), P("dp")),
        out_specs=(P(), P()),
    )
)
assert largest_error(data_parallel(params, x, target)) < TOLERANCE

# %% [markdown]
# A sum and a count, rather than a mean: devices may have different numbers of tokens that count,
# and a mean of means would be wrong then. It also makes microbatches easy: the gradients of any
# number of them are added up on each device, and summed over devices once.


# %%
def in_parts(microbatches):
    step = value_and_grad(local_loss, "dp", microbatches=microbatches)
    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": (P(), P())}
    return jaxpar.jit(jax.shard_map(step, mesh=mesh, **specs))


assert largest_error(in_parts(2)(params, x, target)) < TOLERANCE
for parts in (1, 2):
    counts = count_collectives(in_parts(parts), params, x, target, grad=False)
    print(f"{parts} microbatches: {dict(counts.forward)}")
    assert counts.forward == {"psum": len(params) + 2}  # the gradients, the loss, the number

# %% [markdown]
# The next forms differ in four things only: the mesh, where weights and data lie on it, and the
# local loss. So let us write the rest once: the step, its comparison with one device, and a line of
# a table. `count_collectives` reads the program, forward and backward, and runs nothing. *Kept* is
# what the forward leaves for the backward on each device, shards of the weights among it.

# %%
table, steps = {}, {}


def make_step(axes, specs, data, local_loss):
    """The loss and its gradients as a function of global arrays."""
    mesh = make_mesh(axes)
    step = value_and_grad(local_loss, mesh.axis_names)
    every = {"in_specs": (specs, data, data), "out_specs": (P(), specs)}
    return jaxpar.jit(jax.shard_map(step, mesh=mesh, **every))


def make_loss(axes, specs, data, local_loss, check_vma=True):
    """The loss alone, to be differentiated from outside."""
    mesh = make_mesh(axes)
    every = {"in_specs": (specs, data, data), "out_specs": P(), "check_vma": check_vma}

    def mean(params, x, target):
        return mean_loss(*local_loss(params, x, target), mesh.axis_names)

    return jax.shard_map(mean, mesh=mesh, **every)


def shardings(axes, specs):
    return {name: NamedSharding(make_mesh(axes), spec) for name, spec in specs.items()}


def block_bytes(axes, specs):
    """The bytes of all weights on one device."""
    shards = shardings(axes, specs)
    return sum(4 * np.prod(shards[name].shard_shape(w.shape)) for name, w in params.items())


def count(name, *form):
    loss = make_loss(*form)
    counts = count_collectives(lambda params: loss(params, x, target), params)
    table[name] = counts, block_bytes(*form[:2])
    print(f"forward  {dict(counts.forward)}\nbackward {dict(counts.backward)}")
    return counts


def check(name, *form):
    axes, specs, *_ = form
    placed = jax.device_put(params, shardings(axes, specs))
    steps[name] = make_step(*form), placed
    error = largest_error(steps[name][0](placed, x, target))
    print(f"largest error {error:.1e}")
    assert error < TOLERANCE
    return count(name, *form)


def show_table():
    print(f"{'KiB on each device':>24} weights  sent forward  sent backward  kept")
    for name, (counts, weights) in table.items():
        numbers = weights, counts.forward_bytes, counts.backward_bytes, counts.residual_bytes
        weights, forward, backward, kept = (number / 1024 for number in numbers)
        print(f"{name:>24} {weights:7.0f} {forward:13.0f} {backward:14.0f} {kept:5.0f}")


REPLICATED = dict.fromkeys(SHAPES, P())
WEIGHTS = sum(w.nbytes for w in params.values())

counts = count("data parallel", "dp=8", REPLICATED, P("dp"), local_loss)
SCALARS = counts.forward_bytes  # the sum of the loss and the number of its terms
assert counts.backward["psum"] == len(params) * LAYERS
assert counts.backward_bytes == 2 * 7 / 8 * WEIGHTS

# %% [markdown]
# These are the counts of `jax.grad` *outside* `shard_map`, which needs no `value_and_grad`: JAX
# sums the gradients of replicated weights by itself. But it does so layer by layer, and would do so
# in each microbatch. The bytes are the same: a sum over eight devices sends 2 x 7/8 of its operand.
#
# ## 3. FSDP
#
# Every device holds all weights, all their gradients and all of the optimizer's state. *Fully
# sharded* data parallelism cuts each weight into eight and puts it together where it is used. The
# gradient goes the other way: summed and scattered, an eighth to each device. Let us cut rows.
# The two norms are so small that they stay whole.

# %%
# P(None, ...): the first dimension is that of the layers.
BY_ROWS = {name: P(None, "fsdp") for name in SHAPES} | {"norm_1": P(), "norm_2": P()}
FSDP = "fsdp=8", BY_ROWS, P("fsdp")  # the batch is sharded over the same axis

fsdp_multiply = partial(fsdp_linear, axis="fsdp")  # x @ w, the rows of w sharded


def linear_loss(params, x, target):
    return squared_error(scan(partial(block, multiply=fsdp_multiply), params, x), target)


MATRICES = [name for name in SHAPES if name not in ("norm_1", "norm_2")]

counts = check("fsdp_linear", *FSDP, linear_loss)
assert counts.forward["all_gather"] == len(MATRICES) * LAYERS
assert counts.backward["all_gather"] == counts.backward["psum_scatter"] == len(MATRICES) * LAYERS

# %% [markdown]
# `fsdp_linear` replaces a matmul. It gathers its weight a second time in the backward pass, and so
# keeps the shard alone. On TPU the blocks of a weight travel while others are multiplied (`mode`
# says how; on CPU it is a plain all-gather).
#
# `fsdp_scan` replaces the scan. It gathers all weights of the *next* layer while one computes,
# forward and backward, and the block needs no change at all: it gets whole weights.

# %%
AXIS = dict.fromkeys(SHAPES, 0) | {"norm_1": None, "norm_2": None}  # of one layer's weight


def scan_loss(params, x, target):
    return squared_error(fsdp_scan(block, params, x, "fsdp", dim=AXIS), target)


counts = check("fsdp_scan", *FSDP, scan_loss)
MATRIX_BYTES = sum(params[name].nbytes for name in MATRICES)
assert counts.forward_bytes == 7 / 8 * MATRIX_BYTES + SCALARS


# %% [markdown]
# What happens without either? Gather by hand, and autodiff keeps every weight that was gathered:


# %%
def gather_loss(params, x, target):
    def gathered(w, x):
        return block(fsdp_gather(w, "fsdp", dim=AXIS), x)

    return squared_error(scan(gathered, params, x), target)


count("gathered by hand", *FSDP, gather_loss)
show_table()

kept = {name: counts.residual_bytes for name, (counts, _) in table.items()}
assert kept["gathered by hand"] > kept["fsdp_linear"] > kept["fsdp_scan"]
assert kept["gathered by hand"] - kept["fsdp_linear"] > 0.8 * WEIGHTS

# %% [markdown]
# Between steps the last three store an eighth of the weights each. During a step the last one keeps
# all of them after all, like data parallelism. `fsdp_linear` keeps the activations that its
# backward needs; `fsdp_scan` keeps the input of each block and computes the block once more. The
# price of gathering twice: FSDP sends 3 x 7/8 of the weights in a step, data parallelism 2 x 7/8.
#
# ## 4. Tensor parallel
#
# FSDP cuts the storage; every device still multiplies by all weights, and needs a sequence of its
# own at least. Tensor parallelism cuts the *computation*: a device has its own attention heads and
# its own hidden features, and activations travel instead of weights.
#
# A weight cut by columns takes the whole input and makes a share of the output; the next one, cut
# by rows, takes that share and makes a summand of the whole. Between such pairs activations are
# sharded along the sequence, also for the norms: a gather before the columns, a reduce-scatter
# after the rows, each overlapped with its matmul on TPU.


# %%
def mlp(w, y):  # y: f32[b, s/8, d]
    gate, up = column_parallel_linear(y, (w["gate"], w["up"]), "tp")  # f32[b, s, hidden/8] each
    return row_parallel_linear(jax.nn.silu(gate) * up, w["down"], "tp")  # f32[b, s/8, d]


def tensor_block(w, x, mlp=mlp):  # x: f32[b, s/8, d]
    y = rms_norm(x, w["norm_1"])
    weights = (w[name] for name in "qkvo")
    x = x + parallel_attention(y, *weights, "tp", attend, heads=HEADS, kv_heads=HEADS)
    return x + mlp(w, rms_norm(x, w["norm_2"]))


def tensor_loss(params, x, target):
    return squared_error(scan(tensor_block, params, x), target)


BY_COLUMNS = dict.fromkeys(SHAPES, P(None, None, "tp")) | {
    "norm_1": P(),
    "norm_2": P(),
    "o": P(None, "tp"),
    "down": P(None, "tp"),
}
counts = check("tensor parallel", "tp=8", BY_COLUMNS, P(None, "tp"), tensor_loss)
assert counts.forward["all_gather"] == counts.forward["psum_scatter"] == 2 * LAYERS
assert counts.forward_bytes == 4 * LAYERS * 7 / 8 * x.nbytes + SCALARS

# %% [markdown]
# Two gathers and two scatters a block: query, key and value share a gather, and so do gate and up.
# `parallel_attention` hands `attend` whole sequences of some heads, here one. Heads need not divide
# among devices, and several query heads may share a key and value head; `head_layout` says what
# each device gets.
#
# All devices work on all sixteen sequences; between the pairs each has two positions of every one.
# So each has its own share of the loss, and `tp` is among the axes that `value_and_grad` is told.
#
# ## 5. FSDP and tensor parallel
#
# Now both, on a mesh of 2 x 4. Four devices share the computation of a layer; the two groups of
# four have half of the batch each, and half of every shard. `fsdp_scan` gathers the halves, so that
# the block stays as it is: it sees the weights that it would see on four devices. In place of our
# `mlp` it gets `gated_mlp`, which is the same in one call.


# %%
def both_loss(params, x, target):  # x, target: f32[b/2, s/4, d]
    def mlp(w, y):
        return gated_mlp(y, w["gate"], w["up"], w["down"], "tp")

    sharded = AXIS | {"o": 1, "down": 1}  # the dimension that tp leaves
    y = fsdp_scan(partial(tensor_block, mlp=mlp), params, x, "fsdp", dim=sharded)
    return squared_error(y, target)


ON_BOTH = dict.fromkeys(SHAPES, P(None, "fsdp", "tp")) | {
    "norm_1": P(),
    "norm_2": P(),
    "o": P(None, "tp", "fsdp"),
    "down": P(None, "tp", "fsdp"),
}
BOTH = "fsdp=2,tp=4", ON_BOTH, P("fsdp", "tp"), both_loss
counts = check("FSDP + tensor parallel", *BOTH)
show_table()

activations = 4 * LAYERS * 3 / 4 * x.nbytes / 2  # over tp, half of the batch
weights = 1 / 2 * MATRIX_BYTES / 4  # over fsdp, what one device of four computes with
assert counts.forward_bytes == activations + weights + SCALARS

# %% [markdown]
# Weights and activations both travel, but less of each. Which form sends least depends on sizes:
# FSDP sends weights, however large the batch; tensor parallelism sends activations, however
# wide the hidden layer. Without a stack of layers to scan over, the layers can gather the weights
# themselves: `gated_mlp(..., "tp", fsdp_axis="fsdp")`, and likewise the others.
#
# This is where the rows and columns of one layer's `up` lie. The numbers are those of the devices
# that hold a block.

# %%
PALETTE = plt.get_cmap("Set2").colors


def draw(panel, title, axes, spec):
    shape = SHAPES["up"]
    sharding = NamedSharding(make_mesh(axes), P(*spec[1:]))  # without the dimension of the layers
    holders = {}
    for device, place in sharding.devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(place, shape, strict=True))
        holders.setdefault(bounds, []).append(device.id)
    for (rows, columns), devices in holders.items():
        (top, bottom), (left, right) = rows, columns
        corner, size = (left, top), (right - left, bottom - top)
        panel.add_patch(plt.Rectangle(corner, *size, fc=PALETTE[min(devices)], ec="white"))
        text = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else str(devices[0])
        panel.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", size=8)
    panel.set(xlim=(0, shape[1]), ylim=(shape[0], 0), title=f"{title}\n{sharding.spec}")
    panel.set(xlabel="hidden", xticks=(0, shape[1]), yticks=(0, shape[0]))
    panel.title.set_size(9)
    panel.spines[:].set_visible(False)
    return holders


figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.2), sharey=True)
draw(panels[0], "data parallel", "dp=8", REPLICATED["up"])
draw(panels[1], "FSDP", "fsdp=8", BY_ROWS["up"])
draw(panels[2], "tensor parallel", "tp=8", BY_COLUMNS["up"])
holders = draw(panels[3], "FSDP + tensor parallel", "fsdp=2,tp=4", ON_BOTH["up"])
panels[0].set_ylabel("features")
figure.tight_layout()
plt.show()

assert len(holders) == 8
assert all(len(devices) == 1 for devices in holders.values())

# %% [markdown]
# ## 6. Gradients inside and outside `shard_map`
#
# There are two places to differentiate, and two settings of `check_vma`, which keeps track of the
# axes over which each value varies. Here are three ways that one might try:
#
# - `jax.grad` outside: of the mean loss as a function of global arrays
# - `jax.grad` inside: of the same mean loss, by each device
# - `value_and_grad` inside: of the local sum, by each device. It needs the weights' specs where
#   types do not say what is replicated.
#
# The example is one MLP, with weights on both axes and a replicated norm. There are no layers to
# scan over, so the MLP gathers its weights over `fsdp` itself; all layers here can do so.

# %%
LAYER = {name: params[name][0] for name in ("norm_2", "gate", "up", "down")}
AXES = ("fsdp", "tp")
mesh = make_mesh("fsdp=2,tp=4")
specs = {name: P(*ON_BOTH[name][1:]) for name in LAYER}  # without the dimension of the layers
PLACES = {"mesh": mesh, "in_specs": (specs, P(*AXES), P(*AXES))}


def mlp_loss(w, x, target):
    weights = w["gate"], w["up"], w["down"]
    over = {"fsdp_axis": "fsdp", "fsdp_dim": (0, 1)}
    return squared_error(gated_mlp(rms_norm(x, w["norm_2"]), *weights, "tp", **over), target)


def mean_mlp_loss(w, x, target):
    return mean_loss(*mlp_loss(w, x, target), AXES)


def outside(check_vma):
    loss = jax.shard_map(mean_mlp_loss, **PLACES, out_specs=P(), check_vma=check_vma)
    return jax.value_and_grad(loss)


def inside(check_vma, step):
    return jax.shard_map(step, **PLACES, out_specs=(P(), specs), check_vma=check_vma)


def one_device_mlp(w, x, target):
    y = rms_norm(x, w["norm_2"])
    hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
    return jnp.mean((hidden @ w["down"] - target) ** 2)


wanted = jax.value_and_grad(one_device_mlp)(LAYER, x, target)
found, wrong = {}, []
for check_vma in (True, False):
    ways = {
        "jax.grad outside": outside(check_vma),
        "jax.grad inside": inside(check_vma, jax.value_and_grad(mean_mlp_loss)),
        "value_and_grad inside": inside(check_vma, value_and_grad(mlp_loss, AXES, specs=specs)),
    }
    for name, step in ways.items():
        found[name, check_vma] = jaxpar.jit(step)(LAYER, x, target)
        error = largest_error(found[name, check_vma], wanted)
        print(f"check_vma={check_vma!s:5} {name:>21}: largest error {error:.1e}")
        if error > TOLERANCE:
            wrong.append((name, check_vma))

assert wrong == [("jax.grad inside", False)]
_, grads = found["jax.grad inside", False]
eight_times = 8 * wanted[1]["up"]
atol = TOLERANCE * jnp.max(jnp.abs(eight_times))
np.testing.assert_allclose(grads["up"], eight_times, rtol=0, atol=atol)

# %% [markdown]
# One line is wrong, and nothing says so but the comparison. Without `check_vma` JAX cannot know
# that the loss is one value and not eight: every device asks for the gradient of its own copy, so
# that gradients of sharded weights are eight times too large, and those of replicated weights are
# not even summed. So the contract is:
#
# - outside: `jax.grad` is right, whatever `check_vma` is
# - inside: `value_and_grad` is right, whatever `check_vma` is, and reduces once
# - inside with `jax.grad`: only with `check_vma=True`, which is the default
#
# ## 7. Training
#
# The step ends with an update. It is elementwise, so that it runs on shards as it is and sends
# nothing; the same holds for Adam, whose state is sharded as the weights are. (Clipping by the norm
# of all gradients is not elementwise: `jaxpar.layers.global_norm`.)


# %%
@jax.jit
def update(params, grads):
    return jax.tree.map(lambda w, g: w - 0.3 * g, params, grads)


def train(step, params):
    losses = []
    for _ in range(10):
        loss, grads = step(params, x, target)
        losses.append(float(loss))
        params = update(params, grads)
    return losses, params


expected_losses, _ = train(one_device, params)


figure, panel = plt.subplots(figsize=(5.2, 2.6))
panel.plot(expected_losses, label="one device", lw=9, color=PALETTE[0])
for place, (name, (step, placed)) in enumerate(steps.items(), start=1):
    losses, trained = train(step, placed)
    panel.plot(losses, label=name, lw=9 - 1.8 * place, color=PALETTE[place])
    np.testing.assert_allclose(losses, expected_losses, rtol=10 * TOLERANCE)  # ten steps
panel.set(xlabel="step", ylabel="loss")
panel.legend(frameon=False, fontsize=8)
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

print([f"{loss:.3f}" for loss in losses])
assert trained["up"].addressable_shards[0].data.shape == (LAYERS, FEATURES // 2, HIDDEN // 4)

# %% [markdown]
# ## In short
#
# - Write the local loss as a sum and a count; `value_and_grad` does the rest inside `shard_map`.
# - FSDP: `fsdp_linear` for a matmul, `fsdp_scan` for a stack of layers. Shards are kept, weights
#   are gathered twice.
# - Tensor parallel: columns, then rows, the sequence sharded in between.
# - Both: the tensor-parallel block inside `fsdp_scan`, and specs with both axes.
# - Compare each form with one device, loss and all gradients, with a tolerance that you can derive.
