"""Attention over a ring and its gradients: which tiles each step computes, and in what order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from jaxpar import _loops
from jaxpar._dtypes import sum_dtype
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._ways import Arrivals, Visits, Way, as_it_is
from jaxpar.layers._attention_block import (
    Backward,
    Keys,
    OfKeys,
    Queries,
    Scores,
    State,
    Sums,
    Tile,
    add_gradients,
    attend,
    inverse_of,
    mean_of,
    merge,
)

# Of keys and values, to travel with these.
KeySums = tuple[OfKeys, OfKeys]


@dataclass(frozen=True)
class RingAttention:
    """How attention runs, the same forward and backward."""

    way: Way
    causal: bool
    zigzag: bool
    scores: Scores

    @property
    def balanced(self) -> bool:
        """Whether a device holds an early and a late chunk, of which half of each tile is seen."""
        return self.causal and self.zigzag

    def own_tiles(self, length: int) -> tuple[list[Tile], list[Tile]]:
        """Tiles of a device's own block: for every query one, and those that are left.

        Both orders keep a device's positions ascending.
        """
        middle = length // 2
        early, late = (0, middle), (middle, length - middle)
        if self.causal:
            each, rest = [Tile(early, early, True), Tile(late, late, True)], [Tile(late, early)]
        else:
            each, rest = [Tile(early, (0, length)), Tile(late, (0, length))], []
        return (each, rest) if middle else (each[1:], [])

    def tiles(self, queries: int, keys: int, source: Int[Array, ""]) -> list[Tile]:
        """Tiles of another device's block, or a part of it."""
        if not self.balanced:
            return [Tile((0, queries), (0, keys))]
        # Of 2n chunks device i has i and 2n-1-i. Its late queries see all early keys. Its early
        # queries see those of the devices before it, and its late ones the late keys of those
        # behind it. So each step has as much to do, of the same shape, and nothing to mask.
        rows, columns = queries // 2, keys // 2
        behind = (source > self.way.ring.index()).astype("int32")
        chosen = Tile((behind * rows, rows), (behind * columns, columns))
        return [Tile((rows, rows), (0, columns)), chosen]

    @property
    def chunks(self) -> int:
        """Of how many runs of positions a block consists."""
        return 2 if self.balanced else 1

    def split(self, block: Any, parts: int) -> list[Any]:
        """Deals the positions of keys out to so many parts; to one if they do not divide."""
        length = block.k.shape[-2]
        return _split(block, parts if length % (parts * self.chunks) == 0 else 1, self.chunks)

    def if_seen(self, source: Int[Array, ""], compute: Callable[[Any], Any], state: Any) -> Any:
        """Returns `compute(state)`, or `state` where all of the block is in the future."""
        if not self.causal or self.zigzag:
            return compute(state)
        return _loops.cond(source < self.way.ring.index(), compute, lambda state: state, state)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(method: RingAttention, q: Queries, keys: Keys) -> Queries:
    """Attention of q to the keys and values of all devices.

    All vary over the same axes, the ring's among them. Queries are of the segments of their keys.
    """
    return _forward(method, q, keys).out


def _forward(method: RingAttention, q: Queries, keys: Keys) -> State:
    length, segments = q.shape[-2], keys.segments

    def consume(state: State | None, arrivals: Arrivals) -> State:
        if state is None:
            [(keys, _, _)] = arrivals
            return own(keys)
        for keys, source, _ in arrivals:
            state = add(state, keys, source)
        return state

    def like() -> State:
        wide = q.astype(sum_dtype(q.dtype))
        return State(wide, wide[..., 0], wide[..., 0])

    def own(keys: Keys) -> State:
        each, rest = method.own_tiles(length)
        parts: list[State] = []
        for tile in each:  # apart until the end: to write into the state of all is a pass over it
            of_these = [*(other for other in rest if other.queries == tile.queries), tile]
            first, *more = [attend(method.scores, t, q, keys, segments) for t in of_these]
            state = mean_of(first)
            for part in more:
                state = merge(state, (0, tile.queries[1]), part)
            parts.append(state)
        outs, tops, totals = zip(*parts, strict=True)
        along = q.ndim - 2  # positions, the last dimension of all but the results
        return State(*(lax.concatenate(x, along) for x in (outs, tops, totals)))

    def add(state: State, keys: Keys, source: Int[Array, ""]) -> State:
        def compute(state: State) -> State:
            for tile in method.tiles(length, keys.k.shape[-2], source):
                # One tile after the other: their scores are most of the memory.
                state, k = lax.optimization_barrier((state, keys.k))
                part = attend(method.scores, tile, q, keys._replace(k=k), segments)
                state = merge(state, tile.queries, part)
            return state

        return method.if_seen(source, compute, state)

    def finish(state: State) -> State:
        return state._replace(out=state.out.astype(q.dtype))

    return method.way.gather(
        keys, consume, split=method.split, sums=as_it_is, finish=finish, like=like
    )


