"""Batches: each process passes its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.arguments.calls import naming, type_error, value_error
from jaxpar.layout._array_layout import axes_by_dim
from jaxpar.layout._fit import Placed, Shaped
from jaxpar.layout._layout_error import LayoutProblem, refuse
from jaxpar.layout._mesh import size_of
from jaxpar.layout._paths import arrays_of
from jaxpar.layout._rule import Rule

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout


def place_batch(layout: Layout, batch: Any) -> Any:
    found, tree = arrays_of(batch, "batch")
    problems: list[LayoutProblem] = []
    placed: list[Any] = []
    for leaf in found:
        if leaf is None:
            raise type_error("batch has a leaf that is no array; remove it, or make it an array")
        placed.append(_place(layout, leaf[0], np.asarray(leaf[1]), problems))
    refuse(problems)
    return jax.tree.unflatten(tree, placed)


def batch_part(layout: Layout) -> tuple[int, int]:
    sharding = NamedSharding(layout.mesh, PartitionSpec(*tuple(_rule(layout).layout)[:1]))
    size = size_of(sharding.mesh, axes_by_dim(sharding.spec, 1)[0])
    own = sharding.devices_indices_map((size,))
    mine = sorted(
        {
            along.indices(size)[0]
            for device, (along,) in own.items()
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
    given, like = iter(source), None  # the first batch, whose shapes all batches have
    while True:
        batch = next(given, None)
        with naming("Layout.batches"):  # not while the caller runs
            if not _any_process(batch is not None):
                return
            if batch is None:  # another process still has rows
                batch = _none_of(like)
            batch = jax.tree.map(np.asarray, batch)
            have = _rows_of(batch)
            if like is None:
                like, rows = batch, rows or have
                if not rows:
                    raise value_error(
                        "the first batch has no rows; say how many batches have, rows="
                    )
            found = _filled(layout, batch, have, rows or have)
        yield found


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
    return place_batch(layout, jax.tree.map(fill, batch)), place_batch(layout, weights)


def _place(layout: Layout, path: str, x: np.ndarray, problems: list[LayoutProblem]) -> Any:
    rule = _rule(layout)
    spec = PartitionSpec(*tuple(rule.layout)[: x.ndim])
    sharding = NamedSharding(layout.mesh, spec)
    parts = _processes_along(sharding, x.ndim)
    shape = tuple(size * count for size, count in zip(x.shape, parts, strict=True))
    array = Shaped(path, shape, x.dtype)
    cut = Placed(array, "batch", rule.first(x.ndim), layout.mesh).lay(problems)
    if cut is None:
        return None
    return jax.make_array_from_process_local_data(sharding, x, shape)


def _rule(layout: Layout) -> Rule:
    if layout.rules.batch is None:
        raise value_error(
            "the map has no spec for data; give LayoutMap(..., batch=P('dp')), with the mesh axes "
            "that shard the first dimension"
        )
    return layout.rules.batch


def _processes_along(sharding: NamedSharding, rank: int) -> tuple[int, ...]:
    """Counts each dimension's parts, one for a process."""
    shape = tuple(size_of(sharding.mesh, axes) for axes in axes_by_dim(sharding.spec, rank))
    own = sharding.devices_indices_map(shape)
    mine = [index for device, index in own.items() if device.process_index == jax.process_index()]
    return tuple(
        size // len({along.indices(size)[0] for along in indices})
        for size, indices in zip(shape, zip(*mine, strict=True), strict=True)
    )


def _rows_of(batch: Any) -> int:
    sizes = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or None in sizes:
        raise value_error(
            "the arrays of a batch must have as many rows, along their first dimension, got "
            f"{sorted(map(str, (x.shape for x in jax.tree.leaves(batch))))}"
        )
    (rows,) = sizes
    return int(rows or 0)


def _any_process(mine: bool) -> bool:
    """Returns whether any process has data: all make equally many batches."""
    if jax.process_count() == 1:
        return mine
    return bool(np.any(multihost_utils.process_allgather(np.asarray(mine))))
