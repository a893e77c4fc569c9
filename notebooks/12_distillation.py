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
# # 12. Distillation on two meshes at once
#
# In distillation a small model, the student, learns the answers of a large one, the teacher. Only
# the student trains. The two programs share only a batch and its logits. Each program gets half of
# the devices and its own parallelism. On accelerators, JAX's asynchronous dispatch can run them at
# the same time.
#
# 1. two meshes
# 2. a teacher and a student
# 3. from one mesh to the other
# 4. a loop that waits, and a loop that does not
# 5. a profile of both
#
# Times on CPU devices are not those of accelerators. This notebook measures only *which work
# overlaps*.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import tempfile
from collections import defaultdict
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import gated_mlp, mean_value_and_grad

# %% [markdown]
# ## 1. Two meshes
#
# A mesh can use any devices. The teacher is too large for one device, so it uses tensor
# parallelism. The student is small and uses data parallelism.


# %%
def meshes(devices):
    half = len(devices) // 2
    return (
        jaxpar.make_mesh("tp=-1", devices=devices[:half]),
        jaxpar.make_mesh("dp=-1", devices=devices[half:]),
    )


for name, mesh in zip(("teacher", "student"), meshes(jax.devices()), strict=True):
    print(f"{name}: {dict(mesh.shape)} on devices {[device.id for device in mesh.devices.flat]}")

# %% [markdown]
# ## 2. A teacher and a student
#
# These are two jitted functions of global arrays. Each is compiled for its own mesh. Between the
# teacher's MLPs the rows are sharded over `tp`, as in [notebook 7](07_tensor_parallel.ipynb).

# %%
ROWS, WIDTH, HIDDEN, CLASSES = 1024, 128, 512, 32
rng = np.random.default_rng(0)


def normal(*shape):
    return (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)


TEACHER = {
    "gate": (normal(WIDTH, HIDDEN), P(None, "tp")),
    "up": (normal(WIDTH, HIDDEN), P(None, "tp")),
    "down": (normal(HIDDEN, WIDTH), P("tp")),
    "head": (4 * normal(WIDTH, CLASSES), P()),
}
STUDENT = {"up": (normal(WIDTH, HIDDEN), P()), "down": (normal(HIDDEN, CLASSES), P())}
optimizer = optax.adam(3e-3)


def place(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def specs_of(model):
    return {name: spec for name, (_, spec) in model.items()}


def make_teacher(mesh):
    """Returns the teacher's weights on its mesh, and the function that computes its logits."""

    def local(w, x):  # x: f32[b/tp, d]; gate: f32[d, f/tp]
        for _ in range(4):
            x = x + gated_mlp(x, w["gate"], w["up"], w["down"], "tp", sequence_dim=0)
        return x @ w["head"]  # f32[b/tp, classes]

    specs = specs_of(TEACHER), P("tp")
    answer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    weights = {name: place(mesh, w, spec) for name, (w, spec) in TEACHER.items()}
    return weights, jaxpar.jit(answer, mesh=mesh)


def make_student(mesh):
    """Returns the student's weights and optimizer state on its mesh, and its training step."""

    def local(w, x, logits):  # x: f32[b/dp, d], logits: f32[b/dp, classes]
        student = jax.nn.log_softmax(jax.nn.gelu(x @ w["up"]) @ w["down"])
        teacher = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(teacher) * (teacher - student)), x.shape[0]  # divergence, count

    specs = specs_of(STUDENT)
    gradients = jax.shard_map(
        mean_value_and_grad(local, "dp"),
        mesh=mesh,
        in_specs=(specs, P("dp"), P("dp")),
        out_specs=(P(), specs),
    )

    def step(w, state, x, logits):
        loss, grads = gradients(w, x, logits)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(w, updates), state, loss

    weights = {name: place(mesh, w, spec) for name, (w, spec) in STUDENT.items()}
    return weights, jax.jit(optimizer.init)(weights), jaxpar.jit(step, mesh=mesh)


# %% [markdown]
# ## 3. From one mesh to the other
#
# `jax.device_put` with a sharding of the other mesh copies an array and reshards it. It is
# asynchronous too: it returns at once, and the copy starts when the logits are ready.

# %%
batches = [normal(ROWS, WIDTH) * ROWS**0.5 for _ in range(8)]
teacher_mesh, student_mesh = meshes(jax.devices())
weights, answer = make_teacher(teacher_mesh)
logits = answer(weights, place(teacher_mesh, batches[0], P("tp")))
moved = place(student_mesh, logits, P("dp"))
for name, array in {"logits": logits, "moved": moved}.items():
    print(f"{name}: {array.sharding.spec} on devices {sorted(d.id for d in array.devices())}")
np.testing.assert_array_equal(moved, logits)

w, x = {name: w for name, (w, _) in TEACHER.items()}, batches[0]
for _ in range(4):  # on one device
    x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
np.testing.assert_allclose(logits, x @ w["head"], rtol=1e-3, atol=1e-2)

