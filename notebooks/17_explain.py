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
# The training step below is right, but it takes more than twice as long as it should. `explain`
# compiles it for chips that this machine does not have. For each wait it names the line and the
# cause. It compiles the program again with each edit that might help. Each of sections 2 to 7 finds
# and mends one mistake:
#
# 1. a step with six mistakes
# 2. float32 on the wire
# 3. an optimizer's state sharded by another dimension
# 4. a gather in a loop
# 5. a constraint that says too little
# 6. devices in the order of their numbers
# 7. a checkpoint that sends again
# 8. the result
#
# Times come from a model of the chip. **They are not measured** ([schedules](14_schedules.ipynb)).
# The stored outputs are of jax 0.10.2 and libtpu 0.0.42.1; other versions give other times. The
# assertions check that each edit gains the predicted time.

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

from jaxpar.schedule import compile_for, explain, program_floor, target, timeline

# %% [markdown]
# ## 1. A step with six mistakes
#
# The step trains an MLP after a frozen embedding, on 16 chips. The batch is sharded over `dp` and
# the width over `tp`. The step uses jaxpar only from section 6 on. `explain` names files and lines,
# so the step is a file, `step.py`. All six mistakes are common. Try to find them before you read
# on.

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


def make(mesh):
    return step, arguments(mesh)
