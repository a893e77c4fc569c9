"""Meshes by name, the logical order of a ring on a mesh, and its hops on a torus."""

from dataclasses import dataclass
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh, ring_hops, ring_order
from jaxpar.mesh.meshes import _messages_a_link, why_not_closed
from jaxpar.testing import axis_orders, meshes

V5E, V6E, V4, V5P, V7 = "TPU v5 lite", "TPU v6 lite", "TPU v4", "TPU v5", "TPU7x"


# -- make_mesh --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("tp=8", {"tp": 8}),
        ("dp=2,tp=4", {"dp": 2, "tp": 4}),
        (" dp = 2 , tp = 4 ", {"dp": 2, "tp": 4}),
        ("tp=4,dp=2", {"tp": 4, "dp": 2}),
        ("dp=2,tp=-1", {"dp": 2, "tp": 4}),
        ("dp=-1,tp=8", {"dp": 1, "tp": 8}),
        ("a=2,b=-1,c=2", {"a": 2, "b": 2, "c": 2}),
        ({"dp": 2, "tp": 4}, {"dp": 2, "tp": 4}),
        ({"dp": -1}, {"dp": 8}),
        ({"a": 1, "b": 8, "c": 1}, {"a": 1, "b": 8, "c": 1}),
    ],
)
def test_make_mesh_axes(axes, shape):
    mesh = make_mesh(axes)
    assert list(mesh.shape.items()) == list(shape.items())
    assert {d.id for d in mesh.devices.flat} == set(range(8))
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_uses_the_devices_it_is_given():
    devices = jax.devices()[5:1:-1]
    assert set(make_mesh("dp=2,tp=-1", devices=devices).devices.flat) == set(devices)
    assert make_mesh("tp=-1", devices=jax.devices()[:1]).shape == {"tp": 1}


def test_make_mesh_axis_types():
    explicit = make_mesh("a=2,b=4", axis_types=AxisType.Explicit)
    assert explicit.axis_types == (AxisType.Explicit,) * 2
    by_name = make_mesh("a=2,b=2,c=2", axis_types={"c": AxisType.Explicit, "a": AxisType.Manual})
    assert by_name.axis_types == (AxisType.Manual, AxisType.Auto, AxisType.Explicit)
    assert make_mesh("a=8", axis_types={}).axis_types == (AxisType.Auto,)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("dp", "make_mesh: axes 'dp': 'dp' is not of the form name=size, as in 'dp=2,tp=4'"),
        ("dp=2,tp", "'tp' is not of the form"),
        ("=8", "'=8' is not of the form"),
        ("dp=", "'dp=' is not of the form"),
        ("dp=two", "'dp=two' is not of the form"),
        ("dp=2.0", "'dp=2.0' is not of the form"),
        ("dp=--2", "'dp=--2' is not of the form"),
        ("dp=2=4", "'dp=2=4' is not of the form"),
        ("dp=2,,tp=4", "'' is not of the form"),
        ("", "axes '': '' is not of the form"),
        ("dp=2,dp=4", "make_mesh: axes 'dp=2,dp=4' name 'dp' twice"),
        ("dp=0", "positive or -1, got ['dp=0']"),
        ("dp=-2,b=0,c=4", "positive or -1, got ['dp=-2', 'b=0']"),
        ({}, "axes must have at least one size"),
        ("a=-1,b=2,c=-1", "a=-1 x b=2 x c=-1: ['a', 'c'] are -1; give the sizes of all"),
        (
            "a=-1,b=3",
            "a=-1 x b=3: the other axes take 3, which does not divide 8 devices (8 = 2 x 3 + 2); "
            "choose sizes whose product divides it, or pass fewer devices",
        ),
        ("a=-1,b=16", "the other axes take 16, which does not divide 8 devices (8 = 0 x 16 + 8)"),
        (
            "dp=2,tp=2",
            "dp=2 x tp=2 = 4 devices, but there are 8; make one size -1, "
            "or pass devices=jax.devices()[:4] to use only some",
        ),
        (
            {"dp": 4, "tp": 4},
            "dp=4 x tp=4 = 16 devices, but there are 8; make one size -1, or choose smaller sizes",
        ),
    ],
)
def test_make_mesh_errors(axes, message):
    with pytest.raises(ValueError, match="make_mesh: ") as error:
        make_mesh(axes)
    assert message in str(error.value)


def test_make_mesh_counts_the_given_devices_in_its_errors():
    with pytest.raises(ValueError, match=r"a=8 = 8 devices, but there are 3; .* smaller sizes"):
        make_mesh("a=8", devices=jax.devices()[:3])


def test_make_mesh_of_no_devices():
    with pytest.raises(
        ValueError, match=r"^make_mesh: devices is empty; pass at least one, or None"
    ):
        make_mesh("a=1", devices=[])


def test_make_mesh_unknown_axis_type():
    message = r"axis_types names \['dp', 'pp'\]; the axes are \['tp'\]"
    types = {"tp": AxisType.Auto, "pp": AxisType.Auto, "dp": AxisType.Auto}
    with pytest.raises(ValueError, match=message):
        make_mesh("tp=8", axis_types=types)


