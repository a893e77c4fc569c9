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
# A model says once which dimension of each of its parameters is which. What a mesh changes is one
# small table, from names of dimensions to mesh axes. Everything else follows: specs, shards,
# padding, the optimizer's state. The loss is the same on every mesh. At the end: what a wrong map
# looks like, and a map that is made from the model itself.

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
# Two blocks and a vocabulary of 50 words, which no mesh here divides. Plain functions of a pytree.

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
    logits = (x @ params["embedding"].T)[..., :WORDS]  # padding is no word
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# %% [markdown]
# ## The rules
#
# A pattern matches the whole path of a parameter. Names of dimensions are counted, and their sizes
# compared between arrays.
#
# What is looked up in a table has the table's features, and the batch's rows. The batch lies over
# `fsdp` by its rows, so a table does by its words, and never by its features: activations would
# move from one to the other and back.

# %%
RULES = {
    "embedding": "words features",
    r"blocks/\d+/up": "width hidden",
    r"blocks/\d+/down": "hidden width",
    ".*norm": REPLICATED,
}
WHOLE = dict.fromkeys(("words", "features", "width", "hidden"))
MESHES = {
    "dp=8": WHOLE,
    "fsdp=8": WHOLE | {"words": Padded("fsdp"), "width": "fsdp"},
    "tp=8": WHOLE | {"words": Padded("tp"), "hidden": "tp"},
    "fsdp=2,tp=4": WHOLE | {"words": Padded(("tp", "fsdp")), "width": "fsdp", "hidden": "tp"},
    "dp=2,fsdp=2,tp=2": WHOLE | {"words": Padded(("tp", "fsdp")), "width": "fsdp", "hidden": "tp"},
}

# %% [markdown]
# ## Five trainings
#
# Nothing of the training knows of the mesh but the layout.

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

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 2.4))
for width, (text, (layout, losses)) in zip((9, 7, 5, 3, 1), found.items(), strict=True):
    np.testing.assert_allclose(losses, found["dp=8"][1], rtol=1e-5)
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
# What each device holds, the most replicated first:

# %%
layout = found["fsdp=2,tp=4"][0]
print(layout)
print(layout["blocks/0/up"].picture())

# %% [markdown]
# ## A wrong map
#
# Three mistakes: a misspelt pattern, which elsewhere replicates its parameters without a word;
# names of dimensions in the wrong order; a vocabulary that the axis does not divide. All are found
# at once, each with the edit that mends it.

# %%
wrong = RULES | {r"blocks/\d+/up": "hidden width"}
wrong["blocks/.*/nrom"] = wrong.pop(".*norm")
axes = WHOLE | {"words": "tp", "hidden": "tp"}
try:
    LayoutMap(wrong, axes=axes).layout(
        jax.eval_shape(init, jax.random.key(0)), jaxpar.make_mesh("tp=8")
    )
except LayoutError as error:
    print(error)

# %% [markdown]
# ## A map that fits, and is wrong
#
# Of a square weight all dimensions divide, either way round, and the step computes the same. Only
# what the compiler makes of it tells: `explain` compiles the step for a chip that is not there,
# names for each weight the collectives that it causes, and flags what lies otherwise than what it
# is multiplied with. The exchange is compiled too, so that its gain is known.

# %% tags=["varies"]
square = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


def forward(params, x):
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


exchanged = LayoutMap({"up": ("tp", None), "down": ("tp", None)}, batch=P("dp"))
layout = exchanged.layout({"up": square, "down": square}, jaxpar.make_mesh("dp=2,tp=4"))
print(layout.explain(jax.grad(forward), "v5e:2x4", square))

# %% [markdown]
# ## A map from the model
#
# `infer_layout` follows the parameters through the function: dimensions that are multiplied with
# each other are sharded alike. It returns an ordinary map, and says why if it is asked to. With
# `target="v5e:2x4"` it compiles this map and plainer ones, and takes the fastest.

# %%
shapes = jax.eval_shape(init, jax.random.key(0))
rules = infer_layout(loss, shapes, tokens, jaxpar.make_mesh("fsdp=2,tp=4"), show=print)
print(rules)

# %% [markdown]
# ## In short
#
# - Names of dimensions, once; a small table from names to axes, a mesh.
# - Everything follows: specs, shards, padding, optimizer state, batches, checkpoints.
# - What matches nothing, twice, or in the wrong order is refused, all at once.
# - `explain` asks the compiler of the chip before you rent it.
#
# Next: [reading a schedule](14_schedules.ipynb).
