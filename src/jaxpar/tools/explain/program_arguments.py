"""A program's arguments: names, shardings, and labels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.tools.program.sources import scopes_of
from jaxpar.tools.timeline.timeline import CompiledProgram
from jaxpar.tools.toolkit_api import is_array, subjaxprs, value_error, without_numbers


@dataclass(frozen=True)
class Resharded:
    specs: dict[str, PartitionSpec]  # by name
    text: str
    axes: frozenset[str]  # over which the sharding changes
    disagrees: str  # what the arguments now disagree with; may be empty

    @property
    def lies(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Returns axes up to the last sharded dimension."""
        from jaxpar.tools.toolkit_api import axes_by_dim  # of layouts

        by_dim = {name: axes_by_dim(spec) for name, spec in self.specs.items()}
        return {
            name: axes[: max((d for d, names in enumerate(axes, 1) if names), default=0)]
            for name, axes in by_dim.items()
        }


class ProgramArguments:
    """The arrays among a program's arguments; other leaves are static.

    `leaves` are in order, by JAX's names of parameters.
    """

    def __init__(self, program: CompiledProgram, mesh: Mesh) -> None:
        self.given: tuple[Any, ...] = laid(program.args, mesh)
        self._jaxpr, self._mesh = program.jaxpr.jaxpr, mesh
        self._flat, self._tree = jax.tree.flatten(self.given)
        self._places = dict(zip(_names(self._jaxpr), _places(self._jaxpr, self._flat), strict=True))
        self.leaves = {name: self._flat[place] for name, place in self._places.items()}

    def calling(self, jitted: Callable[..., Any]) -> Callable[..., Any]:
        def call(*leaves: Any) -> Any:
            return jitted(*self._filled(dict(zip(self._places, leaves, strict=True))))

        return call

    def sharded(self, specs: Mapping[str, PartitionSpec]) -> tuple[Any, ...]:
        changed = {
            name: shape_of(self.leaves[name], NamedSharding(self._mesh, spec))
            for name, spec in specs.items()
        }
        return self._filled(changed)

    def _filled(self, changed: Mapping[str, Any]) -> tuple[Any, ...]:
        flat = list(self._flat)
        for name, leaf in changed.items():
            flat[self._places[name]] = leaf
        return self._tree.unflatten(flat)

    def listed(self, names: Collection[str]) -> str:
        alike: dict[str, list[str]] = defaultdict(list)
        for name in names:
            alike[without_numbers(self.label(name))].append(name)
        texts = [self._group(pattern, group) for pattern, group in alike.items()]
        more = len(texts) - 4
        return ", ".join(texts[:4]) + (f" and {more} more" if more > 0 else "")

    def _group(self, pattern: str, names: Sequence[str]) -> str:
        first, *others = names
        if not _POSITION.fullmatch(first):
            return f"{pattern} ({len(names)} arrays)" if others else first
        text = f"{first} and {len(others)} more" if others else first
        if self.label(first) == first:
            return text
        return f"{pattern if others else self.label(first)} ({text})"

    def label(self, name: str) -> str:
        """Returns the name, or a listed array's scopes."""
        return (_POSITION.fullmatch(name) and self._scopes.get(name)) or name

    @cached_property
    def _scopes(self) -> dict[str, str]:
        return dict(zip(self._places, scopes_of_use(self._jaxpr), strict=True))


_POSITION = re.compile(r"\w+(\[\d+\])+")  # an entry of a list of arrays


def _names(jaxpr: core.Jaxpr) -> Sequence[str]:
    """Returns JAX's names, also in the compiled program."""
    known = jaxpr.debug_info.arg_names or ()
    count = len(jaxpr.invars)
    names = [*known, *[""] * (count - len(known))]
    return [name or f"argument {number}" for number, name in enumerate(names[:count])]


