"""Grouped products by loops over blocks of rows.

An outer loop takes one group's weight at a time; inner loops take its rows in blocks of static
lengths, long ones first. So work follows the rows, known only at run time, not the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32, Num, Shaped

from jaxpar.arguments.dtypes import common_dtype, sum_dtype
from jaxpar.arguments.types import Tree
from jaxpar.axis.vma import zeros_alike
from jaxpar.compiler import control_flow

# Lengths of blocks, falling. A block costs a CPU about as much as 25 rows more. It costs a GPU tens
# of microseconds, because the host waits to know whether another follows.
CPU_LENGTHS = (256, 64, 16)
GPU_LENGTHS = (1024, 256)


@dataclass(frozen=True)
class Block:
    """A group's rows, with dynamic start, static length."""

    at: Int32[Array, ""]  # the first row of the block
    inside: Bool[Array, "length 1"]  # the group's rows that were in no block before

    def cut(self, x: Shaped[Array, "rows *row"]) -> Shaped[Array, "length *row"]:
        return lax.dynamic_slice_in_dim(x, self.at, len(self.inside))

    def masked(self, x: Num[Array, "rows d"]) -> Num[Array, "length d"]:
        return jnp.where(self.inside, self.cut(x), 0)

    def place(
        self, whole: Num[Array, "rows d"], part: Num[Array, "length d"]
    ) -> Num[Array, "rows d"]:
        new = jnp.where(self.inside, part.astype(whole.dtype), self.cut(whole))
        return lax.dynamic_update_slice_in_dim(whole, new, self.at, 0)


def fold_groups(
    lengths: tuple[int, ...],
    group_sizes: Int32[Array, " groups"],
    rows: int,
    state: Tree,
    one_group: Callable[[Tree, Array, Callable[..., Any]], Tree],
) -> Tree:
    """Folds `one_group(state, group, fold)` over groups with rows.

    `fold(step, state)` folds `step(state, block)` over the group's blocks.
    """
    ends = jnp.cumsum(group_sizes, dtype="int32")
    starts, filled = ends - group_sizes, group_sizes > 0
    # Groups that have rows come first, and the loop stops behind them. Empty groups cost nothing; a
    # device with many experts and few tokens has many. The order is computed by comparisons: the
    # group at each place follows all groups whose count is at most that place. A sort would end the
    # process under the partitioner before Shardy. A scatter takes longer.
    places = jnp.arange(len(filled))
    counts = jnp.sum(filled[None, :] & (places[None, :] <= places[:, None]), axis=1)
    order = jnp.sum(counts[None, :] <= places[:, None], axis=1, dtype="int32")

    def turn(carry: tuple[Int32[Array, ""], Any]) -> tuple[Int32[Array, ""], Any]:
        number, state = carry
        group = order[number]
        fold = partial(_fold_blocks, lengths, starts[group], ends[group], rows)
        return number + 1, one_group(state, group, fold)

    count = jnp.sum(filled, dtype="int32")
    first = zeros_alike((), "int32", group_sizes)
    with jax.named_scope("filled_groups"):  # estimates of loop lengths know it by this name
        return control_flow.while_loop(lambda carry: carry[0] < count, turn, (first, state))[1]


def _fold_blocks(
    lengths: tuple[int, ...],
    start: Int32[Array, ""],
    end: Int32[Array, ""],
    rows: int,
    step: Any,
    state: Any,
) -> Any:
    lengths = tuple(length for length in lengths if length <= rows) or (rows,)
    for length in lengths:
        # A large block that is not full costs less than many small ones.
        least = 0 if length == lengths[-1] else length * 5 // 8

        def unfinished(carry: Any, least: int = least) -> Bool[Array, ""]:
            return end - carry[0] > least

        def advance(carry: Any, length: int = length) -> Any:
            first, state = carry
            # The buffer may end within the last block, which then begins earlier. It repeats rows
            # of the block before. They are masked, like rows of other groups.
            at = jnp.minimum(first, rows - length)
            row = at + lax.broadcasted_iota("int32", (length, 1), 0)
            return first + length, step(state, Block(at, (row >= first) & (row < end)))

        with jax.named_scope(f"blocks_of_{length}"):
            start, state = control_flow.while_loop(unfinished, advance, (start, state))
    return state


