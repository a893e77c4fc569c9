"""What each process of test_processes.py does: `worker.py CASE RANK COUNT PORT FOLDER`.

What it has to say goes to standard output, where the transport's words would be in the midst of it.
"""

import os
import re
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.layout import Interleaved, LayoutMap, Padded  # noqa: E402
from jaxpar.tools.cli.workers import own_output  # noqa: E402

CASE, RANK, COUNT, PORT, FOLDER = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])


def main() -> None:
    """Runs the case."""
    timeout = 300
    if CASE == "missing":
        timeout = 4
        come_together()
    more = {"timeout_s": timeout}
    if CASE == "late":  # by JAX's names
        more = {"initialization_timeout": timeout, "heartbeat_timeout_seconds": 10}
        more |= {"coordinator_bind_address": f"127.0.0.1:{PORT}"}
    found = jaxpar.initialize(f"localhost:{PORT}", COUNT, RANK, **more)
    assert (found.process, found.processes, found.devices) == (RANK, COUNT, 2 * COUNT)
    assert jaxpar.initialize() == found  # a second time
    {"killed": killed, "late": late, "silent": silent, "differ": differ, "equal": equal}[CASE]()


def come_together() -> None:
    """Waits until all that were started are here, so that none of them is late for another."""
    (FOLDER / f"started {RANK}").touch()
    wait_for(lambda: len(list(FOLDER.glob("started *"))) == int(os.environ["STARTED"]))


def wait_for(is_done) -> None:
    """Waits until it is, at most for minutes."""
    end = time.monotonic() + 300
    while not is_done() and time.monotonic() < end:
        time.sleep(0.05)


def killed() -> None:
    """Process 1 ends on the way."""
    if RANK == 1:
        print("killed", flush=True)
        os._exit(9)
    try:
        jaxpar.agree(timeout_s=3)
    except TimeoutError as reason:
        print(f"TimeoutError: {reason}", flush=True)
        os._exit(3)  # JAX would wait for the dead process at exit


def silent() -> None:
    """Process 0 is there and does not come to the meeting."""
    if RANK == 0:
        wait_for((FOLDER / "said").exists)
        os._exit(0)
    try:
        jaxpar.agree(timeout_s=1)
    except TimeoutError as reason:
        print(f"TimeoutError: {reason}", flush=True)
        (FOLDER / "said").touch()
        os._exit(3)


def late() -> None:
    """Each is late once, for longer than JAX may wait for a process that is stopped."""
    for rank in range(2):
        if rank == RANK:
            time.sleep(6)
        jaxpar.agree(timeout_s=300)
    print("agreed", flush=True)


