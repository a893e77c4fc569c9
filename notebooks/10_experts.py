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
# # 10. Experts, with and without dropping
#
# This notebook has the full layer in one call. With a limit, the layer drops choices:
#
# 1. the layer without dropping
# 2. a capacity: which tokens lose which expert
# 3. small buffers: the overflow is counted
# 4. balance by a loss and by a bias
# 5. chunks that hide a part of the exchange
#
# [The notebook before](09_expert_dispatch.ipynb) shows how tokens travel. Everything runs on eight
# CPU devices in one process. **Nothing below measures speed.** Lost tokens and results are the same
# on accelerators.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
from functools import cache

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import make_mesh
from jaxpar.layers import mean_loss
from jaxpar.moe import (
    Experts,
    RaggedDispatcher,
    expert_capacity,
    load_balance_loss,
    route,
    routed_moe_layer,
    update_router_bias,
)
from jaxpar.testing import count_collectives, tolerance

# %% [markdown]
# There are 64 tokens and 16 experts. Each token goes to the two experts with the best router
# scores. All tokens share a common vector, so the untrained router prefers some experts. The
# reference computes every expert for every token on one device.

# %%
DEVICES, TOKENS, EXPERTS, TOP_K = 8, 8, 16, 2  # TOKENS: per device
LOCAL = EXPERTS // DEVICES  # experts of each device
FEATURES, HIDDEN = 16, 32
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


x = normal(DEVICES * TOKENS, FEATURES) + 0.5 * normal(FEATURES)
router = normal(FEATURES, EXPERTS) / FEATURES**0.5
experts = Experts(
    up=normal(EXPERTS, FEATURES, HIDDEN) / FEATURES**0.5,
    gate=normal(EXPERTS, FEATURES, HIDDEN) / FEATURES**0.5,
    down=normal(EXPERTS, HIDDEN, FEATURES) / HIDDEN**0.5,
)
routing = jax.device_get(jax.jit(route, static_argnums=1)(x @ router, TOP_K))


@jax.jit
def on_one_device(x, router, experts, kept=True):
    """Computes the layer on one device; `kept` [64, 2] says which choices count."""
    routing = route(x @ router, TOP_K)
    weights = jnp.where(kept, routing.weights, 0)
    one_hot = jax.nn.one_hot(routing.experts, EXPERTS)
    weights = jnp.einsum("tk,tke->te", weights, one_hot)
    hidden = jnp.einsum("td,edf->etf", x, experts.up)
    hidden = hidden * jax.nn.silu(jnp.einsum("td,edf->etf", x, experts.gate))
    return jnp.einsum("te,etf,efd->td", weights, hidden, experts.down)


expected = on_one_device(x, router, experts)

# 6: a sharded layer reorders three sums, and three more in a derivative.
TOLERANCE = 6 * tolerance("float32", HIDDEN)


def assert_close(found, wanted):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        atol = TOLERANCE * np.max(np.abs(want))
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# %%
mesh = make_mesh("ep=8")


def sharded(fn, out_specs=P("ep")):  # noqa: B008
    """Shards tokens and experts over `ep`, and replicates the router."""
    in_specs = P("ep"), P(), P("ep")
    return jaxpar.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def numbers_that_arrive(capacity):
    """Sends the number of each token; returns what each device received in `capacity` rows."""

    def plan(x, router, experts):
        chosen = route(x @ router, TOP_K).experts  # int32[t, k]
        dispatcher = RaggedDispatcher.from_target_device_ids(chosen // LOCAL, axis="ep")
        number = lax.axis_index("ep") * TOKENS + jnp.arange(TOKENS, dtype="int32")
        arrived, valid = dispatcher.dispatch(number, capacity)  # [capacity] each
        lost = dispatcher.overflow(capacity)
        return dispatcher.send_sizes[None], arrived[None], valid[None], lost[None]

    return jax.device_get(sharded(plan)(x, router, experts))


# %% jupyter={"source_hidden": true} tags=["drawing"]
PALETTE = plt.get_cmap("Set2").colors
CELL = {"ha": "center", "va": "center"}


def draw_cell(panel, column, row, text="", **style):
    style = {"ec": "white", "lw": 0.6} | style
    panel.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, **style))
    panel.text(column, row, text, size=6.5, **CELL)


