"""Attention between some queries and some keys. Arrays are grouped by key and value head, with
positions next to last.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from jaxpar.arguments.dtypes import sum_dtype

Queries = Float[Array, "*batch groups repeats queries size"]
Results = Float[Array, "*batch groups repeats queries of_value"]
OfQueries = Float[Array, "*batch groups repeats queries"]
OfKeys = Float[Array, "*batch groups keys size"]
OfValues = Float[Array, "*batch groups keys of_value"]
OfPairs = Float[Array, "*batch groups repeats queries keys"]
Segments = Int32[Array, "*batch 1 positions 1"]


class SoftmaxState(NamedTuple):
    """The attention of queries to the keys so far."""

    # The mean of values. `attend` returns a sum instead, weighted by exp(score - top). A sum until
    # the end would take fewer operations, but made no training step shorter (v5p, v6e).
    out: Results
    top: OfQueries  # the highest score; finite even before any
    total: OfQueries  # the sum of exp(score - top)


class Keys(NamedTuple):
    k: OfKeys
    v: OfValues
    segments: Segments | None = None  # no query sees a negative segment


@dataclass(frozen=True)
class Scores:
    scale: float
    precision: Any
    softcap: float | None = None

    def product(self, subscripts: str, left: Array, right: Array) -> Array:
        """Multiplies over batch dimensions, with sums at least float32."""
        return jnp.einsum(
            subscripts,
            left,
            right,
            precision=self.precision,
            preferred_element_type=sum_dtype(left.dtype),
        )

    def __call__(self, q: Queries, k: OfKeys) -> OfPairs:
        """Returns the scores of all pairs, without mask."""
        scores = self.product("...grqe,...gke->...grqk", q, k)
        scores = scores * jnp.asarray(self.scale, scores.dtype)
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def through_cap(self, scores: OfPairs, gradients: OfPairs) -> OfPairs:
        if self.softcap is None:
            return gradients
        return gradients * (1 - jnp.square(scores / self.softcap))


@dataclass(frozen=True)
class Tile:
    """A span of queries, the keys that they attend to, and the mask between.

    A span is a first position and a length. First positions and the mask may be traced.

    Attributes:
      least: the least number of a query minus that of a key it sees. None: no bound.
      most: the largest such difference. None: no bound.
      seen: whether any pair is seen.
    """

    queries: tuple[Any, int]
    keys: tuple[Any, int]
    least: Any = None
    most: Any = None
    seen: Any = True

    def when(self, seen: Any) -> "Tile":
        if self.seen is True or seen is False:
            return replace(self, seen=seen)
        return self if seen is True or self.seen is False else replace(self, seen=self.seen & seen)

    def mask(
        self,
        scores: OfPairs,
        of_queries: Int32[Array, "*batch 1 queries 1"] | None,
        of_keys: Int32[Array, "*batch 1 keys 1"] | None,
    ) -> OfPairs:
        if not (self.least is None and self.most is None):
            shape = (1,) * (scores.ndim - 2) + scores.shape[-2:]
            rows, columns = (
                lax.broadcasted_iota("int32", shape, scores.ndim + dim) for dim in (-2, -1)
            )
            less = rows - columns
            if self.least is not None:
                scores = jnp.where(less >= self.least, scores, -jnp.inf)
            if self.most is not None:
                scores = jnp.where(less <= self.most, scores, -jnp.inf)
        if of_queries is not None and of_keys is not None:
            # [*batch, 1, 1, queries, 1] and [*batch, 1, 1, 1, keys]
            rows = of_queries[..., None, :, :]
            columns = jnp.swapaxes(of_keys, -1, -2)[..., None, :, :]
            alike = (rows == columns) & (columns >= 0)
            scores = jnp.where(alike, scores, -jnp.inf)
        return scores


@dataclass(frozen=True)
class Backward:
    q: Queries
    ct: Results  # the cotangent of the result
    top: OfQueries  # the highest of all scores
    inverse: OfQueries  # 1 / total
    inner: OfQueries  # inner product of result and cotangent
    segments: Segments | None


# The sums of gradients so far: of all queries, of the keys, and of the values.
Sums = tuple[Queries, OfKeys, OfValues]


def attend(
    scores: Scores,
    tile: Tile,
    q: Queries,
    keys: Keys,
    segments: Segments | None = None,
) -> SoftmaxState:
    """Returns a tile's softmax state, with `out` a sum."""
    q, segments = cut(q, tile.queries), _cut_segments(segments, tile.queries)
    keys = _cut_keys(keys, tile.keys)
    logits = tile.mask(scores(q, keys.k), segments, keys.segments)
    # Finite even if no key is seen, as -inf - -inf is NaN. The shift cancels in the result, so it
    # needs no derivative.
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=jnp.finfo(logits.dtype).min / 2))
    weights = jnp.exp(logits - _column(top))
    out = scores.product("...grqk,...gke->...grqe", weights.astype(keys.v.dtype), keys.v)
    return SoftmaxState(out, top, jnp.sum(weights, axis=-1))


