"""Attention between some queries and some keys: partial softmax, its merge, its gradients.

Arrays are grouped by kv head, positions next to last: queries have `repeats` heads for each of the
`groups` heads of keys and values, and segments are of all heads.

A softmax is kept as the highest score and the sum of exponentials below it, apart: their one
float32 logarithm has lost, where scores are around -300, the digits by which weights sum to 1 and
gradients to 0.
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
    """What queries got from the keys that they have seen."""

    # The mean of values; of a tile alone, as `attend` returns it, their sum by exp(score - top). A
    # sum until the end would take fewer operations, and made no training step shorter (v5p, v6e).
    out: Results
    top: OfQueries  # the highest score, finite also before any
    total: OfQueries  # the sum of exp(score - top)


class Keys(NamedTuple):
    """Keys with what belongs to them, which travels with them."""

    k: OfKeys
    v: OfValues
    segments: Segments | None = None  # queries see none that is negative


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys are made, scaled and capped."""

    scale: float
    precision: Any
    softcap: float | None = None

    def product(self, subscripts: str, left: Array, right: Array) -> Array:
        """Multiplies over all batch dimensions, sums in float32 at least."""
        return jnp.einsum(
            subscripts,
            left,
            right,
            precision=self.precision,
            preferred_element_type=sum_dtype(left.dtype),
        )

    def __call__(self, q: Queries, k: OfKeys) -> OfPairs:
        """Returns the scores of all pairs, seen or not."""
        scores = self.product("...grqe,...gke->...grqk", q, k)
        scores = scores * jnp.asarray(self.scale, scores.dtype)
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def through_cap(self, scores: OfPairs, gradients: OfPairs) -> OfPairs:
        """Returns the gradients of scores before the cap, from those of capped scores."""
        if self.softcap is None:
            return gradients
        return gradients * (1 - jnp.square(scores / self.softcap))


@dataclass(frozen=True)
class Tile:
    """Which queries attend to which keys: of either the first position and how many.

    Only the first positions and what decides whether a pair is seen may be traced.

    Attributes:
      queries: of the block of queries.
      keys: of the block of keys.
      least: a query sees only keys whose number in the tile is at least so much below its own;
        None: no bound.
      most: the same, at most so much below; None: no bound.
      seen: whether any pair is seen: otherwise the tile is not computed.
    """

    queries: tuple[Any, int]
    keys: tuple[Any, int]
    least: Any = None
    most: Any = None
    seen: Any = True

    def when(self, seen: Any) -> "Tile":
        """Returns the tile, computed only where this condition holds, too."""
        if self.seen is True or seen is False:
            return replace(self, seen=seen)
        return self if seen is True or self.seen is False else replace(self, seen=self.seen & seen)

    def mask(
        self,
        scores: OfPairs,
        of_queries: Int32[Array, "*batch 1 queries 1"] | None,
        of_keys: Int32[Array, "*batch 1 keys 1"] | None,
    ) -> OfPairs:
        """Returns scores, -inf where a query does not see."""
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
    """What the gradients of a tile need of the queries, apart from keys and values."""

    q: Queries
    ct: Results  # of the result
    top: OfQueries  # of all scores
    inverse: OfQueries  # of the total
    inner: OfQueries  # product of result and cotangent
    segments: Segments | None


# Gradients of all queries, of the keys and of the values, summed so far.
Sums = tuple[Queries, OfKeys, OfValues]


def attend(
    scores: Scores,
    tile: Tile,
    q: Queries,
    keys: Keys,
    segments: Segments | None = None,
) -> SoftmaxState:
    """Returns what a tile's queries get from its keys alone, `out` a sum."""
    q, segments = cut(q, tile.queries), _cut_segments(segments, tile.queries)
    keys = _cut_keys(keys, tile.keys)
    logits = tile.mask(scores(q, keys.k), segments, keys.segments)
    # Finite where no key is seen: -inf - -inf is NaN. The shift cancels in the result, and needs no
    # derivative.
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=jnp.finfo(logits.dtype).min / 2))
    weights = jnp.exp(logits - _column(top))
    out = scores.product("...grqk,...gke->...grqe", weights.astype(keys.v.dtype), keys.v)
    return SoftmaxState(out, top, jnp.sum(weights, axis=-1))