""".lstrip()

# %% [markdown]
# `compiled` writes the text to `step.py` and loads it. Your own program needs only the last line:
# `compile_for` takes the step, a target and the step's arguments. Our step makes its mesh itself,
# so the target gets this mesh by `replace`.
#
# In the folder of `step.py`, this command explains the step on a mesh of `jaxpar.make_mesh` in
# place of `mesh_of`, and writes a page with the timeline:
#
#     jaxpar explain step:make --target v5e:4x4 --mesh dp=2,tp=8 --html step.html

# %%
chips = target("v5e:4x4", "dp=2,tp=8")
devices = sorted(chips.mesh.devices.flat, key=lambda device: device.id)
folder = Path(tempfile.mkdtemp())


def compiled(text):
    path = folder / "step.py"
    path.write_text(text)
    names = runpy.run_path(str(path))
    mesh = names["mesh_of"](devices)
    step, arguments = names["make"](mesh)
    return compile_for(step, replace(chips, mesh=mesh), *arguments)


program = compiled(STEP)
steps = [("as it was", timeline(program))]

# %% [markdown]
# ## 2. Float32 on the wire
#
# This explanation has only one *finding*: a wait, its cause and an edit. `tries` limits how many
# edits are compiled. This finding has only one edit. How to read some of the lines:
#
# - `80% of unseen predictions` says how far predictions are off: in all, and for each kind of
#   operation in the step.
# - `and 1 more array`: the all-reduce sums the gradients of `up` and of `down`.
# - `between`: the instructions that run before and after the wait.

# %% tags=["varies"]
found = explain(program, tries=2, findings=1)
print(found)
(finding,) = found.findings
assert finding.cause == "wide dtype"

# %% [markdown]
# The gradients are computed and stored in bfloat16, but the sum converts them to float32. The
# compiler must not undo that, because the rounding would differ. A sum over many devices may need
# float32. This one is over two.
#
# `mended` applies the edit to the file and compiles it. It compares the new time with the predicted
# one.


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
        f"gain: {1e6 * finding.gain:.0f} us" if finding.is_tried else "gain: not tried",
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
# ## 3. An optimizer's state sharded by another dimension
#
# The largest cost is not always the largest gain. From here on we look at a few of the worst
# findings and show the one with the largest gain.


# %% tags=["varies"]
def best(program, tries, findings):
    findings = explain(program, tries=tries, findings=findings).findings
    return max(findings, key=lambda finding: finding.gain)


finding = best(program, tries=4, findings=3)
show(finding)
assert finding.cause == "resharding"

# %% [markdown]
# Line 51 of `step.py` has no collective. The partitioner inserted one, because `g` is sharded by
# its first dimension, as the weight, and `m` by its second. `explain` compiled the step with
# several shardings of the arguments, and this edit was the fastest.
#
# The gain is larger than this wait. The edit removes two all-to-alls: one brings the gradient to
# the momentum's sharding, the other brings the momentum back. It also removes copies around them.

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
finding = best(program, tries=2, findings=2)
show(finding)
assert finding.cause == "sent twice"

# %% [markdown]
# The loop keeps activations small, but `embedding` is the same in each iteration. A compiler moves
# arithmetic out of loops. It leaves collectives inside.

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
# `P(None, "tp")` was meant to shard rows over `tp` as well. But a spec replicates over every axis
# that it does not name. So rows are sharded over `tp` alone, and `shard_map` needs them over `dp`
# again. The partitioner sends rows by two permutes and a gather: from the sharding over `dp` to the
# one over `tp`, and back. The edit removes all three, so it gains more than the wait for one of
# them. Rows are already sharded over `dp`, so no constraint is needed.

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
finding = best(program, tries=2, findings=2)
show(finding)
assert finding.cause == "links apart"

# %% [markdown]
# On 4 by 4 chips, devices whose numbers differ by 8 are two links apart. Neighbours along `dp`
# differ by 8. The embedding and all gradients travel over `dp`. `make_mesh` gives its last axis the
# nearest neighbours, so the axis with the most traffic comes last. The specs name axes and do not
# change.

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
finding = best(program, tries=2, findings=2)
show(finding)
assert finding.cause == "sent twice"

# %% [markdown]
# `jax.checkpoint` saves nothing inside the function. The backward pass computes the function again,
# and repeats the sum over `tp`. The result of the sum is small, but its transfer is slow. Save it
# by name. The backward pass then also skips the matmul before the sum.

# %%
text, program = mended(
    text,
    finding,
    "sum kept for the backward",
    ("@jax.checkpoint\ndef mlp", "def mlp"),
    ('lax.psum(h, "tp"))', 'checkpoint_name(lax.psum(h, "tp"), "received"))'),
    (
        "\n\ndef gradients",
        '\n\npolicy = jax.checkpoint_policies.save_only_these_names("received")\n'
        "mlp = jax.checkpoint(mlp, policy=policy)\n\n\ndef gradients",
    ),
)

# %% [markdown]
# ## 8. The result

# %% jupyter={"source_hidden": true} tags=["drawing", "varies"]
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
assert not any(finding.is_tried or finding.left for finding in found.findings)
floor = program_floor(program).total
print(
    f"the step takes {1e6 * totals[-1]:.0f} us, and no schedule takes less than {1e6 * floor:.0f}"
)

# %% [markdown]
# `explain` tried none of these edits, because it cannot make them by itself. So their gains are
# unknown. This chip's compiler makes all three remaining collectives synchronous, so nothing can
# overlap with them. (`explain` prints the first cause that holds, and it tests latency before
# synchronous.) The step is far above the floor of the edited program. This floor has neither
# latencies nor passes over memory, and both are long for such small arrays. Other changes could
# help:
#
# - With larger matmuls, another algorithm: shard rows over `tp` too. Sums then become gathers and
#   reduce-scatters that overlap with matmuls ([overlapped matmuls](04_overlapped_matmuls.ipynb)).
# - More rows for each sum of gradients.
# - A chip whose sums overlap with other work.
#
# ## In short
#
# - `explain(compile_for(step, target, *arguments))` gives line, cause, edit and gain.
# - A gain belongs to the full program, compiled with the edit. Here each edited file gains what was
#   predicted, within 5%.
# - An edit changes which wait is the longest. Make one edit and ask again.
# - `jaxpar explain --json before.json`, then `--against before.json`, shows what an edit changed.
# - All causes: [why is this step slow?](../docs/explain.md)
#
# Next: [every link of a torus](18_links.ipynb).
