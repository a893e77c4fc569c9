"""Records the scheduled modules of small programs, for the tests of the parser.

`python tests/schedule/record.py` compiles every program below with the installed jax and writes
`tests/schedule/recorded/<jax version>/<program>.hlo.txt`, after taking out what the parser does not
read: the tables of source positions, metadata other than `op_name`, and all of an instruction's
configuration but its cycles or costs, its algorithm and `is_sync`. Run it once with every
supported version; with names of programs as arguments, it writes only those.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import CompiledProgram, compile_for, target

FOLDER = Path(__file__).parent / "recorded"
SIZE = 512  # of M, K and N: the gathered operand has 512 KiB in bfloat16, a block of it 128
TRIPS = 5
POST_SPMD = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}
SPARSE_CORE = {"xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all": "true"}
HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}


@dataclass(frozen=True)
class Program:
    """A local function of lhs and rhs on four described devices."""

    target: str
    local: Callable[[Any, Any], Any]
    specs: tuple[P, P, P]
    size: int = SIZE
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self) -> CompiledProgram:
        lhs, rhs, out = self.specs
        shape = (self.size, self.size)
        return compile_for(
            jax.shard_map(self.local, in_specs=(lhs, rhs), out_specs=out),
            target(self.target),
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lhs),
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rhs),
            compiler_options=self.options,
        )


def _gather(mode: str) -> Callable[[Any, Any], Any]:
    return lambda lhs, rhs: jaxpar.all_gather_matmul(lhs, rhs, "tp", mode=mode)


def _scatter(mode: str) -> Callable[[Any, Any], Any]:
    wide = {"mode": mode, "wire_dtype": "float32"}
    return lambda lhs, rhs: jaxpar.matmul_reduce_scatter(lhs, rhs, "tp", **wide)


def _loop(lhs, rhs):
    """A block goes round in a loop; each of its five transfers can hide behind a matmul."""

    def step(_, state):
        block, total = state
        return jaxpar.ring_shift(block, "tp"), total + block @ rhs

    zeros = lax.pcast(jnp.zeros((lhs.shape[0], rhs.shape[1]), lhs.dtype), "tp", to="varying")
    return lax.fori_loop(0, TRIPS, step, (lhs, zeros))[1]


def _without_barriers(lhs, rhs):
    """A ring in which nothing keeps XLA from moving the transfers together."""
    parts = []
    for _ in range(4):
        parts.append(lhs @ rhs)
        lhs = jaxpar.ring_shift(lhs, "tp")
    return jnp.concatenate(parts)


def _beside_matmuls(lhs, rhs):
    """An all-gather that independent matmuls could cover."""
    for _ in range(4):
        lhs_next = jnp.tanh(lhs @ lhs.T) @ lhs
        lhs = lhs_next
    return lhs @ lax.all_gather(rhs, "tp", axis=1, tiled=True)


def _ragged(lhs, rhs):
    """An exchange of equal slices beside a matmul, and a grouped matmul of what arrives."""
    slices = jnp.full((4,), lhs.shape[0] // 4, jnp.int32)
    offsets = lax.axis_index("tp") * slices
    begins = jnp.arange(4, dtype=jnp.int32) * slices
    zeros = lax.pcast(jnp.zeros((2 * lhs.shape[0], lhs.shape[1]), lhs.dtype), "tp", to="varying")
    sent = lax.ragged_all_to_all(lhs, zeros, begins, slices, offsets, slices, axis_name="tp")
    product = lhs @ rhs
    sent, product = lax.optimization_barrier((sent, product))
    groups = jnp.stack([rhs, rhs + 1, rhs + 2, rhs + 3])
    return product + lax.ragged_dot(sent, groups, slices)[: lhs.shape[0]]


def _all_to_all(lhs, rhs):
    """An all-to-all that an independent matmul can cover."""
    sent = lax.all_to_all(lhs, "tp", 0, 0, tiled=True)
    product = lhs @ rhs
    sent, product = lax.optimization_barrier((sent, product))
    return product + sent @ rhs


ROWS, COLS, NONE = P("tp"), P(None, "tp"), P()
PROGRAMS = {
    "tpu-ring-one-way": Program("v5e:2x2", _gather("unidirectional"), (ROWS, COLS, COLS)),
    "tpu-ring-both-ways": Program("v5e:2x2", _gather("bidirectional"), (ROWS, COLS, COLS)),
    "tpu-loop": Program("v5e:2x2", _loop, (ROWS, NONE, ROWS)),
    "tpu-all-gather": Program("v5e:2x2", _gather("naive"), (ROWS, COLS, COLS)),
    "tpu-beside-matmuls": Program("v5e:2x2", _beside_matmuls, (ROWS, COLS, ROWS)),
    "tpu-reduce-scatter": Program("v5e:2x2", _scatter("naive"), (COLS, ROWS, ROWS)),
    "tpu-all-reduce-scatter": Program(  # what v5p makes of a reduce-scatter, from some size on
        "v5p:2x2x1", _scatter("naive"), (COLS, ROWS, ROWS), size=2048
    ),
    "tpu-gather-rewritten": Program(
        "v5e:2x2", _gather("naive"), (ROWS, COLS, COLS), options=POST_SPMD
    ),
    "tpu-scatter-rewritten": Program(
        "v5e:2x2", _scatter("naive"), (COLS, ROWS, ROWS), options=POST_SPMD
    ),
    "tpu-ragged": Program("v5p:2x2x1", _ragged, (ROWS, NONE, ROWS), size=2048),
    "tpu-ragged-sparse-core": Program(
        "v5p:2x2x1", _ragged, (ROWS, NONE, ROWS), size=2048, options=SPARSE_CORE
    ),
    "tpu-all-to-all": Program("v5p:2x2x1", _all_to_all, (ROWS, NONE, ROWS)),
    "gpu-ragged": Program("h100:4", _ragged, (ROWS, NONE, ROWS), options=HIDING),
    "gpu-all-to-all": Program("h100:4", _all_to_all, (ROWS, NONE, ROWS), options=HIDING),
    "gpu-ring-one-way": Program("h100:4", _gather("unidirectional"), (ROWS, COLS, COLS)),
    "gpu-all-gather": Program("h100:4", _gather("naive"), (ROWS, COLS, COLS)),
    "gpu-loop": Program("h100:4", _loop, (ROWS, NONE, ROWS)),
    "gpu-without-barriers": Program("h100:4", _without_barriers, (ROWS, NONE, COLS)),
}


def strip(text: str) -> str:
    """Leaves out of a module what the parser does not read."""
    tables = r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n?"
    text = re.sub(tables, "", text, flags=re.MULTILINE)
    text = re.sub(r', metadata=\{(?:op_name="([^"]*)")?[^}]*\}', _metadata, text)
    return re.sub(r", backend_config=(\{.*\})$", _configuration, text, flags=re.MULTILINE)


def _metadata(found: re.Match[str]) -> str:
    return f', metadata={{op_name="{found.group(1)}"}}' if found.group(1) else ""


def _configuration(found: re.Match[str]) -> str:
    kept = (
        "estimated_cycles",
        "known_trip_count",
        "is_sync",
        "debug",
        "lhs_contracting_dimensions",
        "cost_estimate",
    )
    given = json.loads(found.group(1))
    parts = [given, *(part for part in given.values() if isinstance(part, dict))]
    config = {key: part[key] for part in parts for key in kept if key in part}
    text = json.dumps(config, separators=(",", ":"))
    return f", backend_config={text}" if config else ""


def main() -> None:
    """Writes the modules of the installed version."""
    jax.config.update("jax_platforms", "cpu")
    folder = FOLDER / jax.__version__
    folder.mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        compiled = program.compile()
        text = strip(compiled.text)
        (folder / f"{name}.hlo.txt").write_text(text)
        print(f"{name}: {len(compiled.text)} characters, {len(text)} kept, {compiled.seconds:.1f}s")


if __name__ == "__main__":
    main()