# -- ring_order -------------------------------------------------------------------------------


def found_orders(mesh, orders):
    """For each order of axes, where on the mesh the device of each `lax.axis_index` sits."""
    run = jax.shard_map(
        lambda: jnp.stack([lax.axis_index(axes) for axes in orders])[None],
        mesh=mesh,
        in_specs=(),
        out_specs=P(mesh.axis_names),
    )
    index_at = {shard.device: np.asarray(shard.data)[0] for shard in jax.jit(run)().global_shards}
    found = []
    for number, axes in enumerate(orders):
        names = (axes,) if isinstance(axes, str) else axes
        others = [i for i, name in enumerate(mesh.axis_names) if name not in names]
        along = [i for i, name in enumerate(mesh.axis_names) if name in names]
        n = int(np.prod([mesh.devices.shape[i] for i in along]))
        for ring in mesh.devices.transpose(others + along).reshape(-1, n):
            found.append((axes, np.argsort([index_at[device][number] for device in ring])))
    return found


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (3, 1, 2)])
def test_ring_order_of_every_order_of_axes(shape):
    shuffled = np.random.default_rng(0).permutation(jax.devices()[: np.prod(shape)])
    mesh = Mesh(shuffled.reshape(shape), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    orders = [axes for k in (1, 2, 3) for axes in permutations("xyz", k)]
    assert len(orders) == 15
    for axes, found in found_orders(mesh, ["x", *orders]):
        np.testing.assert_array_equal(ring_order(mesh, axes), found, err_msg=f"{axes}")
        np.testing.assert_array_equal(ring_order(mesh.abstract_mesh, axes), found)


@examples(10, derandomize=True)
@given(meshes(), st.data())
def test_ring_order_on_any_mesh(mesh, data):
    for axes, found in found_orders(mesh, [data.draw(axis_orders(mesh))]):
        np.testing.assert_array_equal(ring_order(mesh, axes), found)


def axis_errors(function):
    mesh = make_mesh("x=2,y=4")
    for axes, error, message in [
        ("z", ValueError, r"axis 'z' is not an axis of the mesh, which has {'x': 2, 'y': 4}"),
        (("y", "z"), ValueError, "axis 'z' is not an axis of the mesh"),
        (("x", "x"), ValueError, r"axis \('x', 'x'\) must name at least one mesh axis, and each"),
        ((), ValueError, r"axis \(\) must name at least one mesh axis"),
        (["z"], ValueError, "axis 'z' is not an axis of the mesh"),
        ({"x"}, TypeError, "axis must be a mesh axis name, .* or an Axis, got {'x'}"),
        (0, TypeError, "axis must be a mesh axis name, a tuple or list of them, or an Axis, got 0"),
        (("x", 1), TypeError, r"axis must be .* got \('x', 1\)"),
    ]:
        with pytest.raises(error, match=message):
            function(mesh, axes)


@pytest.mark.parametrize("function", [ring_order, ring_hops])
def test_axis_errors(function):
    axis_errors(function)


# -- ring_hops --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """What `ring_hops` reads of a device."""

    coords: tuple[int, ...]
    device_kind: str
    core_on_chip: int = 0


def chips(kind, *shape, cores=1, origin=(0, 0, 0)):
    """Devices of a slice, in the order of their coordinates: an array of shape (*shape, cores)."""
    grid = np.empty((*shape, cores), object)
    for *place, core in np.ndindex(grid.shape):
        coords = (*place, *[0] * (3 - len(place)))
        grid[(*place, core)] = Chip(tuple(np.add(coords, origin).tolist()), kind, core)
    return grid[..., 0] if cores == 1 else grid


def mesh_of(grid, names):
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * grid.ndim)


@pytest.mark.parametrize(
    ("kind", "box", "last"),
    [
        (V5E, (2, 2), 1),
        (V5E, (4, 2), 3),
        (V5E, (8, 2), 7),
        (V5E, (16, 2), 1),
        (V6E, (4, 4), 3),
        (V6E, (16, 8), 1),
        (V4, (4, 4, 4), 1),
        (V4, (4, 2, 2), 3),  # no whole cube
        (V4, (4, 6, 1), 3),
        (V4, (6, 4, 4), 5),
        (V4, (6, 2), 5),
        (V5P, (2, 2), 1),
        (V5P, (2, 4, 4), 1),
        (V5P, (4, 2), 3),
        (V5P, (4, 4, 2), 3),
        (V5P, (6, 2), 5),
        (V5P, (8, 2), 7),
        (V5P, (8, 4, 4), 1),
        (V5P, (12, 2, 3), 11),
        (V5P, (16, 4, 8), 1),
        (V7, (4, 2), 3),
        (V7, (12, 4, 4), 1),
        (V7, (10, 4, 4), 9),
    ],
)
def test_hops_close_a_ring_where_the_slice_has_the_link(kind, box, last):
    line = [1] * (box[0] - 1) + [last]
    for origin in [(0, 0, 0), (3, 4, 5)]:
        mesh = mesh_of(chips(kind, *box, origin=origin), "xyz"[: len(box)])
        assert (ring_hops(mesh, "x") == line).all()