def mean_of(sums: SoftmaxState) -> SoftmaxState:
    return sums._replace(out=sums.out * _column(inverse_of(sums.total)))


def merge(state: SoftmaxState, queries: tuple[Any, int], part: SoftmaxState) -> SoftmaxState:
    """Merges `part`, of some queries and new keys."""
    before = SoftmaxState(
        cut(state.out, queries),
        cut(state.top, queries, -1),
        cut(state.total, queries, -1),
    )
    top = lax.max(before.top, part.top)
    old = before.total * jnp.exp(before.top - top)
    new = jnp.exp(part.top - top)
    total = old + part.total * new
    inverse = inverse_of(total)
    out = (before.out * _column(old) + part.out * _column(new)) * _column(inverse)
    return SoftmaxState(
        put(state.out, out, queries),
        put(state.top, top, queries, -1),
        put(state.total, total, queries, -1),
    )


def join_sinks(state: SoftmaxState, sinks: Float[Array, "groups repeats"]) -> SoftmaxState:
    wide = _of_heads(sinks, state.top)
    # As in `attend`, the shift needs no derivative.
    top = lax.stop_gradient(lax.max(state.top, wide))
    old = state.total * jnp.exp(state.top - top)
    total = old + jnp.exp(wide - top)
    return SoftmaxState(state.out * _column(old * inverse_of(total)), top, total)


def gradient_of_sinks(
    sinks: Float[Array, "groups repeats"], at: Backward
) -> Float[Array, "groups repeats"]:
    weights = jnp.exp(_of_heads(sinks, at.top) - at.top) * at.inverse
    batch = range(at.top.ndim - 3)
    return -jnp.sum(weights * at.inner, axis=(*batch, -1))


def add_gradients(scores: Scores, tile: Tile, at: Backward, keys: Keys, sums: Sums) -> Sums:
    (dq, dk, dv), queries = sums, tile.queries
    q, ct = cut(at.q, queries), cut(at.ct, queries)
    k, v, of_keys = _cut_keys(keys, tile.keys)
    top, inverse = cut(at.top, queries, -1), cut(at.inverse, queries, -1)
    inner, segments = cut(at.inner, queries, -1), _cut_segments(at.segments, queries)
    logits = scores(q, k)
    # The softmax is over all keys, not only the tile's, as `top` and `inverse` are.
    # Subtract first: the difference is exact where it matters.
    masked = tile.mask(logits, segments, of_keys)
    weights = jnp.exp(masked - _column(top)) * _column(inverse)
    keys_span = tile.keys
    by_weight = scores.product("...grqe,...gke->...grqk", ct, v)
    by_logit = weights * (by_weight - _column(inner))  # scaled later, in the smaller products
    by_logit = scores.through_cap(logits, by_logit)
    scale = jnp.asarray(scores.scale, inner.dtype)
    weights, by_logit = weights.astype(ct.dtype), by_logit.astype(q.dtype)
    new_q = scores.product("...grqk,...gke->...grqe", by_logit, k) * scale
    new_k = scores.product("...grqk,...grqe->...gke", by_logit, q) * scale
    new_v = scores.product("...grqk,...grqe->...gke", weights, ct)
    return (
        put(dq, cut(dq, queries) + new_q, queries),
        put(dk, cut(dk, keys_span) + new_k, keys_span),
        put(dv, cut(dv, keys_span) + new_v, keys_span),
    )


def inverse_of(total: OfQueries) -> OfQueries:
    """Returns 1 / total, or 0 if no key is seen. Other totals are at least 1."""
    return 1 / jnp.maximum(total, 0.5)  # not 1: at a tie, maximum has half the derivative


def _column(x: Float[Array, "*shape"]) -> Float[Array, "*shape 1"]:
    return lax.expand_dims(x, [x.ndim])  # indexing by None traces ten times as long


def _of_heads(x: Float[Array, "groups repeats"], like: OfQueries) -> OfQueries:
    return lax.broadcast_in_dim(x, like.shape, (like.ndim - 3, like.ndim - 2))


def _cut_keys(keys: Keys, span: tuple[Any, int]) -> Keys:
    return Keys(cut(keys.k, span), cut(keys.v, span), _cut_segments(keys.segments, span))


def _cut_segments(
    segments: Segments | None, span: tuple[Any, int]
) -> Int32[Array, "*batch 1 of_span 1"] | None:
    return None if segments is None else cut(segments, span)


def cut(x: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    start, size = span
    if size == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, x.ndim + dim, allow_negative_indices=False)


def put(x: Array, part: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    start, size = span
    if size == x.shape[dim]:
        return part
    return lax.dynamic_update_slice_in_dim(
        x, part, start, x.ndim + dim, allow_negative_indices=False
    )
