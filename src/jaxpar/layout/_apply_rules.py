"""Fits rules to arrays and a mesh."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from jaxpar.arguments.calls import naming
from jaxpar.arguments.types import AnyMesh
from jaxpar.arguments.unit_text import bytes_of, size_text
from jaxpar.axis.padding import PaddedDim
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._layout_error import LayoutProblem, shape_text
from jaxpar.layout._mesh import size_of
from jaxpar.layout._named_sizes import NamedSizes
from jaxpar.layout._paths import arrays_of, described, key_of
from jaxpar.layout._rule import Axes, Entry, Nearest, Rule, axes_of, nearest, shown
from jaxpar.layout._split import Replicate, Split

if TYPE_CHECKING:
    from jaxpar.layout._map import LayoutMap


@dataclass(frozen=True)
class Shaped:
    path: str
    shape: tuple[int, ...]
    dtype: Any
    values: Shaped | None = None  # of the `Quantized` that it is the scales of
    block: int | None = None

    def __str__(self) -> str:
        text = shape_text(self.dtype, self.shape)
        return f"{self.path!r} {text}" if self.path else text

    @property
    def bytes(self) -> int:
        return bytes_of(self.shape, self.dtype)

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return LayoutProblem(self.path, None, text, remedy)


def shapes_in(tree: Any, name: str = "params") -> tuple[list[Shaped | None], Any]:
    """Returns arrays' paths, shapes and dtypes, and the treedef."""
    leaves, treedef = arrays_of(tree, name)
    arrays = [leaf and Shaped(*described(*leaf)) for leaf in leaves]
    if "jaxpar.axis.quantized" in sys.modules:  # otherwise the tree has none
        from jaxpar.layout._scale_dims import with_values

        arrays = with_values(tree, arrays)
    return arrays, treedef


def replicated(array: Shaped, mesh: AnyMesh) -> ArrayLayout:
    whole = tuple(PaddedDim.at_the_end(size, 1, size) for size in array.shape)
    return ArrayLayout(array.path, array.shape, array.dtype, None, PartitionSpec(), whole, mesh)


def fit(
    rules: LayoutMap, arrays: Sequence[Shaped], mesh: AnyMesh, *, strict: bool
) -> tuple[list[ArrayLayout], list[LayoutProblem]]:
    """Returns layouts and problems. Arrays with problems are replicated.

    `strict` also reports unmatched arrays, and unused rules and axes.
    """
    layouts: list[ArrayLayout] = []
    problems: list[LayoutProblem] = []
    placed: list[Placed] = []
    used: set[str] = set()
    by_path: dict[str, ArrayLayout] = {}
    known: dict[tuple[str, tuple[int, ...]], ArrayLayout] = {}  # layers share rules and shapes
    near = Nearest(rules, "the nearest rule is {}")
    shapes = {array.path: array.shape for array in arrays}
    for array in arrays:
        keys = rules.matching(array.path)
        used.update(keys)
        laid = None
        if len(keys) > 1:
            problems.append(_of_several(array, keys))
        elif array.values is not None:
            from jaxpar.layout._scale_dims import laid_like_values

            laid = laid_like_values(array, by_path[array.values.path], rules, problems)
        elif keys:
            placed.append(Placed(array, keys[0], rules.rule(keys[0]), mesh, shapes))
            laid = known.get((keys[0], array.shape)) or placed[-1].lay(problems)
            if laid is not None:
                known[keys[0], array.shape] = laid
                laid = replace(laid, path=array.path, dtype=array.dtype)
        elif strict:
            problems.append(_of_none(array, near.hint(array.path)))
        layouts.append(laid or replicated(array, mesh))
        by_path[array.path] = layouts[-1]
    if strict:
        problems += _exchanged(placed)
        problems += unused_rules(rules, used, list(shapes))
        problems += _unused_axes(rules, mesh, layouts, problems)
        problems += _unknown_axes(rules, mesh)
    return layouts, problems


def _of_several(array: Shaped, keys: Sequence[str]) -> LayoutProblem:
    return array.problem(
        f"{array} is matched by {len(keys)} rules: {', '.join(map(repr, keys))}",
        "narrow one of them, or give the path itself as a key, which goes first",
    )


