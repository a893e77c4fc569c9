"""Meshes by axis names, the logical order of a ring, and its physical hops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from jaxtyping import Bool, Int, Shaped

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.types import MeshAxes
from jaxpar.axis.axis import AxisLike, axis_names, ring_positions
from jaxpar.axis.ring_order import AxisLinks, How, note_links
from jaxpar.mesh.ring_orders import Cycle, Walk, walks_of_places, walks_over
from jaxpar.mesh.slices import on_torus, slice_of
from jaxpar.mesh.torus import closed_dims, slice_grid


@public
def make_mesh(
    axes: MeshAxes,
    *,
    devices: Sequence[Any] | None = None,
    axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> Mesh:
    """Returns a mesh with these axes, in a fast physical order of the devices.

    The last axis gets the nearest devices, so put that with the most traffic last.

    Args:
      axes: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`, major axis first. One size may be -1, for all
        other devices.
      devices: all devices of the mesh. None: `jax.devices()`.
      axis_types: one `jax.sharding.AxisType`, or a mapping by axis name; missing names are Auto.

    Returns:
      A `jax.sharding.Mesh`. `ring_hops` shows the distances of neighbours.

    Raises:
      ValueError: axes are malformed or repeated, `axis_types` has other names, or the product of
        sizes is not the number of devices.

    On a full box of one-device TPU chips, with up to four axes longer than 1, all neighbours are
    one link apart if any order allows it. Otherwise later axes take precedence: first for rings of
    one link, then for shorter steps. Devices of a chip are neighbours on the last axis whose size
    allows it. TPU slices of equal shape lie along the first axes, all with the same layout.

    Other TPU devices keep their order. Other platforms use `jax.experimental.mesh_utils`.

    Example:
      >>> mesh = make_mesh("dp=2,tp=-1")  # 8 devices
      >>> dict(mesh.shape)
      {'dp': 2, 'tp': 4}
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise value_error("devices is empty; pass at least one, or None for all")
    sizes = _fill_sizes(_parse_axes(axes), len(devices))
    if isinstance(axis_types, Mapping):
        unknown = sorted(set(axis_types) - set(sizes))
        if unknown:
            raise value_error(f"axis_types names {unknown}; the axes are {list(sizes)}")
        types = tuple(axis_types.get(name, AxisType.Auto) for name in sizes)
    else:
        types = (axis_types,) * len(sizes)
    shape = tuple(sizes.values())
    grid = slice_grid(devices, shape)
    if grid is None and all(on_torus(device) for device in devices):
        grid = np.array([*devices, None])[:-1].reshape(shape)  # None: no iteration over devices
    elif grid is None:
        grid = mesh_utils.create_device_mesh(shape, devices)
    mesh = Mesh(grid, tuple(sizes), axis_types=types)
    if all(on_torus(device) for device in devices):
        walks = {name: _walks(mesh, name) for name in mesh.axis_names}
        note_links(mesh, AxisLinks(walks, cache(partial(_messages_a_link, mesh))))
    return mesh


def why_not_closed(mesh: Mesh, name: str) -> str | None:
    """Returns why an axis is no closed ring of links; None if it is."""
    # An axis of two counts as closed: three such axes are a cube.
    if not stays_within_a_slice(mesh, name):
        return f"{name} joins slices"
    *steps, back = ring_hops(mesh, name).max(axis=0).tolist()
    if max(steps) > 1:
        return f"neighbours on {name} are up to {max(steps)} links apart"
    return f"the ends of {name} are {back} links apart" if back > 1 else None


def _walks(mesh: Mesh, name: str) -> tuple[Walk, ...]:
    rings = _rings(mesh, (name,))
    if rings.shape[1] < 8 or not stays_within_a_slice(mesh, name):
        return ()
    coords = np.array([device.coords for device in rings.flat]).reshape(*rings.shape, -1)
    extent = np.ptp([device.coords for device in mesh.devices.flat], axis=0) + 1
    around = np.where(closed_dims(rings[0, 0].device_kind, extent), extent, 0)
    walks = walks_of_places(coords[0], around)
    places = range(rings.shape[1])
    for walk in walks:  # check all rings of the axis, not only the first
        for hops in range(1) if isinstance(walk, Cycle) else places:  # a cycle has one next device
            there = [walk.next(place, 1, hops) for place in places]
            apart = np.abs(coords - coords[:, there])
            apart = np.where(around, np.minimum(apart, around - apart), apart)
            if (apart.sum(-1) != 1).any():
                return ()
    return walks


def stays_within_a_slice(mesh: Mesh, name: str) -> bool:
    slices = np.vectorize(slice_of, otypes=[int])(_rings(mesh, (name,)))
    return bool((slices == slices[:, :1]).all())


def _messages_a_link(mesh: Mesh, names: tuple[str, ...], how: How) -> int:
    """Returns the busiest link's messages, if all rings send in both directions."""
    # Hops take dimensions in turn, in the shorter direction.
    rings = _rings(mesh, names)
    size = rings.shape[1]
    places = np.array([(slice_of(device), *device.coords) for device in rings.flat])
    places = (places - places.min(0)).reshape(*rings.shape, -1)
    extent = places.max((0, 1)) + 1
    closed = np.array([False, *closed_dims(rings[0, 0].device_kind, extent[1:])])
    walks: tuple[Walk, ...] = ()
    if how == "collective":
        lengths = np.array([len(set(dim.tolist())) for dim in places[0].T])
        if (lengths > 1).sum() != 1:  # over several dimensions, XLA finds links for all
            return _on_the_same_chips(places)
        closed &= lengths == extent  # an open ring returns over the same links
    elif how == "rings":
        sizes = {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}
        walks = _walks(mesh, *sizes) if len(sizes) == 1 else walks_over(sizes)
    hops = range(size - 1) if any(walk.exchanges for walk in walks) else range(1)
    directions = (1,) if size == 2 or len(hops) > 1 else (1, -1)

    def target(place: int, way: int, walk: Walk | None, hop: int) -> int:
        return (place + way) % size if walk is None else walk.next(place, way, hop)

    def targets(hop: int) -> list[list[int]]:
        """Returns where each device sends, for rings over the same devices."""
        of_all = product(directions, walks or (None,))
        return [[target(place, way, walk, hop) for place in range(size)] for way, walk in of_all]

    return max(
        _busiest(np.stack([places[:, to] for to in targets(hop)]), places, extent, closed)
        for hop in hops
    )


def _on_the_same_chips(places: Int[np.ndarray, "rings size dims"]) -> int:
    chips = Counter(frozenset(map(tuple, ring)) for ring in places.tolist())
    return max(chips.values())


def _busiest(
    to: Int[np.ndarray, "ways rings size dims"],
    start: Int[np.ndarray, "rings size dims"],
    extent: Int[np.ndarray, " dims"],
    closed: Bool[np.ndarray, " dims"],
) -> int:
    """Returns the busiest link's messages if all places send at once."""
    at, used = np.broadcast_to(start, to.shape).copy(), [np.empty((0, len(extent) + 1), int)]
    for dim in range(1, len(extent)):  # between slices there are no links
        apart = to[..., dim] - at[..., dim]
        if closed[dim]:
            half = (extent[dim] - 1) // 2
            apart = (apart + half) % extent[dim] - half
        while apart.any():
            moves, step = apart != 0, np.sign(apart)
            link = dim * step[moves]  # the dimension, with the direction as its sign
            used.append(np.column_stack([at[moves], link]))
            at[..., dim] = (at[..., dim] + step) % extent[dim]
            apart = apart - step
    counts = np.unique(np.concatenate(used), axis=0, return_counts=True)[1]
    return int(counts.max(initial=1))


def _rings(mesh: Mesh, names: tuple[str, ...]) -> Shaped[np.ndarray, "rings size"]:
    order = ring_positions(mesh, names)
    others = [i for i, name in enumerate(mesh.axis_names) if name not in names]
    along = [i for i, name in enumerate(mesh.axis_names) if name in names]
    return mesh.devices.transpose(others + along).reshape(-1, len(order))[:, order]


@public
def ring_order(mesh: Mesh | AbstractMesh, axis: AxisLike) -> Int[np.ndarray, " size"]:
    """Returns the mesh position of each logical index on the ring over `axis`.

    Logical indices count in the order of the *tuple*, as in `lax.axis_index`. The index pairs of
    `lax.ppermute` count in the order of the *mesh*.

    Args:
      mesh: devices, real or described.
      axis: mesh axes in any order.

    Returns:
      `order[p]`: the position of the device with logical index `p`, counted over the ring's axes in
      mesh order.

    Raises:
      ValueError: an axis is missing or repeated.

    Example:
      >>> ring_order(make_mesh("dp=2,tp=2", devices=jax.devices()[:4]), ("tp", "dp"))
      array([0, 2, 1, 3])
    """
    return ring_positions(mesh, axis_names(axis))


@public
def edge_disjoint_rings(mesh: Mesh | AbstractMesh, axis: AxisLike) -> Int[np.ndarray, "rings size"]:
    """Returns the device orders of the rings of `mode="multi-ring"` over several axes.

    Each axis of more than one device gives one ring, which goes through all devices. If each axis
    is a closed ring of links, each step is one link, and the rings use every link of that torus
    once.

    Args:
      mesh: as in `ring_order`.
      axis: a mesh axis, which gives its ring, or several of 3 devices or more.

    Returns:
      `rings[r, s]`: the position, counted over the axes in mesh order, of the device at step `s` of
      ring `r`. The last step leads to the first device.

    Raises:
      ValueError: an axis is missing or repeated, or one of several axes has 2 devices.

    Example:
      >>> from jaxpar.schedule import target
      >>> rings = edge_disjoint_rings(target("v5p:4x4x4", "dp=4,x=4,y=4").mesh, ("x", "y"))
      >>> rings.shape, rings[0, :6].tolist(), rings[1, :6].tolist()
      ((2, 16), [0, 1, 2, 3, 7, 4], [0, 4, 8, 12, 13, 1])

    Source: Kotzig, "Every Cartesian product of two circuits is decomposable into two Hamiltonian
    circuits" (1973); Aubert and Schneider (1982) for more dimensions.
    """
    names = axis_names(axis)
    order = ring_positions(mesh, names)
    sizes = {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}
    if len(sizes) < 2:
        return order[None]
    walks = [walk for walk in walks_over(sizes) if isinstance(walk, Cycle)]
    if not walks:
        raise value_error(
            f"axes of sizes {sizes} are a cube, whose devices exchange blocks over one dimension "
            "after the other and have no rings that share no link; give axes of 3 or more"
        )
    return np.stack([order[walk.devices] for walk in walks])


@public
def ring_hops(mesh: Mesh, axis: AxisLike) -> Int[np.ndarray, "rings size"]:
    """Returns the number of physical links from each device of a ring to the next.

    A ring is fast if all are at most 1: each transfer has its own link. A ring over several axes
    has a longer hop where its last axis begins again; `edge_disjoint_rings` avoid it.

    Args:
      mesh: as in `ring_order`.
      axis: mesh axes in any order.

    Returns:
      `hops[r, p]`: the links from logical index `p` to `p + 1`, or from the last to 0, on ring
      `r`. Rings are in mesh order of the other axes. On TPUs, this is the distance on the torus of
      the mesh's devices, and 0 inside a chip. Dimensions of 16 wrap around on v5e and v6e. On v4,
      v5p and tpu7x, either all dimensions wrap around (each a multiple of 4) or none. On other
      platforms, all hops are 1.

    Raises:
      ValueError: an axis is missing or repeated, or joins TPU slices, which have no links.

    Example:
      >>> ring_hops(make_mesh("tp=8"), "tp").max()  # CPU devices
      np.int64(1)

    Source: wrap-around rules from the book "How to scale your model".
    """
    rings = _rings(mesh, axis_names(axis))
    if not all(on_torus(device) for device in rings.flat):
        return np.asarray(rings != np.roll(rings, -1, axis=1)).astype(int)
    slices = np.array([slice_of(device) for device in rings.flat]).reshape(rings.shape)
    joined = slices[(slices != slices[:, :1]).any(axis=1)]
    if joined.size:
        raise value_error(
            f"axis {axis!r} joins the slices {sorted(set(joined[0].tolist()))}"
            ", between which there are no links to count; name axes that stay within a slice"
        )
    coords = np.array([device.coords for device in rings.flat]).reshape(*rings.shape, -1)
    apart = np.abs(coords - np.roll(coords, -1, axis=1))  # [rings, size, torus dims]
    for number in set(slices[:, 0].tolist()):
        inside = slices[:, 0] == number
        extent = np.ptp(coords[inside], axis=(0, 1)) + 1
        closed = closed_dims(rings[inside][0, 0].device_kind, extent)
        around = np.minimum(apart[inside], extent - apart[inside])
        apart[inside] = np.where(closed, around, apart[inside])
    return apart.sum(-1)


def _parse_axes(axes: MeshAxes) -> dict[str, int]:
    if not isinstance(axes, str):
        mapping: Any = axes
        if not isinstance(mapping, Mapping):
            raise type_error(
                f"axes must be text such as 'dp=2,tp=4' or a mapping of names to sizes, "
                f"got {mapping!r}"
            )
        wrong = {k: v for k, v in mapping.items() if not isinstance(k, str) or type(v) is not int}
        if wrong:
            raise type_error(f"axes must map names to whole numbers, got {wrong}")
        return dict(axes)
    sizes: dict[str, int] = {}
    for part in axes.split(","):
        name, _, size = (text.strip() for text in part.partition("="))
        if not name or not size.removeprefix("-").isdecimal():
            raise value_error(
                f"axes {axes!r}: {part.strip()!r} is not of the form name=size, as in 'dp=2,tp=4'"
            )
        if name in sizes:
            raise value_error(
                f"axes {axes!r} name {name!r} twice; give each axis a name of its own"
            )
        sizes[name] = int(size)
    return sizes


def _fill_sizes(sizes: dict[str, int], devices: int) -> dict[str, int]:
    text = " x ".join(f"{name}={size}" for name, size in sizes.items())
    bad = [f"{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]
    if not sizes or bad:
        raise value_error(f"axes must have at least one size, positive or -1, got {bad or sizes}")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise value_error(f"{text}: {free} are -1; give the sizes of all of them but one")
    fixed = prod(size for size in sizes.values() if size != -1)
    if free:
        if devices % fixed:
            raise value_error(
                f"{text}: the other axes take {fixed}, which does not divide {devices} "
                f"devices ({devices} = {devices // fixed} x {fixed} + {devices % fixed}); "
                "choose sizes whose product divides it, or pass fewer devices"
            )
        return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
    if fixed != devices:
        remedy = (
            f"pass devices=jax.devices()[:{fixed}] to use only some"
            if fixed < devices
            else "choose smaller sizes"
        )
        raise value_error(
            f"{text} = {fixed} devices, but there are {devices}; make one size -1, or {remedy}"
        )
    return sizes
