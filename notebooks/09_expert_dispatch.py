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
# # 9. Experts: how tokens travel
#
# Each token uses a few of many small MLPs, the *experts*. Experts are sharded over devices, so
# tokens must travel. Their targets are known only at run time.
#
# 1. one device: a router, experts and the reference result
# 2. the plan: which token goes to which device
# 3. dispatch and combine by hand, and unwritten rows
#
# The [next notebook](10_experts.ipynb) has the layer, with and without dropping. Everything runs on
# eight CPU devices in one process. **Nothing below measures speed.** Results are the same on
# accelerators.

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
from jax.sharding import PartitionSpec as P
from matplotlib.patches import ConnectionPatch

import jaxpar
from jaxpar import make_mesh
from jaxpar.moe import (
    Experts,
    RaggedDispatcher,
    apply_experts,
    route,
)
from jaxpar.testing import poisoned_rows, tolerance

# %% [markdown]
# ## 1. One device
#
# There are 64 tokens and 16 experts. Each token goes to the two experts with the best router
# scores. All tokens share a common vector, so the untrained router prefers some experts.

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

first = jax.tree.map(lambda a: a[:TOKENS], routing)

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(7, 3))
panel.imshow(first.scores, cmap="Greys", vmin=0, vmax=0.8)
for token, (chosen, weights) in enumerate(zip(first.experts, first.weights, strict=True)):
    for expert, weight in zip(chosen, weights, strict=True):
        text = {"ha": "center", "va": "center", "color": "C3", "size": 8, "weight": "bold"}
        panel.text(expert, token, f"{weight:.2f}", **text)
panel.set(xlabel="expert", ylabel="token", xticks=range(EXPERTS), yticks=range(TOKENS))
panel.set_title("scores of the first tokens, and the two weights of each", size=9)
figure.tight_layout()
plt.show()

# %% [markdown]
# The weights are a softmax over all 16 experts, so the two weights of a token do not sum to 1.
# Models differ in this. `normalize=True` divides by the sum. The result equals
# `scoring="selected_softmax"`, a softmax over the two chosen logits.

# %%
for options in ({}, {"normalize": True}, {"scoring": "selected_softmax"}, {"scoring": "sigmoid"}):
    other = jax.jit(partial(route, top_k=TOP_K, **options))(x[:3] @ router)
    sums = ", ".join(f"{total:.2f}" for total in np.sum(other.weights, axis=1))
    print(f"{options!s:34} experts {other.experts.tolist()}, weights sum to {sums}")
    np.testing.assert_array_equal(other.experts, routing.experts[:3])

# %% [markdown]
# The simplest layer computes every expert for every token and multiplies most results by 0. It does
# eight times the necessary work. All later results are compared with it.


# %%
@jax.jit
def on_one_device(x, router, experts):
    routing = route(x @ router, TOP_K)
    one_hot = jax.nn.one_hot(routing.experts, EXPERTS)
    weights = jnp.einsum("tk,tke->te", routing.weights, one_hot)
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


# %% [markdown]
# ## 2. The plan
#
# Each device has eight tokens and two experts: expert e is on device e // 2. A `RaggedDispatcher`
# takes the devices that each token needs, and makes a *plan* with one small all-gather of row
# counts. Every device then knows the offset of every row in every buffer.
#
# The dispatcher can then send any pytree of rows. Here each token sends its own number, which shows
# the tokens that arrived.

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


ROWS = 32
sizes, arrived, valid, lost = numbers_that_arrive(ROWS)

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(3.4, 3.4))
panel.imshow(sizes, cmap="Greys", vmax=2 * sizes.max())
for (source, target), rows in np.ndenumerate(sizes):
    panel.text(target, source, rows, ha="center", va="center", size=8)
panel.set(xlabel="to device", ylabel="from device", xticks=range(8), yticks=range(8))
panel.set_title("send_sizes of all devices, in rows", size=9)
figure.tight_layout()
plt.show()

# %%
print("rows for each device:", sizes.sum(axis=0))
assert not lost.any()

# %% [markdown]
# If both experts of a token are on one device, the token is sent there once. So there are fewer
# rows than choices. Rows on the diagonal do not travel. An all-gather would send every token to all
# seven other devices.

# %%
targets = routing.experts // LOCAL  # [64, 2]
alone = [token for token, (a, b) in enumerate(targets) if a == b]
print(f"{targets.size} choices, {sizes.sum()} rows; tokens with one device: {alone}")
print(f"{sizes.sum() - sizes.trace()} rows travel; an all-gather sends {7 * DEVICES * TOKENS}")
assert sizes.sum() == targets.size - len(alone)

# %% [markdown]
# The left picture shows each device's tokens and the devices that they need. The right picture
# shows what each device receives: first the rows of device 0, then those of device 1, and so on.
# Hatched rows are unwritten. The arrows follow two tokens. One goes to two devices, and the other
# has both experts on one device.

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


