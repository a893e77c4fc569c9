"""Attention over a ring and its gradients: which tiles each step computes, and in what order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int, Shaped

from jaxpar._dtypes import sum_dtype
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._ways import Arrivals, Visits, Way, as_it_is
from jaxpar.layers._attention_block import (
    Backward,
    Keys,
    OfKeys,
    OfValues,
    Queries,
    Results,
    Scores,
    State,
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

# Of keys and values, to travel with these.
KeySums = tuple[OfKeys, OfValues]

Sinks = Float[Array, "groups repeats"]

# What the backward pass needs of the forward pass, for policies of `jax.checkpoint`.
KEPT = "ring_attention"

# Into how many runs a device's own positions are cut at most, for the scores that a window leaves
# out. More would take longer to trace: there are two tiles a run.
RUNS = 8


@dataclass(frozen=True)
class RingAttention:
    """How attention runs, the same forward and backward.

    Attributes:
      way: how keys come.
      window: how many positions before its own a query sees, and how many behind it; None: all.
      zigzag: whether a device holds an early and a late chunk of positions, and not one run; False
        where queries see all.
      scores: of queries and keys.
    """

    way: Way
    window: tuple[int | None, int | None]
    zigzag: bool
    scores: Scores

    @property
    def causal(self) -> bool:
        return self.window[1] == 0

    @property
    def chunks(self) -> int:
        """Of how many runs of positions a block consists."""
        return 2 if self.zigzag else 1

    def own_tiles(self, length: int) -> tuple[list[Tile], list[Tile]]:
        """Tiles of a device's own block: one for each run of queries, and those that are left.

        Both orders keep a device's positions ascending. A run is at least as long as the window
        where there are more than two of them, so that it sees its neighbours alone.
        """
        runs = self._runs(length)
        if self.window == (None, None):
            return [Tile(run, (0, length)) for run in runs], []
        each = [self._tile(run, run, 0) for run in runs]
        rest: list[Tile] = []
        for early, late in pairwise(runs):
            after: Any = late[0] - early[0]
            if self.zigzag and late[0] == length // 2:  # from one chunk to the other
                between = 2 * (self.way.ring.size - 1 - self.way.ring.index())
                after = after + between.astype("int32") * (length // 2)
            rest.append(self._tile(late, early, after, past=True))
            if not self.causal:
                rest.append(self._tile(early, late, -after, past=False))
        return each, [tile for tile in rest if tile.seen is not False]

    def tiles(self, queries: int, keys: int, source: Int[Array, ""], lane: int) -> list[Tile]:
        """Tiles of another device's block, or a lane of it."""
        if self.window == (None, None):
            return [Tile((0, queries), (0, keys))]
        index, n = self.way.ring.index().astype("int32"), self.way.ring.size
        rows, columns = queries // self.chunks, keys // self.chunks
        early, late = (0, rows), (rows, rows)
        early_keys, late_keys = (0, columns), (columns, columns)

        def after(chunks: Any) -> Any:
            """How far a lane is behind queries that are so many chunks behind its own."""
            return chunks * rows - lane * columns

        before = source < index
        if not self.zigzag:
            past = True if self.causal else before
            tile = self._tile(early, early_keys, after(index - source), past)
            tiles = [tile.when(before) if self.causal else tile]
        elif self.causal:
            # Of 2n chunks device i has i and 2n-1-i. Its late queries see all early keys. Its early
            # queries see those of the devices before it, and its late ones the late keys of those
            # behind it. So each step has as much to do, of the same shape, and, but for a window,
            # nothing to mask.
            behind = (source > index).astype("int32")
            chosen = (behind * rows, rows), (behind * columns, columns)
            tiles = [
                self._tile(late, early_keys, after(2 * n - 1 - index - source), past=True),
                self._tile(*chosen, after(abs(index - source)), past=True),
            ]
        else:
            across = 2 * n - 1 - index - source
            tiles = [
                self._tile(late, early_keys, after(across), past=True),
                self._tile(early, late_keys, after(-across), past=False),
                self._tile(early, early_keys, after(index - source), before),
                self._tile(late, late_keys, after(source - index), ~before),
            ]
        return [tile for tile in tiles if tile.seen is not False]

    def _runs(self, length: int) -> list[tuple[int, int]]:
        """Starts and sizes of the runs into which a device's own positions are cut."""
        chunk, most = length // self.chunks, 2 // self.chunks
        widest = _widest(*self.window)
        if widest is not None:
            most = max(most, min(RUNS, chunk // max(widest, 1)))
        starts = [
            number * chunk + chunk * run // most
            for number in range(self.chunks)
            for run in range(most)
        ]
        edges = pairwise([*starts, length])
        return [(start, end - start) for start, end in edges if end > start]

    def _tile(
        self,
        queries: tuple[Any, int],
        keys: tuple[Any, int],
        after: Any,
        past: Any = None,
    ) -> Tile:
        """The tile of two runs of positions, without what the window leaves out.

        Args:
          queries: where they are in their block.
          keys: the same.
          after: by how much the first query's position is behind the first key's.
          past: whether all keys are before all queries, or else behind them; None: both are the
            same positions.
        """
        left, right = self.window
        if past is not None:
            widest = left if past is True else right if past is False else _widest(left, right)
            if widest is not None:  # of either those next to the other ones
                (row, rows), (column, columns) = queries, keys
                fewer_rows, fewer_columns = max(0, rows - widest), max(0, columns - widest)
                down = _choose(past, 0, fewer_rows)
                along = _choose(past, fewer_columns, 0)
                queries, keys = (
                    (row + down, rows - fewer_rows),
                    (column + along, columns - fewer_columns),
                )
                after = after + down - along
        least = None if right is None or past is True else -right - after
        most = None if left is None or past is False else left - after
        return _bounded(Tile(queries, keys), least, most)

    def split(self, block: Any, parts: int) -> list[Any]:
        """Deals the positions of keys out to so many parts; to one if they do not divide."""
        length = block.k.shape[-2]
        return _split(block, parts if length % (parts * self.chunks) == 0 else 1, self.chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> Results:
    """Attention of q to the keys and values of all devices.

    All vary over the same axes, the ring's among them. Queries are of the segments of their keys.
    """
    return _forward(method, q, keys, sinks).out


def _forward(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> State:
    length, segments = q.shape[-2], keys.segments

    def consume(state: State | None, arrivals: Arrivals) -> State:
        if state is None:
            [(keys, _, _)] = arrivals
            return own(keys)
        for number, (keys, source, _) in enumerate(arrivals):
            state = add(state, keys, source, _lane(number, len(arrivals), keys, length))
        return state

    def like() -> State:
        dtype = sum_dtype(q.dtype)
        of_queries = q[..., 0].astype(dtype)
        return State(_zeros(q, dtype, keys.v.shape[-1]), of_queries, of_queries)

    def own(keys: Keys) -> State:
        each, rest = method.own_tiles(length)
        # Apart until the end: to write into the state of all is a pass over it.
        parts = [mean_of(attend(method.scores, t, q, keys, segments)) for t in each]
        for tile in rest:
            number = _run_of(each, tile)
            start, size = tile.queries
            span = start - each[number].queries[0], size

            def compute(state: State, tile: Tile = tile, span: Any = span) -> State:
                return merge(state, span, attend(method.scores, tile, q, keys, segments))

            parts[number] = _if_seen(tile, compute, parts[number])
        outs, tops, totals = zip(*parts, strict=True)
        along = q.ndim - 2  # positions, the last dimension of all but the results
        return State(*(lax.concatenate(x, along) for x in (outs, tops, totals)))

    def add(state: State, keys: Keys, source: Int[Array, ""], lane: int) -> State:
        for tile in method.tiles(length, keys.k.shape[-2], source, lane):

            def compute(state: State, tile: Tile = tile) -> State:
                # One tile after the other: their scores are most of the memory.
                state, k = lax.optimization_barrier((state, keys.k))
                part = attend(method.scores, tile, q, keys._replace(k=k), segments)
                return merge(state, tile.queries, part)

            state = _if_seen(tile, compute, state)
        return state

    def finish(state: State) -> State:
        if sinks is not None:
            state = join_sinks(state, sinks)
        return state._replace(out=state.out.astype(q.dtype))

    return method.way.gather(
        keys, consume, split=method.split, sums=as_it_is, finish=finish, like=like
    )


def _fwd(method: RingAttention, q: Queries, keys: Keys, sinks: Sinks | None) -> Any:
    # Named here, and not by who calls: a policy of `jax.checkpoint` sees what the backward pass
    # reads, and a name given to the result is another array.
    state = checkpoint_name(_forward(method, q, keys, sinks), KEPT)
    return method.way.forward_first(state.out, (q, keys, sinks, state))


def _bwd(
    method: RingAttention, residuals: tuple[Queries, Keys, Sinks | None, State], ct: Results
) -> tuple[Queries, Keys, Sinks | None]:
    q, keys, sinks, state = residuals
    dtype = sum_dtype(q.dtype)
    # The mean, by the weights of all keys, of these weights' gradients. The derivative of a softmax
    # subtracts it from each of them, and it is known without any weight.
    inner = jnp.sum(state.out.astype(dtype) * ct.astype(dtype), axis=-1)
    inverse = inverse_of(state.total)
    at, length = Backward(q, ct, state.top, inverse, inner, keys.segments), q.shape[-2]
    each, rest = method.own_tiles(length)
    # The first transfer, of keys and values, is shorter than the last, of their gradients.
    first, second = (rest, each) if rest else (each[:-1], each[-1:])

    def add_tile(tile: Tile, keys: Keys, sums: Sums, *, first: bool) -> Sums:
        def compute(sums: Sums) -> Sums:
            block = keys
            if not first:  # as in the forward pass
                sums, k = lax.optimization_barrier((sums, keys.k))
                block = keys._replace(k=k)
            return add_gradients(method.scores, tile, at, block, sums)

        return _if_seen(tile, compute, sums)

    def add_tiles(tiles: list[Tile], dq: Queries, own: Any) -> tuple[Queries, KeySums]:
        sums: Sums = (dq, *own)
        for number, tile in enumerate(tiles):
            sums = add_tile(tile, keys, sums, first=not number)
        return sums[0], sums[1:]

    def visit(dq: Queries, visits: Visits) -> tuple[Queries, list[KeySums]]:
        made: list[Any] = []
        for number, (keys, source) in enumerate(visits):
            sums: Sums = dq, _zeros(keys.k, dtype), _zeros(keys.v, dtype)
            lane = _lane(number, len(visits), keys, length)
            tiles = method.tiles(length, keys.k.shape[-2], source, lane)
            for tile in tiles:
                sums = add_tile(tile, keys, sums, first=not made and tile is tiles[0])
            dq = sums[0]
            made.append(sums[1:])
        return dq, made

    def begin(dq: Queries, own: Any) -> tuple[Queries, KeySums]:
        return add_tiles(first, dq, own)

    def end(dq: Queries, own: Any) -> tuple[Queries, KeySums]:
        return add_tiles(second, dq, own)

    dq, own = _zeros(q, dtype), (_zeros(keys.k, dtype), _zeros(keys.v, dtype))
    dq, (dk, dv) = method.way.circulate(
        *(keys, dq, own, begin, visit, end),
        split=method.split,
        join=lambda parts: _join(parts, method.chunks),
        summed=lambda keys: (keys.k, keys.v),
    )
    of_sinks = None if sinks is None else gradient_of_sinks(sinks, at)
    of_keys = Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype))
    return dq.astype(q.dtype), of_keys, of_sinks


attention.defvjp(_fwd, _bwd)


def _if_seen(tile: Tile, compute: Callable[[Any], Any], state: Any) -> Any:
    """Returns `compute(state)`, or `state` where no pair of the tile is seen."""
    if tile.seen is True:
        return compute(state)
    return lax.cond(tile.seen, compute, lambda state: state, state)


def _run_of(each: Sequence[Tile], tile: Tile) -> int:
    """Which of the runs has the queries of a tile."""
    return max(n for n, run in enumerate(each) if run.queries[0] <= tile.queries[0])


def _lane(number: int, count: int, keys: Keys, length: int) -> int:
    """Which lane of a block has come, as the one of so many of this number.

    Those that come by several directions of one ring are of the same lane of different blocks.
    """
    return number * (length // keys.k.shape[-2]) // count


def _widest(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else max(left, right)


def _choose(condition: Any, if_true: int, if_false: int) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return if_false + condition.astype("int32") * (if_true - if_false)


def _bounded(tile: Tile, least: Any, most: Any) -> Tile:
    """Returns the tile with those bounds that leave a pair out, and whether they leave any in."""
    rows, columns = tile.queries[1], tile.keys[1]
    lowest, highest = 1 - columns, rows - 1  # of a query's number less a key's
    if not rows or not columns:
        return replace(tile, seen=False)
    if least is not None:
        tile = tile.when(least <= highest)
        least = None if isinstance(least, int) and least <= lowest else least
    if most is not None:
        tile = tile.when(most >= lowest)
        most = None if isinstance(most, int) and most >= highest else most
    return replace(tile, least=least, most=most)


def _zeros(
    like: Float[Array, "*shape size"], dtype: Any, size: int | None = None
) -> Float[Array, "*shape of_size"]:
    shape = (*like.shape[:-1], like.shape[-1] if size is None else size)
    return vary_over(varying_axes(like), jnp.zeros_like(like, dtype, shape=shape))


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
