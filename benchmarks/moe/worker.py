"""A compiling process: one case in one form, forward or with gradients, one record.

One layer of experts with the dimensions of a published model, bfloat16, 4096 tokens a device, in
jaxpar's forms and in those of peers.py. Gradients are taken within `shard_map`, so that those
of the experts are not yet summed over dp: that is the same for all forms.

MOE_HLO names a file for the compiled program; with MOE_EVENTS, long events go to standard error.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, comb
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.moe import Experts, routed_moe_layer
from jaxpar.moe._group_blocks import GPU_LENGTHS
from jaxpar.schedule import Assumptions, compile_for, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.cli.ops import with_gradients
from jaxpar.tools.cli.workers import answer, one_line
from moe import peers
from workers import KEPT

TOKENS = 4096  # of a device
FACTOR = 1.25  # of the average load: receive buffers, or slots of an expert
# Beside those that the chip should have: the sort of a library asks for a device.
OPTIONS = {"gpu": {"xla_gpu_enable_cub_radix_sort": False}}


@dataclass(frozen=True)
class Model:
    """The dimensions of one layer."""

    width: int
    hidden: int
    experts: int
    top_k: int


DEEPSEEK_V3 = Model(7168, 2048, 256, 8)
MIXTRAL = Model(4096, 14336, 8, 2)


@dataclass(frozen=True)
class Case:
    """A model on a slice, its experts over ep."""

    model: Model
    target: str
    mesh: str
    shards: int
    tokens: int = TOKENS
    factor: float = FACTOR

    @property
    def local(self) -> int:
        """Experts of a device, with padding."""
        return -(-self.model.experts // self.shards)

    @property
    def with_experts(self) -> int:
        """Devices of ep that have experts which the router knows."""
        return -(-self.model.experts // self.local)

    @cached_property
    def targets(self) -> float:
        """Distinct devices that a token needs, on average, by random routing."""
        missed = comb(self.model.experts - self.local, self.model.top_k)
        return self.with_experts * (1 - missed / comb(self.model.experts, self.model.top_k))

    @property
    def load(self) -> float:
        """The load of a device that has experts, over the average of all."""
        return self.shards / self.with_experts

    def bound(self, passes: int) -> float:
        """Bytes that a device must send: a row for each other device that a token needs.

        Each row comes with the ids and weights of its experts, and one comes back; for gradients
        all rows travel once more.
        """
        rows = self.tokens * self.targets * (self.shards - 1) / self.shards
        return rows * (passes * 2 * self.model.width * 2 + self.model.top_k * 8)


def _cases() -> dict[str, Case]:
    models = {"DeepSeek-V3": DEEPSEEK_V3, "Mixtral 8x7B": MIXTRAL}
    targets = {
        "v5p:4x4x4": ("dp=-1,ep=16", 16),
        "v6e:16x16": ("dp=-1,ep=16", 16),
        "h100:8": ("ep=8", 8),
        "b200:8": ("ep=8", 8),
    }
    return {
        f"{name}, {target}": Case(model, target, *mesh)
        for name, model in models.items()
        for target, mesh in targets.items()
    }


CASES = _cases()
OWN: dict[str, dict[str, Any]] = {
    "jaxpar auto": {},
    "jaxpar ragged": {"dispatch": "ragged"},
    "jaxpar ragged, 4 chunks": {"dispatch": "ragged", "chunks": 4},
}
FORMS = (*OWN, *peers.PEERS)
PASSES = ("forward", "gradients")


def build(case: Case, form: str, which: str, platform: str) -> Any:
    """Returns the function of tokens, router, experts and a cotangent, of local blocks."""
    model = case.model
    shared = {"axis": "ep", "top_k": model.top_k}

    def own(tokens: Array, router: Array, weights: Any) -> Array:
        up, gate, down = weights
        experts = Experts(up=up, gate=gate, down=down)
        options = {"normalize": True, "buffer_factor": case.factor, **shared, **OWN[form]}
        return routed_moe_layer(tokens, router, experts, **options)[0]

    layer = (
        own if form in OWN else partial(peers.peer(form, platform), factor=case.factor, **shared)
    )

    def forward(tokens: Array, router: Array, weights: Any, cotangent: Array) -> Any:
        del cotangent
        return layer(tokens, router, weights)

    return forward if which == "forward" else with_gradients(layer)


def assumed(case: Case, form: str) -> Assumptions:
    """What a device with experts has to do in the average routing."""
    chunks = OWN.get(form, {}).get("chunks", 1)
    pairs = case.tokens * case.model.top_k * case.load / chunks
    return Assumptions(
        sent_rows=case.tokens * case.targets * case.load / chunks,
        grouped_rows=pairs,
        trips=_trips(case, pairs),
    )


def _trips(case: Case, pairs: float) -> dict[str, int]:
    """Trips of the loops over blocks, if all experts have as many pairs."""
    experts = min(case.local, case.model.experts)
    trips: dict[str, int] = {}
    left = pairs / experts
    for length in GPU_LENGTHS:
        least = 0 if length == GPU_LENGTHS[-1] else length * 5 / 8
        blocks = max(0, ceil((left - least) / length))
        trips[f"blocks_of_{length}/"] = blocks
        left -= blocks * length
    # No rows are beyond the slots of experts, which have room for three standard deviations more.
    return {"beyond_slots/": 0, **trips, "filled_groups/": experts}


def record(case: Case, form: str, which: str) -> dict[str, Any]:
    """Compiles a form and plays its schedule."""
    target = describe(case.target, case.mesh)
    model, count = case.model, case.local * case.shards
    every = P(target.mesh.axis_names)

    def array(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)

    d, f = model.width, model.hidden
    tokens = array((case.tokens * target.mesh.size, d), every)
    shapes = ((count, d, f), (count, d, f), (count, f, d))
    weights = tuple(array(shape, P("ep")) for shape in shapes)
    function = jax.shard_map(
        build(case, form, which, target.platform),
        in_specs=(every, P(), P("ep"), every),
        out_specs=every if which == "forward" else (every, every, every, every),
        check_vma=False,
    )
    operands = (tokens, array((d, model.experts), P()), weights, tokens)
    options = {**jaxpar.compiler_options(target), **OPTIONS.get(target.platform, {})}
    program = compile_for(function, target, *operands, compiler_options=options, cache=KEPT)
    if path := os.environ.get("MOE_HLO"):
        with open(path, "w") as file:
            file.write(program.text)
    played = timeline(program, assumed=assumed(case, form))
    if os.environ.get("MOE_EVENTS"):
        for event in played.events:
            if event.seconds > 2e-3 * played.total:
                print(
                    f"{event.kind:8} {event.row:22} {event.name:44} {event.start * 1e3:8.3f} "
                    f"{event.seconds * 1e3:7.3f} {event.synchronous} {len(event.covers)} "
                    f"{event.op[-60:]}",
                    file=sys.stderr,
                )
    return {
        "total": played.total,
        "compute": played.compute,
        "exposed": played.exposed,
        "sent": played.sent_bytes,
        "peak": program.memory.peak,
        "seconds": program.seconds,
        "estimate": played.estimate,
        "unknown loops": len(played.loops_of_unknown_length),
        "synchronous": sum(e.synchronous and e.seconds > 2e-5 for e in played.transfers),
    }


def serve(task: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the record of a case, form and pass, or why there is none."""
    case, form, which = task
    try:
        yield record(CASES[case], form, which)
    except Exception as reason:  # each compiler has its own
        yield {"failure": one_line(reason)}


if __name__ == "__main__":
    answer(serve)
