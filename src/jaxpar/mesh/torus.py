"""The order of a mesh's devices on a TPU slice, so that rings have short links.

Each axis gets a tile of the box: a factor of each dimension. Tiles nest: the innermost axis takes
neighbours, and the next axis steps over its tiles. A ring is a closed walk through a tile.

For rings of one link, split each closed dimension of 4 into two of 2, and give each axis full
dimensions, so that its tile `_closes`. `_walk` shows that this suffices. With one device a chip, it
is necessary: steps on two axes span a square of the mesh, and opposite sides of a square in the box
are along one dimension, so no two axes share a dimension. Several devices a chip are another
dimension.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jaxpar.mesh.slices import on_torus, slice_of
from jaxpar.platforms.chips import Tpu, platform_of


def closed_dims(device_kind: str, extent: Int[np.ndarray, " dims"]) -> Bool[np.ndarray, " dims"]:
    known = platform_of(device_kind)
    if isinstance(known, Tpu) and known.closed is not None:
        return extent == known.closed
    return np.full(extent.shape, (extent % 4 == 0).all())  # only full cubes have closed dimensions


def slice_grid(devices: Sequence[Any], shape: Sequence[int]) -> Shaped[np.ndarray, "..."] | None:
    """Arranges TPU devices in `shape`; None unless they are boxes of one extent."""
    # Slices go to the first axes, with equal layouts.
    if not all(on_torus(device) for device in devices):
        return None
    numbers = sorted({slice_of(device) for device in devices})
    boxes = [_box([device for device in devices if slice_of(device) == n]) for n in numbers]
    first = boxes[0]
    if first is None or any(box is None or box.shape != first.shape for box in boxes):
        return None

    across: list[int] = []
    for size in shape:
        across.append(gcd(size, len(numbers) // prod(across)))
    within = [size // slices for size, slices in zip(shape, across, strict=True)]
    *extent, cores = first.shape
    closed = closed_dims(first.flat[0].device_kind, np.array(extent))
    order = torus_order(within, extent, closed.tolist(), cores)
    grid = np.stack([box.reshape(-1)[order] for box in boxes if box is not None])
    axes = range(len(shape))
    grid = grid.reshape(*across, *within)
    return grid.transpose([i for axis in axes for i in (axis, axis + len(shape))]).reshape(shape)


def _box(devices: list[Any]) -> Shaped[np.ndarray, "*extent cores"] | None:
    """Puts a slice's devices at their coordinates; None if holes remain."""
    coords = np.array([device.coords for device in devices])
    extent = coords.max(axis=0) - coords.min(axis=0) + 1
    cores, rest = divmod(len(devices), int(extent.prod()))
    if rest:
        return None
    # Sort by chip, then by device in the chip.
    order = sorted(range(len(devices)), key=lambda i: (*coords[i], devices[i].core_on_chip))
    chips = coords[order].reshape(-1, cores, coords.shape[1])
    expected = np.indices(extent).reshape(len(extent), -1).T + coords.min(axis=0)
    if not (chips == expected[:, None]).all():
        return None
    box = np.empty(len(devices), object)
    box[:] = [devices[i] for i in order]
    return box.reshape(*extent, cores)


_MOST_TILES = 20_000  # limit of a search; three axes on 4096 chips need a few hundred


class _Dim(NamedTuple):
    """The free part of a dimension: `left` places, `stride` apart."""

    left: int
    stride: int
    around: int  # places on the full dimension if it is closed, otherwise 0
    cost: int  # links from a place to the next; 0 between the devices of a chip


class _Side(NamedTuple):
    size: int
    dim: _Dim


class _TileChoice(NamedTuple):
    score: tuple[int, int, int]  # whether a step takes several links, the longest step, the sum
    sides: tuple[_Side, ...]
    rest: tuple[_Dim, ...]  # the free part of each dimension


_Key = tuple[tuple[int, ...], ...]
_Tiles = dict[int, tuple[_Side, ...]]  # by axis


def torus_order(
    shape: Sequence[int], box: Sequence[int], closed: Sequence[bool], cores: int
) -> Int[np.ndarray, "..."]:
    """Returns an array of `shape` with indices into the flat devices `(*box, cores)`."""
    # Later axes go first. Scores compare rings of one link, then the longest step, then the sum of
    # steps.
    places = np.arange(prod(box) * cores).reshape(*box, cores)
    dims: list[_Dim] = []
    for axis, (size, around) in enumerate(zip(box, closed, strict=True)):
        if size == 4 and around:
            places = places.take([0, 1, 3, 2], axis=axis)
            dims += [_Dim(2, 1, 0, 1)] * 2
        else:
            dims.append(_Dim(size, 1, size if around else 0, 1))
    dims.append(_Dim(cores, 1, 0, 0))
    places = places.reshape([dim.left for dim in dims])

    tiles = _TileSearch(shape, cores).best(tuple(dims))
    index = np.zeros((*shape, len(dims)), int)
    for axis, sides in tiles.items():
        along = [1] * len(shape)
        along[axis] = shape[axis]
        strides = [side.dim.stride for side in sides]
        index += (_walk(sides) * strides).reshape(*along, len(dims))
    return places[tuple(np.moveaxis(index, -1, 0))]


