"""The timing process: the layer on 8 CPU devices, a record a case.

Forward and gradients, float32, against the matmuls alone: on each device, for each of its experts,
a gated MLP of that size over an equal share of as many rows as a device has pairs of a token and an
expert. Rounds are interleaved, and the ratio of each round is to the matmuls of the same round.
Dropless: nothing is lost, whatever the routing, with buffers of the worst case; or of a multiple of
the average.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.moe import Experts, routed_moe_layer
from jaxpar.tools.cli.ops import with_gradients
from jaxpar.tools.cli.workers import answer
from moe import peers

DEVICES, TOKENS, WIDTH, HIDDEN, TOP_K = 8, 1024, 512, 1024, 2  # tokens of a device
EXPERTS = (8, 64)
SLOW = ("ragged_dot",)  # what takes seconds is timed in fewer rounds
LAYERS: dict[str, dict[str, Any]] = {
    "jaxpar": {},
    "buffers x 2": {"buffer_factor": 2.0},
    "2 chunks": {"chunks": 2},
    "all-gather": {"dispatch": "all_gather"},
    "ragged_dot": {"implementation": "ragged_dot", "buffer_factor": 2.0},
}


def serve(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a record of each case."""
    mesh = jaxpar.make_mesh(f"ep={DEVICES}")
    for experts in EXPERTS:
        operands = _operands(mesh, experts)
        timed = {"matmuls": _jitted(mesh, _matmuls)}
        for name, options in LAYERS.items():
            timed[name] = _jitted(mesh, _layer(options))
        timed["capacity einsum"] = _jitted(mesh, _capacity_einsum)
        seconds = _interleaved(timed, operands, rounds)
        base = seconds.pop("matmuls")
        ratios = {
            name: median(own / alone for own, alone in zip(found, base, strict=False))
            for name, found in seconds.items()
        }
        yield {"case": f"{experts} experts", "matmuls": median(base), "ratios": ratios}


def _operands(mesh: Any, experts: int) -> tuple[Any, ...]:
    d, f = WIDTH, HIDDEN
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def draw(shape: tuple[int, ...], spec: P, scale: float = 1.0) -> Array:
        sharding = jax.NamedSharding(mesh, spec)
        return jax.device_put(scale * jax.random.normal(next(keys), shape), sharding)

    tokens = draw((DEVICES * TOKENS, d), P("ep"))
    router = draw((d, experts), P())
    shapes = ((experts, d, f), (experts, d, f), (experts, f, d))
    up, gate, down = (draw(shape, P("ep"), shape[1] ** -0.5) for shape in shapes)
    return tokens, router, (up, gate, down), draw(tokens.shape, P("ep"))


def _jitted(mesh: Any, layer: Any) -> Any:
    """Output and gradients of a layer."""
    every = P("ep")
    mapped = jax.shard_map(
        with_gradients(layer),
        mesh=mesh,
        in_specs=(every, P(), every, every),
        out_specs=(every, every, every, every),
        check_vma=False,
    )
    return jax.jit(mapped)


def _layer(options: dict[str, Any]) -> Any:
    def layer(tokens: Array, router: Array, weights: Any) -> Array:
        up, gate, down = weights
        experts = Experts(up=up, gate=gate, down=down)
        shared = {"axis": "ep", "top_k": TOP_K, "normalize": True}
        return routed_moe_layer(tokens, router, experts, **shared, **options)[0]

    return layer


def _capacity_einsum(tokens: Array, router: Array, weights: Any) -> Array:
    return peers.capacity_einsum(tokens, router, weights, axis="ep", top_k=TOP_K, factor=1.25)


def _matmuls(tokens: Array, router: Array, weights: Any) -> Array:
    """Each expert on its share of as many rows as a device has pairs, and the router's matmul."""
    pairs = jnp.tile(tokens, (TOP_K, 1))  # [t * k, d]
    parts = jnp.split(pairs, len(weights[0]))
    made = [
        (jax.nn.silu(x @ gate) * (x @ up)) @ down
        for x, up, gate, down in zip(parts, *weights, strict=True)
    ]
    out = jnp.concatenate(made).reshape(TOP_K, *tokens.shape).sum(axis=0)
    return out + jnp.sum(tokens @ router, axis=1, keepdims=True)


def _interleaved(timed: dict[str, Any], operands: Any, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for function in timed.values():
        jax.block_until_ready(function(*operands))
    for number in range(rounds):
        for name, function in timed.items():
            if name in SLOW and number >= max(1, rounds // 3):
                continue
            start = time.perf_counter()
            jax.block_until_ready(function(*operands))
            seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    answer(serve)
