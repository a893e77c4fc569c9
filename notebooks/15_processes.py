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
# # 15. Several processes, each with its own data
#
# On one machine a program sees all devices. On many hosts each process runs the same program and
# sees its own devices, while a mesh covers all of them. Here two processes with four CPU devices
# each behave like two hosts:
#
# 1. a program of two processes
# 2. each host's part of a batch
# 3. values that must be equal in all processes
# 4. a step that would hang or compute garbage
# 5. where the arrays are
# 6. overlap by the clock, on a slow network
#
# A notebook is one process. This one starts two more and sends both the same programs.

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt

import jaxpar

# %% [markdown]
# ## 1. A program of two processes
#
# `jaxpar.initialize` connects the processes. On Slurm, Kubernetes or a TPU pod it needs no
# arguments. If a process is missing, `initialize` names it instead of hanging. Afterwards
# `jax.devices()` lists the devices of all processes.


# %%
def free_port():
    while True:  # below the ephemeral ports, so that the port stays free
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


START = """
import json, os, sys
# Gloo, the CPU transport, prints to standard output; send that to standard error.
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
import jax
jax.config.update("jax_platforms", "cpu")
port, rank, devices = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", devices)
import jaxpar
found = jaxpar.initialize(f"127.0.0.1:{port}", 2, rank, timeout_s=600)
for program in map(json.loads, sys.stdin):
    exec(program)
    print("done")
"""


folder = Path(tempfile.mkdtemp())