def draw_buffers(panel, arrived, valid, title):
    rows = arrived.shape[1]
    for (device, row), number in np.ndenumerate(arrived):
        if valid[device, row]:
            draw_cell(panel, device, row, number, fc=PALETTE[number // TOKENS])
        else:
            draw_cell(panel, device, row, fc="white", ec="lightgrey", hatch="////")
    panel.set(xlim=(-0.5, 7.5), ylim=(rows - 0.5, -0.5), xticks=range(8), xlabel="device")
    panel.set(ylabel="row")
    panel.set_title(title, size=9)
    panel.spines[:].set_visible(False)


# %% [markdown]
# ## 1. The layer without dropping
#
# `moe_layer` dispatches, computes, combines and returns statistics. It takes the routing of any
# router. `routed_moe_layer` takes a router matrix and routes first. By default the buffers fit the
# worst case, and no token is dropped. Results and all gradients equal those of one device.


# %%
@cache  # compiled once for the same options
def layer(**options):
    def local(x, router, experts):
        return routed_moe_layer(x, router, experts, axis="ep", top_k=TOP_K, **options)

    return sharded(local, out_specs=(P("ep"), P()))


target = normal(*x.shape)


def sharded_loss(x, router, experts):
    y, _ = layer()(x, router, experts)
    return jnp.sum((y - target) ** 2)


def loss_on_one_device(x, router, experts):
    return jnp.sum((on_one_device(x, router, experts) - target) ** 2)


found, dropless = layer()(x, router, experts)
assert_close(found, expected)
grads = jaxpar.jit(jax.grad(sharded_loss, argnums=(0, 1, 2)))(x, router, experts)
assert_close(grads, jax.grad(loss_on_one_device, argnums=(0, 1, 2))(x, router, experts))

print("tokens of each expert:", dropless.tokens_per_expert)
print("dropped:", dropless.dropped, "overflow:", dropless.overflow)

# %% [markdown]
# `dispatch` chooses the algorithm that brings tokens to experts. `"auto"`, the default, decides
# when the program is traced, from shapes alone. It takes the algorithm that it predicts to be
# faster: the all-gather if a token goes to nearly all devices, else usually the ragged exchange.
# Both give the same result.

# %%
for dispatch in ("auto", "all_gather"):
    program = layer(dispatch=dispatch)
    assert_close(program(x, router, experts)[0], expected)
    counts = count_collectives(program, x, router, experts, platform="tpu", grad=False)
    print(f"{dispatch:>10}: {dict(counts.forward)}")

# %% [markdown]
# These are the collectives on TPU. CPU devices use dense all-to-alls instead of the ragged ones.
# The all-gather of `auto` is the plan, and the psums belong to the statistics.
#
# ## 2. The layer with a capacity
#
# With `capacity_factor` an expert accepts a fixed number of tokens from each device: the factor
# times an even share, rounded up. A rejected token keeps the output of its other expert, unless
# that rejects it too. `capacity_policy` chooses which tokens stay: `"probability"` those with the
# largest weights, `"position"` the first ones. (`"choice"` keeps first choices before second ones.)
#
# The same rule in NumPy:


# %%
def kept_by_rule(capacity, policy):
    chosen, weights = routing.experts, routing.weights
    kept = np.zeros(chosen.shape, bool)
    for device in range(DEVICES):
        here = np.arange(len(chosen)) // TOKENS == device
        for expert in range(EXPERTS):
            pairs = np.argwhere(here[:, None] & (chosen == expert))  # the earliest first
            if policy == "probability":
                pairs = sorted(pairs, key=lambda pair: -weights[tuple(pair)])
            for token, choice in pairs[:capacity]:
                kept[token, choice] = True
    return kept


# %% jupyter={"source_hidden": true} tags=["drawing"]
def draw_choices(panel, kept, title):
    for (token, choice), expert in np.ndenumerate(routing.experts):
        weight = routing.weights[token, choice]
        shade = plt.get_cmap("Greens")(float(0.25 + 0.9 * weight))
        lost = {} if kept[token, choice] else {"text": "x", "ec": "C3", "lw": 1.5, "zorder": 3}
        draw_cell(panel, token, expert, fc=shade, **lost)
    for edge in range(0, 65, TOKENS):
        panel.axvline(edge - 0.5, color="grey", lw=0.8)
    panel.set(xlim=(-0.5, 63.5), ylim=(15.5, -0.5), ylabel="expert", yticks=range(0, 16, 2))
    panel.set_xticks(range(0, 64, TOKENS))
    panel.set_title(title, size=9)


# %%
FACTOR = 1.5
capacity = expert_capacity(TOKENS, TOP_K, EXPERTS, FACTOR)
print(f"capacity {capacity}: {FACTOR} x {TOKENS} tokens x {TOP_K} / {EXPERTS} experts, rounded up")

kept_by = {policy: kept_by_rule(capacity, policy) for policy in ("probability", "position")}
for policy, kept in kept_by.items():
    limited = layer(capacity_factor=FACTOR, capacity_policy=policy)
    found, statistics = limited(x, router, experts)
    assert_close(found, on_one_device(x, router, experts, kept))
    assert statistics.dropped == np.sum(~kept)

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(2, 1, figsize=(10, 6), sharex=True)
for panel, (policy, kept) in zip(panels, kept_by.items(), strict=True):
    title = f'capacity_policy="{policy}": {np.sum(~kept)} of {kept.size} choices dropped'
    draw_choices(panel, kept, title)
panels[1].set_xlabel("token; lines separate devices")
figure.tight_layout()
plt.show()

# %% [markdown]
# Darker cells have larger weights, and a red frame marks a lost choice. Both policies lose the same
# number of choices. By position, the last tokens of each device lose, whatever their weights. By
# probability, small weights lose, but whether a choice is kept then depends on later tokens.
#
# A capacity also bounds the buffers: at most `capacity` tokens of each device for each expert.
#
# ## 3. The layer with small buffers
#
# A capacity can drop a device's tokens even if other devices send that expert few. `buffer_factor`
# only sets the size of the receive buffers: a multiple of an even load. Choices that do not fit are
# lost. `statistics.overflow` counts them.

# %%
for factor in (1.0, 1.5):
    found, statistics = layer(buffer_factor=factor)(x, router, experts)
    differs = np.max(np.abs(found - expected), axis=1) > TOLERANCE * np.max(np.abs(expected))
    print(f"buffer_factor={factor}: {statistics.overflow} choices lost, of {differs.sum()} tokens")
    assert differs.sum() <= statistics.overflow
    assert statistics.dropped == 0

even = DEVICES * TOKENS * TOP_K // DEVICES  # at most this many rows per device at even load
sizes, small, fits, lost = numbers_that_arrive(even)
np.testing.assert_array_equal(lost, np.maximum(sizes.sum(axis=0) - even, 0))

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(5.5, 3.6))
title = f"buffers of {even} rows; did not fit: {', '.join(map(str, lost))}"
draw_buffers(panel, small, fits, title)
figure.tight_layout()
plt.show()

# %% [markdown]
# This is the buffer of `buffer_factor=1`. Some devices are full while others have room. On a full
# device the tokens from the *last* devices are lost. Nothing is written out of bounds. (The layer
# loses slightly more choices than rows. A row may carry two choices, and a second buffer has room
# for 16 choices.) Watch `overflow`, and balance the routing.
#
# ## 4. Balance
#
# `statistics` reports the balance over all devices:

# %%
for name, value in dropless._asdict().items():
    print(f"{name:>18} {value if value.ndim else format(value.item(), '.4g')}")

# %% [markdown]
# `largest_load` is the load of the busiest expert divided by the mean. It is 1 at balance, and so
# is `load_balance_loss`. `entropy` is the mean entropy of a token's scores, at most log(16) = 2.77.
# `router_z_loss` is the mean squared logsumexp of the logits, a penalty of large logits.
#
# `load_balance_loss` uses the means over all devices. The mean of the devices' own losses differs:
# it asks each device to be balanced alone.


# %%
@jax.jit
@jax.vmap  # over devices
def local_loss(logits):
    return load_balance_loss(route(logits, TOP_K))


mean = np.mean(local_loss((x @ router).reshape(DEVICES, TOKENS, EXPERTS)))
print(f"global {dropless.load_balance_loss:.2f}, mean of the local losses {mean:.2f}")
assert mean > dropless.load_balance_loss

# %% [markdown]
# Two methods balance the load:
#
# - Add `load_balance_loss`, times a factor, to your loss. Its gradient changes the router.
# - Add a bias to each expert's score when experts are chosen, but not to the weights.
#   `update_router_bias` raises the bias of an expert with fewer tokens than the mean, and lowers it
#   for more.
#
# Here the full layer learns to predict vectors from vectors: with neither, with the loss, and with
# the bias.


# %%
def objective(params, bias, factor, x, target):
    y, statistics = routed_moe_layer(x, *params, axis="ep", top_k=TOP_K, router_bias=bias)
    error = mean_loss(jnp.sum((y - target) ** 2), y.size, "ep")
    return error + factor * statistics.load_balance_loss, (error, statistics)


SPECS = (P(), P("ep")), P(), P(), P("ep"), P("ep")
objective = jax.shard_map(objective, mesh=mesh, in_specs=SPECS, out_specs=(P(), (P(), P())))


@jax.jit
def train(factor, rate):
    def step(state, _):
        params, bias = state
        grads, (error, statistics) = jax.grad(objective, has_aux=True)(
            params, bias, factor, x, target
        )
        params = jax.tree.map(lambda w, g: w - 0.5 * g, params, grads)
        bias = update_router_bias(bias, statistics.tokens_per_expert, rate)
        return (params, bias), (error, statistics)

    state = (router, experts), jnp.zeros(EXPERTS)
    return lax.scan(step, state, length=60)[1]


RUNS = {"neither": (0.0, 0.0), "loss": (0.3, 0.0), "bias": (0.0, 0.005)}
trained, ends = {}, {}
for name, (factor, rate) in RUNS.items():
    errors, history = trained[name] = jax.device_get(train(factor, rate))
    ends[name] = history.largest_load[-1]
    print(f"{name:>7}: largest load {ends[name]:.2f} and error {errors[-1]:.3f} after 60 steps")
assert max(ends["loss"], ends["bias"]) < ends["neither"]

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(1, 3, figsize=(10, 2.8), width_ratios=(1, 1, 1.4))
for place, (name, (errors, history)) in enumerate(trained.items()):
    style = {"label": name, "color": PALETTE[place]}
    panels[0].plot(errors, **style)
    panels[1].plot(history.largest_load, **style)
    panels[2].bar(np.arange(16) + 0.27 * (place - 1), history.tokens_per_expert[-1], 0.27, **style)
panels[0].set(xlabel="step", title="error")
panels[1].set(xlabel="step", title="largest load", ylim=(1, None))
panels[2].set(xlabel="expert", title="tokens at the end, dotted: even", xticks=range(0, 16, 2))
panels[2].axhline(DEVICES * TOKENS * TOP_K / EXPERTS, color="black", lw=0.8, ls=":")
for panel in panels:
    panel.title.set_size(9)
    panel.spines[["top", "right"]].set_visible(False)
panels[0].legend(frameon=False, fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# Without balancing, two of the busiest experts get even more tokens. `load_balance_loss` balances
# the experts, but the error is larger: the gradients compete. The bias has no gradient.
#
# ## 5. Chunks and what they hide
#
# With `chunks`, each device sends its tokens in several pieces. A piece travels while the experts
# compute the piece before. The result is the same. Each piece needs one exchange for dispatch and
# one for combine:

# %%
found, _ = layer(chunks=2)(x, router, experts)
assert_close(found, expected)

for chunks in (1, 2):
    counts = count_collectives(layer(chunks=chunks), x, router, experts, platform="tpu", grad=False)
    print(f"{chunks} chunks: {counts.forward['ragged_all_to_all']} ragged all-to-alls")
    assert counts.forward["ragged_all_to_all"] == 2 * chunks

# %% [markdown]
# The compiler decides whether the exchanges are hidden. You can read its schedule without a TPU.
# With `pip install '.[tpu]'` the code below compiles a layer for eight TPU chips and simulates the
# schedule. It takes a minute, so it does not run here:
#
# ```python
# from jaxpar.testing import assert_overlapped
#
# def array(*shape, spec=P("ep")):
#     return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)
#
# def layer(x, router, experts):
#     options = {"axis": "ep", "top_k": 8, "buffer_factor": 1.25, "chunks": 4}
#     return routed_moe_layer(x, router, experts, dispatch="ragged", **options)[0]
#
# assert_overlapped(
#     jax.shard_map(layer, in_specs=(P("ep"), P(), P("ep")), out_specs=P("ep")),
#     "v5p:2x2x2",
#     array(8 * 4096, 4096),
#     array(4096, 128, spec=P()),
#     Experts(up=array(128, 4096, 2048), gate=array(128, 4096, 2048), down=array(128, 2048, 4096)),
#     mesh="ep=8",
#     exposed_at_most=0.2,
#     compiler_options={
#         "xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all": "true"
#     },
# )
# ```
#
# With JAX 0.12.0.1 and libtpu 0.0.50.1 it passes: 19% of the time is exposed communication. With
# `chunks=1` that is 25%, and the check fails and names the transfers that the chip waits for. It
# also fails with JAX 0.10.2 and libtpu 0.0.42.1. The number of
# rows depends on data, so the check assumes the most rows that the shapes allow. For your own
# estimate, use `jaxpar.schedule.timeline(compile_for(...), assumed=Assumptions(sent_rows=...))`.
# For a picture, use `jaxpar predict module:function --plot timeline.png`.
#
# ## In short
#
# - `routed_moe_layer` drops nothing by default. Its buffers fit the worst case.
# - `capacity_factor` drops by a rule that you choose. `buffer_factor` saves memory and counts the
#   overflow.
# - Watch `largest_load`. Balance it with the loss or with the bias.
# - Chunks can hide a part of the exchange. The compiler's schedule shows whether they do.
#
# Next: [ring attention](11_ring_attention.ipynb).
