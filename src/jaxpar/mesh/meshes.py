"""Meshes by axis name, the logical order of a ring on a mesh, and its physical hops."""

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
from jaxpar.axis.axis import AxisLike, axis_names, ring_positions, walks_over
from jaxpar.mesh.cycles import Cycle, Walk, walks_of_places
from jaxpar.mesh.torus import closed_dims, on_torus, slice_grid, slice_of
from jaxpar.mesh.walk import AxisLinks, How, note_links


@public
def make_mesh(
    axes: MeshAxes,
    *,
    devices: Sequence[Any] | None = None,
    axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> Mesh:
    """Makes a mesh from axis names and sizes, in a good physical order of the devices.

    On TPU, if the devices are a box of chips:

    - All rings of all axes are of one link (`ring_hops` of at most 1) where, with one device a chip
      and up to four axes longer than 1, any order of the devices makes them so. With two devices
      a chip, where whole dimensions can be dealt out to the axes, the chip being one more.
    - Otherwise axes come first from the last to the first, so put the one with the most
      traffic last: first those that can have rings of one link get them, then longest steps are
      kept short. The order is the best of those that nest one tile for each axis.
    - The devices of a chip are neighbours on the last axis that can use it.
    - Several slices of one extent go to the first axes, as far as their sizes divide, and are
      all laid out alike.

    Other TPU devices keep the order in which they are given; devices of other platforms get that
    of `jax.experimental.mesh_utils`.

    Args:
      axes: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`, major axis first. One size may be -1: it takes
        what the others leave.
      devices: the devices to use, all of them; `jax.devices()` if None.
      axis_types: one `jax.sharding.AxisType` for all axes, or one by axis name (Auto where a name
        is missing).

    Returns:
      A `jax.sharding.Mesh`. `ring_hops` shows how near neighbours on an axis are.

    Raises:
      TypeError: axes that are neither text nor a mapping of names to whole numbers.
      ValueError: no devices, a malformed axis, a repeated name, a size that is not positive, more
        than one -1, or sizes whose product is not the number of devices.

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
        grid = np.array([*devices, None])[:-1].reshape(shape)  # None: devices are no sequences
    elif grid is None:
        grid = mesh_utils.create_device_mesh(shape, devices)
    mesh = Mesh(grid, tuple(sizes), axis_types=types)
    if all(on_torus(device) for device in devices):
        walks = {name: _walks(mesh, name) for name in mesh.axis_names}
        note_links(mesh, AxisLinks(walks, cache(partial(_messages_a_link, mesh))))
    return mesh


def why_not_closed(mesh: Mesh, name: str) -> str | None:
    """Why an axis is no closed ring of links; None where it is: no step is over more than one.

    Two devices at the ends of one link are one here: three such axes are a cube.
    """
    if not _stays_within_a_slice(mesh, name):
        return f"{name} joins slices"
    *steps, back = ring_hops(mesh, name).max(axis=0).tolist()
    if max(steps) > 1:
        return f"neighbours on {name} are up to {max(steps)} links apart"
    return f"the ends of {name} are {back} links apart" if back > 1 else None


def _walks(mesh: Mesh, name: str) -> tuple[Walk, ...]:
    """The walks of an axis by itself that share no link, of which each hop is over one link."""
    rings = _rings(mesh, (name,))
    if rings.shape[1] < 8 or not _stays_within_a_slice(mesh, name):
        return ()
    coords = np.array([device.coords for device in rings.flat]).reshape(*rings.shape, -1)
    extent = np.ptp([device.coords for device in mesh.devices.flat], axis=0) + 1
    around = np.where(closed_dims(rings[0, 0].device_kind, extent), extent, 0)
    walks = walks_of_places(coords[0], around)
    places = range(rings.shape[1])
    for walk in walks:  # other rings may lie otherwise
        for hops in range(1) if isinstance(walk, Cycle) else places:  # a cycle has one next device
            there = [walk.next(place, 1, hops) for place in places]
            apart = np.abs(coords - coords[:, there])
            apart = np.where(around, np.minimum(apart, around - apart), apart)
            if (apart.sum(-1) != 1).any():
                return ()
    return walks


def _stays_within_a_slice(mesh: Mesh, name: str) -> bool:
    slices = np.vectorize(slice_of, otypes=[int])(_rings(mesh, (name,)))
    return bool((slices == slices[:, :1]).all())


def _messages_a_link(mesh: Mesh, names: tuple[str, ...], how: How) -> int:
    """How many messages share the busiest link, where all rings over axes send both ways at once.

    A hop over several links takes one dimension after the other, each the shorter way. Two devices
    of a chip share its links. Those of an axis of two exchange one message each.
    """
    rings = _rings(mesh, names)
    size = rings.shape[1]
    places = np.array([(slice_of(device), *device.coords) for device in rings.flat])
    places = (places - places.min(0)).reshape(*rings.shape, -1)
    extent = places.max((0, 1)) + 1
    closed = np.array([False, *closed_dims(rings[0, 0].device_kind, extent[1:])])
    walks: tuple[Walk, ...] = ()
    if how == "collective":
        lengths = np.array([len(set(dim.tolist())) for dim in places[0].T])
        if (lengths > 1).sum() != 1:  # over several dimensions XLA finds links for each
            return _on_the_same_chips(places)
        closed &= lengths == extent  # what is no closed ring comes back over the same links
    elif how == "rings":
        sizes = {name: mesh.shape[name] for name in names if mesh.shape[name] > 1}
        walks = _walks(mesh, *sizes) if len(sizes) == 1 else walks_over(sizes)
    hops = range(size - 1) if any(walk.exchanges for walk in walks) else range(1)
    directions = (1,) if size == 2 or len(hops) > 1 else (1, -1)

    def target(place: int, way: int, walk: Walk | None, hop: int) -> int:
        return (place + way) % size if walk is None else walk.next(place, way, hop)

    def targets(hop: int) -> list[list[int]]:
        """To which place each device sends, of all rings over the same devices."""
        of_all = product(directions, walks or (None,))
        return [[target(place, way, walk, hop) for place in range(size)] for way, walk in of_all]

    return max(
        _busiest(np.stack([places[:, to] for to in targets(hop)]), places, extent, closed)
        for hop in hops
    )


def _on_the_same_chips(places: Int[np.ndarray, "rings size dims"]) -> int:
    """How many rings are over devices of the same chips."""
    chips = Counter(frozenset(map(tuple, ring)) for ring in places.tolist())
    return max(chips.values())


def _busiest(
    to: Int[np.ndarray, "ways rings size dims"],
    start: Int[np.ndarray, "rings size dims"],
    extent: Int[np.ndarray, " dims"],
    closed: Bool[np.ndarray, " dims"],
) -> int:
    """How many messages share the busiest link, of those that all places send at once."""
    at, used = np.broadcast_to(start, to.shape).copy(), [np.empty((0, len(extent) + 1), int)]
    for dim in range(1, len(extent)):  # between slices there are no links
        apart = to[..., dim] - at[..., dim]
        if closed[dim]:
            half = (extent[dim] - 1) // 2
            apart = (apart + half) % extent[dim] - half
        while apart.any():
            moves, step = apart != 0, np.sign(apart)
            link = dim * step[moves]  # from a place along a dimension, one way or the other
            used.append(np.column_stack([at[moves], link]))
            at[..., dim] = (at[..., dim] + step) % extent[dim]
            apart = apart - step
    counts = np.unique(np.concatenate(used), axis=0, return_counts=True)[1]
    return int(counts.max(initial=1))


def _rings(mesh: Mesh, names: tuple[str, ...]) -> Shaped[np.ndarray, "rings size"]:
    """The devices of each ring, in logical order; rings are in mesh order."""
    order = ring_positions(mesh, names)
    others = [i for i, name in enumerate(mesh.axis_names) if name not in names]
    along = [i for i, name in enumerate(mesh.axis_names) if name in names]
    return mesh.devices.transpose(others + along).reshape(-1, len(order))[:, order]


@public
def ring_order(mesh: Mesh | AbstractMesh, axis: AxisLike) -> Int[np.ndarray, " size"]:
    """Returns the device order of the ring over `axis`: logical index to mesh position.

    The logical index of a device on a tuple of axes counts in the order of the *tuple*, as in
    `lax.axis_index`; collectives that take index pairs count in the order of the *mesh*. Everything
    in jaxpar that permutes goes through this function.

    Args:
      mesh: a concrete or an abstract mesh.
      axis: one mesh axis, or a tuple or list of distinct ones in any order.

    Returns:
      `order[p]`: the position, counted over the ring's axes in mesh order, of the device whose
      logical index is `p`.

    Raises:
      ValueError: an axis that the mesh lacks, or one that is named twice.

    Example:
      >>> ring_order(make_mesh("dp=2,tp=2", devices=jax.devices()[:4]), ("tp", "dp"))
      array([0, 2, 1, 3])
    """
    return ring_positions(mesh, axis_names(axis))


@public
def edge_disjoint_rings(mesh: Mesh | AbstractMesh, axis: AxisLike) -> Int[np.ndarray, "rings size"]:
    """Returns the device orders of the rings that `mode="multi-ring"` goes round.

    There are as many as axes of more than one device. Each goes through all devices; if each axis
    is a closed ring of links (`ring_hops` of 1), each step is over one link, and together the rings
    use every link of that torus once.

    Args:
      mesh: a concrete or an abstract mesh.
      axis: a tuple or list of distinct mesh axes, each of 3 devices or more; axes of one device do
        not count. A single axis is a ring already.

    Returns:
      `rings[r, s]`: the position, counted over the axes in mesh order, of the device at step `s` of
      ring `r`; after the last step comes the first one.

    Raises:
      ValueError: an axis that the mesh lacks, or one that is named twice; of several axes, one of 2
        devices, which have one link between them, or all: a cube has other walks than rings.

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
    """Counts the physical links between each device of a ring and the next one.

    A ring is fast when every entry is 1: each transfer then has a link to itself. The ring over
    several axes is in logical order, and jumps where its last axis begins anew. Its hops say
    nothing of `edge_disjoint_rings`: their steps are over one link where each axis by itself has 3
    devices or more and hops of at most 1.

    Args:
      mesh: a mesh of real or described devices.
      axis: one mesh axis, or a tuple or list of distinct ones in any order.

    Returns:
      `hops[r, p]`: the links from logical index `p` to `p + 1` (the last one back to 0) on ring
      `r`; there is one ring for each position on the other axes, in mesh order. On TPU, the
      distance on the torus, and 0 between two devices of one chip. On v5e and v6e a dimension of
      16 wraps around. On v4, v5p and tpu7x all dimensions do if each is a multiple of 4, else
      none. The extent of a slice is that of its devices in the mesh. Devices of other platforms
      count as behind one switch: 1.

    Raises:
      ValueError: an axis that the mesh lacks, or one that is named twice; an axis that joins TPU
        slices, between which there are no links.

    Example:
      >>> ring_hops(make_mesh("tp=8"), "tp").max()  # CPU devices
      np.int64(1)

    Source: wrap-around rules from the public book "How to scale your model".
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
        given: Any = axes
        if not isinstance(given, Mapping):
            raise type_error(
                f"axes must be text such as 'dp=2,tp=4' or a mapping of names to sizes, "
                f"got {given!r}"
            )
        wrong = {k: v for k, v in given.items() if not isinstance(k, str) or type(v) is not int}
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
