"""Edits that can be tried automatically."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, permutations
from os import sep
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import compiled_with
from jaxpar import compiler_options as options_of
from jaxpar.mesh import make_mesh, ring_hops
from jaxpar.tools.explain.forms import overlapped
from jaxpar.tools.explain.narrow_sums import narrowed
from jaxpar.tools.explain.program_arguments import (
    ProgramArguments,
    Resharded,
    as_namesakes,
    spec_of,
)
from jaxpar.tools.explain.repeats import hoisted, kept
from jaxpar.tools.explain.rewrite import Change, Handler, bound, rewritten
from jaxpar.tools.program.sources import Line, line_of
from jaxpar.tools.timeline.frameworks import donated_by, traced_for
from jaxpar.tools.timeline.timeline import CompiledProgram, compile_for, replayed
from jaxpar.tools.toolkit_api import (
    WHOLE_MATMULS,
    Mode,
    enclosing,
    jitted_with,
    subjaxprs,
    trying,
)
from jaxpar.tools.toolkit_api import Trial as Ways

if TYPE_CHECKING:
    from jaxpar.tools.explain.resharded import Reshardings

MOST_ORDERS = 120  # orders of a mesh's axes: all orders of five axes
MODES: tuple[Mode, ...] = ("bidirectional", "unidirectional", "naive")


@dataclass(frozen=True)
class Edit:
    text: str
    compiled: Callable[[], CompiledProgram | None]  # None: there is nothing to change
    disagrees: str = ""  # evidence of a mistake that needs no trial


class Edits:
    def __init__(self, program: CompiledProgram) -> None:
        self.program, self.target = program, program.target
        self.options = program.compiler_options

    @cached_property
    def arguments(self) -> ProgramArguments:
        return ProgramArguments(self.program, self.target.mesh)

    def compiler_options(self, only: str | None = None) -> Iterator[Edit]:
        """Adds the chip's missing options."""
        lacking = {
            name: value
            for name, value in options_of(self.target).items()
            if self.options.get(name) != value and only in (None, name)
        }
        if lacking:
            text = ", ".join(f"{name}={value}" for name, value in lacking.items())
            yield Edit(
                f"compile with {text}, as jaxpar.compiler_options(mesh) has it",
                lambda: self._compiled(
                    self.program.function, self.arguments.given, {**self.options, **lacking}
                ),
            )

    def cut_matmuls(self) -> Iterator[Edit]:
        """Allows windowed einsums."""
        name = WHOLE_MATMULS.name
        if name in self.options:
            others = {option: x for option, x in self.options.items() if option != name}
            yield Edit(
                f"compile without {name}: the partitioner then cuts large matmuls into pieces, "
                "which overlap with the gather of their operands",
                lambda: self._compiled(self.program.function, self.arguments.given, others),
            )

    def modes(self) -> Iterator[Edit]:
        if self._has_modes:
            for mode in MODES:
                yield Edit(
                    f"give jaxpar's collectives mode={mode!r} (jaxpar tune finds the best)",
                    lambda mode=mode: self._with_mode(mode),
                )

    def forms(self, line: Line | None) -> Iterator[Edit]:
        """Uses jaxpar's overlapped forms."""
        where = f" at {line}" if line else ""
        for form in overlapped(line):
            yield Edit(
                f"{form.edit}{where}", lambda form=form: self._rewritten(Change(form.equations))
            )

    def order(self, axes: Sequence[str]) -> Iterator[Edit]:
        """Brings neighbours nearer, if possible."""
        mesh = self.target.mesh
        best, hops = None, _hops(mesh, axes)
        for order, other in _orders(mesh):
            if (fewer := _hops(other, axes)) < hops:
                best, hops = (order, other), fewer
        if best is not None:
            order, other = best
            shape = ",".join(f"{name}={mesh.shape[name]}" for name in order)
            yield Edit(
                f"make the mesh with jaxpar.make_mesh({shape!r}), whose neighbours along "
                f"{', '.join(axes)} are at most {hops} link{'s' * (hops > 1)} apart",
                lambda: self._on(other),
            )

    def constraints(self) -> Iterator[Edit]:
        """Drops a line's sharding constraints."""
        places: dict[Line | None, None] = {}

        def note(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "sharding_constraint":
                    places[line_of(eqn)] = None
            return {}

        Change(note).touches(self.program.jaxpr.jaxpr)
        for line in places:

            def without(jaxpr: core.Jaxpr, line: Line | None = line) -> dict[int, Handler]:
                return {
                    place: _same
                    for place, eqn in enumerate(jaxpr.eqns)
                    if eqn.primitive.name == "sharding_constraint" and line_of(eqn) == line
                }

            yield Edit(
                f"remove with_sharding_constraint{f' at {line}' if line else ''}, or give it the "
                "sharding of its operand",
                lambda without=without: self._rewritten(Change(without)),
            )

    def mended(self, arguments: Sequence[str], axes: Sequence[str]) -> Iterator[Edit]:
        if self._namesakes and not self._namesakes.specs.keys().isdisjoint(arguments):
            yield self._resharded(self._namesakes)
        for resharded in self._at_odds:
            if not resharded.axes.isdisjoint(axes):
                yield self._resharded(resharded)

    def shardings(self, arguments: Sequence[str], axes: Sequence[str]) -> Iterator[Edit]:
        """Shards other dimensions."""
        for resharded in self._reshardings.near(arguments, axes):
            if not any(resharded.lies.items() <= known.lies.items() for known in self._at_odds):
                yield self._resharded(resharded)

    def barriers(self) -> Iterator[Edit]:
        """Drops optimization barriers."""

        def without(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: _same
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "optimization_barrier"
            }

        yield Edit("remove optimization_barrier", lambda: self._rewritten(Change(without)))

    def unrolled(self) -> Iterator[Edit]:
        """Unrolls scans by two."""

        def twice(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: lambda eqn, xs: bound(eqn, xs, unroll=2)
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "scan"
                and eqn.params["unroll"] == 1
                and eqn.params["length"] > 1
            }

        yield Edit(
            "give lax.scan unroll=2, so that transfers overlap with work of the next iteration",
            lambda: self._rewritten(Change(twice)),
        )

    def once(self) -> Iterator[Edit]:
        """Hoists loop-invariant collectives."""
        yield Edit(
            "gather before the scan, and let its body close over the full array",
            lambda: self._rewritten(Change(hoisted)),
        )

    def kept(self) -> Iterator[Edit]:
        """Saves recomputed collectives' results."""
        yield Edit(
            "save the collective's result for the backward pass: jax.checkpoint(f, policy="
            "jax.checkpoint_policies.save_only_these_names('received')) with "
            "jax.ad_checkpoint.checkpoint_name(result, 'received')",
            lambda: self._rewritten(Change(kept)),
        )

    def narrow(self, line: Line | None) -> Iterator[Edit]:
        """Sums float32 in bfloat16."""
        yield Edit(
            f"sum{f' at {line}' if line else ''} in bfloat16: cast before the collective and "
            "back after it (less exact), or use jaxpar's with wire_dtype='bfloat16'",
            lambda: self._rewritten(Change(partial(narrowed, line))),
        )

    # -- compilation --------------------------------------------------------------------------

    def _compiled(
        self, fn: Any, args: Sequence[Any], options: dict[str, Any], mesh: Mesh | None = None
    ) -> CompiledProgram:
        target = self.target if mesh is None else replace(self.target, mesh=mesh)
        cache = self.program.cache
        return compile_for(fn, target, *args, compiler_options=options, cache=cache)

    def _jitted(self) -> Any:
        return jitted_with(self.program.function, self.options)[0]

    def _rewritten(self, change: Change) -> CompiledProgram | None:
        fn = self._changed(change)
        if fn is None:
            return None
        return self._named(self._compiled(fn, [*self.arguments.leaves.values()], self.options))

    def _changed(self, change: Change) -> Any:
        jitted, arguments = self._jitted(), self.arguments
        with jax.set_mesh(self.target.mesh), compiled_with(self.options), enclosing(jitted):
            return rewritten(arguments.calling(jitted), change, *arguments.leaves.values())

    def _on(self, mesh: Mesh) -> CompiledProgram:
        fn = self._changed(Change(meshes=(self.target.mesh, mesh)))
        moved = ProgramArguments(self.program, mesh)
        if fn is None:
            return self._compiled(self.program.function, moved.given, self.options, mesh)
        return self._named(self._compiled(fn, [*moved.leaves.values()], self.options, mesh))

    def _named(self, compiled: CompiledProgram) -> CompiledProgram:
        names = [name.replace("'", "\\'") for name in self.arguments.leaves]

        def name_of(leaf: re.Match[str]) -> str:
            return f'op_name="{names[int(leaf[1])]}"'

        return replace(compiled, text=_LEAF.sub(name_of, compiled.text))

    @cached_property
    def _reshardings(self) -> Reshardings:
        from jaxpar.tools.explain.resharded import Reshardings  # it takes all of the layouts

        return Reshardings(self.arguments, self.program.jaxpr, self.target.mesh)

    @cached_property
    def _namesakes(self) -> Resharded | None:
        leaves, listed = self.arguments.leaves, self.arguments.listed
        namesakes = as_namesakes({name: x for name, x in leaves.items() if spec_of(x) is not None})
        specs = {name: spec_of(leaves[like]) or P() for name, like in namesakes.items()}
        text = f"shard {listed(specs)} like {listed([*namesakes.values()])}"
        return Resharded(specs, text, frozenset(), "") if specs else None

    @cached_property
    def _at_odds(self) -> list[Resharded]:
        at_odds, known = self._reshardings.at_odds, self._namesakes
        return [resharded for resharded in at_odds if known is None or resharded.lies != known.lies]

    def _resharded(self, resharded: Resharded) -> Edit:
        def compiled() -> CompiledProgram:
            function, args = self.program.function, self.arguments.sharded(resharded.specs)
            try:
                return self._compiled(function, args, self.options)
            except ValueError:
                if not hasattr(function, "trace"):
                    raise
                # `in_shardings` of its jit refuse other arguments. The traced program has none.
                function, args = replayed(function, self._stage, args, donated_by(self._stage))
                return self._compiled(function, args, self.options)

        return Edit(resharded.text, compiled, resharded.disagrees)

    @cached_property
    def _stage(self) -> Any:
        with compiled_with(self.options):
            return traced_for(self.target.mesh, self._jitted(), self.arguments.given).stage

    @cached_property
    def _has_modes(self) -> bool:
        # Tracing again needs a function that may be traced twice, so the lines are read first.
        if not _has_lines_of_jaxpar(self.program.jaxpr.jaxpr):
            return False
        ways = Ways({}, imposed="naive")
        with jax.set_mesh(self.target.mesh), compiled_with(self.options), trying(ways):
            self._jitted().trace(*self.arguments.given)
        return ways.met

    def _with_mode(self, mode: Mode) -> CompiledProgram:
        with trying(Ways({}, imposed=mode)):
            return self._compiled(self.program.function, self.arguments.given, self.options)


_LEAF = re.compile(r'op_name="leaves\[(\d+)\]"')
_ROOMS = tuple(
    f"{Path(jaxpar.__file__).with_name(room)}{sep}"
    for room in ("collectives", "layers", "matmul", "moe")
)


def _has_lines_of_jaxpar(jaxpr: core.Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        trace = eqn.source_info.traceback
        if any(frame.file_name.startswith(_ROOMS) for frame in (trace.frames if trace else ())):
            return True
        if any(map(_has_lines_of_jaxpar, subjaxprs(eqn.params))):
            return True
    return False


def _same(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    return operands


def _hops(mesh: Mesh, axes: Sequence[str]) -> int:
    return max((int(ring_hops(mesh, axis).max()) for axis in axes), default=0)


def _orders(mesh: Mesh) -> Iterator[tuple[tuple[str, ...], Mesh]]:
    """Yields axis orders, each with its best mesh."""
    names, devices = mesh.axis_names, list(mesh.devices.flat)
    devices.sort(key=lambda device: device.id)
    # Trainers have a dozen axes; most have one device and so no neighbours.
    short = [name for name in names if mesh.shape[name] == 1]
    for long in islice(permutations(name for name in names if name not in short), MOST_ORDERS):
        order = (*long, *short)
        made = make_mesh({name: mesh.shape[name] for name in order}, devices=devices)
        grid = made.devices.transpose([order.index(name) for name in names])
        if not np.array_equal(grid, mesh.devices):
            yield order, Mesh(grid, names, axis_types=mesh.axis_types)