def differ() -> None:
    """Layouts, programs and shapes that are not the same."""
    mesh = jaxpar.make_mesh(f"tp={2 * COUNT}")
    last = RANK == COUNT - 1
    spec = ("tp", None) if last else (None, "tp")
    layout = LayoutMap({"w": spec}).layout({"w": jnp.ones((6, 6))}, mesh)
    reduce = jax.lax.pmax if last else jax.lax.psum

    def step(x):
        return jax.shard_map(lambda x: reduce(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P())(
            x
        )

    program = jax.jit(step).lower(jnp.ones(6))
    batch = {"x": np.ones((4 + last, 2))}
    values = {"layout": layout, "step": program, "batch": batch}
    values["more" if last else "less"] = 1
    for name in ("layout", "step", "batch"):
        try:
            jaxpar.agree(mesh=mesh, **{name: values[name]})
            print(f"{name} agreed")
        except ValueError as reason:
            print(f"{name}: {reason}")
    try:
        jaxpar.agree(**({"more": 1} if last else {"less": 1}))
    except ValueError as reason:
        print(f"names: {reason}", flush=True)
    rules = LayoutMap({"w": ("tp",)}, batch=P("dp"))
    placing = rules.layout({"w": jnp.ones(2 * COUNT)}, jaxpar.make_mesh(f"dp={COUNT},tp=2"))
    y, x = np.arange(4), np.ones((4 - last, 3), np.float32)
    for batch in ({"y": y, "x": x}, {"y": y, "x": x.astype("int8") if last else x}, y[last:], y):
        try:
            print(f"placed: {jax.tree.map(jnp.shape, placing.place_batch(batch))}", flush=True)
        except ValueError as reason:
            print(reason, flush=True)
    with pytest.raises(ValueError, match=f"process 0 has 1 arrays, and process {COUNT - 1} has 2;"):
        placing.place_batch([y] * (1 + last))
    for batch, _ in placing.batches([y[last:]], rows=4):
        print(f"filled: {batch.shape}", flush=True)
    with pytest.raises(ValueError, match=r"Layout\.batches: processes make different arrays: pro"):
        next(placing.batches([np.ones((4, 3 + last))]))
    key = jax.random.key(int(last))
    replicated = jax.sharding.NamedSharding(mesh, P())
    given = {
        "key": key,
        "weights": jax.make_array_from_callback(
            (64,), replicated, lambda _: np.full(64, last, np.float32)
        ),
    }
    for name, value in given.items():
        try:
            jaxpar.agree(**{name: value})
        except ValueError as reason:
            print(f"{name}: {reason}", flush=True)
    with jax.default_matmul_precision("highest" if last else None):
        try:
            jaxpar.agree()
        except ValueError as reason:
            print(f"settings: {reason}", flush=True)


def equal() -> None:
    """All of a training's data and checkpoints."""
    mesh = jaxpar.make_mesh(f"dp=2,tp={COUNT}")
    shapes = {"w": jax.ShapeDtypeStruct((10, 6), jnp.float32)}
    rules = LayoutMap({"w": (Padded("tp"), None)}, batch=P(("dp", "tp")))
    layout = rules.layout(shapes, mesh)
    jaxpar.agree(mesh=mesh, rules=rules, layout=layout, shapes=shapes)

    w = np.arange(60, dtype=np.float32).reshape(10, 6)
    params = layout.place({"w": w})
    # Sets have another order in each process, and functions another address.
    words = frozenset(f"word {n}" for n in range(20))
    adam = optax.adam(optax.cosine_decay_schedule(1e-3, 100))
    jaxpar.agree(params=params, config={"words": words, "act": jax.nn.gelu, "optimizer": adam})
    np.testing.assert_array_equal(layout.gather(params)["w"], w)
    born = layout.init(lambda: {"w": jnp.arange(60.0).reshape(10, 6)})
    np.testing.assert_array_equal(layout.gather(born)["w"], w)

    file = FOLDER / "written.safetensors"
    layout.write_safetensors(file, params, transposed="w")
    back = layout.read_safetensors(file, transposed="w")
    np.testing.assert_array_equal(layout.gather(back)["w"], w)
    reason = f"{re.escape(str(file))} exists already" if RANK == 0 else "process 0 could not write"
    with pytest.raises(ValueError, match=f"write_safetensors: {reason}"):
        layout.write_safetensors(file, params, transposed="w")

    # Each process has rows of its own; the last one runs out first.
    rows = [np.full((2, 3), 10.0 * RANK + n) for n in range(3 - (RANK == COUNT - 1))]
    rows[-1] = rows[-1][: 2 - RANK % 2]
    total, count = 0.0, 0.0
    sums = jax.jit(lambda x, weight: (jnp.sum(x[:, 0] * weight), jnp.sum(weight)))
    for batch, weights in layout.batches({"x": x} for x in rows):
        assert batch["x"].shape == (2 * COUNT, 3)
        one = sums(batch["x"], weights)
        total, count = total + float(one[0]), count + float(one[1])
    every = [10.0 * r + n for r in range(COUNT) for n in range(3 - (r == COUNT - 1))]
    last = [10.0 * r + 2 - (r == COUNT - 1) for r in range(COUNT) if r % 2]
    assert count == 2 * len(every) - len(last), count
    assert total == 2 * sum(every) - sum(last), total

    layout.save(FOLDER / "checkpoint", params)
    other = LayoutMap({"w": (None, "tp")}, batch=P("dp")).layout(
        shapes, jaxpar.make_mesh({"dp": COUNT, "tp": 2})
    )
    back = other.restore(FOLDER / "checkpoint")
    np.testing.assert_array_equal(other.gather(back)["w"], w)
    keeps_all_bits(mesh)
    moves_stages(mesh)
    gives_its_part()
    reads_its_shards_alone(mesh)
    print("equal", flush=True)


def keeps_all_bits(mesh) -> None:
    """Floats of 8 bits that are NaN, and keys of which there are none, come back."""
    bytes_ = np.arange(250, 256, dtype=np.uint8)[:5]
    tree = {"f8": bytes_.view(jnp.float8_e5m2), "keys": jax.random.split(jax.random.key(0), 0)}
    layout = LayoutMap({"f8": (Padded("tp"),)}).layout(tree, mesh, strict=False)
    found = layout.gather(layout.place(tree))
    np.testing.assert_array_equal(found["f8"].view(np.uint8), bytes_)
    assert found["keys"].shape == (0,)
    local = {"f8": jnp.ones(5, jnp.float8_e5m2), "keys": tree["keys"]}
    with pytest.raises(ValueError, match=r"outside of the mesh; save what `Layout\.place` gives"):
        layout.save(FOLDER / "local", local)


def moves_stages(mesh) -> None:
    """Layers of a pipeline come to their devices, and back."""
    w = np.arange(8 * COUNT, dtype=np.int8).reshape(4 * COUNT, 2)
    layout, other = (
        LayoutMap({"w": (entry,)}).layout({"w": w}, mesh, strict=False)
        for entry in (Interleaved("tp", 2), Interleaved("dp", 2))
    )
    jaxpar.agree(layout=layout)
    placed = layout.place({"w": w})
    order = np.arange(4 * COUNT).reshape(2, COUNT, 2).swapaxes(0, 1).ravel()
    for shard in placed["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, w[order][shard.index])
    np.testing.assert_array_equal(layout.gather(placed)["w"], w)
    again = layout.place(layout.unpad(placed))  # arrays of which each process has a part
    np.testing.assert_array_equal(layout.gather(again)["w"], w)
    layout.save(FOLDER / "stages", placed)
    np.testing.assert_array_equal(other.gather(other.restore(FOLDER / "stages"))["w"], w)


def gives_its_part() -> None:
    """Processes of one replica read the same rows, those of others others."""
    data = np.arange(24.0).reshape(8, 3)
    for axes, batch in {
        f"dp=2,tp={COUNT}": P("dp"),
        f"dp=2,fsdp={COUNT // 2},tp=2": P(("dp", "fsdp"), "tp"),
        f"tp={2 * COUNT}": P(),
    }.items():
        mesh = jaxpar.make_mesh(axes)
        rules = LayoutMap({".*": ("tp",)}, batch=batch if batch != P() else P(None, None))
        layout = rules.layout({"w": jnp.ones(8)}, mesh, strict=False)
        part, parts = layout.batch_part()
        columns = data[:, :2] if "tp" in tuple(batch) else data
        rows = columns.reshape(parts, 8 // parts, -1)[part]
        placed = layout.place_batch(rows)
        assert placed.shape == columns.shape, (axes, placed.shape)
        for shard in placed.addressable_shards:
            np.testing.assert_array_equal(shard.data, columns[shard.index])


def reads_its_shards_alone(mesh) -> None:
    """Of a checkpoint by what the system counts as read, of safetensors by what is mapped."""
    size = 1 << 20
    rules = LayoutMap({"w": (("dp", "tp"), None)})
    layout = rules.layout({"w": jax.ShapeDtypeStruct((size, 4), jnp.float32)}, mesh)
    w = np.arange(4 * size, dtype=np.float32).reshape(size, 4)
    layout.save(FOLDER / "large", layout.place({"w": w}))
    before = bytes_read()
    back = layout.restore(FOLDER / "large")
    read = bytes_read() - before
    assert read < w.nbytes * (1 / COUNT + 0.25), (read, w.nbytes)
    for shard in back["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, w[shard.index])
    if RANK == 0:
        save_file({"w": w}, FOLDER / "large.safetensors")
    jaxpar.agree(written=True)  # all wait for the file
    before = bytes_mapped()
    back = layout.read_safetensors(FOLDER / "large.safetensors")
    mapped = bytes_mapped() - before
    assert mapped < w.nbytes * (1 / COUNT + 0.25), (mapped, w.nbytes)
    for shard in back["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, w[shard.index])


def bytes_mapped() -> int:
    """Of files, in this process's memory: the pages of a mapped file that it has looked at."""
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def bytes_read() -> int:
    """By this process, of all files."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


if __name__ == "__main__":
    with own_output() as lines, redirect_stdout(lines):
        main()