def _fwd(method: RingAttention, q: Queries, keys: Keys) -> Any:
    state = _forward(method, q, keys)
    return method.way.forward_first(state.out, (q, keys, state))


def _bwd(
    method: RingAttention, residuals: tuple[Queries, Keys, State], ct: Queries
) -> tuple[Queries, Keys]:
    q, keys, state = residuals
    dtype = sum_dtype(q.dtype)
    # The mean, by the weights of all keys, of these weights' gradients. The derivative of a softmax
    # subtracts it from each of them, and it is known without any weight.
    inner = jnp.sum(state.out.astype(dtype) * ct.astype(dtype), axis=-1)
    inverse = inverse_of(state.total)
    at, length = Backward(q, ct, state.top, inverse, inner, keys.segments), q.shape[-2]
    each, rest = method.own_tiles(length)
    # The first transfer, of keys and values, is shorter than the last, of their gradients.
    first, second = (rest, each) if rest else (each[:-1], each[-1:])

    def add_tiles(tiles: list[Tile], dq: Queries, own: Any, keys: Keys) -> tuple[Queries, KeySums]:
        sums: Sums = (dq, *own)
        for number, tile in enumerate(tiles):
            if number:  # as in the forward pass
                sums, k = lax.optimization_barrier((sums, keys.k))
                keys = keys._replace(k=k)
            sums = add_gradients(method.scores, tile, at, keys, sums)
        return sums[0], sums[1:]

    def visit(dq: Queries, visits: Visits) -> tuple[Queries, list[KeySums]]:
        made: list[Any] = []
        for keys, source in visits:

            def compute(state: Any, keys: Keys = keys, source: Int[Array, ""] = source) -> Any:
                if made:  # one block after the other, as tiles are
                    state, k = lax.optimization_barrier((state, keys.k))
                    keys = keys._replace(k=k)
                dq, new = state
                return add_tiles(method.tiles(length, keys.k.shape[-2], source), dq, new, keys)

            state = dq, (_zeros(keys.k, dtype), _zeros(keys.v, dtype))
            dq, new = method.if_seen(source, compute, state)
            made.append(new)
        return dq, made

    def begin(dq: Queries, own: Any) -> tuple[Queries, KeySums]:
        return add_tiles(first, dq, own, keys)

    def end(dq: Queries, own: Any) -> tuple[Queries, KeySums]:
        return add_tiles(second, dq, own, keys)

    dq, own = _zeros(q, dtype), (_zeros(keys.k, dtype), _zeros(keys.v, dtype))
    dq, (dk, dv) = method.way.circulate(
        *(keys, dq, own, begin, visit, end),
        split=method.split,
        join=lambda parts: _join(parts, method.chunks),
        summed=lambda keys: (keys.k, keys.v),
    )
    return dq.astype(q.dtype), Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype))


attention.defvjp(_fwd, _bwd)


def _zeros(like: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    return vary_over(varying_axes(like), jnp.zeros_like(like, dtype))


def _split(block: Any, lanes: int, chunks: int) -> list[Any]:
    """Deals the positions of each chunk out to the lanes.

    A lane has a run of every chunk, early and late ones alike, so that half of each tile of its own
    is seen, as of the whole block.
    """
    if lanes == 1:
        return [block]

    def part(
        x: Shaped[Array, "*batch positions size"], lane: int
    ) -> Shaped[Array, "*batch of_lane size"]:
        *batch, length, size = x.shape
        x = x.reshape(*batch, chunks, lanes, length // (chunks * lanes), size)
        return x[..., lane, :, :].reshape(*batch, length // lanes, size)

    return [jax.tree.map(lambda x, lane=lane: part(x, lane), block) for lane in range(lanes)]


def _join(parts: list[Any], chunks: int) -> Any:
    """The inverse of `_split`."""
    if len(parts) == 1:
        return parts[0]

    def join(
        *xs: Shaped[Array, "*batch of_lane size"],
    ) -> Shaped[Array, "*batch positions size"]:
        *batch, length, size = xs[0].shape
        cut = [x.reshape(*batch, chunks, length // chunks, size) for x in xs]
        return jnp.stack(cut, axis=-3).reshape(*batch, length * len(xs), size)

    return jax.tree.map(join, *parts)
