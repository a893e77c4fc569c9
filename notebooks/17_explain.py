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
# # 17. From a slow step to a fast one in six edits
#
# A training step gives right results and takes more than twice as long as it should. `explain`
# compiles it for chips that are not here, says for each wait which line of yours it comes from and
# why, and compiles it once more with each edit that might help. Here it is asked six times:
#
# 1. a step with six mistakes
# 2. float32 on the wire
# 3. an optimizer's state by another dimension
# 4. a gather in a loop
# 5. a checkpoint that sends again
# 6. a constraint that says too little
# 7. devices in the order of their numbers
# 8. what is left
#
# Times are those of a model of the chip; **they are no measurements**
# ([schedules](14_schedules.ipynb)). What is asserted here: each edit gains what was predicted.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import math
import runpy
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from jaxpar.schedule import compile_for, explain, target, timeline

# %% [markdown]
# ## 1. A step with six mistakes
#
# An MLP behind an embedding that is not trained, on 16 chips: the batch over `dp`, the width over
# `tp`. The step uses nothing of jaxpar. It is a file of its own, `step.py`, because `explain` names
# files and lines. Each mistake is one that people make; try to find them before you read on.

# %%
STEP = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar

D, F, BLOCKS, ROWS = 512, 4096, 4, 128
WEIGHTS = {"up": P(None, "tp"), "down": P("tp", None)}
MOMENTUM = {"up": P(None, "tp"), "down": P(None, "tp")}
BATCH = P(None, "dp")


def mesh_of(devices):
    return Mesh(np.array(devices).reshape(2, 8), ("dp", "tp"))


def norm(x):
    square = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
    return (x * lax.rsqrt(square + 1e-6)).astype(x.dtype)


@jax.checkpoint
def mlp(weights, x):  # x: bf16[m/dp, d], up: bf16[d, f/tp], down: bf16[f/tp, d]
    h = jax.nn.relu(x @ weights["up"]) @ weights["down"]
    return norm(x + lax.psum(h, "tp"))


def gradients(weights, embedding, x, y):  # x, y: bf16[blocks, m/dp, d], embedding: bf16[d/dp, d]
    def embed(_, rows):
        return None, rows @ lax.all_gather(embedding, "dp", tiled=True)

    def loss(weights):
        return jnp.sum((mlp(weights, x) - y.reshape(-1, D)).astype(jnp.float32) ** 2)

    def summed(gradient):
        return lax.psum(gradient.astype(jnp.float32), "dp").astype(gradient.dtype)

    x = lax.scan(embed, None, x)[1].reshape(-1, D)
    return jax.tree.map(summed, jax.grad(loss)(lax.pcast(weights, "dp", to="varying")))


def step(weights, momentum, embedding, x, y):
    x = lax.with_sharding_constraint(norm(x), P(None, "tp"))
    specs = (WEIGHTS, P("dp"), BATCH, BATCH)
    found = jax.shard_map(gradients, in_specs=specs, out_specs=WEIGHTS)(weights, embedding, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, found)
    weights = jax.tree.map(lambda w, m: (w - 1e-3 * m).astype(w.dtype), weights, momentum)
    return weights, momentum


