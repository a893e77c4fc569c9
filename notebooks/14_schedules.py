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
# # 14. Reading a schedule and a profile
#
# A collective costs mainly its exposed time, which the source does not show. The compiler's
# schedule shows it without the chip. A profile shows it on the chip.
#
# 1. a program for a chip that this machine does not have
# 2. the schedule as text
# 3. the schedule as a timeline
# 4. exposed time and its causes
# 5. the floor
# 6. a test that keeps a transfer hidden
# 7. a profile and its names
#
# `pip install 'jax[tpu]'` installs the TPU compiler. The order of instructions, and so the overlap,
# comes from this compiler. Times are simulated on a model of the chip, whose link speeds are fitted
# to public measurements ([predictions](../docs/predictions.md)). **No time here was measured.**
# Stored times are of jax 0.10.2 and libtpu 0.0.42.1.

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
# ## 1. A program for a chip that this machine does not have
#
# A *target* is a slice of TPU chips and a mesh over it. Arguments are shapes with specs. The first
# program is a plain gather and a matmul: activations sharded by rows, a weight sharded by columns.
# The second, `ring`, is `all_gather_matmul`.

# %%
chips = target("v5e:2x4", "tp=8")
print(dict(chips.mesh.shape), "of", chips.chip.kind)
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
# `CompiledProgram.text` is the scheduled module. It lists instructions in the order in which the
# chip runs them. An asynchronous transfer is a pair of `-start` and `-done`. It overlaps with the
# instructions between them. A collective without such a pair is synchronous.
#
# In `ring`, a device gets seven blocks in eight transfers. Six blocks arrive in one piece. The
# block of the opposite device arrives in two halves, one from each side.

# %% tags=["varies"]
COLLECTIVES = r" (all-gather|collective-permute-start|collective-permute-done)\("
for name, program in programs.items():
    print(f"{name:>6}: {dict(Counter(re.findall(COLLECTIVES, program.text)))}")

# %% [markdown]
# ## 3. The schedule as a timeline
#
# `timeline` simulates the text. Instructions take the compiler's own cycle counts. A transfer takes
# the time that its bytes need on the links of its path. Its `-done` waits until it has ended. Blue
# is computation, orange a transfer, red waiting.

# %% jupyter={"source_hidden": true} tags=["drawing", "varies"]
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
# In a terminal, this command compiles the same two programs, draws the picture and writes a trace
# for Perfetto:
#
#     jaxpar predict --target v5e:2x4 --mesh tp=8 --ops gather-lhs-rows --shapes 2048x4096x16384 \
#         --modes naive,bidirectional --plot timeline.png --trace trace.json
#
# For your own program, write a function `make_step(mesh)` in a file `model.py`. It returns the
# function and its arguments. Then give `model:make_step` in place of the options from `--ops` to
# `--modes`.
#
# ## 4. Exposed time and its causes
#
# *Exposed* time is time in which the chip waits for a transfer. A wait has the name of the
# instruction that started its transfer. A transfer *covers* the compute instructions between its
# start and its done. `used links busy` is the share of time that a used link carries data, on
# average.

# %% tags=["varies"]
for name, line in lines.items():
    print(f"{name}: {1e6 * line.exposed:.0f} us of {1e6 * line.total:.0f} wait")
    waits = [event for event in line.events if event.kind == "wait" and event.row == "compute"]
    for wait in sorted(waits, key=lambda event: -event.seconds)[:3]:
        print(f"  {1e6 * wait.seconds:7.1f} us for {wait.name}")
    covered = " or ".join(map(str, sorted({len(event.covers) for event in line.transfers})))
    print(f"  transfers: {len(line.transfers)}; each covers {covered} instructions")
    print(f"  {line.sent_bytes / 2**20:.0f} MiB sent, used links busy {line.link_utilisation:.0%}")

assert lines["ring"].exposed < lines["plain"].exposed / 4
assert lines["ring"].sent_bytes <= lines["plain"].sent_bytes * 1.01

# %% [markdown]
# Exposed time has three main causes:
#
# - The compiler makes a collective synchronous. Then the collective covers nothing.
# - The instruction that makes the data, or the one that needs them, is right next to the transfer.
#   Then the transfer covers too little.
# - The weight has too few columns, so the matmul is shorter than the transfer
#   ([arithmetic](02_collectives.ipynb)).
#
# ## 5. The floor
#
# The *floor* is the longer of two times: the full matmul, compiled alone, and the transfer of the
# bytes over both directions of the ring. We divide each program's time by the floor, and split it
# into parts.

# %% tags=["varies"]
sent = 7 / 8 * M * K * 2  # bytes that a device sends, and receives
floor = matmul_floor(chips, "mk,kn->mn", (M, K), (K, N // 8), sent)
print(f"floor: {1e6 * floor.compute:.0f} us of matmul, {1e6 * floor.transfer:.0f} us of bytes")
for name, line in lines.items():
    matmuls = sum(event.seconds for event in line.events if event.is_matmul)
    parts = {
        "matmuls": matmuls,
        "cuts": line.compute - matmuls,
        "waits for transfers": line.exposed,
        "waits for copies": line.total - line.compute - line.exposed,
    }
    split = ", ".join(f"{part} {1e6 * seconds:.0f} us" for part, seconds in parts.items())
    print(f"{name:>5}: {line.total / floor.total:.2f} times the floor: {split}")

# %% [markdown]
# The ring waits little for transfers, but it is above the floor:
#
# - Eight matmuls of an eighth of the rows take longer than one of all rows.
# - The compiler copies the weight into the chip's fast memory, and the result out of it. The ring
#   waits for both copies. The plain program also copies the weight, but during its gather.
# - One block is cut into halves before it is sent.
#
# With more rows, the small matmuls and the copy of the weight matter less. The plain matmul is 2%
# shorter than that of the floor, which is compiled in another program. A difference of this size
# means nothing.
#
# ## 6. A test that keeps a transfer hidden
#
# An extra cast, another layout or a new compiler can break a schedule. In a test,
# `assert_overlapped` compiles the program. It fails with the name of the longest wait. The ring
# passes, and the plain program fails. (The message names a file and a line. In a notebook the
# file's name is a number; in your test it is your file.)


# %% tags=["varies"]
def check_hidden(local):
    assert_overlapped(mapped(local), "v5e:2x4", *ARGS, mesh="tp=8", exposed_at_most=0.1)


assert lines["ring"].exposed < 0.1 * lines["ring"].total  # so check_hidden(ring) passes
try:
    check_hidden(plain)
except AssertionError as error:
    print(error)

# %% [markdown]
# ## 7. A profile and its names
#
# On the chip itself, `jax.profiler` measures times. jaxpar's functions name their operations. The
# profile shows `all_gather_matmul[tp]` next to an instruction such as `fusion.121`. The compiled
# text holds the same names.
#
# Here is a profile of CPU devices. CPU times mean little, but the names are the same on every
# device. Open the folder of your own profile in XProf or Perfetto.

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
# - `compile_for` and `timeline` show the compiler's own order, simulated on a model of the chip.
# - Look at waits first. The name of a wait leads to its transfer. What the transfer covers shows
#   the cause.
# - Compare times with the floor, not with zero.
# - Use `assert_overlapped` in a test.
#
# Next: [several processes](15_processes.ipynb).
