"""Replica groups of HLO collectives, in each of the forms in which XLA writes them."""

import re
from math import prod

import numpy as np

_LISTED = re.compile(r"replica_groups=\{(\{[0-9,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_MESH_IOTA = re.compile(r"\[([0-9,]+)\](?:T\(([0-9,]+))?")
_AXIS = re.compile(r"'([^']*)'(?::\(([0-9]+)\)([0-9]+))?")


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Partitions that take part together in a collective; all of them where none are named.

    The forms are lists, `{{0,1},{2,3}}`; an iota, `[2,2]<=[2,2]T(1,0)`; and mesh axes,
    `mesh['dp'=2,'tp'=2] {'tp'}`, whose devices may have an order of their own,
    `mesh['dp'=2,'tp'=2], device_ids=(0,2,1,3) {'tp'}`, and of an axis only a part may be meant,
    `{'tp':(2)4}` being 4 of the parts of an axis that has 2 more major ones.
    """
    if found := _LISTED.search(attributes):
        return [integers(group) for group in re.findall(r"\{([0-9,]+)\}", found.group(1))]
    if found := _IOTA.search(attributes):
        shape, sizes, order = found.groups()
        return _iota(sizes, order).reshape(integers(shape)).tolist()
    if found := _MESH.search(attributes):
        return _mesh_groups(*found.groups())
    return [list(range(devices))]


def integers(text: str) -> list[int]:
    """The natural numbers in a text."""
    return [int(number) for number in re.findall(r"[0-9]+", text)]


def _iota(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(prod(integers(sizes))).reshape(integers(sizes))
    return ids.transpose(integers(order)) if order else ids


def _mesh_groups(axes: str, device_ids: str | None, names: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=([0-9]+)", axes)}
    if device_ids is None:
        ids = np.arange(prod(sizes.values()))
    elif found := _MESH_IOTA.match(device_ids):
        ids = _iota(*found.groups())
    else:
        ids = np.array(integers(device_ids))
    # Every axis in three parts, what is more major, meant and more minor: usually 1, all and 1.
    shape = [part for size in sizes.values() for part in (1, size, 1)]
    along: list[int] = []
    for name, before, size in _AXIS.findall(names):
        at = 3 * list(sizes).index(name)
        if size:
            shape[at : at + 3] = int(before), int(size), sizes[name] // (int(before) * int(size))
        along.append(at + 1)
    others = [part for part in range(len(shape)) if part not in along]
    grid = ids.reshape(shape).transpose(others + along)
    return grid.reshape(-1, prod(shape[part] for part in along)).tolist()