def arguments(mesh):
    def shape(sizes, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    sizes = {"up": (D, F), "down": (F, D)}
    weights = {name: shape(sizes[name], WEIGHTS[name]) for name in sizes}
    momentum = {name: shape(sizes[name], MOMENTUM[name], jnp.float32) for name in sizes}
    x = shape((BLOCKS, ROWS, D), BATCH)
    return weights, momentum, shape((D, D), P("dp")), x, x
""".lstrip()

# %% [markdown]
# `compiled` is what a program of your own needs: a target, the mesh, the function, its arguments.
# In a terminal, `jaxpar explain step:make --target v5e:4x4 --mesh dp=2,tp=8 --html step.html` does
# all of it, and writes a page with the timeline.

# %%
chips = target("v5e:4x4", "dp=2,tp=8")
devices = sorted(chips.mesh.devices.flat, key=lambda device: device.id)
folder = Path(tempfile.mkdtemp())


def compiled(text):
    path = folder / "step.py"
    path.write_text(text)
    names = runpy.run_path(str(path))
    mesh = names["mesh_of"](devices)
    return compile_for(names["step"], replace(chips, mesh=mesh), *names["arguments"](mesh))


program = compiled(STEP)
steps = [("as it was", timeline(program))]

# %% [markdown]
# ## 2. Float32 on the wire
#
# The whole explanation, of one finding. `tries` says how many edits may be compiled.

# %% tags=["varies"]
found = explain(program, tries=2, findings=1)
print(found)
(finding,) = found.findings
assert finding.cause == "wide dtype"

# %% [markdown]
# The gradients are computed in bfloat16 and kept in bfloat16; for the sum alone they are made
# float32. The compiler has not taken that back, and could not: it is another result, by a rounding.
# Sums over many devices may want it; here it is a sum of two.
#
# The edit, in the file. `mended` applies it, compiles the file, and holds the step's time against
# what was predicted.


# %%
def mended(text, finding, name, *changes):
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    program = compiled(text)
    before, after = steps[-1][1].total, timeline(program)
    assert math.isclose(before - after.total, finding.gain, rel_tol=0.05), (before, after.total)
    steps.append((name, after))
    return text, program


def show(finding):
    of = finding.of
    lines = [
        f"{1e6 * of.seconds:.0f} us: {of.collective} over {', '.join(of.axes)} at {of.line}",
        f"why:  {finding.cause}: {finding.why}",
        f"edit: {finding.edit}",
        f"gain: {1e6 * finding.gain:.0f} us",
    ]
    for line in lines:
        print(textwrap.fill(line, 96, subsequent_indent=" " * 6))


text, program = mended(
    STEP,
    finding,
    "sums in bfloat16",
    (
        'lax.psum(gradient.astype(jnp.float32), "dp").astype(gradient.dtype)',
        'lax.psum(gradient, "dp")',
    ),
)

# %% [markdown]
# ## 3. An optimizer's state by another dimension
#
# What costs the most is not always what can be saved. From here on the finding that gains the most
# is shown, of the few worst ones.


# %% tags=["varies"]
def best(program, tries, findings):
    findings = explain(program, tries=tries, findings=findings).findings
    return max(findings, key=lambda finding: finding.gain)


finding = best(program, tries=4, findings=3)
show(finding)
assert finding.cause == "resharding"

# %% [markdown]
# The line has no collective: the partitioner put it in, because `m` lies otherwise than `g`. The
# weight lies by its first dimension, its momentum by the second. Of the ways in which the arguments
# could lie, some were compiled, and this one was the fastest.

# %%
text, program = mended(
    text,
    finding,
    "momentum as its weight",
    ('"down": P(None, "tp")}', '"down": P("tp", None)}'),
)

# %% [markdown]
# ## 4. A gather in a loop

# %% tags=["varies"]
finding = best(program, tries=4, findings=2)
show(finding)
assert finding.cause == "sent twice"

# %% [markdown]
# The loop keeps activations small; the weight is the same on each trip. A compiler moves arithmetic
# out of loops, and leaves collectives where they are.

# %%
text, program = mended(
    text,
    finding,
    "gather in front of the scan",
    (
        "    def embed(_, rows):\n",
        '    whole = lax.all_gather(embedding, "dp", tiled=True)\n\n    def embed(_, rows):\n',
    ),
    ('rows @ lax.all_gather(embedding, "dp", tiled=True)', "rows @ whole"),
)

# %% [markdown]
# ## 5. A constraint that says too little

# %% tags=["varies"]
finding = best(program, tries=8, findings=6)
show(finding)
assert finding.cause == "resharding"

# %% [markdown]
# `P(None, "tp")` was meant to cut rows by `tp`. What a spec leaves out is whole: each device gets
# the rows of all of `dp`, and gives them away again one line later. Rows lie over `dp` already, and
# nothing needs to be said.

# %%
text, program = mended(
    text,
    finding,
    "no constraint",
    ('lax.with_sharding_constraint(norm(x), P(None, "tp"))', "norm(x)"),
)

# %% [markdown]
# ## 6. Devices in the order of their numbers

# %% tags=["varies"]
finding = best(program, tries=8, findings=6)
show(finding)
assert finding.cause == "links apart"

# %% [markdown]
# On 4 by 4 chips, numbers that differ by 8 are two links apart, and so are the neighbours along
# `dp`. Over `dp` travel the embedding and all gradients. `make_mesh` gives its last axis the
# nearest neighbours: the order of the axes is the order of their traffic. The specs name axes, and
# stay as they are.

# %%
text, program = mended(
    text,
    finding,
    "mesh by its links",
    (
        'Mesh(np.array(devices).reshape(2, 8), ("dp", "tp"))',
        'jaxpar.make_mesh("tp=8,dp=2", devices=devices)',
    ),
)

# %% [markdown]
# ## 7. A checkpoint that sends again

# %% tags=["varies"]
finding = best(program, tries=8, findings=6)
show(finding)
assert finding.cause == "sent twice"

# %% [markdown]
# `jax.checkpoint` keeps nothing of the function, and computes it again in the backward pass: the
# sum over `tp` included. The sum's result is small beside what is not kept, and costs a trip over
# the links. Kept by name, it also spares the matmul that was summed.

# %%
text, program = mended(
    text,
    finding,
    "sum kept for the backward",
    ("@jax.checkpoint\ndef mlp", "def mlp"),
    ('lax.psum(h, "tp"))', 'checkpoint_name(lax.psum(h, "tp"), "whole"))'),
    (
        "\n\ndef gradients",
        '\n\npolicy = jax.checkpoint_policies.save_only_these_names("whole")\n'
        "mlp = jax.checkpoint(mlp, policy=policy)\n\n\ndef gradients",
    ),
)

# %% [markdown]
# ## 8. What is left

# %% tags=["varies"]
names, lines = zip(*steps, strict=True)
waits = [1e6 * line.exposed for line in lines]
works = [1e6 * (line.total - line.exposed) for line in lines]
figure, panel = plt.subplots(figsize=(8, 2.8))
panel.barh(names, works, color="#0072B2", label="computes")
panel.barh(names, waits, left=works, color="#D0021B", label="waits")
for place, line in enumerate(lines):
    panel.text(1e6 * line.total + 3, place, f"{1e6 * line.total:.0f}", va="center", size=8)
panel.invert_yaxis()
panel.tick_params(labelsize=8)
panel.set_xlabel("microseconds (a model)", size=8)
panel.legend(fontsize=8, frameon=False, loc="lower right")
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

totals = [line.total for line in lines]
assert totals == sorted(totals, reverse=True)
assert totals[-1] < totals[0] / 2

# %% tags=["varies"]
found = explain(program, tries=4, findings=3)
for finding in found.findings:
    show(finding)
assert not any(finding.gain for finding in found.findings)

# %% [markdown]
# Nothing that was tried makes it faster. This chip's compiler makes all three collectives
# synchronous: nothing can run beside them, wherever they stand. What would help
# is another algorithm, not another edit: rows over `tp` too, so that sums become gathers and
# reduce-scatters beside matmuls ([overlapped matmuls](04_overlapped_matmuls.ipynb)), which pays
# with larger matmuls than these; more rows for each sum of gradients; or a chip whose sums run
# beside other work.
#
# ## In short
#
# - `explain(compile_for(step, chips, *shapes))`: line, cause, edit, and what the edit gains.
# - A gain is that of the whole program, compiled with the edit: here each held to the microsecond.
# - An edit changes what waits the longest: make one, ask again.
# - `jaxpar explain --json before.json`, then `--against before.json`: what the edit changed.
# - All causes: [why is this step slow?](../docs/explain.md)
#
# Next: [every link of a torus](18_links.ipynb).
