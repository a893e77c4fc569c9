"""Batches: each process passes its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from jaxpar.arguments.calls import naming, type_error, value_error
from jaxpar.layout._apply_rules import Placed, Shaped
from jaxpar.layout._array_layout import axes_by_dim
from jaxpar.layout._layout_error import LayoutProblem, refuse, shape_text
from jaxpar.layout._mesh import size_of
from jaxpar.layout._paths import arrays_of, described, path_text
from jaxpar.layout._rule import Rule

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout


def place_batch(layout: Layout, batch: Any, *, compare: bool = True) -> Any:
    arrays, tree = _arrays_of(batch)
    problems: list[LayoutProblem] = []
    laid = [_laid(layout, path, x, problems) for path, x in arrays]
    refuse(problems)
    if compare and jax.process_count() > 1:
        _compare([(path, x, shape) for (path, x), (_, shape) in zip(arrays, laid, strict=True)])
    placed = [
        jax.make_array_from_process_local_data(sharding, x, shape)
        for (_, x), (sharding, shape) in zip(arrays, laid, strict=True)
    ]
    return jax.tree.unflatten(tree, placed)


def _arrays_of(batch: Any) -> tuple[list[tuple[str, np.ndarray]], Any]:
    pairs, tree = arrays_of(batch, "batch")
    arrays: list[tuple[str, np.ndarray]] = []
    for pair, (keys, leaf) in zip(pairs, tree_leaves_with_path(batch), strict=True):
        if pair is None:
            raise type_error(
                f"{path_text(keys)!r} of the batch is {leaf!r:.40}, no array; make numbers of it, "
                "or leave it out"
            )
        described(*pair)  # refuses arrays of text
        arrays.append((pair[0], np.asarray(pair[1])))
    return arrays, tree


def _compare(arrays: list[tuple[str, np.ndarray, tuple[int, ...]]]) -> None:
    """Raises in all processes if they would make arrays of different shapes.

    With such arrays their programs differ, whose collectives wait for ever or return garbage.
    """
    marks = [crc32(f"{path} {x.dtype} {shape}".encode()) for path, x, shape in arrays]
    sums = _from_all([len(marks), crc32(repr(marks).encode())])
    if (sums == sums[0]).all():
        return
    counts = sums[:, 0]
    if (counts != counts[0]).any():
        other = int(np.argmax(counts != counts[0]))
        here, there = f"{counts[0]} arrays", f"{counts[other]}"
    else:
        differ = (all_marks := _from_all(marks)) != all_marks[0]
        number = int(np.argmax(differ.any(0)))
        other = int(np.argmax(differ[:, number]))
        path, x, shape = arrays[number]
        text = f"{path!r} {shape_text(x.dtype, x.shape)} of {list(shape)}"
        texts = _from_all(list(text.encode()[:200].ljust(200)))
        here, there = (bytes(texts[rank].tolist()).decode().strip() for rank in (0, other))
    raise value_error(
        f"processes make different arrays: process 0 has {here}, and process {other} has {there}; "
        "give each process as many rows, or use Layout.batches, which fills up"
    )


def _from_all(numbers: list[int]) -> np.ndarray:
    """Returns the numbers of each process, a row each."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(numbers, np.uint32)))


def batch_part(layout: Layout) -> tuple[int, int]:
    sharding = NamedSharding(layout.mesh, PartitionSpec(*tuple(_rule(layout).layout)[:1]))
    size = size_of(sharding.mesh, axes_by_dim(sharding.spec, 1)[0])
    index_of = sharding.devices_indices_map((size,))
    mine = sorted(
        {
            along.indices(size)[0]
            for device, (along,) in index_of.items()
            if device.process_index == jax.process_index()
        }
    )
    if mine != list(range(mine[0], mine[0] + len(mine))) or mine[0] % len(mine):
        raise value_error(
            f"the devices of process {jax.process_index()} have rows {mine} of {size}, which are "
            "no part of equal ones; order the mesh so that a process's devices are neighbours"
        )
    return mine[0] // len(mine), size // len(mine)


