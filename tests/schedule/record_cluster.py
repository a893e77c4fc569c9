"""Records a trace of two CPU processes, for the tests of `read_trace`.

`python tests/schedule/record_cluster.py` runs a ring on two processes of one device each and writes
what the second one recorded to `tests/schedule/traced/<jax version>/ring.*.gz`: the plane of
its threads, as it is, and the program without the tables of source positions.
"""

import gzip
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar

FOLDER = Path(__file__).parent / "traced" / jax.__version__
CALLS = 3
SHAPES = (((512, 256), P("tp")), ((256, 512), P(None, "tp")))


def member(port: str, process: str, folder: str) -> None:
    """One process: compiles, runs once, and records some calls."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    mesh = jaxpar.make_mesh("tp=2")

    def ring(x, w):
        return jaxpar.all_gather_matmul(x, w, "tp", mode="unidirectional")

    args = [
        jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index, shape=shape: np.ones(shape)[index]
        )
        for shape, spec in SHAPES
    ]
    specs = tuple(spec for _, spec in SHAPES)
    mapped = jax.shard_map(
        ring, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check_vma=False
    )
    run = jax.jit(mapped).lower(*args).compile()
    jax.block_until_ready(run(*args))
    with jax.profiler.trace(folder):
        for _ in range(CALLS):
            jax.block_until_ready(run(*args))
    (Path(folder) / "hlo.txt").write_text(run.as_text() or "")
    jax.distributed.shutdown()


def of_threads(trace: bytes) -> bytes:
    """The plane of the host's threads alone: others hold the module with its paths."""
    found, at = b"", 0
    while at < len(trace):
        start = at
        tag, at = varint(trace, at)
        length, at = varint(trace, at)
        at += length
        if tag == 0x0A and b"/host:CPU" in trace[start : start + 40]:
            found += trace[start:at]
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def without_positions(text: str) -> str:
    tables = "FileNames|FunctionNames|FileLocations|StackFrames"
    text = re.sub(rf"^({tables})\n(?:.+\n)*\n?", "", text, flags=re.MULTILINE)
    return re.sub(r'metadata=\{[^}]*?(op_name="[^"]*")[^}]*\}', r"metadata={\1}", text)


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, port, str(process), f"{folder}/{process}"]
            for process in range(2)
        ]
        members = [subprocess.Popen(command) for command in commands]
        assert [one.wait() for one in members] == [0, 0]
        second = Path(folder) / "1"
        (trace,) = second.rglob("*.xplane.pb")
        files = {
            "ring.xplane.pb.gz": of_threads(trace.read_bytes()),
            "ring.hlo.txt.gz": without_positions((second / "hlo.txt").read_text()).encode(),
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (FOLDER / name).write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    member(*sys.argv[1:]) if len(sys.argv) > 1 else main()
