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
# # 14. Reading a schedule, and a profile
#
# A collective that is hidden costs nothing, one that is not costs all of its time, and the source
# looks the same. Two things tell them apart: the compiler's schedule, which can be had without the
# machine, and a profile, which needs it.
#
# 1. a program for a chip that is not here
# 2. the schedule as text
# 3. the schedule as a timeline
# 4. what is exposed, and why
# 5. the floor
# 6. a test that keeps it hidden
# 7. a profile, and the names in it
#
# `pip install 'jax[tpu]'` brings the TPU compiler. Times are those of a model of the chip with
# measured links; **they are no measurements**. What runs beside what is the compiler's own.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import compile_for, matmul_floor, target, timeline
from jaxpar.testing import assert_overlapped

# %% [markdown]
# ## 1. A program for a chip that is not here
#
# A target is a slice and a mesh over it. Arguments are shapes with specs. The program is a plain
# gather and a matmul: rows of activations, columns of a weight.

# %%
chips = target("v5e:2x4", "tp=8")
print(chips.mesh.shape, "of", chips.chip.kind)
M, K, N = 2048, 4096, 16384
ARGS = (
    jax.ShapeDtypeStruct((M, K), jnp.bfloat16, sharding=P("tp")),
    jax.ShapeDtypeStruct((K, N), jnp.bfloat16, sharding=P(None, "tp")),
)


def mapped(local):
    return jax.shard_map(local, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))


def plain(x, w):  # x: bf16[m/8, k], w: bf16[k, n/8]
    return lax.all_gather(x, "tp", tiled=True) @ w


def ring(x, w):
    return jaxpar.all_gather_matmul(x, w, "tp", mode="bidirectional")


programs = {fn.__name__: compile_for(mapped(fn), chips, *ARGS) for fn in (plain, ring)}

# %% [markdown]
# ## 2. The schedule as text
#
# `CompiledProgram.text` is the scheduled module: instructions in the order in which the chip will
# run them. An asynchronous transfer is a pair, a `-start` and a `-done`; what stands between them
# runs beside it. A collective without such a pair blocks.

# %% tags=["varies"]
COLLECTIVES = r" (all-gather|collective-permute-start|collective-permute-done)\("
for name, program in programs.items():
    print(f"{name:>6}: {dict(Counter(re.findall(COLLECTIVES, program.text)))}")

# %% [markdown]
# ## 3. The schedule as a timeline
#
# `timeline` plays the text: instructions take the compiler's own cycles, transfers their bytes over
# the links on their way, a done waits. Blue computes, orange travels, red waits.

# %% tags=["varies"]
COLOURS = {"compute": "#0072B2", "transfer": "#E69F00", "wait": "#D0021B"}
lines = {name: timeline(program) for name, program in programs.items()}
figure, panels = plt.subplots(2, 1, figsize=(8, 3.2), sharex=True)
for panel, (name, line) in zip(panels, lines.items(), strict=True):
    rows = {"compute": 1}
    for event in line.events:
        if event.kind in COLOURS and event.row != "memory":
            row = rows.setdefault(event.row, len(rows) + 1)
            span = [(1e6 * event.start, 1e6 * event.seconds)]
            panel.broken_barh(span, (row - 0.4, 0.8), color=COLOURS[event.kind], ec="white")
    panel.set_yticks(list(rows.values()), list(rows), size=7)
    panel.invert_yaxis()
    panel.set_title(f"{name}: {1e6 * line.total:.0f} us, {line.exposed / line.total:.0%} exposed")
    panel.title.set_size(9)
    panel.spines[["top", "right"]].set_visible(False)
panels[-1].set_xlabel("microseconds (a model)")
figure.tight_layout()
plt.show()

# %% [markdown]
# The same picture of any function, with a trace for Perfetto, from the terminal:
#
#     jaxpar predict model:layer --target v5e:2x4 --plot timeline.png --trace trace.json
#
# ## 4. What is exposed, and why
#
# A wait has a name, that of the transfer, and a length. A transfer has what it covers: the compute
# instructions between its start and its done.

