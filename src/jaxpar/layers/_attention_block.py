"""Attention between some queries and some keys: partial softmax, its merge, its gradients.

Arrays are grouped by kv head, positions next to last: queries [..., g, r, s, e] for r query heads
to each of g kv heads, keys and values [..., g, s, e], logsumexp [..., g, r, s].
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxpar._dtypes import sum_dtype

State = tuple[Array, Array]  # what queries got so far, over the sum of weights, and its logarithm


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys are made and scaled."""

    scale: float
    precision: Any

    def product(self, subscripts: str, left: Array, right: Array) -> Array:
        """Multiplies over all batch dimensions, sums in float32 at least."""
        return jnp.einsum(
            subscripts,
            left,
            right,
            precision=self.precision,
            preferred_element_type=sum_dtype(left.dtype),
        )

    def __call__(self, q: Array, k: Array, causal: bool) -> Array:
        """Returns the scaled scores, [..., g, r, queries, keys]."""
        scores = self.product("...grqe,...gke->...grqk", q, k)
        scores = scores * jnp.asarray(self.scale, scores.dtype)
        if not causal:
            return scores
        rows, columns = (lax.broadcasted_iota("int32", scores.shape[-2:], dim) for dim in (0, 1))
        return jnp.where(rows >= columns, scores, -jnp.inf)


@dataclass(frozen=True)
class Tile:
    """Which queries attend to which keys: of either the first position and how many.

    In a causal tile both are the same positions, and a query attends to the keys up to its own. In
    any other it attends to all. Only the first positions may be traced.
    """

    queries: tuple[Any, int]
    keys: tuple[Any, int]
    causal: bool = False


@dataclass(frozen=True)
class Backward:
    """What the gradients of a tile need of the queries, apart from keys and values."""

    q: Array
    ct: Array  # cotangent of the result, of the shape of q
    logsumexp: Array
    inner: Array  # product of result and cotangent, [..., g, r, s]


def attend(scores: Scores, tile: Tile, q: Array, k: Array, v: Array) -> State:
    """Returns what a tile's queries get from its keys alone."""
    q, k, v = cut(q, tile.queries), cut(k, tile.keys), cut(v, tile.keys)
    logits = scores(q, k, tile.causal)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = scores.product("...grqk,...gke->...grqe", weights.astype(v.dtype), v)
    return out / total, (top + jnp.log(total))[..., 0]


def merge(state: State, tile: Tile, part: State) -> State:
    """Adds to the state of all queries what a tile's queries got from keys not yet seen."""
    (out, before), (new, after) = state, part
    out_rows, before_rows = cut(out, tile.queries), cut(before, tile.queries, -1)
    both = jnp.logaddexp(before_rows, after)
    rows = out_rows * jnp.exp(before_rows - both)[..., None]
    rows += new * jnp.exp(after - both)[..., None]
    return put(out, rows, tile.queries), put(before, both, tile.queries, -1)


def add_gradients(
    scores: Scores, tile: Tile, at: Backward, k: Array, v: Array, sums: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Adds a tile's gradients to those of all queries, of the keys and of the values."""
    (dq, dk, dv), queries, keys = sums, tile.queries, tile.keys
    q, ct, k, v = cut(at.q, queries), cut(at.ct, queries), cut(k, keys), cut(v, keys)
    logsumexp, inner = cut(at.logsumexp, queries, -1), cut(at.inner, queries, -1)
    weights = jnp.exp(scores(q, k, tile.causal) - logsumexp[..., None])
    by_weight = scores.product("...grqe,...gke->...grqk", ct, v)
    by_logit = weights * (by_weight - inner[..., None]) * jnp.asarray(scores.scale, inner.dtype)
    weights, by_logit = weights.astype(ct.dtype), by_logit.astype(q.dtype)
    new_q = scores.product("...grqk,...gke->...grqe", by_logit, k)
    new_k = scores.product("...grqk,...grqe->...gke", by_logit, q)
    new_v = scores.product("...grqk,...grqe->...gke", weights, ct)
    return (
        put(dq, cut(dq, queries) + new_q, queries),
        put(dk, cut(dk, keys) + new_k, keys),
        put(dv, cut(dv, keys) + new_v, keys),
    )


def cut(x: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    """Returns a span's positions of `x`."""
    start, size = span
    if size == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, x.ndim + dim)


def put(x: Array, part: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    """Returns `x` with a span's positions replaced."""
    start, size = span
    if size == x.shape[dim]:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, x.ndim + dim)
