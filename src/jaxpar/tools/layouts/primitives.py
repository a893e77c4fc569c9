"""The effect of each primitive on its operands' dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from jaxpar.tools.layouts.classes import (
    LOOKED_UP,
    Classes,
    Contraction,
    Cut,
    Made,
    OneHot,
    Sum,
    Tokens,
    weights_of,
)


class Steps(Classes):
    # Each method serves one primitive. It takes the equation, operands, shapes and result.
    def _elementwise(self, args: list[Tokens], shapes: list[Any], out: Tokens) -> Tokens:
        tokens = list(self.fresh(out))
        for operand, shape in zip(args, shapes, strict=True):
            for d, (token, size) in enumerate(zip(operand, shape, strict=True)):
                if size == out[d]:
                    tokens[d] = self.join(token, tokens[d])
        return tuple(tokens)

    def _shard_map(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        # A shard_map itself fixes its arrays' layout, so results are fresh.
        self.unsure["jax.shard_map"] += [t for tokens in args for t in tokens]
        return [self.fresh(v.aval.shape) for v in e.outvars]

    def _reduced(self, e: Any, tokens: Tokens, axes: Sequence[int], out: Sequence[int]) -> Tokens:
        over = tuple(tokens[d] for d in axes)
        self.sums.append(Sum(over, self.bytes_of(e.outvars[0]), e.primitive.name))
        return tuple(t for d, t in enumerate(tokens) if d not in axes)

    def _dot_general(self, e: Any, args: list[Tokens], shapes: list[Any], out: Any) -> list[Tokens]:
        numbers, (left, right) = e.params["dimension_numbers"], args
        contracted, batch, free = self._matched(numbers, left, right)
        size = self.bytes_of(e.outvars[0])
        flops = 2.0 * prod(out) * prod(shapes[0][d] for d in numbers[0][0])
        what = "a matmul"
        for side, other in ((left, right), (right, left)):
            if isinstance(side, OneHot) and weights_of(other):
                what = LOOKED_UP
                self.looked_up |= weights_of(other)
        self.sums.append(Sum(tuple(contracted), size, what))
        result = (*batch, *free)
        self.matmuls.append(Contraction(self.times * flops, (*result, *contracted), result, size))
        if bool(weights_of(left)) != bool(weights_of(right)):
            self.experts += tuple(batch)
        return [result]

    def _matched(
        self, numbers: Any, left: Tokens, right: Tokens, others: Sequence[int] = ()
    ) -> tuple[list[int], list[int], list[int]]:
        (contract_l, contract_r), (batch_l, batch_r) = numbers
        contracted = [
            self.join(left[a], right[b]) for a, b in zip(contract_l, contract_r, strict=True)
        ]
        batch = [self.join(left[a], right[b]) for a, b in zip(batch_l, batch_r, strict=True)]
        free = [t for d, t in enumerate(left) if d not in (*contract_l, *batch_l)]
        free += [t for d, t in enumerate(right) if d not in (*contract_r, *batch_r, *others)]
        return contracted, batch, free

    def _ragged_dot_general(
        self, e: Any, args: list[Tokens], shapes: list[Any], out: Any
    ) -> list[Tokens]:
        numbers = e.params["ragged_dot_dimension_numbers"]
        of_matmul, (left, right, groups) = numbers.dot_dimension_numbers, args
        contracted, batch, free = self._matched(
            of_matmul, left, right, numbers.rhs_group_dimensions
        )
        of_groups = [right[d] for d in numbers.rhs_group_dimensions]
        experts = [self.join(token, groups[-1]) for token in of_groups] or [groups[-1]]
        size = self.bytes_of(e.outvars[0])
        flops = 2.0 * prod(out) * prod(shapes[0][d] for d in of_matmul[0][0])
        results = (*batch, *free)
        if of_groups:
            self.sums.append(Sum(tuple(experts), size, "experts' rows"))
            self.experts += tuple(experts)
        else:  # the gradient of experts' weights: each has a matmul of its rows
            results, flops = (*experts, *results), flops / max(1, out[0])
        self.sums.append(Sum(tuple(contracted), size, "a matmul"))
        tokens = (*experts, *batch, *free, *contracted)
        self.matmuls.append(Contraction(self.times * flops, tokens, (*experts, *results), size))
        return [results]

    def _conv_general_dilated(
        self, e: Any, args: list[Tokens], shapes: list[Any], out: Any
    ) -> list[Tokens]:
        numbers = e.params["dimension_numbers"]
        left, right, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        grouped = e.params["feature_group_count"] > 1 or e.params["batch_group_count"] > 1
        inputs = args[0][left[1]], args[1][right[1]]
        if grouped:
            self.unsure["a convolution in groups"] += [*inputs, args[1][right[0]]]
        else:
            self.join(*inputs)
        size = self.bytes_of(e.outvars[0])
        flops = self.times * 2.0 * prod(out) * prod(shapes[1][d] for d in right[1:])
        self.sums.append(Sum((inputs[0],), size, "a convolution"))
        tokens = list(self.fresh(out))
        rows, features = args[0][left[0]], args[1][right[0]]
        tokens[result[0]], tokens[result[1]] = rows, features
        self.matmuls.append(Contraction(flops, (rows, *inputs, features), (rows, features), size))
        return [tuple(tokens)]

    def _transpose(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        return [tuple(args[0][d] for d in e.params["permutation"])]

    def _broadcast_in_dim(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        tokens = list(self.fresh(out))
        for d, into in enumerate(e.params["broadcast_dimensions"]):
            if shapes[0][d] == out[into]:
                tokens[into] = args[0][d]
        return [tuple(tokens)]

    def _squeeze(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        gone = {d % len(shapes[0]) for d in e.params["dimensions"]}
        return [tuple(t for d, t in enumerate(args[0]) if d not in gone)]

    def _reshape(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        """Joins each dimension to its group's major part."""
        tokens = list(self.fresh(out))
        before, after = list(enumerate(shapes[0])), list(enumerate(out))
        while before and after:
            left, right = [before.pop(0)], [after.pop(0)]
            while prod(n for _, n in left) != prod(n for _, n in right):
                smaller = prod(n for _, n in left) < prod(n for _, n in right)
                source, group = (before, left) if smaller else (after, right)
                if not source:
                    break
                group.append(source.pop(0))
            major_l = next((d for d, n in left if n > 1), left[0][0])
            major_r = next((d for d, n in right if n > 1), right[0][0])
            tokens[major_r] = self.join(args[0][major_l], tokens[major_r])
        return [tuple(tokens)]

    _expand_dims = _reshape

    def _gather(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        numbers, sizes = e.params["dimension_numbers"], e.params["slice_sizes"]
        tokens = list(self.fresh(out))
        gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
        kept = [d for d in range(len(shapes[0])) if d not in gone]
        for d, into in zip(kept, numbers.offset_dims, strict=True):
            whole = sizes[d] == shapes[0][d]
            tokens[into] = args[0][d] if whole else self._cut(e, args[0][d], sizes[d])
        rows = self.rows_of(e)
        for d, token in zip(rows, args[1], strict=False):
            if out[d] == shapes[1][min(rows.index(d), len(shapes[1]) - 1)]:
                tokens[d] = self.join(token, tokens[d])
        picked = [d for d in numbers.start_index_map if d in gone and shapes[0][d] > 1]
        repeated = isinstance(args[1], Made) and len(picked) == len(rows) == 1
        if repeated and out[rows[0]] % shapes[0][picked[0]] == 0:
            # Repeats each entry in place, as keys' heads for their queries.
            self.join(args[0][picked[0]], tokens[rows[0]])
        elif picked:
            over = tuple(args[0][d] for d in picked)
            self.sums.append(Sum(over, self.bytes_of(e.outvars[0]), LOOKED_UP))
        return [tuple(tokens)]

    def bytes_of(self, atom: Any) -> float:
        """Returns the bytes in all iterations of loops."""
        from jaxpar.tools.toolkit_api import bytes_of

        return self.times * bytes_of(atom.aval.shape, atom.aval.dtype)

    def rows_of(self, e: Any) -> list[int]:
        """Returns the dimensions from a gather's indices."""
        numbers = e.params["dimension_numbers"]
        return [d for d in range(e.outvars[0].aval.ndim) if d not in numbers.offset_dims]

    def _kept(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        """Keeps dimensions of unchanged size."""
        return [
            tuple(
                t if a == b else self._cut(e, t, b)
                for t, a, b in zip(args[0], shapes[0], out, strict=True)
            )
        ]

    _slice = _dynamic_slice = _pad = _kept

    def _cut(self, e: Any, before: int, size: int, result: int = 0) -> int:
        """Returns a new dimension, part of an earlier one."""
        after = self.new(size)
        self.cuts.append(Cut(e.primitive.name, before, after, self.bytes_of(e.outvars[result])))
        return after

    def _along(self, e: Any, tokens: Tokens, dims: Sequence[int]) -> None:
        """Notes an operation that needs a full dimension."""
        size = self.bytes_of(e.invars[0])
        self.cuts += [Cut(e.primitive.name, tokens[d], None, size) for d in dims]

    def _split(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        axis = e.params["axis"]
        results: list[Tokens] = []
        for n, variable in enumerate(e.outvars):
            tokens, size = list(args[0]), variable.aval.shape[axis]
            if size != shapes[0][axis]:
                tokens[axis] = self._cut(e, tokens[axis], size, n)
            results.append(tuple(tokens))
        return results

    def _unstack(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        axis = e.params["axis"] % len(shapes[0])
        self._along(e, args[0], [axis])
        return [(*args[0][:axis], *args[0][axis + 1 :]) for _ in e.outvars]

    def _stack(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        axis = e.params["axis"] % len(out)
        tokens = self._elementwise(args, shapes, shapes[0])
        return [(*tokens[:axis], self.new(out[axis]), *tokens[axis:])]

    def _concatenate(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        axis = e.params["dimension"]
        tokens, after = list(args[0]), self.new(out[axis])
        for other, operand in zip(args, e.invars, strict=True):
            tokens = [
                self.join(t, o) if d != axis else t
                for d, (t, o) in enumerate(zip(tokens, other, strict=True))
            ]
            self.cuts.append(Cut("concatenate", other[axis], after, self.bytes_of(operand)))
        tokens[axis] = after
        return [tuple(tokens)]

    def _top_k(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        axis = e.params.get("axis", -1) % len(out)
        self._along(e, args[0], [axis])
        best = (*args[0][:axis], self.new(out[axis]), *args[0][axis + 1 :])
        return [best for _ in e.outvars]

    def _scatter(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        """Joins the updated array's and rows' other dimensions."""
        numbers, updates = e.params["dimension_numbers"], args[2]
        gone = (*numbers.inserted_window_dims, *getattr(numbers, "operand_batching_dims", ()))
        kept = [d for d in range(len(out)) if d not in gone]
        for d, of in zip(kept, numbers.update_window_dims, strict=True):
            if shapes[2][of] == out[d]:
                self.join(args[0][d], updates[of])
        return [args[0]]

    _scatter_add = _scatter_mul = _scatter_min = _scatter_max = _scatter_sub = _scatter

    def _dynamic_update_slice(
        self, e: Any, args: list[Tokens], shapes: Any, out: Any
    ) -> list[Tokens]:
        for t, u, a, b in zip(args[0], args[1], shapes[0], shapes[1], strict=True):
            if a == b:
                self.join(t, u)
        return [args[0]]

    def _iota(self, e: Any, args: list[Tokens], shapes: Any, out: Any) -> list[Tokens]:
        return [self.fresh(out)]


def fits(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return not shape or (
        len(shape) == len(out) and all(a in (1, b) for a, b in zip(shape, out, strict=True))
    )
