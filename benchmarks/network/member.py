"""One process of the cluster: does what it reads from standard input, line by line, and replies.

    python -m network.member ADDRESS PROCESS PROCESSES SHAPE

Process 0 replies with a line of JSON; the others do the same work and are silent.
"""

import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpar import make_mesh
from jaxpar.ring import of_mode
from jaxpar.ring.order import (
    Beside,
    Order,
    Send,
    Work,
    known_after,
    written_after,
)
from jaxpar.schedule import CompiledProgram, Memory, Target, read_trace
from jaxpar.tools.cli.bench_times import place, tolerance
from jaxpar.tools.cli.ops import OPS, Shape, with_gradients
from jaxpar.tools.cli.workers import own_output
from jaxpar.tools.timeline.timeline import covered
from network.stack import Stack

RING = ("tp",)
TRACED_CALLS = 3


@dataclass(frozen=True)
class Program:
    """A compiled variant of a case, and its arguments."""

    compiled: Any
    args: list[Any]

    def __call__(self) -> Any:
        return jax.block_until_ready(self.compiled(*self.args))


class Member:
    """The shape, and the programs of the case at hand, by variant."""

    def __init__(self, shape: Shape):
        self.mesh: Mesh = make_mesh({"tp": jax.device_count()})
        self.shape = shape
        self.programs: dict[str, Program] = {}

    def prepare_matmul(self, op: str, backward: bool, variants: list[str]) -> dict[str, Any]:
        """Compiles the variants of a case and compares each result with NumPy's, in float64."""
        rng, (rows, depth, cols) = np.random.default_rng(0), self.shape
        sizes = (rows, depth), (depth, cols), (rows, cols)
        lhs, rhs, ct = (rng.standard_normal(size, np.float32) for size in sizes)
        operands = [lhs, rhs, ct][: 3 if backward else 2]
        specs = OPS[op].specs(RING)[: len(operands)]
        args = [place(x, self.mesh, spec) for x, spec in zip(operands, specs, strict=True)]
        self.programs = {
            name: Program(self._compile(op, backward, name, args), args) for name in variants
        }
        pairs = {"out": (lhs, rhs)}
        if backward:
            pairs |= {"dlhs": (ct, rhs.T), "drhs": (lhs.T, ct)}
        wrong: list[str] = []
        for variant, program in self.programs.items():
            for (name, pair), result in zip(pairs.items(), program(), strict=True):
                allowed = tolerance("float32", pair[0].shape[1], self.mesh.size, "cpu")
                off = error(result, *pair)
                if not off <= allowed:
                    wrong.append(
                        f"{variant}: {name} is off by {off:.3g} rms, {allowed:.3g} allowed"
                    )
        return {"wrong": wrong}

    def prepare_stack(self, variants: list[str]) -> dict[str, Any]:
        """Compiles training steps, and compares losses and gradients with those of one device."""
        stack = Stack.of(self.shape, self.mesh)
        self.programs = {name: Program(*stack.compile(name)) for name in variants}
        return {"wrong": stack.compare(self.programs)}

    def time(self, variant: str) -> dict[str, Any]:
        """Times one call, which all processes begin together."""
        multihost_utils.sync_global_devices("start")
        start = perf_counter()
        self.programs[variant]()
        multihost_utils.sync_global_devices("stop")
        return {"seconds": perf_counter() - start}

    def trace(self, variant: str) -> dict[str, Any]:
        """Traces some calls; returns milliseconds a call and process, means over all processes."""
        multihost_utils.sync_global_devices("trace")
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(TRACED_CALLS):
                    self.programs[variant]()
            mine = cover(Path(folder), self.mesh, self.programs[variant].compiled.as_text())
        total = np.mean(multihost_utils.process_allgather(mine), axis=0) * 1e3
        return dict(zip(("transfer_ms", "matmul_ms", "both_ms"), total.tolist(), strict=True))

    def _compile(self, op: str, backward: bool, variant: str, args: list[jax.Array]) -> Any:
        mode = {"serial": "unidirectional", "memory scheduler": "unidirectional"}
        function = OPS[op].bind(self.mesh, RING, mode.get(variant, variant))

        def forward(lhs: Any, rhs: Any) -> Any:
            return (function(lhs, rhs),)

        program = with_gradients(function) if backward else forward
        if variant != "serial":
            return jax.jit(program).lower(*args).compile()
        with serial_rings():
            return jax.jit(program).lower(*args).compile()


@dataclass(frozen=True)
class SerialOrder(Order):
    """Forbids the overlap: a transfer waits for the turn before, and matmuls for the transfer."""

    def beside(self, index: jax.Array, leaving: Any, send: Send, work: Work) -> Beside:
        leaving = written_after(index, leaving)
        arrived = send(leaving)
        leaving = written_after(arrived, leaving)
        made = work.compute(index, leaving, work.take(known_after(arrived, index)))
        return known_after((made, arrived), index), made, arrived


@contextmanager
def serial_rings() -> Generator[None, None, None]:
    """Has rings that are traced inside wait for their transfers."""
    traced_order = of_mode.traced_order
    jax.clear_caches()  # or a ring that was traced before would be taken from there
    of_mode.traced_order = SerialOrder
    try:
        yield
    finally:
        of_mode.traced_order = traced_order
        jax.clear_caches()


def cover(folder: Path, mesh: Mesh, text: str) -> np.ndarray:
    """Seconds of transfers, of matmuls and of both at a time: means over the calls of a trace."""
    program = CompiledProgram(
        Target("here", mesh, None), text, Memory(0, 0, 0, 0, 0), seconds=0.0, jaxpr=None
    )
    found: list[tuple[float, float, float]] = []
    for call in range(TRACED_CALLS):
        measured = read_trace(folder, program, run=call)
        matmuls = [event for event in measured.events if event.is_matmul]
        transfer, matmul = measured.transfer, covered(matmuls)
        both = transfer + matmul - covered([*matmuls, *measured.transfers])
        found.append((transfer, matmul, min(max(both, 0.0), transfer)))
    return np.mean(np.array(found, np.float32), axis=0)


def error(got: jax.Array, left: np.ndarray, right: np.ndarray) -> float:
    """The largest error of any element of a product of standard normals, in units of its rms."""
    worst = 0.0
    for shard in got.addressable_shards:
        rows, cols = shard.index
        want = left[rows].astype(np.float64) @ right[:, cols].astype(np.float64)
        worst = np.maximum(worst, np.max(np.abs(np.asarray(shard.data) - want)))
    # The same verdict everywhere: a process that stops alone hangs its peers.
    worst = np.max(multihost_utils.process_allgather(np.float32(worst)))
    return float(worst / np.sqrt(left.shape[1]))


def main() -> None:
    """Joins the cluster and serves until standard input ends."""
    address, process, processes, shape = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    with own_output() as replies:
        jax.distributed.initialize(address, int(processes), int(process))
        rows, depth, cols = map(int, shape.split("x"))
        member = Member((rows, depth, cols))
        for line in sys.stdin:
            name, args = json.loads(line)
            reply = getattr(member, name)(*args)
            if jax.process_index() == 0:
                print(json.dumps(reply), file=replies)
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
