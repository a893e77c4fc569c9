"""The mesh axes over which a compiled collective sends.

A program knows devices by number. Here its groups and pairs get the names of a mesh.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxpar.tools.program.costs import Message
from jaxpar.tools.toolkit_api import on_torus, slice_of

Pairs = tuple[tuple[int, int], ...]
Groups = Sequence[Sequence[int]]


def in_mesh(message: Message, mesh: Mesh) -> Message:
    """Numbers a message's devices by their places in a mesh of all slices."""
    slices = places_of_slices(mesh)
    if len(slices) < 2:
        return message
    if message.between_slices:
        place = {device.id: number for number, device in enumerate(mesh.devices.flat)}
        ids = {device for group in (*message.pairs, *message.groups) for device in group}
        if lost := sorted(ids - place.keys()):
            raise ValueError(
                f"in_mesh: a transfer between slices has the device {lost[0]}, which is not in the "
                f"mesh {dict(mesh.shape)}; give the mesh that the program was compiled for"
            )
        pairs = tuple((place[source], place[target]) for source, target in message.pairs)
        groups = [[place[n] for n in group] for group in message.groups] or slices.T.tolist()
        return replace(message, pairs=pairs, groups=groups)
    if message.pairs:
        pairs = tuple((int(row[a]), int(row[b])) for row in slices for a, b in message.pairs)
        return replace(message, pairs=pairs)
    groups = message.groups or [range(slices.shape[1])]
    return replace(
        message, groups=[row[list(group)].tolist() for row in slices for group in groups]
    )


@lru_cache
def places_of_slices(mesh: Mesh) -> Int[np.ndarray, "slices size"]:
    numbers = np.array([slice_of(d) if on_torus(d) else 0 for d in mesh.devices.flat])
    return np.array([np.flatnonzero(numbers == number) for number in np.unique(numbers)])


def lane_of(mesh: Mesh, pairs: Pairs) -> str:
    """Names a permute by axes, as in `"tp +1"`."""
    shape = tuple(mesh.shape.values())
    source, target = (
        np.array(np.unravel_index(np.array(p), shape)) for p in zip(*pairs, strict=True)
    )
    parts: list[str] = []
    for name, size, difference in zip(mesh.axis_names, shape, target - source, strict=True):
        offsets = set((difference % size).tolist())
        if offsets == {0}:
            continue
        offset = offsets.pop() if len(offsets) == 1 else None
        signed = None if offset is None else offset - size if 2 * offset > size else offset
        parts.append(name if signed is None else f"{name} {signed:+d}")
    return ", ".join(parts) or "itself"


def lane_of_groups(mesh: Mesh, groups: Groups) -> str:
    shape = tuple(mesh.shape.values())
    members = np.array(np.unravel_index(np.array(groups[0]), shape))  # [axes, size]
    return ",".join(
        name
        for name, row in zip(mesh.axis_names, members, strict=True)
        if len(set(row.tolist())) > 1
    )


def axes_of(mesh: Mesh, message: Message) -> tuple[str, ...]:
    message = in_mesh(message, mesh)
    if message.kind == "collective-permute":
        text = lane_of(mesh, message.pairs)
    else:
        text = lane_of_groups(mesh, message.groups or [range(mesh.size)])
    parts = (part.split()[0] for part in text.split(",") if part.strip())
    return tuple(name for name in dict.fromkeys(parts) if name in mesh.axis_names)