def _places(jaxpr: core.Jaxpr, flat: Sequence[Any]) -> Iterator[int]:
    left = iter([(n, _kind(jax.typeof(leaf))) for n, leaf in enumerate(flat) if is_array(leaf)])
    for number, var in enumerate(jaxpr.invars):
        wanted = _kind(var.aval)
        place = next((n for n, kind in left if kind == wanted), None)
        if place is None:
            shape, dtype, _ = wanted
            raise value_error(
                f"argument {number} of the traced program, {dtype}{list(shape)}, is none of those "
                "that it was compiled with; pass arrays and static arguments by place"
            )
        yield place


def _kind(aval: Any) -> tuple[Any, ...]:
    return tuple(aval.shape), aval.dtype, aval.weak_type


def scopes_of_use(jaxpr: core.Jaxpr) -> list[str]:
    by_number: dict[int, str] = {}
    _note_scopes(jaxpr, {var: number for number, var in enumerate(jaxpr.invars)}, "", by_number)
    return [by_number.get(number, "") for number in range(len(jaxpr.invars))]


def _note_scopes(
    jaxpr: core.Jaxpr, known: dict[core.Var, int], around: str, by_number: dict[int, str]
) -> None:
    for eqn in jaxpr.eqns:
        variables = (x for x in eqn.invars if isinstance(x, core.Var) and x in known)
        numbers = [known[x] for x in variables if known[x] not in by_number]
        if not numbers:
            continue
        within = f"{around}/{eqn.source_info.name_stack}"
        for inner in subjaxprs(eqn.params):
            pairs = list(zip(reversed(inner.invars), reversed(eqn.invars), strict=False))
            inside = {a: known[b] for a, b in pairs if isinstance(b, core.Var) and b in known}
            _note_scopes(inner, inside, within, by_number)
        scopes = "/".join(filter(_NAME.fullmatch, scopes_of(f"{within}/{eqn.primitive.name}")))
        for number in numbers:
            if scopes:
                by_number.setdefault(number, scopes)
        if eqn.primitive.name in _SAME and not scopes:
            known[eqn.outvars[0]] = numbers[0]


_NAME = re.compile(r"[\w.-]+")  # an einsum's text is a scope too, but no name
_SAME = ("convert_element_type", "copy", "reshape", "sharding_constraint", "transpose")


def laid(args: Any, mesh: Mesh) -> Any:
    def on_mesh(x: Any) -> Any:
        sharding: Any = getattr(x, "sharding", None)
        if getattr(sharding, "spec", None) is None:
            return x
        kind = sharding.memory_kind
        return shape_of(x, NamedSharding(mesh, sharding.spec, memory_kind=kind))

    with jax.set_mesh(mesh):  # without it, a shape with a bare spec has no sharding
        return jax.tree.map(on_mesh, args)


def as_namesakes(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the earlier argument of the same name and shape where its sharding differs.

    An optimizer's `state[0].mu['up']` is a namesake of `params['up']`.
    """
    first: dict[tuple[str, Any], str] = {}
    namesakes: dict[str, str] = {}
    for name, leaf in leaves.items():
        keys, spec = _KEYS.findall(name), _padded_spec(leaf)
        tails = ("".join(keys[n:]) for n in range(1, len(keys)))
        like = next((first[t, leaf.shape] for t in tails if (t, leaf.shape) in first), None)
        if like is None:
            first[_TREE.sub("", name), leaf.shape] = name
        elif _padded_spec(leaves[like]) != spec:
            namesakes[name] = like
    return namesakes


_KEYS = re.compile(r"^\w+|\.\w+|\[[^]]*\]")
_TREE = re.compile(r"^\w+(\.params)?")


def spec_of(x: Any) -> PartitionSpec | None:
    return getattr(getattr(x, "sharding", None), "spec", None)


def shape_of(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _padded_spec(x: Any) -> list[Any]:
    spec = spec_of(x) or PartitionSpec()
    return [*spec, *[None] * (len(x.shape) - len(spec))]


def spec_text(spec: PartitionSpec) -> str:
    entries = ", ".join(map(repr, spec))
    return f"P({entries})"
