"""Edits that can be tried by themselves: what a person would change, and the program with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import compiled_with
from jaxpar import compiler_options as options_of
from jaxpar.mesh import make_mesh, ring_hops
from jaxpar.tools.explain.forms import overlapped
from jaxpar.tools.explain.narrow_sums import narrowed
from jaxpar.tools.explain.program_arguments import (
    as_namesakes,
    exchanged,
    is_over,
    laid,
    last_of,
    listed,
    named,
    shape_of,
    spec_of,
    spec_text,
)
from jaxpar.tools.explain.repeats import hoisted, kept
from jaxpar.tools.explain.rewrite import Change, Handler, bound, rewritten
from jaxpar.tools.private_names import WHOLE_MATMULS, Mode, enclosing, jitted_with, trying
from jaxpar.tools.private_names import Trial as Ways
from jaxpar.tools.program.sources import Line, line_of
from jaxpar.tools.timeline.timeline import CompiledProgram, compile_for

MODES: tuple[Mode, ...] = ("bidirectional", "unidirectional", "naive")


@dataclass(frozen=True)
class Edit:
    """One edit: what a person would change, and how to compile the program with it."""

    text: str
    compiled: Callable[[], CompiledProgram | None]  # None: there is nothing to change


class Edits:
    """The edits of one program, by their kinds."""

    def __init__(self, program: CompiledProgram) -> None:
        self.program, self.target = program, program.target
        self.args, self.options = laid(program.args, program.target.mesh), program.compiler_options

    def compiler_options(self, only: str | None = None) -> Iterator[Edit]:
        """The options that the chip should have, or one of them, where the program lacks some."""
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
                    self.program.function, self.args, {**self.options, **lacking}
                ),
            )

    def cut_matmuls(self) -> Iterator[Edit]:
        """Matmuls that the partitioner may cut, where the program has it leave them whole."""
        name = WHOLE_MATMULS.name
        if name in self.options:
            others = {option: x for option, x in self.options.items() if option != name}
            yield Edit(
                f"compile without {name}: the partitioner then cuts large matmuls into pieces, "
                "beside which the blocks of what they gather travel",
                lambda: self._compiled(self.program.function, self.args, others),
            )

    def modes(self) -> Iterator[Edit]:
        """Another mode for all collectives of jaxpar's."""
        if self._has_modes:
            for mode in MODES:
                yield Edit(
                    f"give jaxpar's collectives mode={mode!r} (jaxpar tune finds the best of each)",
                    lambda mode=mode: self._with_mode(mode),
                )

    def forms(self, line: Line | None) -> Iterator[Edit]:
        """The gathers and reduce-scatters beside matmuls, as one of jaxpar's."""
        where = f" at {line}" if line else ""
        for form in overlapped(line):
            yield Edit(
                f"{form.edit}{where}", lambda form=form: self._rewritten(Change(form.equations))
            )

    def order(self, axes: Sequence[str]) -> Iterator[Edit]:
        """A mesh in which neighbours along these axes are nearer, if there is one."""
        mesh = self.target.mesh
        best, hops = None, _hops(mesh, axes)
        for order, other in _orders(mesh):
            if (found := _hops(other, axes)) < hops:
                best, hops = (order, other), found
        if best is not None:
            order, other = best
            shape = ",".join(f"{name}={mesh.shape[name]}" for name in order)
            yield Edit(
                f"make the mesh with jaxpar.make_mesh({shape!r}), whose neighbours along "
                f"{', '.join(axes)} are at most {hops} link{'s' * (hops > 1)} apart",
                lambda: self._on(other),
            )

    def constraints(self) -> Iterator[Edit]:
        """The program without one of its sharding constraints; without all of them."""
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
                f"take with_sharding_constraint away{f' at {line}' if line else ''}, or give it "
                "the sharding that its operand has",
                lambda without=without: self._rewritten(Change(without)),
            )

    def specs(self, arguments: Sequence[str], axes: Sequence[str]) -> Iterator[Edit]:
        """Other dimensions of arguments sharded over some axes than now.

        Arrays of one shape and spec change together, as the layers of a model and its optimizer's
        state do; then, of each shape, one alone.
        """
        leaves = self._leaves
        for name in arguments:
            leaf = leaves.get(name)
            spec = spec_of(leaf)
            if leaf is None or spec is None or not is_over(spec, axes):
                continue
            alike = [n for n, x in leaves.items() if x.shape == leaf.shape and spec_of(x) == spec]
            same = [n for n in alike if last_of(n) == last_of(name)]
            for new in exchanged(spec, leaf.shape, self.target.mesh):
                for group in (alike, same) if len(same) < len(alike) else (alike,):
                    yield self._sharding(
                        f"by {spec_text(new)} in place of {spec_text(spec)}",
                        dict.fromkeys(group, new),
                    )

    def namesakes(self, arguments: Sequence[str]) -> Iterator[Edit]:
        """Arguments sharded as earlier ones of the same names are, as an optimizer's state is."""
        found = as_namesakes(self._leaves)
        if not found.keys().isdisjoint(arguments):
            yield self._sharding("as the earlier arguments of the same names and shapes", found)

    def barriers(self) -> Iterator[Edit]:
        """The program without its optimization barriers."""

        def without(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: _same
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "optimization_barrier"
            }

        yield Edit("take optimization_barrier away", lambda: self._rewritten(Change(without)))

    def unrolled(self) -> Iterator[Edit]:
        """Two trips of each scan in one."""

        def twice(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: lambda eqn, xs: bound(eqn, xs, unroll=2)
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "scan"
                and eqn.params["unroll"] == 1
                and eqn.params["length"] > 1
            }

        yield Edit(
            "give lax.scan unroll=2, so that one trip's transfers can run beside the other's work",
            lambda: self._rewritten(Change(twice)),
        )

    def once(self) -> Iterator[Edit]:
        """Collectives of one operand once: in front of a scan, or in the forward pass alone."""
        yield Edit(
            "gather in front of the scan, and let its body close over the whole array",
            lambda: self._rewritten(Change(hoisted)),
        )

    def kept(self) -> Iterator[Edit]:
        """What a checkpointed function sends, kept for its backward pass."""
        yield Edit(
            "keep what the collective results in: jax.checkpoint(f, policy="
            "save_only_these_names('whole')) with checkpoint_name(result, 'whole'), both of "
            "jax.ad_checkpoint and its policies",
            lambda: self._rewritten(Change(kept)),
        )

    def narrow(self, line: Line | None) -> Iterator[Edit]:
        """Sums of float32 in bfloat16 on the wire."""
        yield Edit(
            f"sum{f' at {line}' if line else ''} in bfloat16: cast before the collective and "
            "back behind it (less exact), or use jaxpar's with wire_dtype='bfloat16'",
            lambda: self._rewritten(Change(partial(narrowed, line))),
        )

    # -- how to compile with them -------------------------------------------------------------

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
        return self._compiled(fn, jax.tree.leaves(self.args), self.options)

    def _changed(self, change: Change) -> Any:
        jitted = self._jitted()
        with jax.set_mesh(self.target.mesh), compiled_with(self.options), enclosing(jitted):
            return rewritten(jitted, change, *self.args)

    def _on(self, mesh: Mesh) -> CompiledProgram:
        change = Change(meshes=(self.target.mesh, mesh))
        fn = self._changed(change)

        args = laid(self.args, mesh)
        if fn is None:
            return self._compiled(self.program.function, args, self.options, mesh)
        return self._compiled(fn, jax.tree.leaves(args), self.options, mesh)

    @cached_property
    def _leaves(self) -> dict[str, Any]:
        """The arguments that have specs, by their names."""
        given = named(self.program.function, self.args)
        return {name: x for name, x in given.items() if spec_of(x) is not None}

    def _sharding(self, how: str, specs: dict[str, PartitionSpec]) -> Edit:
        return Edit(
            f"shard {listed(specs)} {how}",
            lambda: self._compiled(self.program.function, self._sharded(specs), self.options),
        )

    def _sharded(self, specs: dict[str, PartitionSpec]) -> tuple[Any, ...]:
        mesh = self.target.mesh
        flat = [
            shape_of(x, NamedSharding(mesh, specs[name])) if name in specs else x
            for name, x in named(self.program.function, self.args).items()
        ]
        leaves, tree = jax.tree.flatten(self.args)
        assert len(leaves) == len(flat)
        return tree.unflatten(flat)

    @cached_property
    def _has_modes(self) -> bool:
        """Whether the program has collectives of jaxpar's."""
        ways = Ways({}, imposed="naive")
        with jax.set_mesh(self.target.mesh), compiled_with(self.options), trying(ways):
            self._jitted().trace(*self.args)
        return ways.met

    def _with_mode(self, mode: Mode) -> CompiledProgram:
        with trying(Ways({}, imposed=mode)):
            return self._compiled(self.program.function, self.args, self.options)


def _same(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    return operands


def _hops(mesh: Mesh, axes: Sequence[str]) -> int:
    """The most links between neighbours along axes, each of them by itself."""
    return max((int(ring_hops(mesh, axis).max()) for axis in axes), default=0)


def _orders(mesh: Mesh) -> Iterator[tuple[tuple[str, ...], Mesh]]:
    """An order of the axes, and the same mesh with its devices as they are best for that order."""
    names, devices = mesh.axis_names, list(mesh.devices.flat)
    devices.sort(key=lambda device: device.id)
    for order in permutations(names):
        made = make_mesh({name: mesh.shape[name] for name in order}, devices=devices)
        grid = made.devices.transpose([order.index(name) for name in names])
        if not np.array_equal(grid, mesh.devices):
            yield order, Mesh(grid, names, axis_types=mesh.axis_types)