def follow(panels, number, color):
    """Frames a token and the rows where it arrived, and draws arrows between them."""
    source, token = divmod(number, TOKENS)
    frame = {"fc": "none", "ec": color, "lw": 2, "zorder": 4}
    draw_cell(panels[0], source, token, **frame)
    places = {"coordsA": panels[0].transData, "coordsB": panels[1].transData}
    for device, row in np.argwhere((arrived == number) & valid):
        draw_cell(panels[1], device, row, **frame)
        ends = (source + 0.5, token), (device - 0.5, row)
        arrow = ConnectionPatch(*ends, **places, arrowstyle="-|>", color=color, lw=1.3)
        panels[0].figure.add_artist(arrow)


figure, panels = plt.subplots(1, 2, figsize=(10, 5.6))
for number, needed in enumerate(targets):
    source, token = divmod(number, TOKENS)
    text = f"{number}\nto {', '.join(map(str, sorted(set(needed.tolist()))))}"
    draw_cell(panels[0], source, token, text, fc=PALETTE[source])
panels[0].set(xlim=(-0.5, 7.5), ylim=(TOKENS - 0.5, -0.5), xticks=range(8), xlabel="device")
panels[0].set(ylabel="token of the device")
panels[0].set_title("tokens, and the devices that they need", size=9)
panels[0].spines[:].set_visible(False)
draw_buffers(panels[1], arrived, valid, f"receive buffers of {ROWS} rows")
figure.tight_layout(w_pad=4)
split = 61  # a token for two devices
follow(panels, split, "black")
follow(panels, alone[-1], "C3")
plt.show()

# %%
for device in range(DEVICES):
    wanted = [n for n in range(64) if device in targets[n]]  # in order: device 0 first
    np.testing.assert_array_equal(arrived[device][valid[device]], wanted)

# %% [markdown]
# Shapes are static, so a safe buffer holds the worst case: all 64 tokens. 32 rows are enough here.
# [The next notebook](10_experts.ipynb) uses smaller buffers by design.
#
# ## 3. Dispatch and combine by hand
#
# Each token travels with its experts and weights. The receiver makes a pair of each row and each
# local expert that the row needs, and sorts the pairs by expert. `apply_experts` applies each
# expert's MLP to its group of pairs, and scales the results by `weights`. The results of one row
# are added. `combine` sends each row back and adds the rows of each token.


# %%
def by_hand(x, router, experts):  # x: f32[t, d]; experts: two of them
    routing = route(x @ router, TOP_K)
    dispatcher = RaggedDispatcher.from_target_device_ids(routing.experts // LOCAL, axis="ep")
    sent = x, routing.experts, routing.weights
    (rows, chosen, weights), valid = dispatcher.dispatch(sent, ROWS)  # [r, d], [r, k], [r, k]

    local = chosen - LOCAL * lax.axis_index("ep")
    mine = valid[:, None] & (local >= 0) & (local < LOCAL)
    group = jnp.where(mine, local, LOCAL).ravel()  # [r k]; LOCAL: no local expert
    order = jnp.argsort(group)
    group_sizes = jnp.bincount(group, length=LOCAL + 1)[:LOCAL]
    row = order // TOP_K
    pairs = apply_experts(rows[row], experts, group_sizes, weights=weights.ravel()[order])
    made = jnp.zeros((ROWS, FEATURES)).at[row].add(pairs)  # pairs of no group are 0

    combined, _ = dispatcher.combine(made, ROWS)  # [t, d]
    return combined


assert_close(sharded(by_hand)(x, router, experts), expected)

# %% [markdown]
# Unwritten rows can hold anything. On CPU they are 0, which hides mistakes. `poisoned_rows` fills
# them with NaN, which shows mistakes. Below, each device computes the mean of its received rows
# three times. Only the mean with `jnp.where` is always right.


# %%
def means(x, router, experts):
    chosen = route(x @ router, TOP_K).experts
    dispatcher = RaggedDispatcher.from_target_device_ids(chosen // LOCAL, axis="ep")
    rows, valid = dispatcher.dispatch(x, ROWS)
    unmasked = jnp.sum(rows)
    multiplied = jnp.sum(rows * valid[:, None])  # NaN * 0 is NaN
    masked = jnp.sum(jnp.where(valid[:, None], rows, 0))
    return jnp.stack([unmasked, multiplied, masked])[None] / (valid.sum() * FEATURES)


print("unwritten rows of 0:  ", np.round(sharded(means)(x, router, experts)[0], 3))
with poisoned_rows():
    poisoned = sharded(means)(x, router, experts)
    print("unwritten rows of NaN:", np.round(poisoned[0], 3))
    assert np.all(np.isnan(poisoned) == [True, True, False])
    assert_close(sharded(by_hand)(x, router, experts), expected)  # reads no unwritten row

# %% [markdown]
# ## In short
#
# - A plan is one small all-gather. After it every device knows all offsets.
# - A token travels once to each device that it needs. Each of them returns one row.
# - Unwritten rows can hold anything. Mask them with `jnp.where`, and test inside `poisoned_rows()`.
#
# Next: [the layer](10_experts.ipynb) in one call.