class _TileSearch:
    """Branch and bound over the axes' tiles, innermost axis first."""

    def __init__(self, shape: Sequence[int], cores: int):
        self.shape = shape
        self.axes = [axis for axis in reversed(range(len(shape))) if shape[axis] > 1]
        self.looked_at = 0
        # A closed walk through several chips needs a link for each.
        sums = (n // cores if n > cores else 0 for n in (shape[axis] for axis in self.axes))
        self.least = [(0, 1, total) for total in sums]
        self.chosen: tuple[_Key, _Tiles] | None = None

    def best(self, dims: tuple[_Dim, ...]) -> _Tiles:
        # Try all orders of nesting. One that helps an earlier axis must not cost a later axis.
        orders = permutations(self.axes) if len(self.axes) < 5 else [tuple(self.axes)]
        for order in orders:
            self._nest(order, dims, self.least, {})
        assert self.chosen is not None
        return self.chosen[1]

    def _nest(
        self,
        order: tuple[int, ...],
        dims: tuple[_Dim, ...],
        scores: list[tuple[int, int, int]],
        tiles: _Tiles,
    ) -> None:
        key = tuple(zip(*scores, strict=True))
        if self.chosen and (key >= self.chosen[0] or self.looked_at >= _MOST_TILES):
            return
        if not order:
            self.chosen = key, tiles
            return
        axis, *inside = order
        place = self.axes.index(axis)
        options = _options(self.shape[axis], dims)
        self.looked_at += len(options)
        for option in options:
            better = [*scores[:place], option.score, *scores[place + 1 :]]
            self._nest(tuple(inside), option.rest, better, {**tiles, axis: option.sides})


@lru_cache(maxsize=1024)
def _options(size: int, dims: tuple[_Dim, ...]) -> tuple[_TileChoice, ...]:
    options: list[_TileChoice] = []
    for sizes in _tilings(size, dims):
        sides = tuple(map(_Side, sizes, dims))
        rest = tuple(
            dim._replace(left=dim.left // side, stride=dim.stride * side) for side, dim in sides
        )
        longest, total = _steps(tuple(sorted(side for side in sides if side.size > 1)))
        options.append(_TileChoice((int(longest > 1), max(longest, 1), total), sides, rest))
    return tuple(sorted(options, key=lambda option: option.score))


@lru_cache(maxsize=1024)
def _tilings(size: int, dims: tuple[_Dim, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns each tile's sides; of equal dimensions, only one order."""
    if not dims:
        return ((),) if size == 1 else ()
    first, *others = dims
    return tuple(
        (side, *rest)
        for side in range(1, min(size, first.left) + 1)
        if size % side == 0 and first.left % side == 0
        for rest in _tilings(size // side, tuple(others))
        if not (others and first == others[0] and side < rest[0])
    )


@lru_cache(maxsize=4096)
def _steps(sides: tuple[_Side, ...]) -> tuple[int, int]:
    """Returns a walk's longest step, and the sum, in links."""
    walk = _walk(sides)
    steps = np.zeros(len(walk), int)
    for place, (_, dim) in zip(walk.T, sides, strict=True):
        apart = np.abs(place - np.roll(place, -1)) * dim.stride
        if dim.around:
            apart = np.minimum(apart, dim.around - apart)
        steps += apart * dim.cost
    return int(steps.max()), int(steps.sum())


def _closes(sides: list[_Side]) -> bool:
    """Returns whether a walk through the tile can close with steps of one place."""
    # With several sides, places must be even in number: every step changes a place's colour.
    if len(sides) > 1:
        return prod(size for size, _ in sides) % 2 == 0
    return all(size == 2 or size * dim.stride == dim.around for size, dim in sides)


def _walk(sides: tuple[_Side, ...]) -> Int[np.ndarray, "size dims"]:
    # The longest strides come first, because a snake takes the first ones least often.
    order = sorted(
        (i for i, side in enumerate(sides) if side.size > 1),
        key=lambda i: -sides[i].dim.stride * sides[i].dim.cost,
    )
    lanes = [i for i in order if sides[i].size % 2 == 0]
    if not _closes([sides[i] for i in order]):
        # Out over every second place, back over the others: no step is longer than two places.
        path = _snake([sides[i].size for i in order])
        path = np.concatenate([path[::2], path[1::2][::-1]])
    elif len(order) < 2:
        path = _snake([sides[i].size for i in order])
    else:
        # The snake goes to and fro over all places but its first, which is the lane back.
        order = [lanes[0], *(i for i in order if i != lanes[0])]
        out = sides[lanes[0]].size
        snake = _snake([sides[i].size for i in order[1:]])
        rows = [snake[1:] if row % 2 == 0 else snake[:0:-1] for row in range(out)]
        rows.append(np.repeat(snake[:1], out, axis=0))
        lane = np.concatenate([np.repeat(np.arange(out), len(snake) - 1), np.arange(out)[::-1]])
        path = np.concatenate([lane[:, None], np.concatenate(rows)], axis=1)
    walk = np.zeros((len(path), len(sides)), int)
    walk[:, order] = path
    return walk


def _snake(sizes: list[int]) -> Int[np.ndarray, "size dims"]:
    """Returns a box walk by neighbours, the last dimension fastest."""
    path = np.zeros((1, 0), int)
    for size in reversed(sizes):
        rows = [path if row % 2 == 0 else path[::-1] for row in range(size)]
        outer = np.repeat(np.arange(size), len(path))
        path = np.concatenate([outer[:, None], np.concatenate(rows)], axis=1)
    return path
