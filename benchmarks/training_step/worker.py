"""A compiling process: one case in one form, one record.

Two decoder layers with the dimensions of a published model: loss and gradients for bfloat16
weights that are sharded over fsdp and tp, the sequence of activations sharded over tp between the
matmuls. The same arithmetic in these forms:

- `jaxpar`: `fsdp_scan` over layers of overlapped matmuls, all with mode="auto";
- `naive`: the same functions with mode="naive", each layer gathering its weights first, under
  `jax.checkpoint` and `lax.scan`;
- `plain jit`: global arrays of the same shardings, left to XLA's partitioner, also checkpointed;
- `plain jit, windowed`: the same without the option that keeps matmuls of gathered operands whole,
  as a TPU's compiler has it by default.

Compiled programs are kept in the user's folder for caches: a second call only plays them.
TRAINING_STEP_HLO names a file for the compiled program.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, compiler_options
from jaxpar.layers import (
    fsdp_gather,
    fsdp_scan,
    gated_mlp,
    parallel_attention,
    ring_attention,
    rms_norm,
)
from jaxpar.platforms.compilers import WHOLE_MATMULS
from jaxpar.schedule import Target, compile_for, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.cli.workers import answer, one_line
from workers import KEPT

LAYERS = 2


@dataclass(frozen=True)
class Model:
    """The dimensions of one layer."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int

    def weights(self) -> dict[str, tuple[tuple[int, int], int]]:
        """The shape of each matrix, and its dimension over tp; the other one is over fsdp."""
        d, f, q, kv = self.width, self.hidden, self.heads, self.kv_heads
        e = self.head_size
        return {
            "query": ((d, q * e), 1),
            "key": ((d, kv * e), 1),
            "value": ((d, kv * e), 1),
            "output": ((q * e, d), 0),
            "gate": ((d, f), 1),
            "up": ((d, f), 1),
            "down": ((f, d), 0),
        }


LLAMA_8B = Model(4096, 14336, 32, 8, 128)
LLAMA_70B = Model(8192, 28672, 64, 8, 128)


@dataclass(frozen=True)
class Case:
    """A model on a slice; each group of tp devices has one sequence."""

    model: Model
    target: str
    mesh: str
    sequence: int


SLICES = {
    "v5p:8x8x8": "fx=8,fy=16,cp=1,tp=4",
    "v6e:16x16": "fx=16,fy=4,cp=1,tp=4",
    "h100:8": "fx=2,fy=1,cp=1,tp=4",
    "b200:8": "fx=2,fy=1,cp=1,tp=4",
}
# Chips whose compiler waits for collectives: one model shows whether a default loses there.
WAITING = {
    "v5e:4x8": "fx=4,fy=2,cp=1,tp=4",
    "v5e:8x8": "fx=8,fy=8,cp=1,tp=1",
    "v4:2x2x4": "fx=4,fy=2,cp=1,tp=4",
}
# One axis for fsdp. Over 32 devices the partitioner makes windowed einsums if it may; over 128 not.
ONE_AXIS = [
    ("v5p:8x8x8", "fsdp=128,cp=1,tp=4"),
    ("v5p:4x4x8", "fsdp=32,cp=1,tp=4"),
    ("v6e:16x16", "fsdp=64,cp=1,tp=4"),
    ("v6e:16x16", "fsdp=32,cp=1,tp=8"),
]
MODELS = {"8B": LLAMA_8B, "70B": LLAMA_70B}
CASES = {
    f"Llama 3 {size}, {chips}": Case(model, chips, mesh, 8192)
    for chips, mesh in SLICES.items()
    for size, model in MODELS.items()
}
CASES |= {
    f"Llama 3 8B, {chips}": Case(LLAMA_8B, chips, mesh, 8192) for chips, mesh in WAITING.items()
}
CASES |= {
    f"Llama 3 {size}, {chips}, {mesh.partition(',')[0]}": Case(model, chips, mesh, 8192)
    for chips, mesh in ONE_AXIS
    for size, model in MODELS.items()
}
WINDOWED = "plain jit, windowed"
FORMS = ("jaxpar", "naive", "plain jit", WINDOWED)


