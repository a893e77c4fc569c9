"""Finds each weight's role in tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._names import ANY_TABLE, Named
from jaxpar.layout._weights import Weight, WeightGroups

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


class Roles:
    """Roles by names of weights, and by weights around them. The order of the cases decides."""

    def __init__(self, weights: WeightGroups) -> None:
        self._weights = weights
        # Each head's query, key and value lie together in these families alone.
        self._is_bloom = any("word_embeddings_layernorm" in path for path in weights.of)
        self._widths = weights.widths()
        parts = [weight.named.parts for weight in weights.of.values()]
        self._state_spaces = {path[:-1] for path in parts if path[-1] == "a_log"}

    def of(self, weight: Weight) -> str | LayoutProblem | None:
        """Returns columns, rows, vocabulary, heads or whole, if known."""
        if weight.given:
            return weight.given
        named, matrix = weight.named, self._weights.matrix_of(weight.named.parts)
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
            case "table" if not weight.is_table and named.adapter is None:
                return "whole" if len(weight.shape) < 2 else None
            case "table" if self._is_lesser(weight):
                return None
            case kind:
                return ROLES.get(kind or "")

    def unlike(self, weight: Weight) -> LayoutProblem | None:
        """Returns why columns' shape refutes a name of rows."""
        for other in self._weights.in_parent[weight.named.parent]:
            if (
                not other.given
                and other.named.inside == weight.named.inside
                and other.shape == weight.shape
                and len(set(weight.shape)) > 1
                and self.of(other) == "columns"
            ):
                path = weight.pattern
                return weight.problem(
                    f"has a name of rows, but the shape of {other.array.path!r}, which is sharded "
                    "by columns",
                    f"give columns={path!r}, or rows={path!r}",
                )
        return None

    def _is_part(self, weight: Weight) -> bool:
        """Returns whether it is an extra array beside a matrix, or has no name of a matrix."""
        named = weight.named
        if named.bias or named.adapter or len(weight.shape) < 2 or named.kind is None:
            return False
        if not named.direct and any(
            other.named.direct for other in self._weights.matrices(named.module)
        ):
            return True
        return (
            bool(named.inside) and ROLES.get(named.kind) in ("columns", "rows") and not named.leaf
        )

    def _of_state_space(self, weight: Weight) -> str | LayoutProblem | None:
        """Returns the role of an array with the channels of a state-space layer."""
        parts = weight.named.parts
        layers = self._state_spaces
        if not layers:
            return None
        layer = next((parts[:i] for i in range(len(parts)) if parts[:i] in layers), ())
        if not layer or not re.fullmatch(r"a_log|d|dt_bias|conv1d", parts[len(layer)]):
            return None
        inputs = [w for w in self._weights.in_parent[layer] if w.named.name.startswith("in_proj")]
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
            for other in self._weights.in_parent[named.parent]
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
        """Returns whether gates, or others, make it wider than the rows' input."""
        shape, inside = weight.shape, weight.named.inside
        rows = [
            other.shape
            for other in self._weights.in_parent[weight.named.parent]
            if other.kind in ("down", "out") and other.named.inside == inside
        ]
        if len(shape) != 2 or _sorted(shape) in map(_sorted, rows):
            return False
        double = {(wide, out // 2) for wide, out in (shape, shape[::-1]) if not out % 2}
        if any(row in double or row[::-1] in double for row in rows):
            return True
        out, inputs = self._hidden(shape), [self._hidden(row) for row in rows]
        return out is not None and bool(inputs) and not {None, out} & set(inputs)

    def _hidden(self, shape: tuple[int, ...]) -> int | None:
        """Returns a matrix's size beside the width of blocks, if one size is a width."""
        inner = [size for size in shape if size not in self._widths]
        return inner[0] if len(shape) == 2 and len(inner) == 1 else None

    def _gates_mlp(self, named: Named) -> bool:
        """Returns whether a gate is as large as an MLP."""
        of_mlp = {
            (other.named.inside, _sorted(other.shape))
            for other in self._weights.in_parent[named.parent]
            if other.named.kind in ("mlp", "down", "out", "attention")
        }
        gates = self._weights.matrices(named.module)
        return any((gate.named.inside, _sorted(gate.shape)) in of_mlp for gate in gates)

    def _by_head(self, weight: Weight) -> bool:
        """Returns whether each head's query, key, value lie together in a known family."""
        named = weight.named
        known = self._is_bloom or any(re.fullmatch(r"gpt_neox\w*", p) for p in named.parts)
        return (
            known
            and named.name == "query_key_value"
            and any(max(w.shape) == 3 * min(w.shape) for w in self._weights.matrices(named.module))
        )

    def _is_logits(self, weight: Weight) -> bool:
        """Returns whether its matrix is as large as a table."""
        matrix = weight if len(weight.shape) > 1 else self._weights.matrix_of(weight.named.parts)
        of = self._weights.matrices(weight.named.module) if matrix is None else [matrix]
        return any(map(self._weights.as_large_as_a_table, of))

    def _is_lesser(self, weight: Weight) -> bool:
        """Returns whether another table is larger. Flax calls any table `embedding`."""
        rows = max((table.shape[0] for table in self._weights.tables), default=0)
        generic = not weight.named.inside or re.fullmatch(ANY_TABLE, weight.named.name) is not None
        return generic and len(weight.shape) == 2 and weight.shape[0] < rows

    def _ends_block(self, named: Named) -> bool:
        beside = self._weights.in_parent[named.parent]
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


def _sorted(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(shape))
