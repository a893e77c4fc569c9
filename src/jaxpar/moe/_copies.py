"""Copies of rows in another order: the row of each copy, and the places of each row's copies.

So copying rows and summing copies are gathers, each the derivative of the other, not slow
scatter-adds. An empty copy belongs to no row.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Int32, Shaped

from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.vma import vary_alike, zeros_alike
from jaxpar.choose.of_experts import gathers_apart
from jaxpar.compiler import unwritten_memory
from jaxpar.compiler.derivatives import linear_pair
from jaxpar.compiler.unwritten_memory import unwritten


class Copies(NamedTuple):
    source: Int32[Array, " copies"]  # the row of each copy; at least `rows` for empty copies
    places: Int32[Array, "rows k"]  # where each row's copies are; at least `copies` for none


def copies_by_key(
    keys: Int[Array, "rows k"], keys_count: int, capacity: int, spare: int = 0
) -> tuple[Copies, Int32[Array, " {keys_count}"]]:
    """Copies a row for each key, sorted by key, then by row.

    Keys outside of 0 to `keys_count - 1` get none. Copies beyond `capacity` are dropped; `spare`
    empty ones follow. The counts of keys include dropped copies.
    """
    rows, k = keys.shape
    count = rows * k
    flat = keys.astype("int32").reshape(count)
    # Entries without a copy get one more key, the last. They sort behind all copies and are not
    # counted.
    flat = jnp.where((flat >= 0) & (flat < keys_count), flat, keys_count)
    sizes = jnp.sum(
        flat[:, None] == jnp.arange(keys_count, dtype="int32")[None, :], axis=0, dtype="int32"
    )
    flat, entries = vary_alike((), flat, jnp.arange(count, dtype="int32"))
    # The second sort inverts the permutation. A scatter would write an entry after the other.
    flat, order = lax.sort((flat, entries), num_keys=1, is_stable=True)
    _, places = lax.sort((order, entries), num_keys=1)
    used = jnp.sum(sizes, dtype="int32")
    source = jnp.where(entries < used, order // max(k, 1), rows)
    missing = (0, max(capacity - count, 0) + spare)
    source = jnp.pad(source[:capacity], missing, constant_values=rows)
    places = jnp.where(places < jnp.minimum(used, capacity), places, len(source))
    return Copies(source, places.reshape(rows, k)), sizes


def spread(
    copies: Copies, x: Shaped[Array, "rows *row"], *, fill: bool = True, blank: bool = False
) -> Shaped[Array, "copies *row"]:
    """Returns each copy's row of `x`, 0 for empty copies.

    Without `fill` empty copies hold anything, which saves a pass on TPU. `blank` describes the
    cotangent, as in `collect`.
    """
    copies, x = vary_alike((), copies, x)
    differentiable = jnp.issubdtype(x.dtype, jnp.inexact)
    out: Array = (_spread if differentiable else _copy)(EmptyRows(fill, blank), copies, x)
    return out


def collect(
    copies: Copies, y: Shaped[Array, "copies *row"], *, blank: bool = False
) -> Shaped[Array, "rows *row"]:
    """Sums each row's copies in `y`, narrow floats in float32.

    With `blank` the last row of `y` is an empty copy and 0, which saves a pass on TPU. Otherwise
    empty copies are not read.
    """
    copies, y = vary_alike((), copies, y)
    differentiable = jnp.issubdtype(y.dtype, jnp.inexact)
    # With `blank` the derivative need not fill empty copies, because they are not read.
    out: Array = (_collect if differentiable else _sum)(EmptyRows(not blank, blank), copies, y)
    return out


def take_rows(
    x: Shaped[Array, "rows *row"],
    places: Int[Array, " taken"],
    fill: Shaped[Array, ""] | int | None = 0,
) -> Shaped[Array, "taken *row"]:
    """Returns `x[places]`, `fill` outside, or any row if None."""
    shape = (*places.shape, *x.shape[1:])
    if not prod(shape) or not x.shape[0]:
        return zeros_alike(shape, x.dtype, x, places)
    taken = jnp.take(x, places, 0, mode="clip")
    return taken if fill is None else where_rows((places >= 0) & (places < len(x)), taken, fill)


def where_rows(
    which: Bool[Array, " rows"], x: Shaped[Array, "rows *row"], fill: Any = 0
) -> Shaped[Array, "rows *row"]:
    """Returns `x`, with `fill` in other rows."""
    return jnp.where(which.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(fill, x.dtype))


@dataclass(frozen=True)
class EmptyRows:
    fill: bool  # copying rows makes them 0
    blank: bool  # the last row is 0 when copies are summed
    derived_by_jax: ClassVar[bool] = False


def _copy(
    empty: EmptyRows, copies: Copies, x: Shaped[Array, "rows *row"]
) -> Shaped[Array, "copies *row"]:
    if empty.fill:
        return take_rows(x, copies.source)
    anything = unwritten((), x.dtype) if unwritten_memory.poisoned else None
    return take_rows(x, copies.source, anything)


def _sum(
    empty: EmptyRows, copies: Copies, y: Shaped[Array, "copies *row"]
) -> Shaped[Array, "rows *row"]:
    rows, k = copies.places.shape
    count = copies.source.size
    if not gathers_apart():
        return _sum_at_once(y, copies.places)
    # At most count / j rows have j copies or more. Each length is whole tiles of TPUs, and has room
    # for one row more, which has no such copies.
    lengths = [min(rows, (count // (j + 1) // 16 + 1) * 16) for j in range(k)]
    if sum(lengths) + rows >= rows * k:
        return _sum_firsts(y, copies.places, [rows] * k, empty.blank)
    # Rows with the most copies come first. All first copies are summed, then the second copies of
    # rows that have two, and so on. In a worst-case buffer most rows have one copy or none.
    places = lax.sort(copies.places, dimension=1)
    having = jnp.sum(places < count, axis=1, dtype="int32")
    having, numbers = vary_alike((), having, jnp.arange(rows, dtype="int32"))
    _, order = lax.sort((-having, numbers), num_keys=1)
    _, back = lax.sort((order, numbers), num_keys=1)
    sums = _sum_firsts(y, take_rows(places, order, None), lengths, empty.blank)
    # Rows beyond `sums` have no copies. Then the last row of `sums` has none either: its sum is 0.
    return take_rows(sums, jnp.minimum(back, len(sums) - 1), None)


def _sum_at_once(
    y: Shaped[Array, "copies *row"], places: Int[Array, "rows k"]
) -> Shaped[Array, "rows *row"]:
    dtype = addition_dtype(y.dtype)
    total = zeros_alike((len(places), *y.shape[1:]), dtype, y, places)
    for column in range(places.shape[1]):
        total = total + take_rows(y, places[:, column]).astype(dtype)
    return total.astype(y.dtype)


def _sum_firsts(
    y: Shaped[Array, "copies *row"], places: Int[Array, "rows k"], lengths: list[int], blank: bool
) -> Shaped[Array, "sums *row"]:
    """Sums rows at `places`: column j for the first lengths[j] rows."""
    dtype, shape = addition_dtype(y.dtype), (lengths[0], *y.shape[1:])
    if not prod(shape) or not len(y):
        return zeros_alike(shape, y.dtype, y, places)
    at = jnp.concatenate([places[:length, j] for j, length in enumerate(lengths)])
    # One gather, because k of them compile k times as long for TPU. A barrier separates it from the
    # masks: they belong to the additions, whose layout is not the gather's.
    each, at = lax.optimization_barrier((take_rows(y, at, None), at))  # [sum(lengths), *row]
    inside = at < len(y)
    # The last column comes first, so that no pass is longer than the column that it adds.
    total: Any = None
    for length, end in zip(reversed(lengths), reversed(list(accumulate(lengths))), strict=True):
        part = each[end - length : end]
        if not blank:
            part = where_rows(inside[end - length : end], part)
        part = part.astype(dtype)
        if total is not None:
            margin = [(0, length - len(total))] + [(0, 0)] * (y.ndim - 1)
            part = part + jnp.pad(total, margin)
        total = part
    return total.astype(y.dtype)


_spread, _collect = linear_pair(_copy, _sum)
