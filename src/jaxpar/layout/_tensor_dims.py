"""Finds each weight's dimension that tensor parallelism shards, or why it is unknown.

A matrix needs a known input dimension. A bias is as long as the output. Blocks' inputs and outputs
are as wide as norms and tables. Others follow weights of the same kind. The array's name decides
last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from jaxpar.layout._fit import Shaped
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import OF_HEADS, PAIR
from jaxpar.layout._paths import key_of
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._roles import Weight, WeightGroups, unlike
from jaxpar.layout._rule import Axes, shown


class TensorDims:
    def __init__(
        self,
        arrays: Sequence[Shaped],
        given: Mapping[str, Pattern],
        layers: Container[str],
        *,
        axes: Axes,
        count: int,
        head_size: int | None,
    ) -> None:
        self._weights = weights = WeightGroups(arrays, given, layers)
        self._axes, self._count, self._head_size = axes, count, head_size
        self._widths = weights.widths()
        # The output dimension: from biases by place and leaf, from widths by leaf.
        self._by_bias: dict[tuple[tuple[str, ...], str], set[int]] = defaultdict(set)
        self._by_width: dict[str, set[int]] = defaultdict(set)
        # Keys and values may have an input of another width: they do not decide alone.
        self._by_key: dict[str, set[int]] = defaultdict(set)
        for weight in weights.of.values():
            named = weight.named
            if len(weight.shape) != 2 + (named.name == PAIR) or named.adapter or named.bias:
                continue
            role, parts, leaf = weights.role(weight), weight.named.parts, weight.named.leaf
            if weight.kind == "whole" or role in ("vocabulary", "heads"):
                continue
            if weight.kind == "logits" or weights.vocabulary_dim(weight) is not None:
                continue  # GPT-2 stores it unlike all other matrices
            if (out := self._out_by_bias(weight)) is not None:
                for place in range(len(parts)):
                    self._by_bias[parts[:place], leaf].add(out)
            elif isinstance(role, str) and role in ("columns", "rows"):
                out = self._out_by_width(weight, role)
                if out is not None:
                    (self._by_key if named.is_key else self._by_width)[leaf].add(out)

    def of(self, path: str) -> int | LayoutProblem | None:
        """Returns a dimension, a problem, None if replicated."""
        weight = self._weights.of[path]
        found = self._dim(weight)
        if not isinstance(found, int):
            return found
        # A single entry is replicated, such as the one key of all heads.
        return weight.first + found if weight.shape[found] != 1 else None

    def _dim(self, weight: Weight) -> int | LayoutProblem | None:
        rank, named, role = len(weight.shape), weight.named, self._weights.role(weight)
        if isinstance(role, LayoutProblem):
            return None if named.adapter == "a" else role
        if rank < 1 or role == "whole":
            return None
        if named.adapter is None and (rank == 1 or named.bias):
            return (self._few_heads(weight) or 0) if role == "columns" else None
        if role is None:
            path = weight.pattern
            return weight.problem(
                "has a name without a known role",
                f"give its role: columns={path!r}, or rows, vocabulary or whole",
            )
        if named.adapter is not None:
            return self._of_adapter(weight, role)
        if role == "vocabulary":
            return 0
        if role == "heads":
            return {"heads": rank - 3, "bias by heads": 0}.get(named.kind or "", rank - 1)
        if rank > 2 and named.name != PAIR:
            return self._of_heads(weight, role)
        return self._few_heads(weight) or self._of_matrix(weight, role)

    def _of_matrix(self, weight: Weight, role: str) -> int | LayoutProblem:
        """Returns columns' output dimension, rows' input dimension."""
        if role == "rows" and weight.given is None:
            wrong = unlike(weight, self._weights.in_parent[weight.named.parent])
            if wrong is not None:
                return wrong
        last = len(weight.shape) - 1
        if role == "columns" and (dim := self._weights.vocabulary_dim(weight)) is not None:
            return dim
        out = self._out(weight, role)
        if out is None:
            return weight.problem(
                "may be [in, out] or [out, in]: neither biases nor widths around it decide",
                self._own_rule(weight),
            )
        return last - 1 + (out if role == "columns" else 1 - out)

    def _out(self, weight: Weight, role: str) -> int | None:
        """Returns the output among the last two, or None."""
        parts, leaf = weight.named.parts, weight.named.leaf
        usual, own = int(leaf != "weight"), self._out_by_bias(weight)
        if own is not None or weight.kind == "logits":
            return usual if own is None else own
        for place in range(len(parts) - 1, -1, -1):
            said = self._by_bias.get((parts[:place], leaf))
            if said:
                return min(said) if len(said) == 1 else None
        said = self._by_width[leaf] or (self._by_key[leaf] and self._by_key[leaf] | {usual})
        own = self._out_by_width(weight, role)
        if len(said) == 1:
            return None if own not in (None, *said) else min(said)
        if not self._by_width[leaf] and said:
            return None
        # GPT-2's weights are published in both orders under the same names.
        either = leaf in ("weight", "kernel") and weight.named.name.startswith("c_")
        return None if either or own not in (None, usual) else usual

    def _out_by_bias(self, weight: Weight) -> int | None:
        *before, last = weight.named.parts
        names = {"bias", "b"} if weight.named.leaf else {f"{last}_bias"}
        names.add(re.sub("_weight$", "_bias", last))
        sizes = {
            other.shape[0]
            for other in self._weights.beside[tuple(before)]
            if other.named.parts[-1] in names and len(other.shape) == 1
        }
        return _only(dim for dim, size in enumerate(weight.shape[-2:]) if size in sizes)

    def _out_by_width(self, weight: Weight, role: str) -> int | None:
        wide = _only(d for d, size in enumerate(weight.shape[-2:]) if size in self._widths)
        return wide if wide is None or role == "rows" else 1 - wide

    def _of_heads(self, weight: Weight, role: str) -> int | LayoutProblem:
        """Returns the heads of [in, heads, size] or [heads, size, out]."""
        rank, named = len(weight.shape), weight.named
        if weight.given:
            if named.leaf == "weight":
                return 0 if role == "columns" else rank - 1
            return 1 if role == "columns" else 0
        right = rank == 3 and named.leaf != "weight" and named.kind in ("attention", "out")
        if right and self._share_heads(weight, role):
            return 1 if role == "columns" else 0
        path = weight.pattern
        return weight.problem(
            f"has {rank} dimensions, which are not [in, heads, size] or [heads, size, out]",
            f"give stacked={path!r} if the first counts layers or experts; otherwise "
            f"{self._own_rule(weight)}",
        )

    def _share_heads(self, weight: Weight, role: str) -> bool:
        shape, heads = weight.shape, defaultdict[str, set[int]](set)
        for other in self._weights.in_parent[weight.named.parent]:
            if len(other.shape) == 3 and other.named.adapter is None:
                kind = other.named.kind or ""
                if kind == "mlp" and sorted(other.shape) == sorted(shape):
                    return False
                heads[kind].add(other.shape[1 if kind == "attention" else 0])
        both = heads["attention"] & heads["out"]
        if role == "rows":
            return shape[0] in both or not heads["attention"]
        if shape[0] not in self._widths and shape[1] in self._widths:
            return False
        return any(not count % shape[1] for count in both if shape[1]) or not heads["out"]

    def _of_adapter(self, weight: Weight, role: str) -> int | LayoutProblem | None:
        """Returns b's dimension for columns, a's for rows, tables."""
        named, shape = weight.named, weight.shape
        columns = role == "columns" or (role == "heads" and named.name != "attn_vec_einsum")
        if (named.adapter == "b") != columns:
            return None
        if len(shape) > 2:  # [rank, heads, size], [heads, size, rank]
            return len(shape) - 2 if columns else 0
        others = [
            other.shape
            for other in self._weights.in_module[named.module]
            if other.named.adapter not in (None, named.adapter)
            and len(other.named.parts) == len(named.parts)
        ]
        ranks = set(shape).intersection(*others) or set(shape)
        if len(set(shape)) > 1:
            return 1 - shape.index(min(ranks))
        return int((named.leaf != "weight") == columns)

    def _own_rule(self, weight: Weight) -> str:
        key, axis = key_of(weight.array.path), shown(self._axes)
        return (
            f"give whole={weight.pattern!r}, and add its own rule, with {axis!r} for the sharded "
            f"dimension: rules | {{{key!r}: ...}}"
        )

    def _few_heads(self, weight: Weight) -> LayoutProblem | None:
        named = weight.named
        if weight.given or named.kind not in ("attention", "fused") or named.name == "sinks":
            return None
        if named.bias and len(weight.shape) > 1:  # [heads, size]
            return None
        size = self._head_size or self._head_size_by_norm(named.parent)
        if size is None:
            return None
        size *= 3 if named.kind == "fused" else 1  # a head's query, key and value lie together
        dim = self._of_matrix(weight, "columns") if len(weight.shape) == 2 else 0
        out = weight.shape[dim] if isinstance(dim, int) else 0
        heads, rest = divmod(out, size)
        if rest or not heads % self._count:
            return None
        return weight.problem(
            f"has {heads} heads of {size}, which {self._count} devices do not divide",
            f"replicate them, whole={weight.pattern!r}, or use fewer devices along this axis",
        )

    def _head_size_by_norm(self, parent: tuple[str, ...]) -> int | None:
        norms, most = set[int](), 0
        for other in self._weights.in_parent[parent]:
            if re.fullmatch(OF_HEADS, other.named.name):
                norms |= set(other.shape) if len(other.shape) == 1 else set()
            elif other.named.kind in ("attention", "fused"):
                most = max(most, *other.shape)
        return min(norms) if len(norms) == 1 and min(norms) < most else None


def _only(found: Iterable[int]) -> int | None:
    dims = list(found)
    return dims[0] if len(dims) == 1 else None
