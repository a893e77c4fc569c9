"""Edits that can be tried by themselves: the program is compiled with them, and played again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxpar._jit import jitted_with
from jaxpar._options import compiled_with
from jaxpar._options import compiler_options as options_of
from jaxpar._tuning import Trial as Ways
from jaxpar._tuning import trying
from jaxpar.mesh import make_mesh, ring_hops
from jaxpar.schedule._exposed import Exposed, Exposures
from jaxpar.schedule._forms import overlapped
from jaxpar.schedule._rewrite import Change, Handler, bound, rewritten
from jaxpar.schedule._sources import Line, line_of
from jaxpar.schedule._timeline import CompiledProgram, Timeline, compile_for, timeline


@dataclass(frozen=True)
class Trial:
    """One edit: what a person would change, and how to compile the program with it."""

    edit: str
    compiled: Callable[[], CompiledProgram | None]  # None: there is nothing to change


@dataclass(frozen=True)
class Tried:
    """What an edit brings: the whole step, compiled with it and played.

    Attributes:
      edit: what was changed, in words.
      seconds: that the step takes with it.
      peak: bytes of memory that it needs.
      program: compiled with the edit.
      exposed: what that program exposes.
    """

    edit: str
    seconds: float
    peak: int
    program: CompiledProgram
    exposed: tuple[Exposed, ...]


class Trials:
    """Finds edits of a program and tries them, each once, and no more of them than `most`."""

    def __init__(self, program: CompiledProgram, played: Timeline, most: int) -> None:
        self.program, self.target, self.left = program, program.target, most
        self.args, self.options = program.args, program.compiler_options
        self.done: dict[str, Tried | None] = {}
        self.played = played

    def best(self, trials: Iterable[Trial], removes: Exposed | None = None) -> Tried | None:
        """The fastest of some edits, None if none was tried.

        Args:
          trials: the edits.
          removes: only those that take away most of what is exposed in this way.
        """
        found = [tried for trial in trials if (tried := self._try(trial)) is not None]
        if removes is not None:
            found = [tried for tried in found if self._is_removed(removes, tried)]
        return min(found, key=lambda tried: tried.seconds, default=None)

    @staticmethod
    def _is_removed(exposed: Exposed, tried: Tried) -> bool:
        left = (
            other.seconds
            for other in tried.exposed
            if (other.line, other.phase, other.axes) == (exposed.line, exposed.phase, exposed.axes)
        )
        return sum(left) < exposed.seconds / 2

    def _try(self, trial: Trial) -> Tried | None:
        if trial.edit not in self.done:
            if self.left <= 0 or self.program.function is None:
                return None
            self.left -= 1
            self.done[trial.edit] = None
            try:
                compiled = trial.compiled()
            except Exception:  # an edit that does not fit the program is none
                compiled = None
            if compiled is not None:
                played = timeline(compiled)
                exposed = tuple(Exposures(compiled, played).found())
                self.done[trial.edit] = Tried(
                    trial.edit, played.total, compiled.memory.peak, compiled, exposed
                )
        return self.done[trial.edit]

    # -- kinds of edits -----------------------------------------------------------------------

    def compiler_options(self) -> Iterator[Trial]:
        """The options that the chip should have, where the program lacks some."""
        lacking = {
            name: value
            for name, value in options_of(self.target).items()
            if self.options.get(name) != value
        }
        if lacking:
            text = ", ".join(f"{name}={value}" for name, value in lacking.items())
            yield Trial(
                f"compile with jaxpar.compiler_options(mesh), that is with {text}",
                lambda: self._compiled(
                    self.program.function, self.args, {**self.options, **lacking}
                ),
            )

    def modes(self) -> Iterator[Trial]:
        """Another mode at all places where jaxpar chooses one."""
        if not (asked := self._asked()):
            return
        for mode in ("bidirectional", "unidirectional", "naive"):
            ways = {
                site: {part: mode for part in parts if mode in parts[part]}
                for site, parts in asked.items()
            }
            yield Trial(
                f"give jaxpar's collectives mode={mode!r} (jaxpar tune finds the best for each)",
                lambda ways=ways: self._with_ways(ways),
            )

    def forms(self, line: Line | None) -> Iterator[Trial]:
        """The gathers and reduce-scatters beside matmuls, as one of jaxpar's."""
        where = f" at {line}" if line else ""
        for form in overlapped(line):
            yield Trial(
                f"{form.edit}{where}", lambda form=form: self._rewritten(Change(form.equations))
            )

    def order(self, axes: Sequence[str]) -> Iterator[Trial]:
        """A mesh in which neighbours along these axes are nearer, if there is one."""
        mesh = self.target.mesh
        best, hops = None, _hops(mesh, axes)
        for other in _orders(mesh):
            if (found := _hops(other, axes)) < hops:
                best, hops = other, found
        if best is not None:
            shape = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
            yield Trial(
                f"make the mesh with jaxpar.make_mesh({shape!r}), whose neighbours along "
                f"{', '.join(axes)} are at most {hops} link{'s' * (hops > 1)} apart",
                lambda: self._on(best),
            )

    def constraints(self) -> Iterator[Trial]:
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

            yield Trial(
                f"take with_sharding_constraint away{f' at {line}' if line else ''}, or give it "
                "the sharding that its operand has",
                lambda without=without: self._rewritten(Change(without)),
            )

    def specs(self, arguments: Sequence[str]) -> Iterator[Trial]:
        """Other dimensions of an argument sharded than now."""
        leaves = _named(self.program.function, self.args)
        for name in arguments:
            leaf = leaves.get(name)
            spec = None if leaf is None else _spec(leaf)
            if leaf is None or spec is None:
                continue
            alike = {
                other
                for other, x in leaves.items()
                if x.shape == leaf.shape and _spec(x) == spec and _last(other) == _last(name)
            }
            for new in _exchanged(spec, leaf.shape, self.target.mesh):
                others = len(alike) - 1
                more = f" (and of {others} arrays like it)" if others else ""
                yield Trial(
                    f"shard {name}{more} by {_text(new)} in place of {_text(spec)}",
                    lambda new=new, alike=alike: self._compiled(
                        self.program.function, self._laid(alike, new), self.options
                    ),
                )

    def barriers(self) -> Iterator[Trial]:
        """The program without its optimization barriers."""

        def without(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: _same
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "optimization_barrier"
            }

        yield Trial("take optimization_barrier away", lambda: self._rewritten(Change(without)))

    def unrolled(self) -> Iterator[Trial]:
        """Two trips of each scan in one."""

        def twice(jaxpr: core.Jaxpr) -> dict[int, Handler]:
            return {
                place: lambda eqn, xs: bound(eqn, xs, unroll=2)
                for place, eqn in enumerate(jaxpr.eqns)
                if eqn.primitive.name == "scan"
                and eqn.params["unroll"] == 1
                and eqn.params["length"] > 1
            }

        yield Trial(
            "give lax.scan unroll=2, so that one trip's transfers can run beside the other's work",
            lambda: self._rewritten(Change(twice)),
        )

    def narrow(self, line: Line | None) -> Iterator[Trial]:
        """Sums of float32 in bfloat16 on the wire."""
        yield Trial(
            f"sum{f' at {line}' if line else ''} in bfloat16: cast before the collective and "
            "back behind it (less exact), or use jaxpar's with wire_dtype='bfloat16'",
            lambda: self._rewritten(Change(partial(_narrowed, line))),
        )

    # -- how to compile with them -------------------------------------------------------------

    def _compiled(
        self, fn: Any, args: Sequence[Any], options: dict[str, Any], mesh: Mesh | None = None
    ) -> CompiledProgram:
        target = self.target if mesh is None else replace(self.target, mesh=mesh)
        return compile_for(fn, target, *args, compiler_options=options)

    def _jitted(self) -> Any:
        return jitted_with(self.program.function, self.options)[0]

    def _rewritten(self, change: Change) -> CompiledProgram | None:
        with jax.set_mesh(self.target.mesh), compiled_with(self.options):
            fn = rewritten(self._jitted(), change, *self.args)
        if fn is None:
            return None
        return self._compiled(fn, jax.tree.leaves(self.args), self.options)

    def _on(self, mesh: Mesh) -> CompiledProgram:
        change = Change(meshes=(self.target.mesh, mesh))
        with jax.set_mesh(self.target.mesh), compiled_with(self.options):
            fn = rewritten(self._jitted(), change, *self.args)

        def laid(x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            return x if sharding is None else _shape(x, change.of(sharding))

        args: Any = jax.tree.map(laid, self.args)
        if fn is None:
            return self._compiled(self.program.function, args, self.options, mesh)
        return self._compiled(fn, jax.tree.leaves(args), self.options, mesh)

    def _laid(self, names: set[str], spec: PartitionSpec) -> tuple[Any, ...]:
        flat = [
            _shape(x, _respecified(x.sharding, spec)) if name in names else x
            for name, x in _named(self.program.function, self.args).items()
        ]
        leaves, tree = jax.tree.flatten(self.args)
        assert len(leaves) == len(flat)
        return tree.unflatten(flat)

    def _asked(self) -> dict[str, dict[str, Sequence[str]]]:
        """What jaxpar chooses in the program: the ways of each part of each site."""
        trial = Ways({})
        self._traced(trial)
        found: dict[str, dict[str, Sequence[str]]] = {}
        for asked in trial.asked.values():
            found.setdefault(asked.site, {})[asked.part] = asked.ways
        return found

    def _traced(self, trial: Ways) -> Any:
        with jax.set_mesh(self.target.mesh), compiled_with(self.options), trying(trial):
            return self._jitted().trace(*self.args)

    def _with_ways(self, ways: Any) -> CompiledProgram:
        with trying(Ways(ways)):
            return self._compiled(self.program.function, self.args, self.options)


def _same(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    return operands


def _narrowed(line: Line | None, jaxpr: core.Jaxpr) -> dict[int, Handler]:
    found: dict[int, Handler] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        if line is not None and line_of(eqn) != line:
            continue
        wide = any(x.aval.dtype == jnp.float32 and x.aval.shape for x in eqn.invars)
        if wide and eqn.primitive.name in ("psum", "psum2", "psum_invariant"):
            found[place] = _sum_narrowly
        elif wide and eqn.primitive.name == "reduce_scatter":
            found[place] = _scatter_narrowly
    return found


def _sum_narrowly(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    groups = eqn.params.get("axis_index_groups")
    return [
        lax.psum(x.astype(jnp.bfloat16), eqn.params["axes"], axis_index_groups=groups).astype(
            x.dtype
        )
        if x.dtype == jnp.float32 and x.shape
        else lax.psum(x, eqn.params["axes"], axis_index_groups=groups)
        for x in operands
    ]


def _scatter_narrowly(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), params = operands, eqn.params
    summed = lax.psum_scatter(
        x.astype(jnp.bfloat16),
        params["axis_name"],
        scatter_dimension=params["scatter_dimension"],
        axis_index_groups=params["axis_index_groups"],
        tiled=params["tiled"],
    )
    return [summed.astype(x.dtype)]


# -- meshes ---------------------------------------------------------------------------------------


def _hops(mesh: Mesh, axes: Sequence[str]) -> int:
    """The most links between neighbours along axes, each of them by itself."""
    return max((int(ring_hops(mesh, axis).max()) for axis in axes), default=0)


def _orders(mesh: Mesh) -> Iterator[Mesh]:
    """The same mesh with its devices in other orders, each the best for some order of the axes."""
    names, devices = mesh.axis_names, list(mesh.devices.flat)
    devices.sort(key=lambda device: device.id)
    for order in permutations(names):
        made = make_mesh({name: mesh.shape[name] for name in order}, devices=devices)
        grid = made.devices.transpose([order.index(name) for name in names])
        if not np.array_equal(grid, mesh.devices):
            yield Mesh(grid, names, axis_types=mesh.axis_types)


# -- arguments ------------------------------------------------------------------------------------


def _named(function: Any, args: Sequence[Any]) -> dict[str, Any]:
    """The leaves of arguments, by the names that JAX gives the program's parameters."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{n}]" for n in range(len(args) - len(names))]
        else:
            names.append(parameter.name)
    return {
        f"{name}{keystr(keys)}": leaf
        for name, arg in zip(names, args, strict=False)
        for keys, leaf in tree_flatten_with_path(arg)[0]
    }


def _last(name: str) -> str:
    """What is left of a name without the argument's own: the same weight's state has it too."""
    return name[name.find("[") :] if "[" in name else name


def _spec(x: Any) -> PartitionSpec | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, PartitionSpec) else getattr(sharding, "spec", None)


def _respecified(sharding: Any, spec: PartitionSpec) -> Any:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return spec


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _exchanged(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> Iterator[PartitionSpec]:
    """A spec with the axes of two dimensions exchanged, where sizes divide."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for first, second in reversed(list(combinations(range(len(shape)), 2))):
        if entries[first] == entries[second]:
            continue
        new = list(entries)
        new[first], new[second] = new[second], new[first]
        sizes = [int(np.prod([mesh.shape[name] for name in _names(entry)])) for entry in new]
        if all(length % size == 0 for length, size in zip(shape, sizes, strict=True)):
            yield PartitionSpec(*new)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _text(spec: PartitionSpec) -> str:
    entries = ", ".join(map(repr, spec))
    return f"P({entries})"