def test_hops_on_v5e_2x4():
    mesh = mesh_of(chips(V5E, 2, 4), "xy")
    np.testing.assert_array_equal(ring_hops(mesh, "y"), [[1, 1, 1, 3]] * 2)
    np.testing.assert_array_equal(ring_hops(mesh, "x"), [[1, 1]] * 4)
    np.testing.assert_array_equal(ring_hops(mesh, ("x", "y")), [[1, 1, 1, 4, 1, 1, 1, 4]])
    np.testing.assert_array_equal(ring_hops(mesh, ("y", "x")), [[1, 2, 1, 2, 1, 2, 1, 4]])


def test_hops_of_a_cycle_through_v5e_2x4_are_one():
    grid = chips(V5E, 2, 4)
    cycle = np.concatenate([grid[0], grid[1, ::-1]])
    np.testing.assert_array_equal(ring_hops(mesh_of(cycle, "x"), "x"), [[1] * 8])
    np.testing.assert_array_equal(
        ring_hops(mesh_of(cycle.reshape(4, 2), "xy"), ("x", "y")), [[1] * 8]
    )


def test_hops_wrap_on_the_extent_of_the_slice_and_not_of_the_ring():
    # Each ring is half of an axis of 16: its ends are 7 apart either way round or not.
    halves = chips(V5E, 16).reshape(2, 8)
    np.testing.assert_array_equal(ring_hops(mesh_of(halves, "xy"), "y"), [[1] * 7 + [7]] * 2)
    # Eight apart in an axis of 16; ten apart is six the other way.
    np.testing.assert_array_equal(ring_hops(mesh_of(halves, "xy"), "x"), [[8, 8]] * 8)
    far = chips(V5E, 16)[[0, 10, *range(1, 10), *range(11, 16)]]
    assert ring_hops(mesh_of(far, "x"), "x")[0, 0] == 6


def test_hops_of_several_rings_are_in_mesh_order():
    # Rings over y alternate between neighbours and chips three apart.
    grid = chips(V5E, 4)[[0, 1, 0, 3]].reshape(2, 2)
    np.testing.assert_array_equal(ring_hops(mesh_of(grid, "xy"), "y"), [[1, 1], [3, 3]])
    block = chips(V5P, 2, 3, 4)
    mesh = mesh_of(block, "xyz")
    np.testing.assert_array_equal(ring_hops(mesh, "y"), [[1, 1, 2]] * 8)
    assert ring_hops(mesh, ("z", "x")).shape == (3, 8)
    np.testing.assert_array_equal(ring_hops(mesh, ("z", "x")), [[1, 2, 1, 2, 1, 2, 1, 4]] * 3)
    np.testing.assert_array_equal(ring_hops(mesh, ("x", "z")), [[1, 1, 1, 4, 1, 1, 1, 4]] * 3)


def test_two_cores_of_a_chip_are_no_hop_apart():
    grid = chips(V7, 4, cores=2)
    mesh = mesh_of(grid, "xc")
    np.testing.assert_array_equal(ring_hops(mesh, "c"), [[0, 0]] * 4)
    np.testing.assert_array_equal(ring_hops(mesh, ("x", "c")), [[0, 1] * 3 + [0, 3]])


def test_hops_without_coordinates_are_one():
    mesh = make_mesh("x=2,y=4")
    np.testing.assert_array_equal(ring_hops(mesh, ("y", "x")), [[1] * 8])
    np.testing.assert_array_equal(ring_hops(mesh, "y"), [[1] * 4] * 2)


@pytest.mark.parametrize("kind", [None, V5E, V5P])
def test_a_ring_of_one_has_no_hops(kind):
    devices = np.array(jax.devices()[:3]) if kind is None else chips(kind, 3)
    mesh = mesh_of(devices.reshape(3, 1), "xy")
    np.testing.assert_array_equal(ring_hops(mesh, "y"), [[0]] * 3)


@pytest.mark.parametrize("axes", [8, ("dp", "tp"), {"dp": "2"}, {"dp": True}, {1: 8}])
def test_mesh_axes_of_the_wrong_type(axes):
    with pytest.raises(TypeError, match="make_mesh: axes must"):
        make_mesh(axes)


@pytest.mark.parametrize(
    ("kind", "axes", "messages"),
    [
        (V5P, "dp=4,x=4,y=4", {"dp": 1, "x": 1, "y": 1}),
        (V7, "dp=8,x=4,y=4", {"dp": 2, "x": 2, "y": 2}),  # y: two chips, to and fro between them
        (V7, "x=4,y=32", {"x": 2, "y": 1}),  # y: both devices of each chip, one after the other
    ],
)
def test_devices_of_a_chip_share_the_links_of_an_axis(kind, axes, messages):
    grid = chips(kind, 4, 4, 4, cores=2 if kind == V7 else 1)
    mesh = make_mesh(axes, devices=list(grid.flat))
    closed = [name for name in mesh.axis_names if why_not_closed(mesh, name) is None]
    assert {name: _messages_a_link(mesh, (name,), "ring") for name in closed} == messages