class Step:
    """Loss and gradients of one case."""

    def __init__(self, case: Case, target: Target) -> None:
        self.model, self.sequence, self.mesh = case.model, case.sequence, target.mesh
        self.groups = self.mesh.size // self.mesh.shape["tp"]
        self.fsdp = tuple(name for name in self.mesh.axis_names if name not in ("cp", "tp"))
        matrices = self.model.weights()
        sharded = {0: P(None, "tp", self.fsdp), 1: P(None, self.fsdp, "tp")}
        self.specs = {name: sharded[along] for name, (_, along) in matrices.items()}
        self.dims: dict[str, int | None] = {n: 1 - along for n, (_, along) in matrices.items()}
        self.shapes: dict[str, tuple[int, ...]] = {n: shape for n, (shape, _) in matrices.items()}
        for norm in ("attention_norm", "mlp_norm"):
            self.specs[norm], self.dims[norm] = P(), None
            self.shapes[norm] = (self.model.width,)
        self.states = P(self.fsdp, ("cp", "tp"))

    def arguments(self) -> tuple[Any, Any]:
        """Descriptions of the stacked weights, and of the first layer's input."""

        def describe(shape: tuple[int, ...], spec: P) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)

        weights = {n: describe((LAYERS, *self.shapes[n]), self.specs[n]) for n in self.shapes}
        width = self.model.width
        return weights, describe((self.groups, self.sequence, width), self.states)

    def build(self, form: str) -> Any:
        """Returns the jitted function of weights and input."""
        if form.startswith("plain jit"):
            out = {n: NamedSharding(self.mesh, spec) for n, spec in self.specs.items()}
            return jax.jit(jax.value_and_grad(self.plain), out_shardings=(None, out))
        local = self.overlapped if form == "jaxpar" else self.naive
        mapped = jax.shard_map(local, in_specs=(self.specs, self.states), out_specs=P())
        return jax.jit(jax.value_and_grad(mapped))

    def overlapped(self, weights: Any, x: Array) -> Array:
        layer = partial(self.layer, mode="auto")
        return self.loss(fsdp_scan(layer, weights, x, over(self.fsdp, "auto"), dim=self.dims))

    def naive(self, weights: Any, x: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, shards: Any) -> Array:
            whole = fsdp_gather(shards, over(self.fsdp, "naive"), dim=self.dims)
            return self.layer(whole, x, mode="naive")

        return self.loss(lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0])

    def loss(self, y: Array) -> Array:
        return lax.pmean(jnp.mean(y.astype(jnp.float32) ** 2), self.mesh.axis_names)

    def layer(self, w: Any, x: Array, mode: Any) -> Array:
        normed = rms_norm(x, w["attention_norm"])
        weights = (w[name] for name in ("query", "key", "value", "output"))
        heads = {"heads": self.model.heads, "kv_heads": self.model.kv_heads}
        tp = over("tp", mode)
        x = x + parallel_attention(normed, *weights, tp, attend, **heads)
        normed = rms_norm(x, w["mlp_norm"])
        return x + gated_mlp(normed, w["gate"], w["up"], w["down"], tp)

    def plain(self, weights: Any, x: Array) -> Array:
        """The same on global arrays; attention in a shard_map of its own, as kernels are."""

        def lay(y: Array, *spec: Any) -> Array:
            return lax.with_sharding_constraint(y, P(*spec))

        fsdp, heads = self.fsdp, P(self.fsdp, "cp", "tp")
        attention = jax.shard_map(attend, in_specs=(heads,) * 3, out_specs=heads)

        @jax.checkpoint
        def layer(x: Array, w: Any) -> Array:
            normed = rms_norm(x, w["attention_norm"])
            q, k, v = (normed @ w[name] for name in ("query", "key", "value"))
            split = (*q.shape[:2], -1, self.model.head_size)
            o = attention(*(lay(y.reshape(split), fsdp, None, "tp") for y in (q, k, v)))
            x = x + lay(o.reshape(q.shape) @ w["output"], fsdp, "tp")
            normed = rms_norm(x, w["mlp_norm"])
            hidden = jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])
            return x + lay(lay(hidden, fsdp, None, "tp") @ w["down"], fsdp, "tp")

        y = lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        return jnp.mean(y.astype(jnp.float32) ** 2)


def over(names: str | tuple[str, ...], mode: Any) -> Axis:
    """The axes in a mode; sums travel in bfloat16, as the other forms send them."""
    return Axis(names, mode=mode, wire_dtype="bfloat16")


def attend(q: Array, k: Array, v: Array) -> Array:
    return ring_attention(q, k, v, "cp")


def record(case: Case, form: str) -> dict[str, Any]:
    """Compiles a form and plays its schedule; empty where the chip's compiler has no such form."""
    target = describe(case.target, case.mesh)
    options = compiler_options(target)
    if form == WINDOWED and options.pop(WHOLE_MATMULS.name, None) is None:
        return {}
    step = Step(case, target)
    program = compile_for(
        step.build(form),
        target,
        *step.arguments(),
        compiler_options=options,
        cache=KEPT,
    )
    played = timeline(program)
    if path := os.environ.get("TRAINING_STEP_HLO"):
        with open(path, "w") as file:
            file.write(program.text)
    return {
        "total": played.total,
        "estimate": played.estimate,
        "compute": played.compute,
        "exposed": played.exposed,
        "sent": played.sent_bytes,
        "peak": program.memory.peak,
        "temporaries": program.memory.temporaries,
        "seconds": program.seconds,
        "unknown loops": len(played.loops_of_unknown_length),
    }


def serve(task: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the record of a case and form, or why there is none."""
    case, form = task
    try:
        yield record(CASES[case], form)
    except Exception as reason:  # each compiler has its own
        yield {"failure": one_line(reason)}


if __name__ == "__main__":
    answer(serve)
