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
# # 19. Pipelines
#
# A pipeline puts the first layers of a model on one device, the next ones on another. The batch is
# cut into *microbatches*, which pass through the devices one after the other. Only activations
# travel. So a pipeline is for networks that are too slow for weights and gradients.
#
# 1. schedules: who computes what, and when
# 2. the bubble and the memory
# 3. one training step, with data and tensor parallelism, against one device
# 4. a checkpoint that moves to another pipeline
# 5. what a compiler makes of it
#
# Sections 1 to 4 run on eight CPU devices in one process. Section 5 is predicted for TPUs, without
# a TPU.

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
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import pipeline
from jaxpar.layout import Interleaved, LayoutMap
from jaxpar.schedule import compile_for, target, timeline

# %% [markdown]
# ## 1. Schedules
#
# A *stage* is some layers in a row. Here four devices have one stage each. `1F0` is the forward
# pass of stage 1 for microbatch 0, and `1B0` its backward pass. A backward pass takes about twice
# as long.
#
# In a *trip*, each device computes at most one forward and one backward pass, of different
# microbatches. The result of one pass is sent while the other one is computed.

# %%
print(pipeline.one_f_one_b(devices=4, microbatches=4))

# %% [markdown]
# At first the last device has nothing to do, and at the end again. The first device waits in
# between, until the first backward pass reaches it. This is the *bubble*. It is smaller if each
# device has several stages that are not neighbours (*virtual stages*): device 0 has stages 0 and 4,
# device 1 has stages 1 and 5. A microbatch then passes every device twice. Stages are shorter, so a
# device waits a shorter time before its first work.


# %% jupyter={"source_hidden": true} tags=["drawing", "src/jaxpar/pipeline/schedule.png"]
def draw(panel, schedule, title):
    """Draws a device a row; each trip has room for a forward and a backward pass."""
    length = 1 / schedule.virtual_stages  # a stage of half the layers takes half as long
    together = list(zip(*schedule.trips(), strict=True))
    now = 0.0
    for trips in together:
        for half, share, colours in (("forward", 1, "Blues"), ("backward", 2, "Oranges")):
            if not any(getattr(trip, half) for trip in trips):
                continue
            for device, trip in enumerate(trips):
                if done := getattr(trip, half):
                    shade = 0.25 + 0.5 * (done.stage // schedule.devices) / schedule.virtual_stages
                    colour = plt.get_cmap(colours)(shade)
                    box = plt.Rectangle(
                        (now, device - 0.45), share * length, 0.9, fc=colour, ec="w", lw=0.4
                    )
                    panel.add_patch(box)
                    place = now + share * length / 2, device
                    panel.text(*place, done.microbatch, ha="center", va="center", size=5)
            now += share * length
    panel.set(xlim=(0, 36), ylim=(schedule.devices - 0.5, -0.5), yticks=range(schedule.devices))
    panel.set_ylabel("device", size=7)
    panel.tick_params(labelsize=6)
    panel.set_title(f"{title}: bubble {schedule.bubble():.0%}", size=7, loc="left")
    panel.spines[["top", "right"]].set_visible(False)


figure, panels = plt.subplots(3, 1, figsize=(8, 4.2), sharex=True, layout="constrained")
draw(panels[0], pipeline.gpipe(4, 8), "gpipe(4, 8)")
draw(panels[1], pipeline.one_f_one_b(4, 8), "one_f_one_b(4, 8)")
draw(panels[2], pipeline.interleaved_1f1b(4, 8, 2), "interleaved_1f1b(4, 8, virtual_stages=2)")
panels[2].set_xlabel("time; blue: forward, orange: backward, darker: second stage", size=7)
plt.show()

# %% [markdown]
# ## 2. The bubble and the memory
#
# With p devices, m microbatches and v virtual stages the bubble is (p - 1) / (v m + p - 1), if p
# divides m. A device keeps what its backward passes need, the *residuals*. `gpipe` keeps those of
# all microbatches, so `value_and_grad` refuses it. The other two stop growing: 1F1B at 2 p + 1
# microbatches.

# %%
print("microbatches   bubble: gpipe  1f1b  v=2   v=4     residuals: gpipe  1f1b  v=2   v=4")
for m in (4, 8, 16, 32):
    found = [
        pipeline.gpipe(4, m),
        pipeline.one_f_one_b(4, m),
        *(pipeline.interleaved_1f1b(4, m, v) for v in (2, 4)),
    ]
    bubbles = "  ".join(f"{one.bubble():4.0%}" for one in found)
    peaks = "  ".join(f"{one.peak_activations():4.1f}" for one in found)
    print(f"{m:12}           {bubbles}                  {peaks}")
for m, v in ((8, 1), (8, 2), (16, 4)):
    np.testing.assert_allclose(pipeline.interleaved_1f1b(4, m, v).bubble(), 3 / (v * m + 3))

# %% [markdown]
# ## 3. A training step
#
# The model has a tied embedding and eight residual MLPs. The mesh axis `pp` has size 2. Each of its
# two places has two stages of two layers. The weights are also sharded over `tp`, and the batch
# over `dp`.
#
# All devices run the same program in every trip. So a stage may use collectives over other axes,
# such as the `psum` below. The last stage's result is cut along `last_dim`: each device of `pp`
# computes the loss of its part.

# %%
LAYERS, WIDTH, HIDDEN, WORDS, ROWS, LENGTH = 8, 16, 32, 64, 16, 8
rng = np.random.default_rng(0)
layers = {
    "up": rng.standard_normal((LAYERS, WIDTH, HIDDEN), np.float32) / 4,
    "down": rng.standard_normal((LAYERS, HIDDEN, WIDTH), np.float32) / 6,
}
shared = {"table": rng.standard_normal((WORDS, WIDTH), np.float32) / 4}
batch = {name: rng.integers(0, WORDS, (ROWS, LENGTH), np.int32) for name in ("tokens", "labels")}


def stage(layers, x, batch, tp="tp"):  # x [rows, length, width]
    def layer(x, w):
        out = jnp.tanh(x @ w["up"]) @ w["down"]
        return x + (lax.psum(out, tp) if tp else out), None

    return lax.scan(layer, x, layers)[0]


def first(shared, batch):
    return shared["table"][batch["tokens"]]


def last(shared, x, batch, pp="pp"):  # x [rows, length/pp, width]
    size = x.shape[1]
    start = lax.axis_index(pp) * size if pp else 0
    labels = lax.dynamic_slice_in_dim(batch["labels"], start, size, 1)
    losses = -jax.nn.log_softmax(x @ shared["table"].T)
    return jnp.sum(jnp.take_along_axis(losses, labels[..., None], -1)), labels.size


# %% [markdown]
# `Interleaved` says that the layers lie in the order of the devices: those of stages 0 and 2 first.
# `layout.place` puts them there.

# %%
mesh = jaxpar.make_mesh("dp=2,pp=2,tp=2")
rules = LayoutMap(
    {
        "layers/up": (Interleaved("pp", 2), None, "tp"),
        "layers/down": (Interleaved("pp", 2), "tp", None),
        "shared/table": (),
    }
)
params = {"layers": layers, "shared": shared}
layout = rules.layout(params, mesh, strict=False)
placed = layout.place(params)

schedule = pipeline.interleaved_1f1b(devices=2, microbatches=4, virtual_stages=2)
gradients = pipeline.value_and_grad(stage, first, last, schedule, "pp", batch_axes="dp", last_dim=1)
specs = layout.specs["layers"], layout.specs["shared"]
step = jaxpar.jit(
    jax.shard_map(gradients, mesh=mesh, in_specs=(*specs, P("dp")), out_specs=(P(), specs))
)
loss, found = step(placed["layers"], placed["shared"], batch)
found = layout.gather({"layers": found[0], "shared": found[1]})


def on_one_device(params):
    x = stage(params["layers"], first(params["shared"], batch), batch, tp=None)
    loss, count = last(params["shared"], x, batch, pp=None)
    return loss / count


wanted, right = jax.value_and_grad(on_one_device)(params)
print(f"loss {loss:.5f}, on one device {wanted:.5f}")
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-6), found, right)
# %% [markdown]
# ## 4. Another pipeline
#
# Files have the layers in the model's order. So a checkpoint of this pipeline can go on with four
# devices, or without a pipeline.