def start_processes(devices, within=()):
    """Starts two processes that wait for programs; `within` is a command that runs them."""
    (folder / "start.py").write_text(START)
    env = {**os.environ, "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    port = str(free_port())
    return [
        subprocess.Popen(
            [*within, sys.executable, str(folder / "start.py"), port, str(rank), str(devices)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"stderr_{rank}").open("w"),
            text=True,
        )
        for rank in range(2)
    ]


processes = start_processes(devices=4)


def run(program):
    """Runs a program in both processes, and prints what each prints, in order."""
    for process in processes:
        process.stdin.write(json.dumps(textwrap.dedent(program)) + "\n")
        process.stdin.flush()
    texts = []
    for rank, process in enumerate(processes):
        lines = []
        while (line := process.stdout.readline()) not in ("done\n", ""):
            lines.append(line)
        assert line, (folder / f"stderr_{rank}").read_text()  # the process ended
        texts.append("".join(lines).rstrip("\n"))
        print(textwrap.indent(texts[-1], f"process {rank}: "))
    return texts


said = run("""
    print(f"{found.local_devices} of {found.devices} devices, on a {found.platform}")
""")
assert all("4 of 8 devices" in text for text in said)

# %% [markdown]
# ## 2. Each host's part of a batch
#
# No host should read the full batch. A layout's `batch_part` says which part a process reads.
# `place_batch` builds a global array from the parts. Here each row holds its own number, so a sum
# shows that every row arrived once.

# %%
said = run("""
    import numpy as np
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from jaxpar.layout import LayoutMap

    mesh = jaxpar.make_mesh("dp=4,tp=2")
    rules = LayoutMap({"w": P(None, "tp")}, batch=P("dp"))
    layout = rules.layout({"w": jnp.ones((3, 4))}, mesh)
    part, parts = layout.batch_part()
    rows = range(16 * part // parts, 16 * (part + 1) // parts)
    mine = np.float32(rows)[:, None] * np.ones(3, np.float32)  # what this host reads from its disk
    batch = layout.place_batch(mine)
    total = jax.jit(jnp.sum)(batch)
    print(f"part {part} of {parts}: {rows}, global {batch.shape}, sum {total:.0f}")
""")
assert all(f"sum {3 * sum(range(16))}" in text for text in said)

# %% [markdown]
# Without a layout, `jax.make_array_from_process_local_data(sharding, mine)` does the same for your
# own sharding.
#
# ## 3. Values that must be equal in all processes
#
# All processes must run the same program with the same shapes over the same mesh. If any of these
# differs, a collective can hang or return garbage. `jaxpar.agree` compares values first, and
# reports what differs and where. Here one process has read another configuration:

# %%
said = run("""
    config = {"layers": 12, "rate": 1e-3 if rank == 0 else 3e-3}
    jaxpar.agree(layers=config["layers"])
    try:
        jaxpar.agree(rate=config["rate"])
    except Exception as error:
        print(type(error).__name__, "-", str(error).splitlines()[0])
""")
assert all("rate" in text for text in said)

# %% [markdown]
# `jaxpar.agree` also compares meshes, layouts, shapes and the text of a lowered program.
#
# ## 4. A step that would hang or compute garbage
#
# Values that agreed once can differ later. One process may take another branch, or receive a batch
# of another shape. `jaxpar.guard` wraps a step and compares each new program before it runs. Below,
# process 1 takes a maximum where process 0 takes a sum of the same shape. Without a guard both
# would end with status 0 and wrong numbers.

# %%
said = run("""
    import textwrap
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    mesh = jaxpar.make_mesh("dp=8")
    reduce = lax.psum if rank == 0 else lax.pmax

    def loss(x):
        return reduce(x, "dp")

    loss = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    step = jaxpar.guard(loss, timeout_s=60)
    try:
        step(jnp.arange(8.0))
    except ValueError as error:
        print(textwrap.fill(str(error), 80))
""")
for text in map(str.split, said):
    assert " ".join(text[:11]) == "guard: processes 0 and 1 run different programs in call 1"
    assert {"psum", "pmax"} < set(text)

# %% [markdown]
# The guard reports a killed process at once. After `timeout_s` it also names the line of a process
# that is missing or still compiles: [when a step hangs](../docs/hangs.md).
#
# ## 5. Where the arrays are
#
# A global array has shards on devices that this process cannot reach. `np.asarray` of it fails.
# `addressable_shards` lists the local shards. The picture shows which rows of a batch of 16 over
# `dp=4,tp=2` each process holds:

# %%
said = run("""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jaxpar.make_mesh("dp=4,tp=2")
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("dp")))
    for shard in x.addressable_shards:
        rows = shard.index[0]
        print("device", jax.devices().index(shard.device), "rows", rows.start, "to", rows.stop)
    try:
        np.asarray(x)
    except RuntimeError as error:
        print("error:", str(error).split(" (")[0], "...")
""")

assert all("error:" in text for text in said)

# %% jupyter={"source_hidden": true} tags=["drawing"]
figure, panel = plt.subplots(figsize=(6, 2.4))
for rank, text in enumerate(said):
    for line in text.splitlines():
        if not line.startswith("error"):
            _, device, _, first, _, end = line.split()
            panel.barh(int(device), int(end) - int(first), 0.8, int(first), color=f"C{rank}")
panel.set(xlabel="rows", ylabel="device", yticks=range(8), xticks=range(0, 17, 4))
panel.set_title("what each process holds: process 0 blue, process 1 orange", size=9)
panel.invert_yaxis()
panel.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Checkpoints are also local: `layout.save` and `layout.restore` write and read each process's own
# part. Run `jaxpar doctor` on all hosts first to test collectives between them.
#
# ## 6. Overlap by the clock
#
# In one process, CPU devices cannot show overlap: a transfer is a copy on the computing cores. Two
# processes on a slow network can. Linux can make such a network without root: a namespace with its
# own loopback, which `tc` limits to 1 Gbit/s for both directions together. If this machine cannot
# make one, the cell prints why, and the processes use the ordinary loopback.


# %%
def stop_processes(processes):
    for process in processes:
        process.stdin.close()
    assert [process.wait() for process in processes] == [0, 0]


stop_processes(processes)

# %% tags=["varies"]
# Gloo looks up the host name, so it must resolve to the loopback.
SLOW_NETWORK = """
echo localhost > /proc/sys/kernel/hostname &&
ip link set lo up &&
tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms &&
echo ready && exec cat
"""
try:
    network = subprocess.Popen(  # the namespace ends with this process
        ["unshare", "--map-root-user", "--net", "--uts", "sh", "-c", SLOW_NETWORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reply = network.stdout.readline().strip()
except OSError as error:
    reply = str(error)

within = []
if reply == "ready":
    within = ["nsenter", f"--target={network.pid}", "--user", "--net", "--uts"]
    within.append("--preserve-credentials")
print("network of 1 Gbit/s:", reply)
processes = start_processes(devices=1, within=within)

# %% [markdown]
# Each process has half of the rows of `x` and needs all rows for its columns of `w`. `naive`
# gathers `x`, then multiplies. `unidirectional` multiplies its own half while the other arrives.
# For comparison the program also times the transfer alone, and the matmuls alone.

# %% tags=["varies"]
said = run("""
    import statistics, time
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jaxpar.make_mesh("tp=2")

    def transfer(x, w):  # x: f32[m/2, k], w: f32[k, n/2]
        return lax.all_gather(x, "tp", tiled=True)

    def matmuls(x, w):  # as many rows as after the gather
        return jnp.concatenate([x, x]) @ w

    def naive(x, w):
        return jaxpar.all_gather_matmul(x, w, "tp", mode="naive")

    def unidirectional(x, w):
        return jaxpar.all_gather_matmul(x, w, "tp", mode="unidirectional")

    def normal(seed, spec):
        make = lambda: jax.random.normal(jax.random.key(seed), (2048, 2048))
        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()

    rows, columns = P("tp"), P(None, "tp")
    x, w = normal(0, rows), normal(1, columns)
    programs = {}
    for local in (transfer, matmuls, naive, unidirectional):
        sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
        programs[local.__name__] = jax.jit(sharded)

    results = [programs[name](x, w).addressable_data(0) for name in ("naive", "unidirectional")]
    np.testing.assert_allclose(*results, rtol=1e-3, atol=1e-3)

    seconds = {name: [] for name in programs}
    for _ in range(7):
        for name, program in programs.items():
            sync_global_devices("start")
            start = time.perf_counter()
            jax.block_until_ready(program(x, w))
            sync_global_devices("stop")
            seconds[name].append(time.perf_counter() - start)
    for name, measured in seconds.items():
        print(f"{name:>14}: {1e3 * statistics.median(measured):4.0f} ms")
""")
stop_processes(processes)
if within:
    network.stdin.close()
    network.wait()

# %% [markdown]
# The stored times are medians of seven rounds on two cores. `naive` takes about as long as the
# transfer and the matmuls together. `unidirectional` hides most of the transfer.
# [Network](../benchmarks/network/README.md) has more such measurements, with four processes.
#
# ## In short
#
# - Call `jaxpar.initialize()` first, and run the same program everywhere.
# - `batch_part` says what to read, and `place_batch` makes it global.
# - `jaxpar.agree(...)` checks the configuration before the first collective.
# - `jaxpar.guard(step)` compares each new program before it runs.
# - To measure overlap without accelerators, use several processes and a slow network.
#
# Next: [testing a collective of your own](16_testing.ipynb).
