"""Finds each weight's role in tensor parallelism."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpar.layout._alike import Alike
from jaxpar.layout._fit import Shaped
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import Named, Names
from jaxpar.layout._paths import pattern_of
from jaxpar.layout._patterns import Pattern

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
}


@dataclass(frozen=True)
class Weight:
    """An array without the dimensions that count layers and experts.

    Attributes:
      first: the number of those dimensions.
      given: the user's role.
      alike: all arrays whose paths differ in an index.
    """

    array: Shaped
    named: Named
    first: int
    given: str | None
    alike: Alike

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[self.first :]

    @property
    def kind(self) -> str | None:
        return None if self.given else self.named.kind

    @property
    def pattern(self) -> str:
        return self.alike.pattern(self.array.path) or ".*"  # the pytree is one array

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return self.array.problem(f"{self.array} {text}", remedy)


class WeightGroups:
    def __init__(
        self, arrays: Sequence[Shaped], given: Mapping[str, Pattern], layers: Container[str]
    ) -> None:
        names = Names(array.path for array in arrays)
        self.of: dict[str, Weight] = {}
        self.in_module: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        self.in_parent: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        self.beside: dict[tuple[str, ...], list[Weight]] = defaultdict(list)
        groups: dict[str, Alike] = defaultdict(Alike)
        for array in arrays:
            named = names.of[array.path]
            roles = [role for role, pattern in given.items() if array.path in pattern]
            first = _leading(array, named, array.path in layers)
            alike = groups[pattern_of(array.path)]
            alike.add(array.path, array.shape)
            weight = Weight(array, named, first, roles[0] if roles else None, alike)
            self.of[array.path] = weight
            self.in_module[named.module].append(weight)
            self.in_parent[named.parent].append(weight)
            self.beside[named.parts[:-1]].append(weight)
        self.tables = [weight for weight in self.of.values() if _is_table(weight)]
        self._table_shapes = {_sorted(table.shape) for table in self.tables}

    def role(self, weight: Weight) -> str | LayoutProblem | None:
        """Returns columns, rows, vocabulary, heads or whole, if known."""
        if weight.given:
            return weight.given
        named, matrix = weight.named, self._matrix_of(weight)
        if matrix is not None and matrix.given:
            return matrix.given
        match named.kind:
            case "whole":
                return "whole"
            case _ if self._is_part(weight):
                return None
            case "gate":
                return "columns" if self._gates_mlp(named) else "whole"
            case "fused":
                return "columns" if self._by_head(named) else _of_fused(weight)
            case "out" if self._is_logits(weight) and not self._ends_block(named):
                return "columns"
            case "mlp" if self._is_pair(weight):
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

    def _matrix_of(self, weight: Weight) -> Weight | None:
        """Returns a bias's matrix, if the only one."""
        before, last = weight.named.parts[:-1], weight.named.parts[-1]
        if last not in ("bias", "b"):
            return None
        found = [
            other
            for other in self.beside[before]
            if other.named.leaf and not other.named.bias and len(other.shape) > 1
        ]
        return found[0] if len(found) == 1 else None

    def _is_part(self, weight: Weight) -> bool:
        """Returns whether it is an extra array beside a matrix."""
        named = weight.named
        return not (named.direct or named.bias or named.adapter or len(weight.shape) < 2) and any(
            other.named.direct for other in self.matrices(named.module)
        )

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

    def _by_head(self, named: Named) -> bool:
        """Returns whether each head's query, key, value lie together."""
        return named.name == "query_key_value" and any(
            max(w.shape) == 3 * min(w.shape) for w in self.matrices(named.module)
        )

    def _is_logits(self, weight: Weight) -> bool:
        """Returns whether its matrix is as large as a table."""
        matrix = weight if len(weight.shape) > 1 else self._matrix_of(weight)
        of = self.matrices(weight.named.module) if matrix is None else [matrix]
        return any(_sorted(w.shape) in self._table_shapes for w in of)

    def _is_lesser(self, weight: Weight) -> bool:
        """Returns whether another table is larger. Flax calls any table `embedding`."""
        rows = max((table.shape[0] for table in self.tables), default=0)
        return not weight.named.inside and len(weight.shape) == 2 and weight.shape[0] < rows

    def _ends_block(self, named: Named) -> bool:
        beside = self.in_parent[named.parent]
        return any(w.named.kind in ("attention", "mlp", "fused") for w in beside)


def unlike(weight: Weight, beside: Iterable[Weight]) -> LayoutProblem | None:
    """Returns why columns' shape refutes a name of rows."""
    for other in beside:
        if (
            ROLES.get(other.kind or "") == "columns"
            and other.named.inside == weight.named.inside
            and other.shape == weight.shape
            and len(set(weight.shape)) > 1
        ):
            path = weight.pattern
            return weight.problem(
                f"has a name of rows, but the shape of {other.array.path!r}, which is sharded by "
                "columns",
                f"give columns={path!r}, or rows={path!r}",
            )
    return None


def _of_fused(weight: Weight) -> LayoutProblem:
    path = weight.pattern
    return weight.problem(
        "may hold several projections one after the other, which a block of columns would mix",
        f"split it into an array for each; or give columns={path!r} if the columns of each device "
        f"lie together, and whole={path!r} otherwise",
    )


def _is_table(weight: Weight) -> bool:
    """Returns whether it has a row for each token."""
    if len(weight.shape) != 2:
        return False
    named = weight.named
    if weight.given or named.adapter is not None:
        return weight.given == "vocabulary"
    return named.kind == "table" and named.direct and named.leaf != "kernel"


def _leading(array: Shaped, named: Named, stacked: bool) -> int:
    rank, own = len(array.shape), 1 if named.bias else 2
    first = min(int(stacked), rank)
    return rank - own if named.of_experts and rank - first > own else first


def _sorted(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(shape))