def _of_none(array: Shaped, hint: str) -> LayoutProblem:
    return array.problem(
        f"{array} is matched by no rule{hint}",
        f"add one, {key_of(array.path)!r}: REPLICATED holds all "
        f"{size_text(array.bytes)} on each device",
    )


@dataclass(frozen=True)
class Placed:
    array: Shaped
    key: str
    rule: Rule
    mesh: AnyMesh
    shapes: Mapping[str, tuple[int, ...]]  # of all arrays

    def lay(self, problems: list[LayoutProblem]) -> ArrayLayout | None:
        if wrong := self._refusal():
            problems.append(wrong)
            return None
        entries = self._entries()
        padding = (*entries, *[()] * (len(self.array.shape) - len(entries)))
        blocks = [self._blocks(dim, entry) for dim, entry in enumerate(padding)]
        wrongs = [block for block in blocks if isinstance(block, LayoutProblem)]
        problems += wrongs
        if wrongs:
            return None
        spec = PartitionSpec(*(shown(axes_of(entry)) for entry in entries))
        array, fine = self.array, tuple(b for b in blocks if isinstance(b, PaddedDim))
        return ArrayLayout(array.path, array.shape, array.dtype, self.key, spec, fine, self.mesh)

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return LayoutProblem(
            self.array.path, self.key, f"{self.array}: rule {self.key!r}: {text}", remedy
        )

    def _refusal(self) -> LayoutProblem | None:
        """Returns a problem that no size decides."""
        rule, rank, value = self.rule, len(self.array.shape), self.rule.given
        match rule.action:
            case Split(axes=()):
                return self.problem(
                    f"{value!r} says how many shards, and not over which mesh axis",
                    f"name one, as in Split('tp', {value.dim}); the mesh has {_text(self.mesh)}",
                )
            case Split(dim=dim) if not -rank <= dim < rank:
                return self.problem(
                    f"{value!r} is of a dimension that the array lacks, which has {rank}",
                    f"choose from {-rank} to {rank - 1}" if rank else "say REPLICATED",
                )
            case Replicate(count=count) if count != self.mesh.size:
                return self.problem(
                    f"{value!r} is for {count} devices, and the mesh has {self.mesh.size}",
                    "say REPLICATED",
                )
            case _:
                pass
        if rule.names is not None and len(rule.names) != rank:
            return self.problem(
                f"{value!r} names {len(rule.names)} dimensions, and the array has {rank}",
                "name every dimension, or have another rule match this array",
            )
        if len(rule.entries) > rank:
            return self.problem(
                f"{rule.layout} is of {len(rule.entries)} dimensions, and the array has {rank}",
                f"give at most {rank}, or have another rule match this array",
            )
        return next((self.problem(*unknown) for unknown in _unknown(rule, self.mesh)), None)

    def _entries(self) -> tuple[Entry, ...]:
        split = self.rule.action
        if not isinstance(split, Split):
            return self.rule.entries
        return (*[()] * (split.dim % len(self.array.shape)), split.axes)

    def _blocks(self, dim: int, entry: Entry) -> PaddedDim | LayoutProblem:
        size, names = self.array.shape[dim], axes_of(entry)
        count = size_of(self.mesh, names)
        if isinstance(self.rule.action, Split):
            return PaddedDim.evenly(size, count)
        if not isinstance(entry, tuple):
            try:
                with naming(""):
                    return entry.blocks(size, count)
            except ValueError as reason:
                text, _, remedy = str(reason).removeprefix(": ").rpartition("; ")
                return self.problem(f"dimension {dim}: {text}", remedy)
        if size % count:
            return self._undivided(dim, names)
        return PaddedDim.at_the_end(size, count, size // count)

    def _undivided(self, dim: int, names: Axes) -> LayoutProblem:
        shape, size, count = self.array.shape, self.array.shape[dim], size_of(self.mesh, names)
        axes = [*map(axes_of, self.rule.entries), *[()] * (len(shape) - len(self.rule.entries))]

        def held(changes: dict[int, Axes], padded: int = size) -> str:
            changed = {**dict(enumerate(axes)), **changes}
            cut = prod(size_of(self.mesh, entry) for entry in changed.values())
            return f"{size_text(self.array.bytes / size * padded / cut)} a device"

        over = repr(shown(names))
        padded = -(-size // count) * count
        elsewhere = [
            (f"shard dimension {d} of {n}", {dim: (), d: names})
            for d, n in enumerate(shape)
            if d != dim and not axes[d] and n and not n % count
        ] + [
            (f"shard it over {name!r}", {dim: (name,)})
            for name, parts in self.mesh.shape.items()
            if not any(name in entry for entry in axes) and parts > 1 and not size % parts
        ]
        other = next((f"{text}, {held(moved)}" for text, moved in elsewhere), None)
        named = f" ({self.rule.names[dim]!r})" if self.rule.names else ""
        from jaxpar.layout._weight_formats import shares

        # Padded scales of blocks would be of other entries.
        shared = shares(self.array.path, dim, self.shapes)
        pad = "" if shared else f"pad it to {padded}, Padded({over}), {held({}, padded)}; "
        return self.problem(
            f"{over} ({count}) does not divide dimension {dim}{named}: {size} = "
            f"{size // count} x {count} + {size % count}",
            f"{pad}replicate it, None, {held({dim: ()})}; or "
            f"{other or 'use another axis, of which none fits here'}",
        )


def _exchanged(placed: Sequence[Placed]) -> list[LayoutProblem]:
    """Returns problems of sizes that fit exchanged names."""
    named = [
        (place, place.rule.names)
        for place in placed
        if place.rule.names is not None and len(place.rule.names) == len(place.array.shape)
    ]
    sizes = NamedSizes(Counter((place.key, names, place.array.shape) for place, names in named))
    problems: list[LayoutProblem] = []
    for place, names in named:
        shape = place.array.shape
        if (swap := sizes.mended(place.key, names, shape)) is not None:
            name, size, order = swap
            problems.append(
                place.problem(
                    f"as {place.rule.given!r} its {name!r} has {shape[names.index(name)]} entries, "
                    f"and {size} in other arrays",
                    f"write {' '.join(order)!r}, with which all sizes agree",
                )
            )
    return problems


def unused_rules(rules: LayoutMap, used: set[str], paths: Sequence[str]) -> list[LayoutProblem]:
    near = Nearest(paths, "the nearest path is {}")
    exact = used.intersection(paths)
    return [
        LayoutProblem(
            None,
            key,
            f"rule {key!r} matches no array{near.hint(key)}",
            "it must match a full path, and `.*` matches anything; correct it or remove it",
        )
        for key in rules
        if key not in used and not any(map(rules.pattern(key).fullmatch, exact))
    ]


def _unused_axes(
    rules: LayoutMap, mesh: AnyMesh, laid: Sequence[ArrayLayout], problems: Sequence[LayoutProblem]
) -> list[LayoutProblem]:
    used = {name for array in laid for names in array.axes for name in names}
    others = [rules.rule(problem.rule) for problem in problems if problem.rule is not None]
    others += _of_data(rules).values()
    used |= {name for rule in others for name in rule.mesh_axes}
    return [
        LayoutProblem(
            None,
            None,
            f"mesh axis {name!r} shards nothing: its {size} devices would do the same work",
            f"name it in a rule, or in batch, if it shards data: batch=P({name!r})",
        )
        for name, size in mesh.shape.items()
        if size > 1 and name not in used
    ]


def _unknown_axes(rules: LayoutMap, mesh: AnyMesh) -> list[LayoutProblem]:
    return [
        LayoutProblem(None, None, f"{where}: {text}", remedy)
        for where, rule in _of_data(rules).items()
        for text, remedy in _unknown(rule, mesh)
    ]


def _unknown(rule: Rule, mesh: AnyMesh) -> Iterator[tuple[str, str]]:
    """Yields a text and a remedy for each axis that the mesh lacks."""
    for name in rule.mesh_axes:
        if name not in mesh.shape:
            near = nearest(name, map(str, mesh.axis_names))
            yield (
                f"the mesh has no axis {name!r}, but {_text(mesh)}",
                f"name one of those, or None for an unsharded dimension{near}",
            )


def _of_data(rules: LayoutMap) -> dict[str, Rule]:
    by_argument = {} if rules.batch is None else {"batch": rules.batch}
    if rules.results is not None:
        by_argument |= {f"results[{key!r}]": rules.results.rule(key) for key in rules.results}
    return by_argument


def _text(mesh: AnyMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