def mean_of(sums: SoftmaxState) -> SoftmaxState:
    """Returns the same, `out` a mean."""
    return sums._replace(out=sums.out * _column(inverse_of(sums.total)))


def merge(state: SoftmaxState, queries: tuple[Any, int], part: SoftmaxState) -> SoftmaxState:
    """Adds to the state of all queries what some of them got, as a sum, from keys not yet seen."""
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
    """Adds to the softmax of all queries one score a head, without a value."""
    wide = _of_heads(sinks, state.top)
    # As in `attend`, the shift needs no derivative.
    top = lax.stop_gradient(lax.max(state.top, wide))
    old = state.total * jnp.exp(state.top - top)
    total = old + jnp.exp(wide - top)
    return SoftmaxState(state.out * _column(old * inverse_of(total)), top, total)


def gradient_of_sinks(
    sinks: Float[Array, "groups repeats"], at: Backward
) -> Float[Array, "groups repeats"]:
    """Returns the gradient of the sinks, which have weights but no values."""
    weights = jnp.exp(_of_heads(sinks, at.top) - at.top) * at.inverse
    batch = range(at.top.ndim - 3)
    return -jnp.sum(weights * at.inner, axis=(*batch, -1))


def add_gradients(scores: Scores, tile: Tile, at: Backward, keys: Keys, sums: Sums) -> Sums:
    """Adds a tile's gradients to those of all queries, of the keys and of the values."""
    (dq, dk, dv), queries = sums, tile.queries
    q, ct = cut(at.q, queries), cut(at.ct, queries)
    k, v, of_keys = _cut_keys(keys, tile.keys)
    top, inverse = cut(at.top, queries, -1), cut(at.inverse, queries, -1)
    inner, segments = cut(at.inner, queries, -1), _cut_segments(at.segments, queries)
    logits = scores(q, k)
    # The weights of the whole softmax, not of the tile's: `top` and `inverse` are of all keys.
    # The difference first, which is exact where it matters.
    masked = tile.mask(logits, segments, of_keys)
    weights = jnp.exp(masked - _column(top)) * _column(inverse)
    keys_span = tile.keys
    by_weight = scores.product("...grqe,...gke->...grqk", ct, v)
    by_logit = weights * (by_weight - _column(inner))  # scaled in what is made of it, s x e
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
    """1 / total. It is at least 1 where a key is seen; else 0, as all that is multiplied by it."""
    return 1 / jnp.maximum(total, 0.5)  # not 1, where the derivative of the larger one is a half


def _column(x: Float[Array, "*shape"]) -> Float[Array, "*shape 1"]:
    return lax.expand_dims(x, [x.ndim])  # indexing by None takes ten times as long to trace


def _of_heads(x: Float[Array, "groups repeats"], like: OfQueries) -> OfQueries:
    return lax.broadcast_in_dim(x, like.shape, (like.ndim - 3, like.ndim - 2))


def _cut_keys(keys: Keys, span: tuple[Any, int]) -> Keys:
    return Keys(cut(keys.k, span), cut(keys.v, span), _cut_segments(keys.segments, span))


def _cut_segments(
    segments: Segments | None, span: tuple[Any, int]
) -> Int32[Array, "*batch 1 of_span 1"] | None:
    return None if segments is None else cut(segments, span)


def cut(x: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    """Returns a span's positions of `x`."""
    start, size = span
    if size == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, x.ndim + dim, allow_negative_indices=False)


def put(x: Array, part: Array, span: tuple[Any, int], dim: int = -2) -> Array:
    """Returns `x` with a span's positions replaced."""
    start, size = span
    if size == x.shape[dim]:
        return part
    return lax.dynamic_update_slice_in_dim(
        x, part, start, x.ndim + dim, allow_negative_indices=False
    )
