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
# # 13. One model, five meshes
#
# A model names the dimensions of its parameters once. For each mesh, a small table maps these names
# to mesh axes. Specs, shards, padding and the optimizer's state follow from the table. The loss is
# the same on every mesh. The end shows a wrong map, and a map inferred from the model.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded, infer_layout

# %% [markdown]
# ## The model
#
# The model is a plain function of a pytree: two blocks and a vocabulary of 50 words. No mesh here
# shards 50 words evenly.

# %%
WIDTH, HIDDEN, WORDS = 16, 64, 50


def init(key):
    def draw(shape):
        return 0.1 * jax.random.uniform(key, shape, minval=-1.0)

    block = {"norm": jnp.ones(WIDTH), "up": draw((WIDTH, HIDDEN)), "down": draw((HIDDEN, WIDTH))}
    return {"embedding": draw((WORDS, WIDTH)), "blocks": [block, block]}


def loss(params, tokens):
    x = params["embedding"][tokens[:, :-1]]
    for block in params["blocks"]:
        y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * block["norm"]
        x = x + jax.nn.silu(y @ block["up"]) @ block["down"]
    logits = (x @ params["embedding"].T)[..., :WORDS]  # without padding
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# %% [markdown]
# ## The rules
#
# A rule maps a pattern of full parameter paths to dimension names. A table then says for each mesh
# which axis shards a name, or None. `Padded` pads a dimension that the axis does not divide, here
# the 50 words.
#
# Shard the words of an embedding table over `fsdp`, not its features. The batch is sharded over
# `fsdp`, so each device needs all features of the words that it looks up.

# %%
RULES = {
    "embedding": "words features",
    r"blocks/\d+/up": "width hidden",
    r"blocks/\d+/down": "hidden width",
    ".*norm": REPLICATED,
}
UNSHARDED = {"words": None, "features": None, "width": None, "hidden": None}
MESHES = {
    "dp=8": UNSHARDED,
    "fsdp=8": UNSHARDED | {"words": Padded("fsdp"), "width": "fsdp"},
    "tp=8": UNSHARDED | {"words": Padded("tp"), "hidden": "tp"},
    "fsdp=2,tp=4": UNSHARDED | {"words": Padded(("tp", "fsdp")), "width": "fsdp", "hidden": "tp"},
    "dp=2,fsdp=2,tp=2": UNSHARDED
    | {"words": Padded(("tp", "fsdp")), "width": "fsdp", "hidden": "tp"},
}

# %% [markdown]
# ## Five training runs
#
# The training code depends on the mesh only through the layout.

# %%
tokens = np.random.default_rng(0).integers(0, WORDS, (16, 12))


def train(axes, mesh, steps=5):
    over = tuple(name for name in ("dp", "fsdp") if name in mesh.shape)
    rules = LayoutMap(RULES, axes=axes, batch=P(over or None))
    layout = rules.layout(jax.eval_shape(init, jax.random.key(0)), mesh)
    params = layout.init(init, jax.random.key(0))
    optimizer = optax.adam(1e-2)
    states = layout.like(jax.eval_shape(optimizer.init, params))
    state = jax.jit(optimizer.init, out_shardings=states.shardings)(params)

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    step = jaxpar.jit(step, mesh=mesh, out_shardings=(layout.shardings, states.shardings, None))
    losses = []
    for _ in range(steps):
        params, state, value = step(params, state, layout.place_batch(tokens))
        losses.append(float(value))
    return layout, losses


found = {text: train(axes, jaxpar.make_mesh(text)) for text, axes in MESHES.items()}
for text, (layout, losses) in found.items():
    held = layout.table().bytes_per_device
    print(f"{text:17} {held:6} bytes a device, losses {np.round(losses, 4)}")
    np.testing.assert_allclose(losses, found["dp=8"][1], rtol=1e-5)

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panels = plt.subplots(1, 2, figsize=(8, 2.4))
for width, (text, (layout, losses)) in zip((9, 7, 5, 3, 1), found.items(), strict=True):
    panels[0].plot(losses, lw=width, label=text)
    panels[1].barh(text, layout.table().bytes_per_device / 1024)
panels[0].set(xlabel="step", ylabel="loss")
panels[0].legend(frameon=False, fontsize=8)
panels[1].set(xlabel="KiB of weights on each device")
panels[1].invert_yaxis()
for panel in panels:
    panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Three meshes cut all matrices in eight, so their bytes are equal.
#
# The next table shows what each device holds, the most replicated arrays first. In its specs, `-`
# is a dimension that is not sharded, and `tp+fsdp` is one that two axes shard. The picture below it
# shows which device holds which block.

# %%
layout = found["fsdp=2,tp=4"][0]
print(layout)
print(layout["blocks/0/up"].picture())

# %% [markdown]
# ## A wrong map
#
# This map has three mistakes: a misspelt pattern, a rule with one name too many, and a vocabulary
# that the axis does not divide. The error lists every array and rule that they affect, each with a
# correction.

# %%
wrong = RULES | {r"blocks/\d+/up": "layers width hidden"}
wrong["blocks/.*/nrom"] = wrong.pop(".*norm")
axes = UNSHARDED | {"words": "tp", "hidden": "tp", "layers": None}
try:
    LayoutMap(wrong, axes=axes).layout(
        jax.eval_shape(init, jax.random.key(0)), jaxpar.make_mesh("tp=8")
    )
except LayoutError as error:
    print(error)

# %% [markdown]
# ## A map that fits and is wrong
#
# Swapped names are reported if the sizes of other arrays contradict them. A square weight can be
# sharded along either dimension, with the same result. Only the compiled program shows which is
# faster. `explain` compiles the step for a chip that this machine does not have, and lists the
# collectives that each weight causes. If a matmul contracts dimensions of a weight and the data
# that are sharded differently, it also compiles the step with the weight's dimensions swapped, and
# predicts the gain.
#
# `times` is 0.5 where two weights share one collective.

# %% tags=["varies"]
square = x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


def forward(params, x):
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


swapped = LayoutMap({"up": ("tp", None), "down": ("tp", None)}, batch=P("dp"))
layout = swapped.layout({"up": square, "down": square}, jaxpar.make_mesh("dp=2,tp=4"))
print(layout.explain(jax.grad(forward), "v5e:2x4", x))

# %% [markdown]
# ## A map from the model
#
# `infer_layout` follows the parameters through the function. Dimensions that meet in a matmul get
# the same axis (here `tp`), and `fsdp` shards the largest dimension that is left. It returns an
# ordinary map and prints its reasons. With `target="v5e:2x4"` it compiles this map and simpler
# ones, and takes the fastest.

# %%
shapes = jax.eval_shape(init, jax.random.key(0))
rules = infer_layout(loss, shapes, tokens, jaxpar.make_mesh("fsdp=2,tp=4"), show=print)
print(rules)

# %% [markdown]
# ## In short
#
# - Name the dimensions once. A small table from names to axes gives the layout on a mesh.
# - Specs, shards, padding, optimizer state, batches and checkpoints follow from it.
# - The layout reports all mistakes at once.
# - A layout also saves and restores checkpoints: [save](../docs/questions/save.md).
# - `explain` asks the chip's compiler before you rent the chip.
#
# Next: [reading a schedule](14_schedules.ipynb).