def block_dot(
    left: Num[Array, "_ _"],
    right: Num[Array, "_ _"],
    dims: tuple[int, int],
    preferred: Any,
    precision: Any,
) -> Num[Array, "_ _"]:
    dtype = common_dtype(left.dtype, right.dtype)  # a cotangent may be wider
    sums = sum_dtype(dtype) if preferred is None else preferred
    if left.shape[dims[0]] < 32:
        dtype = common_dtype(dtype, sums)  # CPUs may lack such small dots of narrow operands
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((dims[0],), (dims[1],)), ((), ())),
        precision=precision,
        preferred_element_type=sums,
    )


def blocks_rows_product(
    lengths: tuple[int, ...],
    multiply: Callable[[Array, Array], Array],
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "groups _ _"],
    group_sizes: Int32[Array, " groups"],
    columns: int,
    dtype: Any,
) -> Num[Array, "rows {columns}"]:
    def one_group(
        out: Num[Array, "rows out"], group: Int[Array, ""], fold: Callable[..., Array]
    ) -> Num[Array, "rows out"]:
        weight = lax.dynamic_index_in_dim(rhs, group, keepdims=False)
        return fold(lambda out, block: block.place(out, multiply(block.cut(lhs), weight)), out)

    out = zeros_alike((len(lhs), columns), dtype, lhs, rhs, group_sizes)
    return fold_groups(lengths, group_sizes, len(lhs), out, one_group)


def blocks_group_products(
    lengths: tuple[int, ...],
    multiply: Callable[[Array, Array], Array],
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "rows out"],
    group_sizes: Int32[Array, " groups"],
    dtype: Any,
) -> Num[Array, "groups into out"]:
    like = lhs, rhs, group_sizes
    out = zeros_alike((len(group_sizes), lhs.shape[1], rhs.shape[1]), dtype, *like)

    def one_group(
        out: Num[Array, "groups into out"], group: Int[Array, ""], fold: Callable[..., Any]
    ) -> Num[Array, "groups into out"]:
        totals = Totals(group)

        def step(sums: Any, block: Block) -> Any:
            return totals.add(sums, multiply(block.masked(lhs), block.masked(rhs)))

        total: Array = totals.close(out, fold(step, totals.open(out)))
        return total

    return fold_groups(lengths, group_sizes, len(lhs), out, one_group)


@dataclass(frozen=True)
class Totals:
    """Sums over blocks, added to arrays by group."""

    group: Int[Array, ""]

    def open(self, out: Any) -> Any:

        def start(x: Num[Array, "groups *weight"]) -> Num[Array, "..."]:
            wide = sum_dtype(x.dtype)
            if wide == x.dtype:
                return x
            return lax.dynamic_index_in_dim(x, self.group, keepdims=False).astype(wide)

        return jax.tree.map(start, out)

    def add(self, sums: Any, parts: Any) -> Any:

        def add(total: Num[Array, "*total"], part: Num[Array, "*weight"]) -> Num[Array, "*total"]:
            part = part.astype(total.dtype)
            # A total belongs to this group alone. If `open` took the result itself, it has all
            # groups.
            if total.ndim == part.ndim:
                return total + part
            old = lax.dynamic_index_in_dim(total, self.group, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, old + part, self.group, 0)

        return jax.tree.map(add, sums, parts)

    def close(self, out: Any, sums: Any) -> Any:

        def put(
            whole: Num[Array, "groups *weight"], total: Num[Array, "..."]
        ) -> Num[Array, "groups *weight"]:
            if total.ndim == whole.ndim:
                return total
            return lax.dynamic_update_index_in_dim(whole, total.astype(whole.dtype), self.group, 0)

        return jax.tree.map(put, out, sums)
