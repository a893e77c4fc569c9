"""Cycles of a torus: through all devices, over one link a step, and no link twice."""

from itertools import pairwise, product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxpar import edge_disjoint_rings, make_mesh, ring_hops, ring_order
from jaxpar.axis.ring_order import AxisLinks, note_links, traced_links
from jaxpar.mesh.ring_orders import (
    AcrossCube,
    AlongLong,
    AlongOne,
    AlongShort,
    Listed,
    Straight,
    disjoint_cycles,
    disjoint_walks,
)
from jaxpar.schedule import target


def links(cycle, sizes):
    """The links that a cycle takes, each as the set of its two ends."""
    walk = cycle.devices
    for ends in pairwise([*walk, walk[0]]):
        one, other = (np.array(np.unravel_index(end, sizes)) for end in ends)
        apart = np.minimum((one - other) % sizes, (other - one) % sizes)
        assert apart.sum() == 1, (sizes, ends)
        yield frozenset(ends)


def check(sizes):
    cycles = disjoint_cycles(sizes)
    assert len(cycles) == len(sizes)
    for cycle in cycles:
        assert sorted(cycle.devices) == list(range(prod(sizes)))
        assert [cycle.step(device) for device in cycle.devices] == list(range(prod(sizes)))
    taken = [link for cycle in cycles for link in links(cycle, sizes)]
    assert len(set(taken)) == len(taken) == prod(sizes) * len(sizes)  # every link of the torus
    return cycles


@pytest.mark.parametrize(
    "sizes",
    [(3, 3), (4, 4), (5, 5), (8, 8), (16, 16), (4, 8), (8, 4), (4, 16), (16, 4), (8, 16), (9, 3)],
)
def test_where_one_side_divides_the_other_places_are_computed(sizes):
    assert [type(cycle) for cycle in check(sizes)] == [AlongShort, AlongLong]


@pytest.mark.parametrize("sizes", [(3, 4), (6, 3), (4, 12), (12, 4), (8, 12), (5, 7), (12, 20)])
def test_other_tori_split_too(sizes):
    assert [type(cycle) for cycle in check(sizes)] == [Listed, Listed]


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 4, 4), (4, 4, 8), (4, 8, 4), (3, 4, 5)])
def test_tori_of_three_dimensions(sizes):
    check(sizes)


@pytest.mark.parametrize("dimensions", [2, 3, 4])
def test_walks_across_a_cube_are_never_over_one_link(dimensions):
    size, walks = 2**dimensions, disjoint_walks((2,) * dimensions)
    assert walks == tuple(AcrossCube(dimensions, first) for first in range(dimensions))
    for walk in walks:
        for device in range(size):
            # What comes by each hop is another device's, and at last its own.
            owners = [walk.behind(device, hops) for hops in range(size + 1)]
            assert sorted(owners[:-1]) == list(range(size))
            assert owners[0] == owners[-1] == device
    for hops in range(size):
        sent = [(device, walk.next(device, 1, hops)) for walk in walks for device in range(size)]
        assert len(set(sent)) == len(sent) == size * dimensions  # every link, both ways
        for walk in walks:
            for device in range(size):
                neighbour = walk.next(device, 1, hops)
                assert (device ^ neighbour).bit_count() == 1
                assert walk.behind(neighbour, hops + 1) == walk.behind(device, hops)


@examples(20)
@given(st.lists(st.integers(3, 9), min_size=1, max_size=3).filter(lambda s: prod(s) <= 200))
def test_any_torus(sizes):
    check(tuple(sizes))


def test_one_dimension_is_a_ring_already():
    assert disjoint_cycles((5,)) == (Straight(5),)
    check((5,))


