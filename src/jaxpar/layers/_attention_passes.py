"""The forward and backward pass of ring attention, tile by tile of queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from jaxpar.arguments.dtypes import sum_dtype
from jaxpar.axis.vma import vary_over, varying_axes
from jaxpar.compiler import control_flow
from jaxpar.layers._attention_block import (
    Backward,
    Keys,
    OfKeys,
    OfValues,
    Queries,
    Results,
    SoftmaxState,
    Sums,
    Tile,
    add_gradients,
    attend,
    gradient_of_sinks,
    inverse_of,
    join_sinks,
    mean_of,
    merge,
)
from jaxpar.layers._attention_tiles import RingAttention, run_of
from jaxpar.ring.ways import Arrivals, Round, Use, Visits, as_it_is, forward_first

# Gradients of keys and values, which travel with them.
KeySums = tuple[OfKeys, OfValues]

Sinks = Float[Array, "groups repeats"]

# The name of the residuals, for policies of `jax.checkpoint`.
KEPT = "attention"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> Results:
    """Computes attention. All operands vary over the same axes."""
    return _forward(method, q, keys, sinks).out


def _forward(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> SoftmaxState:
    length, segments = q.shape[-2], keys.segments

    def consume(state: SoftmaxState | None, arrivals: Arrivals) -> SoftmaxState:
        if state is None:
            [(keys, _, _)] = arrivals
            return begin(keys)
        for number, (keys, source, _) in enumerate(arrivals):
            state = add(
                state, keys, source, method.lane(number, len(arrivals), keys.k.shape[-2], length)
            )
        return state

    def like() -> SoftmaxState:
        dtype = sum_dtype(q.dtype)
        of_queries = q[..., 0].astype(dtype)
        return SoftmaxState(_zeros(q, dtype, keys.v.shape[-1]), of_queries, of_queries)

    def begin(keys: Keys) -> SoftmaxState:
        each, rest = method.own_tiles(length)
        # Joined only at the end: each write into the joint state would be a pass over it.
        parts = [mean_of(attend(method.scores, t, q, keys, segments)) for t in each]
        for tile in rest:
            number = run_of(each, tile)
            start, size = tile.queries
            span = start - each[number].queries[0], size

            def compute(state: SoftmaxState, tile: Tile = tile, span: Any = span) -> SoftmaxState:
                return merge(state, span, attend(method.scores, tile, q, keys, segments))

            parts[number] = _if_seen(tile, compute, parts[number])
        outs, tops, totals = zip(*parts, strict=True)
        along = q.ndim - 2  # positions: next to last in the results, last in the rest
        return SoftmaxState(*(lax.concatenate(x, along) for x in (outs, tops, totals)))

    def add(state: SoftmaxState, keys: Keys, source: Int[Array, ""], lane: int) -> SoftmaxState:
        for tile in method.tiles(length, keys.k.shape[-2], source, lane):

            def compute(state: SoftmaxState, tile: Tile = tile) -> SoftmaxState:
                # Compute tiles in turn: their scores take most of the memory.
                state, k = lax.optimization_barrier((state, keys.k))
                part = attend(method.scores, tile, q, keys._replace(k=k), segments)
                return merge(state, tile.queries, part)

            state = _if_seen(tile, compute, state)
        return state

    def finish(state: SoftmaxState) -> SoftmaxState:
        if sinks is not None:
            state = join_sinks(state, sinks)
        return state._replace(out=state.out.astype(q.dtype))

    use = Use(consume, sums=as_it_is, finish=finish, like=like)
    return method.way.gather(keys, use, split=method.split)


def _fwd(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> Any:
    # Named here, not by the caller: a policy of `jax.checkpoint` looks at the arrays that the
    # backward pass reads. A name for the returned result would make another array.
    state = checkpoint_name(_forward(method, q, keys, sinks), KEPT)
    return forward_first([method.way], state.out, (q, keys, sinks, state))


def _bwd(
    method: RingAttention, residuals: tuple[Queries, Keys, Sinks | None, SoftmaxState], ct: Results
) -> tuple[Queries, Keys, Sinks | None]:
    q, keys, sinks, state = residuals
    dtype = sum_dtype(q.dtype)
    # The mean of the weights' gradients, weighted by the softmax over all keys. The derivative of
    # the softmax subtracts it. The result and its cotangent give it without any weight.
    inner = jnp.sum(state.out.astype(dtype) * ct.astype(dtype), axis=-1)
    inverse = inverse_of(state.total)
    at, length = Backward(q, ct, state.top, inverse, inner, keys.segments), q.shape[-2]
    each, rest = method.own_tiles(length)
    # The first transfer (keys and values) is shorter than the last (their gradients).
    first, second = (rest, each) if rest else (each[:-1], each[-1:])

    def add_tile(tile: Tile, keys: Keys, sums: Sums, *, first: bool) -> Sums:
        def compute(sums: Sums) -> Sums:
            block = keys
            if not first:  # as in the forward pass
                sums, k = lax.optimization_barrier((sums, keys.k))
                block = keys._replace(k=k)
            return add_gradients(method.scores, tile, at, block, sums)

        return _if_seen(tile, compute, sums)

    def add_tiles(tiles: list[Tile], dq: Queries, key_sums: Any) -> tuple[Queries, KeySums]:
        sums: Sums = (dq, *key_sums)
        for number, tile in enumerate(tiles):
            sums = add_tile(tile, keys, sums, first=not number)
        return sums[0], sums[1:]

    def visit(dq: Queries, visits: Visits) -> tuple[Queries, list[Any]]:
        made: list[Any] = []
        for number, (keys, source) in enumerate(visits):
            sums: Sums = dq, _zeros(keys.k, dtype), _zeros(keys.v, dtype)
            size = keys.k.shape[-2]
            lane = method.lane(number, len(visits), size, length)
            tiles = method.tiles(length, size, source, lane)
            for tile in tiles:
                sums = add_tile(tile, keys, sums, first=not made and tile is tiles[0])
            dq = sums[0]
            made.append(sums[1:])
        return dq, made

    def begin(dq: Queries, key_sums: Any) -> tuple[Queries, KeySums]:
        return add_tiles(first, dq, key_sums)

    def end(dq: Queries, key_sums: Any) -> tuple[Queries, KeySums]:
        return add_tiles(second, dq, key_sums)

    dq, key_sums = _zeros(q, dtype), (_zeros(keys.k, dtype), _zeros(keys.v, dtype))
    steps = Round(begin, visit, end, method.split, method.join, lambda keys: (keys.k, keys.v))
    dq, (dk, dv) = method.way.circulate(keys, dq, key_sums, steps)
    of_sinks = None if sinks is None else gradient_of_sinks(sinks, at)
    of_keys = Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype))
    return dq.astype(q.dtype), of_keys, of_sinks


attention.defvjp(_fwd, _bwd)


def _if_seen(tile: Tile, compute: Callable[[Any], Any], state: Any) -> Any:
    if tile.seen is True:
        return compute(state)
    return control_flow.cond(tile.seen, compute, lambda state: state, state)


def _zeros(
    like: Float[Array, "*shape size"], dtype: Any, size: int | None = None
) -> Float[Array, "*shape of_size"]:
    shape = (*like.shape[:-1], like.shape[-1] if size is None else size)
    return vary_over(varying_axes(like), jnp.zeros_like(like, dtype, shape=shape))