# %%
four = jaxpar.make_mesh("pp=4,tp=2")
moved = rules.layout(params, four, strict=False).place(layout.gather(placed))
for where, tree in (("pp=2", placed), ("pp=4", moved)):
    order = [
        int(np.argmin(np.abs(layers["up"][:, 0, 0] - x))) for x in tree["layers"]["up"][:, 0, 0]
    ]
    print(f"{where}: layers {order}")

# %% [markdown]
# ## 5. What a compiler makes of it
#
# The same functions, larger, are compiled for four TPU v5p chips. `timeline` predicts the step. Its
# bubble counts passes only, not the loss.

# %% tags=["varies"]
chips = target("v5p:2x2x1", "pp=4")


def array(dtype, *shape, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=spec)


def predicted(virtual_stages, microbatches=4, width=512):
    schedule = pipeline.interleaved_1f1b(4, microbatches, virtual_stages)
    fn = pipeline.value_and_grad(
        lambda layers, x, batch: stage(layers, x, batch, tp=None), first, last, schedule, "pp",
        last_dim=1,
    )  # fmt: skip
    own = {"up": P("pp"), "down": P("pp")}, {"table": P()}
    local = jax.shard_map(fn, mesh=chips.mesh, in_specs=(*own, P()), out_specs=(P(), own))
    args = (
        {
            "up": array(jnp.bfloat16, LAYERS, width, 4 * width, spec=P("pp")),
            "down": array(jnp.bfloat16, LAYERS, 4 * width, width, spec=P("pp")),
        },
        {"table": array(jnp.bfloat16, 4 * width, width, spec=P())},
        {name: array(jnp.int32, microbatches, width, spec=P()) for name in ("tokens", "labels")},
    )
    return timeline(compile_for(jaxpar.jit(local, mesh=chips.mesh), chips, *args))


for count in (1, 2):
    played = predicted(count)
    print(
        f"virtual stages {count}: {played.total * 1e6:.0f} us, of which the bubble is "
        f"{played.bubble * 1e6:.0f} us, and waits for transfers {played.exposed * 1e6:.0f} us"
    )

# %% [markdown]
# Within one slice FSDP hides its transfers and has no bubble, so it is faster there
# ([when not](../docs/when_not.md)). A pipeline is for several slices, or hosts behind a slow
# network.
