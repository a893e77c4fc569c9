"""Finds each weight's dimension that tensor parallelism shards, or why it is unknown.

A matrix needs a known input dimension. A bias is as long as the output. Blocks' inputs and outputs
are as wide as norms and tables. Others follow weights of the same kind. The array's name decides
last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import NORM, OF_HEADS, PAIR
from jaxpar.layout._part_dims import Dim, PartDims
from jaxpar.layout._paths import key_of
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._roles import Roles
from jaxpar.layout._rule import Axes, shown
from jaxpar.layout._weight_formats import side_of
from jaxpar.layout._weights import NamedArray, Weight, WeightGroups


class TensorDims:
    def __init__(
        self,
        arrays: Sequence[NamedArray],
        patterns: Mapping[str, Pattern],
        layers: Container[str],
        *,
        axes: Axes,
        count: int,
        head_size: int | None,
    ) -> None:
        self._weights = weights = WeightGroups(arrays, patterns, layers)
        self._roles = roles = Roles(weights)
        self._axes, self._count, self._head_size = axes, count, head_size
        self._widths = weights.widths()
        # The output dimension: from biases by place and leaf, from widths by leaf.
        self._by_bias: dict[tuple[tuple[str, ...], str], set[int]] = defaultdict(set)
        # By leaf, and whether it is of experts.
        self._by_width: dict[tuple[str, bool], set[int]] = defaultdict(set)
        # Keys and values may have an input of another width: they do not decide alone.
        self._by_key: dict[tuple[str, bool], set[int]] = defaultdict(set)
        self._found: dict[tuple[str, str | None], Dim] = {}
        self._parts = PartDims(weights, roles, self._of_weight, self._own_rule, count)
        for weight in weights.of.values():
            self._learn(weight)

    def _learn(self, weight: Weight) -> None:
        """Learns where outputs lie from a matrix whose neighbours show it."""
        named, weights = weight.named, self._weights
        if len(weight.shape) != 2 + (named.name == PAIR) or named.adapter or named.bias:
            return
        if weight.unpacked.out is not None or weight.unpacked.problem:
            return
        if named.kind == "logits" or weights.vocabulary_dim(weight) is not None:
            return  # GPT-2 stores it unlike all other matrices
        # By name, also of a weight that the user replicates.
        role, parts, leaf = self._roles.of(weight), named.parts, named.leaf
        if weight.given == "whole":
            role = self._roles.of(replace(weight, given=None))
        if isinstance(role, LayoutProblem):
            role = "columns" if named.kind in ("fused", "mlp") else None
        if named.kind == "whole" or role in ("vocabulary", "heads"):
            return
        if (out := self._out_by_bias(weight)) is not None:
            for place in range(len(parts)):
                self._by_bias[parts[:place], leaf].add(out)
        elif role not in ("columns", "rows"):
            return
        elif (out := self._out_by_width(weight, role)) is not None:
            is_key = named.is_key and not self._roles.mixes_channels(named)
            (self._by_key if is_key else self._by_width)[leaf, named.of_experts].add(out)

    def of(self, path: str) -> Dim:
        """Returns a dimension, a problem, None if replicated."""
        part = self._weights.parts.get(path)
        weight = self._weights.of[path] if part is None else part.weight
        dim = self._of_weight(weight) if part is None else self._parts.dim(part)
        return weight.first + dim if isinstance(dim, int) else dim

    def _of_weight(self, weight: Weight) -> Dim:
        key = weight.array.path, weight.given
        if key not in self._found:
            dim = self._dim(weight)
            # A single entry is replicated, such as the only key of all heads.
            single = isinstance(dim, int) and weight.shape[dim] == 1
            self._found[key] = None if single else self._parts.uncut(weight, dim)
        return self._found[key]

    def _dim(self, weight: Weight) -> Dim:
        rank, named = len(weight.shape), weight.named
        if rank < 1:
            return None
        role = self._roles.of(weight)
        if isinstance(role, LayoutProblem):
            return None if named.adapter == "a" else role
        if role == "whole":
            return None
        if weight.unpacked.problem is not None:
            edit = self._own_rule(weight.array, weight.pattern)
            return weight.problem(weight.unpacked.problem, f"unpack it, or {edit}")
        if named.adapter is None and (rank == 1 or named.bias):
            return self._of_vector(weight, role)
        if role is None:
            if not weight.is_matrix and (named.kind is None or side_of(named.inside) == "neither"):
                return None
            return self._unknown(weight)
        if named.of_all_experts and (rank, weight.first) == (2, 0):
            edit = self._own_rule(weight.array, weight.pattern)
            return weight.problem("has no dimension that counts experts", edit)
        if named.adapter is not None:
            return self._of_adapter(weight, role)
        if role == "vocabulary":
            return 0
        if role == "channels":
            return next((dim for dim, size in enumerate(weight.shape) if size > 1), None)
        if role == "heads":
            if named.kind == "heads" and rank < 3:
                return self._unknown(weight)
            return {"heads": rank - 3, "bias by heads": 0}.get(named.kind or "", rank - 1)
        if rank > 2 and named.name != PAIR:
            return self._of_heads(weight, role)
        return self._few_heads(weight) or self._of_matrix(weight, role)

    def _unknown(self, weight: Weight) -> LayoutProblem:
        path, text = weight.pattern, "has a name without a known role"
        edit = f"give its role: columns={path!r}, or rows, vocabulary or whole"
        if NORM.search(weight.named.name):
            text = "has the name of a norm, which no matrix is"
            edit += f"; or stacked={path!r} if its first dimension counts layers"
        return weight.problem(text, edit)

    def _of_vector(self, weight: Weight, role: str | None) -> Dim:
        """Returns 0 for a bias of columns, and other vectors of outputs."""
        named = weight.named
        columns, side = role == "columns", side_of(named.inside)
        if role == "channels":
            return 0
        if named.bias or named.direct or side == "outputs" or weight.given:
            return (self._few_heads(weight) or 0) if columns else None
        if role is None or side == "neither" or weight.shape == (1,):
            return None
        return weight.problem(
            "may have an entry for each input, or for each output, of a weight that is not there",
            self._own_rule(weight.array, weight.pattern),
        )

    def _of_matrix(self, weight: Weight, role: str) -> int | LayoutProblem:
        """Returns columns' output dimension, rows' input dimension."""
        if role == "rows" and weight.given is None:
            wrong = self._roles.unlike(weight)
            if wrong is not None:
                return wrong
        last = len(weight.shape) - 1
        if role == "columns" and (dim := self._weights.vocabulary_dim(weight)) is not None:
            return dim
        out = self._out(weight, role)
        if out is None:
            return weight.problem(
                "may be [in, out] or [out, in]: neither biases nor widths around it decide",
                self._own_rule(weight.array, weight.pattern),
            )
        return last - 1 + (out if role == "columns" else 1 - out)

    def _out(self, weight: Weight, role: str) -> int | None:
        """Returns the output among the last two, or None."""
        parts, leaf = weight.named.parts, weight.named.leaf
        if weight.unpacked.out is not None:
            return weight.unpacked.out
        usual, by_bias = int(leaf != "weight"), self._out_by_bias(weight)
        if by_bias is not None or weight.kind == "logits":
            return usual if by_bias is None else by_bias
        for place in range(len(parts) - 1, -1, -1):
            said = self._by_bias.get((parts[:place], leaf))
            if said:
                return min(said) if len(said) == 1 else None
        said = self._said(leaf, usual, weight.named.of_experts)
        by_width = self._out_by_width(weight, role)
        if len(said) == 1:
            return None if by_width not in (None, *said) else min(said)
        if said:  # they disagree
            return by_width if by_width == usual else None
        # Published in both orders under the same names: GPT-2's weights, and stacked experts.
        either = leaf in ("weight", "kernel") and weight.named.name.startswith("c_")
        of_experts = weight.named.of_experts and not leaf
        either |= of_experts and bool(re.fullmatch(r"w\d|.*_proj", weight.named.name))
        return None if either or by_width not in (None, usual) else usual

    def _said(self, leaf: str, usual: int, of_experts: bool) -> set[int]:
        """Returns what matrices of the same leaf show, first those of experts for experts."""
        for experts in (of_experts, not of_experts):
            by_key = self._by_key[leaf, experts]
            said = self._by_width[leaf, experts] or (by_key and by_key | {usual})
            if said:
                return said
        return set()

    def _out_by_bias(self, weight: Weight) -> int | None:
        parts = weight.named.parts
        before, last = parts[:-1], parts[-1]
        names = {"bias", "b"} if weight.named.leaf else {f"{last}_bias"}
        names.add(re.sub("_weight$", "_bias", last))
        biases = [w for w in self._weights.beside[before] if w.named.parts[-1] in names]
        biases += [w for w in self._weights.beside[parts] if w.named.parts[-1] in ("bias", "b")]
        sizes = {bias.shape[0] for bias in biases if len(bias.shape) == 1}
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
            f"{self._own_rule(weight.array, weight.pattern)}",
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
        if len(shape) < 2:
            return self._unknown(weight)
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

    def _own_rule(self, array: NamedArray, pattern: str) -> str:
        key, axis = key_of(array.path), shown(self._axes)
        return (
            f"give whole={pattern!r}, and add its own rule, with {axis!r} for the sharded "
            f"dimension: rules | {{{key!r}: ...}}"
        )

    def _few_heads(self, weight: Weight) -> LayoutProblem | None:
        named = weight.named
        if weight.given or named.kind not in ("attention", "fused") or named.name == "sinks":
            return None
        if named.bias and len(weight.shape) > 1:  # [heads, size]
            return None
        size = self._head_size or self._head_size_by_norm(named.parent)
        if size is None or self._roles.mixes_channels(named):
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
                most = max(most, *other.shape, 0)
        return min(norms) if len(norms) == 1 and min(norms) < most else None


def _only(places: Iterable[int]) -> int | None:
    dims = list(places)
    return dims[0] if len(dims) == 1 else None