# %% [markdown]
# ## 4. A loop that waits, and a loop that does not
#
# The first loop waits for each program before it continues, because it reads each loss with
# `float`. The second loop never waits. It starts the teacher's *next* answer before the student
# learns from the current one. It stores losses as arrays and reads them at the end.


# %%
def distil(devices, wait):
    """Returns a function that trains a new student and returns its losses."""
    teacher_mesh, student_mesh = meshes(devices)
    teacher, answer = make_teacher(teacher_mesh)
    start, start_state, learn = make_student(student_mesh)

    def logits_of(batch):
        return answer(teacher, place(teacher_mesh, batch, P("tp")))

    def train_and_wait():
        w, state, losses = start, start_state, []
        for batch in batches:
            logits = jax.block_until_ready(logits_of(batch))
            x, targets = place(student_mesh, batch, P("dp")), place(student_mesh, logits, P("dp"))
            w, state, loss = learn(w, state, x, targets)
            losses.append(float(loss))  # waits for the student
        return losses

    def train():
        w, state, losses = start, start_state, []
        logits = logits_of(batches[0])
        for step, batch in enumerate(batches):
            x, targets = place(student_mesh, batch, P("dp")), place(student_mesh, logits, P("dp"))
            if step + 1 < len(batches):
                logits = logits_of(batches[step + 1])  # can run while the student learns
            w, state, loss = learn(w, state, x, targets)
            losses.append(loss)
        return [float(loss) for loss in losses]

    return train_and_wait if wait else train


losses_waiting = distil(jax.devices(), wait=True)()
losses = distil(jax.devices(), wait=False)()
print("with waiting:   ", " ".join(f"{loss:.2f}" for loss in losses_waiting))
print("without waiting:", " ".join(f"{loss:.2f}" for loss in losses))
np.testing.assert_array_equal(losses_waiting, losses)

# %% [markdown]
# The losses are bitwise equal.
#
# ## 5. A profile of both
#
# So far each program ran on four devices. JAX's CPU backend runs only one multi-device program at a
# time, even on disjoint devices. The profile below therefore uses one device for each program.
# Accelerators do not have this limit, and the code is the same.
#
# `jax.profiler.trace` records every operation of every device. `jax.profiler.ProfileData` reads the
# record.


# %%
def profile(run):
    """Runs a function; returns (start, end), in seconds, of each device's operations."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [file] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    found = defaultdict(list)
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and "device_ordinal" in stats:
                    start = event.start_ns * 1e-9
                    span = start, start + event.duration_ns * 1e-9
                    found[int(stats["device_ordinal"])].append(span)
    first = min(start for spans in found.values() for start, _ in spans)
    return {device: np.array(sorted(spans)) - first for device, spans in sorted(found.items())}


two = jax.devices()[:2]
loops = {"with waiting": distil(two, wait=True), "without waiting": distil(two, wait=False)}
for loop in loops.values():
    loop()  # compiles
profiles = {name: profile(loop) for name, loop in loops.items()}


# %% tags=["varies"]
def busy_at(times, spans):
    """Returns at which times a device computes."""
    busy = np.zeros(len(times), bool)
    for start, end in spans:
        busy |= (start <= times) & (times < end)
    return busy


seconds, both_busy = {}, {}
for name, spans in profiles.items():
    seconds[name] = max(spans[0].max(), spans[1].max())
    times = np.linspace(0, seconds[name], 5000)
    both_busy[name] = np.mean(busy_at(times, spans[0]) & busy_at(times, spans[1]))
    print(f"{name:>15}: both busy {both_busy[name]:.0%} of the time")
assert both_busy["with waiting"] < 0.05 < both_busy["without waiting"]

# %% jupyter={"source_hidden": true} tags=["drawing", "varies"]
figure, panels = plt.subplots(2, 1, figsize=(8, 2.8), sharex=True)
for panel, (name, spans) in zip(panels, profiles.items(), strict=True):
    for device, colour in ((0, "C0"), (1, "C1")):
        bars = [(1e3 * start, 1e3 * (end - start)) for start, end in spans[device]]
        panel.broken_barh(bars, (device - 0.4, 0.8), color=colour)
    panel.set_yticks((0, 1), ("teacher", "student"))
    title = f"{name}: {1e3 * seconds[name]:.0f} ms, both busy {both_busy[name]:.0%} of it"
    panel.set_title(title, size=9)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
panels[-1].set_xlabel("milliseconds")
figure.tight_layout()
plt.show()

# %% [markdown]
# In the first picture teacher and student alternate. In the second they overlap. CPU devices share
# cores, so these times say little. On accelerators the shorter program should add little time, but
# this was not measured.
#
# Split the devices so that both programs take about the same time.
# `make_mesh(..., devices=...)` takes any devices, and `jaxpar predict` predicts each time.
#
# ## In short
#
# - Give each program its own mesh and its own parallelism.
# - `jax.device_put` to a sharding of the other mesh is asynchronous too.
# - Dispatch the next step of one program before you wait for the other. Read no value within the
#   loop.
# - A profile shows when each device was busy.
#
# Next: [layouts](13_layouts.ipynb).
