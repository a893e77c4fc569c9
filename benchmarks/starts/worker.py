"""A compiling process: one explicit start of JAX on one chip, one record of what became of it.

The program starts a transfer, multiplies two matrices that have nothing to do with it, and waits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxpar import compiler_options
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.tools.cli.workers import answer, one_line
from jaxpar.tools.program.operations import Collective

AXIS = "x"
ROWS, WIDTH = 4096, 4096  # of a device's block and of the matmul beside it


@dataclass(frozen=True)
class Call:
    """A start: its keywords, and the kind of transfer in HLO."""

    keywords: dict[str, Any]
    kind: str
    sums: bool = False  # the result is the same on all devices


CALLS = {
    "ppermute_start": Call({}, "collective-permute"),
    "all_gather_start": Call({"tiled": True}, "all-gather"),
    "psum_scatter_start": Call({"tiled": True}, "reduce-scatter"),
    "psum_start": Call({}, "all-reduce", sums=True),
    "all_to_all_start": Call({"split_axis": 0, "concat_axis": 0, "tiled": True}, "all-to-all"),
}


def exported() -> set[str]:
    """The starts that `jax.lax` has."""
    return {name for name in CALLS if hasattr(lax, name)}


def start_of(name: str) -> Callable[..., Any] | None:
    """A start of JAX's; one that `jax.lax` lacks stands beside one that it has."""
    for known in exported():
        home = import_module(getattr(lax, known).__module__)
        return getattr(lax, name, None) or getattr(home, name, None)
    return None


def program(name: str, ordered: bool) -> Any:
    """The function of a block and two matrices, within `shard_map`."""
    start, call = start_of(name), CALLS[name]
    if start is None:
        raise NotImplementedError(f"jax {jax.__version__} has no {name}")

    def local(x: Array, a: Array, b: Array) -> tuple[Array, Array]:
        keywords = dict(call.keywords)
        if name == "ppermute_start":
            n = lax.axis_size(AXIS)
            keywords["perm"] = [(i, (i + 1) % n) for i in range(n)]
        under_way = start(x, AXIS, **keywords)
        product = a @ b
        return under_way.done(), product

    if ordered:
        from jax.experimental.overlap import program_order  # of jax 0.12

        local = program_order(local, enforce=True)
    out = P() if call.sums else P(AXIS)
    return jax.shard_map(local, in_specs=(P(AXIS), P(AXIS), P()), out_specs=(out, P(AXIS)))


def record(chips: str, options: bool, name: str, ordered: bool) -> dict[str, Any]:
    """Compiles the program and looks at the transfer."""
    described = target(chips, f"{AXIS}=-1")
    n = described.mesh.size
    describe = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x = describe((n * ROWS, 8, WIDTH // 8), sharding=P(AXIS))
    a, b = describe((n * ROWS, WIDTH), sharding=P(AXIS)), describe((WIDTH, WIDTH), sharding=P())
    compiled = compile_for(
        program(name, ordered),
        described,
        *(x, a, b),
        compiler_options=compiler_options(described) if options else {},
    )
    kinds = {
        operation.name: operation.message.kind
        for schedule in compiled.module.schedules
        for operation in schedule.operations
        if isinstance(operation, Collective)
    }
    transfers = timeline(compiled).transfers
    own = [event for event in transfers if kinds[event.name] == CALLS[name].kind]
    return {
        "kinds": sorted({kinds[event.name] for event in transfers}),
        "found": len(own),
        "synchronous": all(event.synchronous for event in own),
        "covers": any(event.covers for event in own),
    }


def serve(task: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields the record of a task, or why the compiler refuses the program."""
    try:
        yield record(*task)
    except Exception as reason:  # each compiler has its own
        yield {"failure": one_line(reason)}


if __name__ == "__main__":
    answer(serve)
