"""Groups a pytree's arrays by the weights that they hold, and weights by their modules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpar.layout._layer_groups import Alike
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import Named, Names
from jaxpar.layout._paths import parts_of, pattern_of
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._weight_formats import Unpacked, unpacked


class NamedArray(Protocol):
    """An array's path, shape and dtype; of a `Quantized` beside its values, those."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def values(self) -> Any: ...
    def problem(self, text: str, remedy: str) -> LayoutProblem: ...


@dataclass(frozen=True)
class Weight:
    """An array without the dimensions that count layers and experts.

    Attributes:
      first: the number of those dimensions.
      given: the user's role.
      alike: all arrays whose paths differ in an index.
      unpacked: the weight of which the array is the largest part.
    """

    array: NamedArray
    named: Named
    first: int
    given: str | None
    alike: Alike
    unpacked: Unpacked

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unpacked.shape

    @property
    def kind(self) -> str | None:
        return None if self.given else self.named.kind

    @property
    def is_matrix(self) -> bool:
        return sum(size > 1 for size in self.shape) > 1

    @property
    def is_table(self) -> bool:
        """Returns whether it has a row for each token."""
        if len(self.shape) != 2:
            return False
        named = self.named
        if self.given or named.adapter is not None:
            return self.given == "vocabulary"
        return named.kind == "table" and named.direct and named.leaf != "kernel"

    @property
    def pattern(self) -> str:
        return self.alike.pattern(self.array.path) or ".*"  # the pytree is an array

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return self.array.problem(f"{self.array} {text}", remedy)


@dataclass(frozen=True)
class Part:
    """An array beside a weight's largest array, without its dimensions of layers and experts."""

    array: NamedArray
    weight: Weight
    shape: tuple[int, ...]
    given: str | None
    names: Sequence[str]
    alike: Alike

    @property
    def pattern(self) -> str:
        return self.alike.pattern(self.array.path)


class WeightGroups:
    """All weights, and the parts of those that several arrays hold."""

    def __init__(
        self, arrays: Sequence[NamedArray], roles: Mapping[str, Pattern], layers: Container[str]
    ) -> None:
        self._names = names = Names(array.path for array in arrays)
        self._given = {
            array.path: next((role for role, paths in roles.items() if array.path in paths), None)
            for array in arrays
        }
        self._layers = layers
        self._alike: dict[str, Alike] = defaultdict(Alike)
        self.of: dict[str, Weight] = {}
        self.parts: dict[str, Part] = {}
        self.parts_of: dict[str, list[Part]] = defaultdict(list)
        self.in_module: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        self.in_parent: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        self.beside: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        groups: dict[str, list[NamedArray]] = defaultdict(list)
        for array in arrays:
            self._alike[pattern_of(array.path)].add(array.path, array.shape)
            part = names.parts.get(array.path)
            groups[part.largest if part else array.path].append(array)
        # Biases follow their matrices.
        for path, group in sorted(groups.items(), key=lambda item: names.of[item[0]].bias):
            self._add(path, group)
        for weight in list(self.of.values()):
            self._move(weight)
        self.tables = [weight for weight in self.of.values() if weight.is_table]

    def _add(self, path: str, group: Sequence[NamedArray]) -> None:
        array, named = next(a for a in group if a.path == path), self._names.of[path]
        name = self._names.parts[path].name if len(group) > 1 or path in self._names.parts else ""
        matrix = self.matrix_of(named.parts)
        if name == "blocks":  # [out, in / numbers, bytes]
            first = max(len(array.shape) - 3, 0)
        elif matrix is not None and path not in self._layers:
            first = min(matrix.first, len(array.shape) - 1)
        else:
            first = _leading(array, named, path in self._layers)
        shapes = {self._names.parts[a.path].name: a.shape[first:] for a in group if a is not array}
        behind = unpacked(name, array.shape[first:], array.dtype, shapes)
        weight = Weight(
            array, named, first, self._given[path], self._alike[pattern_of(path)], behind
        )
        if weight.is_matrix:
            weight = replace(weight, named=named.of_matrix())
        elif matrix is not None and named.kind == "whole":
            weight = replace(weight, named=replace(named, kind=matrix.named.kind))
        self.of[path] = weight
        self.in_module[named.module].append(weight)
        self.in_parent[named.parent].append(weight)
        self.beside[named.parts[:-1]].append(weight)
        for other in group:
            if other is not array:
                last = parts_of(other.path)[-1].lower()
                self._add_part(other, weight, (self._names.parts[other.path].name, last))

    def _add_part(self, array: NamedArray, weight: Weight, names: Sequence[str]) -> None:
        path, shape = array.path, array.shape[weight.first :]
        alike = self._alike[pattern_of(path)]
        part = Part(array, weight, shape, self._given[path], names, alike)
        self.parts[path] = part
        self.parts_of[weight.array.path].append(part)

    def _move(self, weight: Weight) -> None:
        """Counts a vector beside a matrix among its parts."""
        named, shape = weight.named, weight.shape
        if weight.is_matrix or not shape or named.bias or named.adapter or not named.inside:
            return
        if named.kind in (None, "whole"):
            return
        beside = [w for w in self.matrices(named.module) if w.named.direct and w.is_matrix]
        if len(beside) != 1:
            return
        sizes = zip(shape, beside[0].shape, strict=False)
        if len(shape) == 1 or all(size in (1, whole) for size, whole in sizes):
            self._add_part(weight.array, beside[0], named.inside)
            del self.of[weight.array.path]

    def matrix_of(self, bias: tuple[str, ...]) -> Weight | None:
        """Returns the only matrix of a bias with this path."""
        before, last = bias[:-1], bias[-1]
        beside = [w for w in self.beside[before] if not w.named.bias and len(w.shape) > 1]
        if last in ("bias", "b"):
            matrices = [w for w in beside if w.named.leaf]
            matrices += [w for w in self.in_module[before] if w.named.parts == before]
        elif last.endswith("_bias"):
            stem = last.removesuffix("_bias")
            names = (stem, f"{stem}_weight", f"{stem}_kernel")
            matrices = [w for w in beside if w.named.parts[-1] in names]
        else:
            return None
        return matrices[0] if len(matrices) == 1 else None

    def as_large_as_a_table(self, weight: Weight) -> bool:
        return any(sorted(weight.shape) == sorted(table.shape) for table in self.tables)

    def widths(self) -> set[int]:
        """Returns blocks' widths, from norms and tables."""
        norms = (w for w in self.of.values() if w.kind == "whole" and len(w.shape) == 1)
        widths = {
            norm.shape[0]
            for norm in norms
            if re.match(r"ln|.*norm|.*rnorm", norm.named.name)
            and not re.match(r"_?(q|k|kv|query|key)_|.*norm_[qk]$", norm.named.name)  # of heads
        }
        return widths | {table.shape[1] for table in self.tables}

    def vocabulary_dim(self, weight: Weight) -> int | None:
        if not self.as_large_as_a_table(weight):
            return None
        rows = {table.shape[0] for table in self.tables}
        dims = [dim for dim, size in enumerate(weight.shape) if size in rows]
        return dims[0] if len(dims) == 1 else None

    def matrices(self, module: tuple[str, ...]) -> list[Weight]:
        weights = self.in_module[module]
        return [w for w in weights if len(w.shape) > 1 and w.named.adapter is None]


def _leading(array: NamedArray, named: Named, stacked: bool) -> int:
    rank, inner = len(array.shape), 1 if named.bias else 2  # dimensions that do not lead
    first = min(int(stacked), rank)
    return rank - inner if named.of_experts and rank - first > inner else first
