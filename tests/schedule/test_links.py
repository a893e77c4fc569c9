"""Routes, loads and names of links, against counts of one's own on described devices."""

from collections import deque
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpar.mesh.ring_orders import disjoint_cycles
from jaxpar.platforms.chips import platforms
from jaxpar.schedule import target
from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.hlo import replica_groups
from jaxpar.tools.program.mesh_axes import lane_of, lane_of_groups
from jaxpar.tools.timeline.floor import rings_over
from jaxpar.tools.timeline.links import Links

CHIPS = {known.kind: known.chip for known in platforms()}
TORUS = replace(CHIPS["TPU v4"], link=2.0)
GATHER = Message("all-gather", 1.0)
SWITCH = replace(CHIPS["NVIDIA A100-SXM4-40GB"], link=4.0, network=1.0)


def in_order(name, *, along=None):
    """Described devices in the order of their coordinates, or only those on one axis."""
    devices = sorted(target(name).mesh.devices.flat, key=lambda d: (d.coords, d.core_on_chip))
    if along is not None:
        devices = [d for d in devices if not any(np.delete(d.coords, along))]
    return Mesh(devices, ("tp",))


def ring(size, offset=1):
    return tuple((n, (n + offset) % size) for n in range(size))


def distances(mesh, wraps):
    """Links between every two devices of a grid, by a search over neighbours."""
    places = [tuple(d.coords) for d in mesh.devices.flat]
    extent = np.max(places, axis=0) + 1

    def neighbours(place):
        for dim, step in product(range(len(extent)), (1, -1)):
            moved = list(place)
            moved[dim] += step
            if wraps[dim]:
                moved[dim] %= extent[dim]
            if 0 <= moved[dim] < extent[dim]:
                yield tuple(moved)

    def search(start):
        found, queue = {start: 0}, deque([start])
        while queue:
            place = queue.popleft()
            for other in neighbours(place):
                if other not in found:
                    found[other] = found[place] + 1
                    queue.append(other)
        return found

    return [[found[b] for b in places] for found in map(search, places)]


GRIDS = [
    ("v5e:4x4", (False, False, False)),
    ("v5p:4x2x2", (False, False, False)),  # no whole cube
    ("v5e:8x16", (False, True, False)),
    ("v5p:4x4x4", (True, True, True)),
]


@pytest.mark.parametrize(("name", "wraps"), GRIDS)
def test_hops_and_loads_are_those_of_a_search(name, wraps):
    mesh = in_order(name)
    links, far = Links(mesh, TORUS), np.array(distances(mesh, wraps))
    size = mesh.size
    for source, goal in product(range(0, size, 13), range(size)):
        route = links.permute(((source, goal),))
        assert route.hops == len(route.links) == far[source, goal]
        assert (route.seconds == 1 / TORUS.link).all()

    everyone = links.all_to_all([list(range(size))])
    assert everyone.hops == far.max()
    assert everyone.seconds.sum() * TORUS.link == pytest.approx(far.sum() / size)


@pytest.mark.parametrize(("name", "wraps"), GRIDS)
def test_all_to_all_loads_the_links_across_the_middle(name, wraps):
    """No link carries less than its share of what crosses a cut, and none much more."""
    mesh = in_order(name)
    extent = np.max([d.coords for d in mesh.devices.flat], axis=0) + 1
    bound = max(
        # Half of the devices send half of their messages across; each way has these links.
        (mesh.size / 2) * 0.5 / ((mesh.size / length) * (2 if wrap else 1))
        for length, wrap in zip(extent, wraps, strict=True)
        if length > 1
    )
    seconds = Links(mesh, TORUS).all_to_all([list(range(mesh.size))]).seconds
    assert seconds.max() * TORUS.link == pytest.approx(bound)


def test_a_ring_of_neighbours_costs_its_bytes_over_one_link():
    mesh = in_order("v5p:4x4x4")
    links = Links(mesh, TORUS)
    for offset in (1, -1):
        route = links.permute(ring(4, offset))
        assert route.hops == 1
        assert len(route.links) == 4
        assert (route.seconds == 1 / TORUS.link).all()
    both = [set(links.permute(ring(4, offset)).links.tolist()) for offset in (1, -1)]
    assert not both[0] & both[1]


def test_without_wrap_around_the_last_message_goes_back_over_every_link():
    route = Links(in_order("v5e:4x4", along=0), TORUS).permute(ring(4))
    assert (route.hops, len(route.links)) == (3, 6)
    assert (route.seconds == 1 / TORUS.link).all()