def batches(layout: Layout, source: Iterable[Any], rows: int | None) -> Iterator[tuple[Any, Array]]:
    iterator, like = iter(source), None  # the first batch, whose shapes all batches have
    while True:
        batch = next(iterator, None)
        with naming("Layout.batches"):  # not while the caller runs
            if not _any_process(batch is not None):
                return
            if batch is None:  # another process still has rows
                batch = _none_of(like)
            arrays, tree = _arrays_of(batch)
            batch, have = jax.tree.unflatten(tree, [x for _, x in arrays]), _rows_of(arrays)
            if like is None:
                like, rows = batch, rows or have
                if not rows:
                    raise value_error(
                        "the first batch has no rows; say how many batches have, rows="
                    )
            filled = _filled(layout, batch, have, rows or have)
        yield filled


def _none_of(like: Any) -> Any:
    if like is None:
        raise value_error(
            f"process {jax.process_index()} has no batch at all, and others have; give each "
            "process at least one"
        )
    return jax.tree.map(lambda x: x[:0], like)


def _filled(layout: Layout, batch: Any, have: int, rows: int) -> tuple[Any, Array]:
    if have > rows:
        raise value_error(
            f"a batch has {have} rows, and batches have at most {rows}; say how many the largest "
            "has, rows="
        )

    def fill(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, rows - have)] + [(0, 0)] * (x.ndim - 1))

    weights = (np.arange(rows) < have).astype(np.float32)
    return place_batch(layout, jax.tree.map(fill, batch)), place_batch(
        layout, weights, compare=False
    )


def _laid(
    layout: Layout, path: str, x: np.ndarray, problems: list[LayoutProblem]
) -> tuple[NamedSharding, tuple[int, ...]]:
    """Returns a global array's sharding and shape; adds why it does not fit."""
    rule = _rule(layout)
    spec = PartitionSpec(*tuple(rule.layout)[: x.ndim])
    sharding = NamedSharding(layout.mesh, spec)
    parts = _processes_along(sharding, x.ndim)
    shape = tuple(size * count for size, count in zip(x.shape, parts, strict=True))
    array = Shaped(path, shape, x.dtype)
    Placed(array, "batch", rule.first(x.ndim), layout.mesh, {}).lay(problems)
    return sharding, shape


def _rule(layout: Layout) -> Rule:
    if layout.rules.batch is None:
        raise value_error(
            "the map has no spec for data; give LayoutMap(..., batch=P('dp')), with the mesh axes "
            "that shard the first dimension"
        )
    return layout.rules.batch


def _processes_along(sharding: NamedSharding, rank: int) -> tuple[int, ...]:
    """Counts each dimension's parts, a part for a process."""
    shape = tuple(size_of(sharding.mesh, axes) for axes in axes_by_dim(sharding.spec, rank))
    parts = sharding.devices_indices_map(shape)
    mine = [index for device, index in parts.items() if device.process_index == jax.process_index()]
    return tuple(
        size // len({along.indices(size)[0] for along in indices})
        for size, indices in zip(shape, zip(*mine, strict=True), strict=True)
    )


def _rows_of(arrays: list[tuple[str, np.ndarray]]) -> int:
    sizes = {x.shape[0] if x.ndim else None for _, x in arrays}
    if len(sizes) != 1 or None in sizes:
        raise value_error(
            "the arrays of a batch must have as many rows, along their first dimension, got "
            f"{', '.join(f'{path!r} {x.shape}' for path, x in arrays) or 'no array'}"
        )
    (rows,) = sizes
    return int(rows or 0)


def _any_process(mine: bool) -> bool:
    """Returns whether any process has data: all make equally many batches."""
    if jax.process_count() == 1:
        return mine
    return bool(np.any(multihost_utils.process_allgather(np.asarray(mine))))