def test_the_walks_of_a_square():
    one, other = disjoint_cycles((4, 4))
    assert one.devices == [0, 1, 2, 3, 7, 4, 5, 6, 10, 11, 8, 9, 13, 14, 15, 12]
    transposed = [4 * (device % 4) + device // 4 for device in one.devices]
    assert other.devices[:4] == transposed[:4] == [0, 4, 8, 12]


@pytest.mark.parametrize("sizes", [(4, 4), (4, 16), (16, 4), (3, 4), (3, 3, 3)])
def test_places_are_the_same_where_they_are_traced(sizes):
    for cycle in disjoint_cycles(sizes):
        steps = jnp.arange(cycle.size, dtype="int32")
        assert jax.jit(jax.vmap(cycle.device))(steps).tolist() == cycle.devices
        assert jax.jit(jax.vmap(cycle.step))(jnp.array(cycle.devices)).tolist() == steps.tolist()


def test_two_devices_have_one_link():
    with pytest.raises(ValueError, match=r"disjoint_cycles: sizes \(4, 2\) must be 3 or more each"):
        disjoint_cycles((4, 2))


# -- edge_disjoint_rings ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("x", "y"), ["y", "x"]])
def test_rings_of_a_mesh_are_of_one_link_each(axes):
    plane = target("v5p:4x4x8", "dp=4,x=4,y=8").mesh
    rings = edge_disjoint_rings(plane, axes)
    assert rings.shape == (2, 32)
    np.testing.assert_array_equal(rings, edge_disjoint_rings(plane.abstract_mesh, axes))
    taken = []
    for ring in rings:
        along = Mesh(plane.devices.reshape(4, 32)[:, ring], ("dp", "ring"))
        assert (ring_hops(along, "ring") == 1).all()
        taken += map(frozenset, pairwise([*ring.tolist(), int(ring[0])]))
    assert len(taken) == len(set(taken)) == 2 * 32


def test_rings_count_positions_in_mesh_order():
    plane = target("v5p:4x4x8", "dp=4,x=4,y=8").mesh
    walks = [cycle.devices for cycle in disjoint_cycles((8, 4))]
    order = ring_order(plane, ("y", "x"))
    np.testing.assert_array_equal(edge_disjoint_rings(plane, ("y", "x")), order[walks])


def test_one_axis_is_the_ring_itself():
    for axes in ("tp", ("tp",), ("one", "tp")):
        rings = edge_disjoint_rings(make_mesh("one=1,tp=8"), axes)
        np.testing.assert_array_equal(rings, [range(8)])


def test_axes_that_have_no_disjoint_rings():
    mesh = make_mesh("x=2,y=4")
    with pytest.raises(ValueError, match=r"edge_disjoint_rings: .* sizes \{'x': 2, 'y': 4\}: each"):
        edge_disjoint_rings(mesh, ("x", "y"))
    with pytest.raises(ValueError, match="edge_disjoint_rings: axis 'z' is not an axis of"):
        edge_disjoint_rings(mesh, ("x", "z"))


@pytest.mark.parametrize(
    ("slice_name", "mesh", "axis", "walks"),
    [
        ("v5p:4x4x4", "dp=4,tp=16", "tp", 2),
        ("v5p:4x4x4", "tp=64", "tp", 3),
        ("v5p:4x4x4", "fsdp=16,tp=4", "fsdp", 2),
        ("v5p:8x8x4", "dp=4,tp=64", "tp", 2),
        ("v5p:4x4x8", "dp=4,tp=32", "tp", 2),
        ("v5p:4x4x4", "dp=8,tp=8", "tp", 3),  # 4 x 2: a closed side of four is two of a cube
        ("v5p:4x4x4", "dp=2,fsdp=4,tp=8", "tp", 3),
        ("v5p:2x2x2", "tp=8", "tp", 3),
        ("v6e:16x16", "tp=256", "tp", 2),
        ("v6e:16x16", "dp=16,tp=16", "tp", 0),  # one dimension: a ring has all its links
        ("v6e:4x4", "tp=16", "tp", 0),  # open
        ("v5p:4x4x4", "dp=16,tp=4", "tp", 0),
        ("tpu7x:4x4x4", "dp=8,tp=16", "tp", 0),  # two devices share the links of a chip
    ],
)
def test_walks_of_one_axis_are_over_links_of_their_own(slice_name, mesh, axis, walks):
    mesh = target(slice_name, mesh).mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = traced_links().walks.get(axis, ())
    assert len(found) == walks
    coords = np.array([device.coords for device in mesh.devices.flat])
    extent = np.ptp(coords, axis=0) + 1
    closed = extent == 16 if slice_name.startswith("v6e") else extent % 4 == 0
    order = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    for ring in order.reshape(-1, order.shape[-1]):
        at = np.array([device.coords for device in ring])
        cube = any(isinstance(walk, AcrossCube) for walk in found)
        for hops in range(len(ring) if cube else 1):  # a cycle has one next device
            used = []
            for walk in found:
                for way in (1,) if cube else (1, -1):
                    there = [walk.next(place, way, hops) for place in range(len(ring))]
                    apart = np.abs(at - at[there])
                    apart = np.where(closed, np.minimum(apart, extent - apart), apart)
                    assert (apart.sum(1) == 1).all()
                    used += list(enumerate(there))
            assert len(set(used)) == len(used)
    for walk in found:  # what has come by so many hops is of the device that it says
        place = jnp.arange(walk.size)
        for hops in range(walk.size) if walk.size < 16 else (0, 1, 5, walk.size - 1):
            behind = jax.vmap(lambda device, hops=hops, walk=walk: walk.behind(device, hops))(place)
            there = [walk.next(int(device), 1, hops) for device in place]
            again = [walk.behind(int(device), hops + 1) for device in there]
            assert again == [int(device) for device in behind]


def test_meshes_that_look_alike_and_lie_otherwise_have_the_links_of_both():
    mesh = target("v5p:4x4x4", "others=4,alike=16").mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert len(traced_links().walks["alike"]) == 2
        before = traced_links().messages
        assert before(("alike",), "ring") == 1
        note_links(mesh, AxisLinks(messages=lambda names, how: 3))
        assert not traced_links().walks
        assert traced_links().messages(("alike",), "ring") == 3
        note_links(mesh, AxisLinks())
        assert traced_links().messages is None


@pytest.mark.parametrize(
    ("slice_name", "mesh", "names", "ring", "rings", "collective"),
    [
        ("v6e:4x4", "tp=16", "tp", 1, 1, 1),  # a closed walk through all
        ("v6e:4x4", "x=4,y=4", "y", 1, 1, 1),  # tiles of 2x2, each a ring of links
        ("v6e:4x4", "x=4,y=4", "x", 2, 2, 1),  # a hop is over two links
        ("v6e:4x4", "x=4,y=4", "x,y", 2, 2, 1),
        ("v6e:4x4", "x=4,y=4", "y,x", 2, 2, 1),
        ("v6e:16x16", "tp=4,dp=64", "tp", 4, 4, 8),  # four links apart
        ("v6e:16x16", "dp=16,tp=16", "tp", 1, 1, 1),
        ("v5p:4x4x4", "dp=4,x=4,y=4", "x,y", 1, 1, 1),
        ("v5p:4x4x4", "dp=4,tp=16", "tp", 1, 1, 1),
        ("v5p:2x2x2", "x=2,y=2,z=2", "x,y,z", 2, 1, 1),  # exchanges across a cube
        ("v5p:4x2x1", "tp=4,dp=2", "tp", 2, 2, 2),  # an open line: round it is back over it
        ("tpu7x:4x4x4", "dp=2,x=8,y=8", "x,y", 1, 2, 1),  # two devices share a chip's links
        ("tpu7x:2x2x2", "tp=8,dp=2", "tp", 2, 2, 2),  # and so do their rings
    ],
)
def test_how_many_messages_share_a_link(slice_name, mesh, names, ring, rings, collective):
    mesh = target(slice_name, mesh).mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shared = traced_links().messages
    found = [shared(tuple(names.split(",")), how) for how in ("ring", "rings", "collective")]
    assert found == [ring, rings, collective]


def test_a_cube_has_other_walks_than_rings():
    mesh = make_mesh("x=2,y=2,z=2")
    with pytest.raises(ValueError, match=r"^edge_disjoint_rings: axes of sizes .* are a cube"):
        edge_disjoint_rings(mesh, ("x", "y", "z"))


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (3, 4, 5)])
def test_along_one_dimension_a_device_comes_past_its_row(sizes):
    devices, directions = range(prod(sizes)), (1, -1)
    taken = []
    for dimension, side in enumerate(sizes):
        walk = AlongOne(sizes, dimension)
        assert (walk.size, walk.around) == (prod(sizes), side)
        for device in devices:
            places = np.array(np.unravel_index(device, sizes))
            assert walk.place(device) == places[dimension]
            for distance in range(side + 1):
                places[dimension] = (walk.place(device) - distance) % side
                assert walk.behind(device, distance) == np.ravel_multi_index(places, sizes)
            assert walk.next(walk.behind(device, 1), 1, 0) == device
        taken += [(d, walk.next(d, to, 0)) for d, to in product(devices, directions)]
    assert len(set(taken)) == len(taken)  # no two dimensions share a link