def test_sixteen_devices_on_an_axis_of_v5e_are_a_ring():
    route = Links(in_order("v5e:16x16", along=1), TORUS).permute(ring(16))
    assert (route.hops, len(route.links)) == (1, 16)


def test_messages_that_share_a_link_add_up():
    route = Links(in_order("v5e:4x4", along=0), TORUS).permute(((0, 2), (1, 3)))
    assert route.hops == 2
    assert sorted(route.seconds * TORUS.link) == [1, 1, 2]


@pytest.mark.parametrize(("name", "along", "size"), [("v5e:16x16", 1, 16), ("v5e:4x4", 0, 4)])
def test_groups_that_lie_between_each_other_on_a_line_share_its_links(name, along, size):
    links = Links(in_order(name, along=along), TORUS)
    beside = [list(range(size // 2)), list(range(size // 2, size))]
    between = [list(range(0, size, 2)), list(range(1, size, 2))]
    share = (size // 2 - 1) / (size // 2)
    assert np.allclose(links.ring(beside, 1, GATHER).seconds * TORUS.link, share)
    shared = links.ring(between, 1, GATHER).seconds * TORUS.link / share
    assert shared.max() == 2
    # On an open line nothing goes beyond the outermost members of a group.
    assert sorted(set(shared)) == ([2] if size == 16 else [1, 2])


def test_half_way_round_each_way_takes_half():
    route = Links(in_order("v5p:4x4x4"), TORUS).permute(ring(4, 2))
    assert route.hops == 2
    assert sum(route.seconds * TORUS.link) == 8
    assert max(route.seconds * TORUS.link) == 1


def test_two_devices_of_a_chip_share_its_links_and_need_none_between_them():
    mesh = in_order("tpu7x:2x2x1")
    links = Links(mesh, TORUS)
    within = links.permute(((0, 1), (1, 0)))
    assert (within.hops, len(within.links)) == (0, 0)
    first, second = (n for n, d in enumerate(mesh.devices.flat) if list(d.coords) == [0, 1, 0])
    route = links.permute(((0, first), (1, second)))
    assert (route.hops, (route.seconds * TORUS.link).tolist()) == (1, [2])


@pytest.mark.parametrize(
    ("groups", "hops", "ways"), [([[0, 1, 2, 3]], 2, 2), ([[0, 1], [2, 3]], 1, 1)]
)
def test_a_collective_of_xla_uses_both_directions_of_what_closes(groups, hops, ways):
    links = Links(in_order("v5p:4x4x4"), TORUS)
    route = links.ring(groups, 1, GATHER)
    size = len(groups[0])
    assert route.hops == hops
    assert (route.seconds == (size - 1) / size / ways / TORUS.link).all()
    edges = {frozenset(pair) for g in groups for pair in [*pairwise(g), (g[-1], g[0])]}
    assert len(route.links) == 2 * len(edges)


def test_a_collective_over_several_dimensions_goes_along_one_after_the_other():
    found = target("v5p:4x4x4").mesh
    links, everyone = Links(found, TORUS), [list(range(64))]
    several = replace(GATHER, ways=6, phases=3)
    route = links.ring(everyone, 2, several)
    assert (route.hops, route.in_pieces) == (2 * (2 + 2 + 2), False)
    one_ring = links.ring(everyone, 2, GATHER)
    assert (one_ring.hops, one_ring.in_pieces) == (2 * 63, True)
    assert one_ring.seconds.max() == pytest.approx(3 * route.seconds.max())


def test_what_ends_somewhere_has_as_many_ways_as_its_ends_have_links():
    """A line has one; a plane of two by two has two, which both cores of its chips share."""
    line = Links(in_order("v6e:4x4", along=0), TORUS).ring([[0, 1, 2, 3]], 1, GATHER)
    assert line.seconds.max() * TORUS.link == 3 / 4
    cores = target("tpu7x:2x2x1", "x=2,y=2,core=2").mesh
    plane = Links(cores, TORUS).ring(
        [list(range(0, 8, 2)), list(range(1, 8, 2))], 1, replace(GATHER, ways=4, phases=2)
    )
    assert plane.seconds.max() * TORUS.link == 2 * 3 / 4 / 2


def test_a_hop_of_a_ring_takes_no_less_than_its_latency():
    chip = replace(TORUS, link=1.0, latency=1.0, start=10.0)
    links = Links(in_order("v6e:4x4"), chip)
    route = links.ring([list(range(16))], 1, GATHER)
    assert links.latency(route.of(0.0)) == 10 + 15
    assert links.latency(route.of(1.0)) == 10 + 15 - 15 / 16 / 2
    assert links.latency(route.of(100.0)) == 10  # pieces travel while others wait
    assert links.latency(links.permute(((0, 0),))) == 0


def test_gpus_of_a_host_are_behind_one_switch():
    links = Links(target("h100:4").mesh, SWITCH)
    route = links.permute(ring(4))
    assert (route.hops, len(route.links)) == (1, 8)  # everyone's port out, and in
    assert (route.seconds == 1 / 4).all()
    everyone = links.all_to_all([[0, 1, 2, 3]])
    assert everyone.seconds == pytest.approx(3 / 4 / 4)


def test_between_hosts_gpus_use_the_network():
    mesh = target("h100:2x4", "dp=2,tp=4").mesh
    hosts = [d.process_index for d in mesh.devices.flat]
    assert [hosts.count(host) for host in sorted(set(hosts))] == [4, 4]
    route = Links(mesh, SWITCH).permute(ring(8))
    crossing = sum(hosts[a] != hosts[b] for a, b in ring(8))
    assert sorted(route.seconds) == [1 / 4] * 2 * (8 - crossing) + [1.0] * 2 * crossing


def test_links_within_a_group():
    """Two for each dimension that closes; of a group that does not close, those of its corners."""

    def within(name, mesh, axes):
        found = target(name, mesh)
        return Links(found.mesh, found.chip).within(rings_over(found.mesh, axes))

    assert within("v5p:4x4x4", "dp=4,x=4,y=4", "y") == 2
    assert within("v5p:4x4x4", "dp=4,x=4,y=4", ("y", "x")) == 4
    assert within("v5p:4x4x4", "x=4,y=4,z=4", ("x", "y", "z")) == 6
    assert within("v5p:4x4x4", "dp=8,tp=8", "tp") == 3  # a cube
    assert within("v6e:4x4", "tp=16", "tp") == 2  # its corners
    assert within("v6e:16x16", "x=16,y=16", ("x", "y")) == 4
    assert within("h100:8", "tp=8", "tp") == 1


def test_rings_over_the_same_axes_have_rows_of_their_own():
    plane = target("v5p:4x4x4", "dp=4,x=4,y=4")
    links = Links(plane.mesh, plane.chip)
    walks = [cycle.devices for cycle in disjoint_cycles((4, 4))]
    rows = []
    for walk in (*walks, walks[0][::-1]):
        ends = list(pairwise([*walk, walk[0]]))
        pairs = tuple((16 * dp + a, 16 * dp + b) for dp in range(4) for a, b in ends)
        rows.append(links.transfer(Message("collective-permute", 8.0, pairs=pairs), 1.0))
    assert [one.row for one in rows] == ["x, y ring 1+", "x, y ring 2+", "x, y ring 1-"]
    used = [set(one.route.links.tolist()) for one in rows]
    assert all(len(found) == 64 for found in used)
    assert not used[0] & used[1]
    assert not used[0] & used[2]  # the other way has links of its own
    assert {one.route.hops for one in rows} == {1}


def test_lanes_are_named_by_mesh_axes():
    mesh = target("v5e:2x4", "dp=2,tp=4").mesh
    assert (
        lane_of(mesh, ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4))) == "tp +1"
    )
    assert lane_of(mesh, ((1, 0), (0, 3))) == "tp -1"
    assert lane_of(mesh, ((0, 2), (5, 7))) == "tp +2"
    assert lane_of(mesh, ((0, 4), (4, 0))) == "dp +1"
    assert lane_of(mesh, ((0, 5), (4, 1))) == "dp +1, tp +1"
    assert lane_of(mesh, ((0, 1), (1, 3))) == "tp"
    assert lane_of(mesh, ((0, 0), (1, 1))) == "itself"
    assert lane_of_groups(mesh, [[0, 1, 2, 3], [4, 5, 6, 7]]) == "tp"
    assert lane_of_groups(mesh, [[0, 4], [1, 5]]) == "dp"
    assert lane_of_groups(mesh, [list(range(8))]) == "dp,tp"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("", []),
        ("replica_groups={}", []),
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[2,2]T(1,0)", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'tp'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'dp'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['dp'=2,'tp'=2] {'tp','dp'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['tp'=4] {'tp'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['dp'=2,'tp'=2], device_ids=(0,3,2,1) {'tp'}", [[0, 3], [2, 1]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['tp'=8] {'tp':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['tp'=8] {'tp':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_replica_groups_in_every_form(text, groups):
    attributes = f", channel_id=1, {text}, use_global_device_ids=true, dimensions={{0}}"
    assert replica_groups(attributes) == groups
