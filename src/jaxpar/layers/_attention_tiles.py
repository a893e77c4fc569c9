"""The tiles, spans of queries and the keys they attend to, that a device computes.

A run is a span of adjacent positions. A lane is a part of a block that travels by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped

from jaxpar.layers._attention_block import Scores, Tile
from jaxpar.ring.ways import Way

# The most runs in a chunk of local positions, to skip scores outside the window. More runs would
# take longer to trace, with two tiles each.
RUNS = 8


@dataclass(frozen=True)
class RingAttention:
    """The settings of ring attention.

    Attributes:
      window: how many positions a query sees before its own, and after it. None: all.
      zigzag: whether a device holds an early and a late chunk. False if queries see all positions.
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
        """Returns the number of runs in a block."""
        return 2 if self.zigzag else 1

    def own_tiles(self, length: int) -> tuple[list[Tile], list[Tile]]:
        """Returns tiles of each run, and between runs."""
        # If there are more than two runs, none is shorter than the window: it sees its neighbours.
        runs = self._runs(length)
        if self.window == (None, None):
            return [Tile(run, (0, length)) for run in runs], []
        each = [self._tile(run, run, 0) for run in runs]
        rest: list[Tile] = []
        for early, late in pairwise(runs):
            after: Any = late[0] - early[0]
            if self.zigzag and late[0] == length // 2:  # the gap between the two chunks
                between = 2 * (self.way.ring.size - 1 - self.way.ring.index())
                after = after + between.astype("int32") * (length // 2)
            rest.append(self._tile(late, early, after, past=True))
            if not self.causal:
                rest.append(self._tile(early, late, -after, past=False))
        return each, [tile for tile in rest if tile.seen is not False]

    def tiles(self, queries: int, keys: int, source: Int[Array, ""], lane: int) -> list[Tile]:
        if self.window == (None, None):
            return [Tile((0, queries), (0, keys))]
        index, n = self.way.ring.index().astype("int32"), self.way.ring.size
        rows, columns = queries // self.chunks, keys // self.chunks
        early, late = (0, rows), (rows, rows)
        early_keys, late_keys = (0, columns), (columns, columns)

        def after(chunks: Any) -> Any:
            """Returns how far queries are behind a lane `chunks` chunks earlier."""
            return chunks * rows - lane * columns

        before = source < index
        if not self.zigzag:
            past = True if self.causal else before
            tile = self._tile(early, early_keys, after(index - source), past)
            tiles = [tile.when(before) if self.causal else tile]
        elif self.causal:
            # Device i has chunks i and 2n-1-i of 2n. Its late queries see all early keys. Its early
            # queries see the early keys of devices before it. Its late queries see the late keys of
            # devices after it. So each step does the same work, in the same shapes. Without a
            # window, it masks nothing.
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
        # `after` is the first query's position minus the first key's. `past` is True if all keys
        # are before all queries, False if after them, and None if positions are the same.
        left, right = self.window
        if past is not None:
            widest = left if past is True else right if past is False else _widest(left, right)
            if widest is not None:  # keep those next to the other run
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
        """Splits keys into `parts` lanes, or one if uneven."""
        # A lane has a run of every chunk, so that half of each of its tiles is seen.
        chunks, length = self.chunks, block.k.shape[-2]
        run = length // (parts * chunks)
        if parts == 1 or run * parts * chunks != length:
            return [block]

        def part(
            x: Shaped[Array, "*batch positions size"], lane: int
        ) -> Shaped[Array, "*batch of_lane size"]:
            *batch, _, size = x.shape
            x = x.reshape(*batch, chunks, parts, run, size)
            return x[..., lane, :, :].reshape(*batch, chunks * run, size)

        return [jax.tree.map(lambda x, lane=lane: part(x, lane), block) for lane in range(parts)]

    def join(self, lanes: list[Any]) -> Any:
        if len(lanes) == 1:
            return lanes[0]

        def join(
            *xs: Shaped[Array, "*batch of_lane size"],
        ) -> Shaped[Array, "*batch positions size"]:
            *batch, length, size = xs[0].shape
            cut = [x.reshape(*batch, self.chunks, length // self.chunks, size) for x in xs]
            return jnp.stack(cut, axis=-3).reshape(*batch, length * len(xs), size)

        return jax.tree.map(join, *lanes)

    def lane(self, number: int, count: int, keys: int, length: int) -> int:
        """Returns which lane of its block arrives."""
        # Arrivals from several directions of a ring are the same lane of different blocks.
        return number * (length // keys) // count


def run_of(each: Sequence[Tile], tile: Tile) -> int:
    return max(n for n, run in enumerate(each) if run.queries[0] <= tile.queries[0])


def _widest(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else max(left, right)


def _choose(condition: Any, if_true: int, if_false: int) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return if_false + condition.astype("int32") * (if_true - if_false)


def _bounded(tile: Tile, least: Any, most: Any) -> Tile:
    """Drops bounds that exclude no pair; sets `seen`."""
    rows, columns = tile.queries[1], tile.keys[1]
    lowest, highest = 1 - columns, rows - 1  # of a query's number minus a key's
    if not rows or not columns:
        return replace(tile, seen=False)
    if least is not None:
        tile = tile.when(least <= highest)
        least = None if isinstance(least, int) and least <= lowest else least
    if most is not None:
        tile = tile.when(most >= lowest)
        most = None if isinstance(most, int) and most >= highest else most
    return replace(tile, least=least, most=most)
