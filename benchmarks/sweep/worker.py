"""A compiling process of the sweep: some points of one slice, every form of each."""

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpar
from jaxpar import Axis
from jaxpar.axis.ring_order import traced_links
from jaxpar.choose.record import Decision, noting
from jaxpar.choose.tuning import versions
from jaxpar.schedule import Target, compile_for, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.cli.ops import OPS, with_gradients
from jaxpar.tools.cli.workers import answer, one_line
from overlap import peers
from sweep.points import Point, point_from
from sweep.special import SPECIAL
from workers import KEPT

ONE_RING = "one ring"
TPUS = ("v", "tpu")  # what their slices begin with
PEERS = ("naive", "XLA post_spmd", "XLA plain jit", ONE_RING)


class Compiler:
    """Compiles programs that were not compiled before, by this process or an earlier one."""

    def __init__(self, cache: Path) -> None:
        lines = cache.read_text().splitlines() if cache.exists() else []
        self.known: dict[str, dict[str, Any]] = dict(map(json.loads, lines))
        self.versions = json.dumps(versions("jax", "libtpu")) + model_of_chips()

    def figures(
        self, function: Any, target: Target, operands: Any, options: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Returns a key of the program, and what its schedule takes."""
        with jax.set_mesh(target.mesh), jaxpar.compiled_with(options):
            text = function.trace(*operands).lower().as_text()
        mesh = dict(target.mesh.shape)
        said = f"{target.name} {mesh} {sorted(options.items())} {self.versions}\n{text}"
        key = hashlib.sha256(said.encode()).hexdigest()[:24]
        if key not in self.known:
            program = compile_for(function, target, *operands, compiler_options=options, cache=KEPT)
            played = timeline(program)
            self.known[key] = {
                "total": played.total,
                "compute": played.compute,
                "exposed": played.exposed,
                "temporaries": program.memory.temporaries,
            }
        return key, self.known[key]


def model_of_chips() -> str:
    """A hash of the code that says what an instruction takes: other code, other times."""
    package = Path(jaxpar.__file__).parent
    folders = ("platforms", "platforms/families", "tools/program", "tools/timeline")
    files = [file for folder in folders for file in (package / folder).glob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def forms(point: Point, target: Target, ways: bool) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields name, jitted function, operands and compiler options of each form of a point."""
    common = jaxpar.compiler_options(target) if point.options else {}
    if point.op in SPECIAL:
        yield from special_forms(point, target, ways, common)
        return
    op, ring, dtype = OPS[point.op], tuple(point.ring.split(",")), jnp.dtype(point.dtype)
    matmul = point.op, point.shape, dtype, target.mesh, ring
    operands = peers.operands(*matmul)[: 3 if point.grad else 2]
    for peer in PEERS[:-1]:
        if peer == "XLA post_spmd" and not point.slice.startswith(TPUS):
            continue  # it is of the TPU compiler
        if peer == "XLA plain jit":
            layouts = peers.plain_jit(*matmul, grad=point.grad)
            for (function, args), options in product(layouts, peers.plain_options(common)):
                yield peer, function, args[: len(operands)], options
        else:
            function = peers.build(peer, point.op, target.mesh, ring, grad=point.grad)
            yield peer, function, operands, peers.compiler_options(peer, common)

    def own(axis: Axis) -> Any:
        lhs, rhs, out = op.specs(ring)
        function = jax.shard_map(
            lambda lhs, rhs: op.local(lhs, rhs, axis, None),
            mesh=target.mesh,
            in_specs=(lhs, rhs),
            out_specs=out,
        )
        return jax.jit(with_gradients(function) if point.grad else function)

    with jax.set_mesh(target.mesh):
        all_links = len(ring) > 1 or traced_links().walks.get(*ring)
    if all_links:
        yield ONE_RING, own(Axis(ring, "bidirectional")), operands, common
    yield "auto", own(Axis(ring)), operands, common
    if ways:
        for mode in candidates(decided(own(Axis(ring)), operands, target, common, point.grad)):
            yield mode, own(Axis(ring, mode)), operands, common


def special_forms(
    point: Point, target: Target, ways: bool, common: dict[str, Any]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields the forms of a matmul that is no `Op`."""
    special, ring, mesh = SPECIAL[point.op], tuple(point.ring.split(",")), target.mesh
    operands = special.operands(point.shape, jnp.dtype(point.dtype), mesh, ring)
    operands = operands[: 3 if point.grad else 2]
    how = mesh, ring, point.shape, point.grad

    def own(axis: Axis) -> Any:
        return special.mapped(lambda x, w: special.own(x, w, axis), *how)

    naive = special.mapped(lambda x, w: special.naive(x, w, ring), *how)
    yield "naive", naive, operands, common
    if point.slice.startswith(TPUS):
        yield "XLA post_spmd", naive, operands, common | peers.POST_SPMD
    for options in peers.plain_options(common):
        yield "XLA plain jit", special.plain_jit(*how), operands, options
    yield "auto", own(Axis(ring)), operands, common
    if ways:
        for mode in candidates(decided(own(Axis(ring)), operands, target, common, point.grad)):
            yield mode, own(Axis(ring, mode)), operands, common


def decided(
    function: Any, operands: Any, target: Target, options: dict[str, Any], grad: bool
) -> list[Decision]:
    """Returns the decisions of a function of one matmul that count: of its passes.

    One without gradients asks for both passes, in case that they are taken, and then for one alone.
    """
    with noting() as notes, jax.set_mesh(target.mesh), jaxpar.compiled_with(options):
        function.trace(*operands)
    both = [d for d in notes.decisions if d.problem.backward]
    return both if grad and both else [d for d in notes.decisions if not d.problem.backward]


def candidates(decisions: list[Decision]) -> list[str]:
    """Names the algorithms that `auto` chooses from in all passes, but for naive: it is a peer."""
    out = {row.way for d in decisions for row in d.rows if row.out}
    names = dict.fromkeys(row.way for d in decisions for row in d.rows)
    return [name for name in names if name not in out and name != "naive"]


def serve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record of each form of each point."""
    # Programs are kept by their text. Without this it has the library's lines, and each edit of the
    # library would have all of them compiled again.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    compiler = Compiler(Path(task["cache"]))
    for entry in task["points"]:
        point = point_from(entry)
        target = describe(point.slice, point.mesh)
        for form, function, operands, options in forms(point, target, task["ways"]):
            record: dict[str, Any] = {"point": entry, "form": form}
            try:
                if form == "auto":
                    found = decided(function, operands, target, options, point.grad)
                    record["taken"] = " | ".join(d.taken for d in found)
                record["key"], found = compiler.figures(function, target, operands, options)
                record |= found
            except Exception as reason:  # each compiler has its own
                record["failure"] = one_line(reason)
            yield record


if __name__ == "__main__":
    answer(serve)
