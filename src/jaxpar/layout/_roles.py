"""Finds each weight's role in tensor parallelism."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpar.layout._alike import Alike
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import ANY_TABLE, Named, Names
from jaxpar.layout._paths import parts_of, pattern_of
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._weight_formats import Unpacked, unpacked

ROLES = {
    "attention": "columns",
    "mlp": "columns",
    "logits": "columns",
    "out": "rows",
    "down": "rows",
    "table": "vocabulary",
    "heads": "heads",
    "bias by heads": "heads",
    "bias by heads, last": "heads",
    "channels": "channels",
}


class NamedArray(Protocol):
    """An array's path, shape and dtype."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
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
    def pattern(self) -> str:
        return self.alike.pattern(self.array.path) or ".*"  # the pytree is one array

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return self.array.problem(f"{self.array} {text}", remedy)


@dataclass(frozen=True)
class Part:
    """An array beside the largest one of a weight, without its dimensions of layers and experts."""

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
        self, arrays: Sequence[NamedArray], given: Mapping[str, Pattern], layers: Container[str]
    ) -> None:
        self._names = names = Names(array.path for array in arrays)
        self._given = {
            array.path: next((role for role, paths in given.items() if array.path in paths), None)
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
        self._has_bloom = any("word_embeddings_layernorm" in path for path in self.of)
        self._state_spaces = {
            named.parts[:-1] for named in names.of.values() if named.parts[-1] == "a_log"
        }
        self.tables = [weight for weight in self.of.values() if _is_table(weight)]
        self._table_shapes = {_sorted(table.shape) for table in self.tables}

    def _add(self, path: str, group: Sequence[NamedArray]) -> None:
        array, named = next(a for a in group if a.path == path), self._names.of[path]
        name = self._names.parts[path].name if len(group) > 1 or path in self._names.parts else ""
        matrix = self._matrix_named(named.parts)
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

    def role(self, weight: Weight) -> str | LayoutProblem | None:
        """Returns columns, rows, vocabulary, heads or whole, if known."""
        if weight.given:
            return weight.given
        named, matrix = weight.named, self._matrix_of(weight)
        if matrix is not None and matrix.given:
            return matrix.given
        if (of_channels := self._of_state_space(weight)) is not None:
            return of_channels
        match named.kind:
            case "whole":
                return "whole"
            case _ if self._is_part(weight):
                return None
            case "gate":
                return "columns" if self._gates_mlp(named) else "whole"
            case "fused":
                return "columns" if self._by_head(weight) else _of_fused(weight)
            case "attention" if self.mixes_channels(named):
                return self._of_channels(named)
            case "out" if self._is_logits(weight) and not self._ends_block(named):
                return "columns"
            case "mlp" if self._is_pair(matrix or weight):
                return _of_fused(weight)
            case "perhaps logits":
                return "columns" if self._is_logits(weight) else None
            case "logits" if not named.direct and not self._is_logits(weight):
                return None
            case "table" if not _is_table(weight) and named.adapter is None:
                return "whole" if len(weight.shape) < 2 else None
            case "table" if self._is_lesser(weight):
                return None
            case kind:
                return ROLES.get(kind or "")

    def widths(self) -> set[int]:
        """Returns blocks' widths, from norms and tables."""
        norms = (w for w in self.of.values() if w.kind == "whole" and len(w.shape) == 1)
        found = {
            norm.shape[0]
            for norm in norms
            if re.match(r"ln|.*norm|.*rnorm", norm.named.name)
            and not re.match(r"_?(q|k|kv|query|key)_|.*norm_[qk]$", norm.named.name)  # of heads
        }
        return found | {table.shape[1] for table in self.tables}

    def vocabulary_dim(self, weight: Weight) -> int | None:
        if _sorted(weight.shape) not in self._table_shapes:
            return None
        rows = {table.shape[0] for table in self.tables}
        found = [dim for dim, size in enumerate(weight.shape) if size in rows]
        return found[0] if len(found) == 1 else None

    def matrices(self, module: tuple[str, ...]) -> list[Weight]:
        found = self.in_module[module]
        return [w for w in found if len(w.shape) > 1 and w.named.adapter is None]

    def unlike(self, weight: Weight) -> LayoutProblem | None:
        """Returns why columns' shape refutes a name of rows."""
        for other in self.in_parent[weight.named.parent]:
            if (
                not other.given
                and other.named.inside == weight.named.inside
                and other.shape == weight.shape
                and len(set(weight.shape)) > 1
                and self.role(other) == "columns"
            ):
                path = weight.pattern
                return weight.problem(
                    f"has a name of rows, but the shape of {other.array.path!r}, which is sharded "
                    "by columns",
                    f"give columns={path!r}, or rows={path!r}",
                )
        return None

    def _matrix_of(self, weight: Weight) -> Weight | None:
        return self._matrix_named(weight.named.parts)

    def _matrix_named(self, bias: tuple[str, ...]) -> Weight | None:
        """Returns the matrix of a bias with this path, if the only one."""
        *before, last = bias
        beside = [w for w in self.beside[tuple(before)] if not w.named.bias and len(w.shape) > 1]
        if last in ("bias", "b"):
            found = [w for w in beside if w.named.leaf]
        elif last.endswith("_bias"):
            stem = last.removesuffix("_bias")
            names = (stem, f"{stem}_weight", f"{stem}_kernel")
            found = [w for w in beside if w.named.parts[-1] in names]
        else:
            return None
        return found[0] if len(found) == 1 else None

    def _is_part(self, weight: Weight) -> bool:
        """Returns whether it is an extra array beside a matrix, or has no name of a matrix."""
        named = weight.named
        if named.bias or named.adapter or len(weight.shape) < 2 or named.kind is None:
            return False
        if not named.direct and any(other.named.direct for other in self.matrices(named.module)):
            return True
        return (
            bool(named.inside) and ROLES.get(named.kind) in ("columns", "rows") and not named.leaf
        )

    def _of_state_space(self, weight: Weight) -> str | LayoutProblem | None:
        """Returns the role of an array with the channels of a state-space layer."""
        parts = weight.named.parts
        layers = self._state_spaces
        layer = (
            next((parts[:i] for i in range(len(parts)) if parts[:i] in layers), ())
            if layers
            else ()
        )
        if not layer or not re.fullmatch(r"a_log|d|dt_bias|conv1d", parts[len(layer)]):
            return None
        inputs = [w for w in self.in_parent[layer] if w.named.name.startswith("in_proj")]
        if inputs and all(other.given == "whole" for other in inputs):
            return "whole"
        return weight.problem(
            "belongs to the channels of a state-space layer, which projections hold fused",
            f"give whole={weight.pattern!r} if those are replicated",
        )

    def mixes_channels(self, named: Named) -> bool:
        """Returns whether its key and value are the MLP of RWKV."""
        shapes = {
            re.sub(r"^(w_?|to_)|_?(proj|lin)$", "", other.named.name)[:1]: other.shape
            for other in self.in_parent[named.parent]
            if other.named.kind == "attention" and len(other.shape) == 2
        }
        if "q" in shapes or not {"k", "v"} <= set(shapes):
            return False
        parent = next((part for part in named.parent[::-1] if not part.isdigit()), "")
        transposed = shapes["k"] == shapes["v"][::-1] and len(set(shapes["k"])) > 1
        return (
            transposed or re.fullmatch(r"ffn|feed_forward|channel_mix\w*|cmix", parent) is not None
        )

    def _of_channels(self, named: Named) -> str:
        """Returns the role in an MLP whose receptance gates its results."""
        if named.name == "receptance":
            return "whole"
        return "rows" if "v" in named.name else "columns"

    def _is_pair(self, weight: Weight) -> bool:
        """Returns whether gates make it twice the rows' input."""
        shape, inside = weight.shape, weight.named.inside
        rows = [
            other.shape
            for other in self.in_parent[weight.named.parent]
            if other.kind in ("down", "out") and other.named.inside == inside
        ]
        if len(shape) != 2 or _sorted(shape) in map(_sorted, rows):
            return False
        double = {(wide, out // 2) for wide, out in (shape, shape[::-1]) if not out % 2}
        return any(row in double or row[::-1] in double for row in rows)

    def _gates_mlp(self, named: Named) -> bool:
        """Returns whether a gate is as large as an MLP."""
        of_mlp = {
            (other.named.inside, _sorted(other.shape))
            for other in self.in_parent[named.parent]
            if other.named.kind in ("mlp", "down", "out", "attention")
        }
        return any(
            (w.named.inside, _sorted(w.shape)) in of_mlp for w in self.matrices(named.module)
        )

    def _by_head(self, weight: Weight) -> bool:
        """Returns whether each head's query, key, value lie together in a known family."""
        named = weight.named
        known = self._has_bloom or any(re.fullmatch(r"gpt_neox\w*", p) for p in named.parts)
        return (
            known
            and named.name == "query_key_value"
            and any(max(w.shape) == 3 * min(w.shape) for w in self.matrices(named.module))
        )

    def _is_logits(self, weight: Weight) -> bool:
        """Returns whether its matrix is as large as a table."""
        matrix = weight if len(weight.shape) > 1 else self._matrix_of(weight)
        of = self.matrices(weight.named.module) if matrix is None else [matrix]
        return any(_sorted(w.shape) in self._table_shapes for w in of)

    def _is_lesser(self, weight: Weight) -> bool:
        """Returns whether another table is larger. Flax calls any table `embedding`."""
        rows = max((table.shape[0] for table in self.tables), default=0)
        generic = not weight.named.inside or re.fullmatch(ANY_TABLE, weight.named.name) is not None
        return generic and len(weight.shape) == 2 and weight.shape[0] < rows

    def _ends_block(self, named: Named) -> bool:
        beside = self.in_parent[named.parent]
        return any(w.named.kind in ("attention", "mlp", "fused") for w in beside)


def _of_fused(weight: Weight) -> LayoutProblem:
    path = weight.pattern
    return weight.problem(
        "may hold several projections one after the other, which a block of columns would mix",
        f"split it into an array for each; or give columns={path!r} if the columns of each device "
        "lie together (GPT-NeoX has each head's query, key and value together), and "
        f"whole={path!r} otherwise; infer_layout(..., show=print) tells from the function whether "
        "its parts would move between devices",
    )


def _is_table(weight: Weight) -> bool:
    """Returns whether it has a row for each token."""
    if len(weight.shape) != 2:
        return False
    named = weight.named
    if weight.given or named.adapter is not None:
        return weight.given == "vocabulary"
    return named.kind == "table" and named.direct and named.leaf != "kernel"


def _leading(array: NamedArray, named: Named, stacked: bool) -> int:
    rank, own = len(array.shape), 1 if named.bias else 2
    first = min(int(stacked), rank)
    return rank - own if named.of_experts and rank - first > own else first


def _sorted(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(shape))