# %% tags=["varies"]
for name, line in lines.items():
    print(f"{name}: {1e6 * line.exposed:.0f} us of {1e6 * line.total:.0f} wait")
    waits = [event for event in line.events if event.kind == "wait" and event.row == "compute"]
    for wait in sorted(waits, key=lambda event: -event.seconds)[:3]:
        print(f"  {1e6 * wait.seconds:7.1f} us for {wait.name}")
    covered = [len(event.covers) for event in line.transfers]
    print(
        f"  {len(line.transfers)} transfers, beside {min(covered)} to {max(covered)} instructions"
    )
    print(f"  {line.sent_bytes / 2**20:.0f} MiB sent, links busy {line.link_utilisation:.0%}")

assert lines["ring"].exposed < lines["plain"].exposed / 4
assert lines["ring"].sent_bytes <= lines["plain"].sent_bytes * 1.01

# %% [markdown]
# Three causes cover nearly all that is exposed: a collective that the compiler makes synchronous
# (it covers nothing), one whose operand or user stands right beside it (it covers too little), and
# one with too few columns to hide behind ([arithmetic](02_collectives.ipynb)).
#
# ## 5. The floor
#
# What no schedule beats: the longer of the matmul in one piece and the bytes alone, over both
# directions of the ring.

# %% tags=["varies"]
floor = matmul_floor(chips, "mk,kn->mn", (M, K), (K, N // 8), 7 / 8 * M * K * 2)
print(f"{1e6 * floor.compute:.0f} us of matmul, {1e6 * floor.transfer:.0f} us of bytes")
for name, line in lines.items():
    print(f"{name:>6}: {line.total / floor.total:.2f} of the floor")

# %% [markdown]
# The ring waits little, and is not at the floor: eight matmuls of an eighth of the rows each
# take longer than one of all rows. With more rows that price is smaller.
#
# ## 6. A test that keeps it hidden
#
# A schedule is as easily broken as a result: a cast too many, another layout, a new compiler. In a
# test, `assert_overlapped` compiles and fails with what is waited for the longest. The ring passes,
# the plain form does not:


# %% tags=["varies"]
def check_hidden(local):
    assert_overlapped(mapped(local), "v5e:2x4", *ARGS, mesh="tp=8", exposed_at_most=0.1)


assert lines["ring"].exposed < 0.1 * lines["ring"].total  # so check_hidden(ring) passes
try:
    check_hidden(plain)
except AssertionError as error:
    print(error)

# %% [markdown]
# ## 7. A profile, and the names in it
#
# On the machine itself the profiler measures. jaxpar's functions name what they do, so that a
# profile says `all_gather_matmul[tp]` where an instruction says `fusion.121`. The compiled text has
# the same names, and a profile its instructions; here is a profile of CPU devices, whose times mean
# little and whose names are those of any device. For yours, open the folder in XProf or Perfetto.

# %%
mesh = jaxpar.make_mesh("tp=8")
small = jnp.ones((256, 256)), jnp.ones((256, 512))
run = jaxpar.jit(
    jax.shard_map(ring, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
)
text = run.lower(*small).compile().as_text()
scopes = dict(re.findall(r'%?(\S+) = [^\n]*op_name="([^"]*)"', text))

with tempfile.TemporaryDirectory() as folder:
    run(*small)  # compiles
    with jax.profiler.trace(folder):
        jax.block_until_ready(run(*small))
    [file] = Path(folder).rglob("*.xplane.pb")
    profiled = jax.profiler.ProfileData.from_file(str(file))

ran = defaultdict(set)
for plane in profiled.planes:
    for line in plane.lines:
        for event in line.events:
            operation = dict(event.stats).get("hlo_op")
            if operation is not None and "all_gather_matmul" in scopes.get(operation, ""):
                ran[scopes[operation].split("/")[-1]].add(operation)
for name in ("dot_general", "ppermute"):
    print(f"{name}: {len(ran[name])} instructions within all_gather_matmul[tp]")
    assert ran[name]

# %% [markdown]
# ## In short
#
# - `compile_for` and `timeline`: the compiler's own order, under a model of the chip.
# - Look at waits first; a wait's name leads to its transfer, what that covers to its cause.
# - Compare with the floor, not with zero.
# - `assert_overlapped` in a test.
#
# Next: [several processes](15_processes.ipynb).
