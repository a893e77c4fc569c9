import sys

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import find, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxpar.testing import axis_orders, meshes, specs

quick = examples(50)
many = settings(max_examples=2000)  # for find, which stops early


@quick
@given(meshes())
def test_mesh_is_auto_over_distinct_devices_of_a_prefix(mesh):
    assert 1 <= mesh.size <= 8
    assert mesh.axis_names == ("x", "y", "z")[: len(mesh.axis_names)]
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {d.id for d in mesh.devices.flat} == set(range(mesh.size))


@pytest.mark.parametrize("size", range(1, 9))
def test_every_size_is_drawn(size):
    assert find(meshes(), lambda mesh: mesh.size == size, settings=many).size == size


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 3), (4, 2), (7, 1)])
def test_multi_axis_shapes_are_drawn(shape):
    assert find(meshes(), lambda mesh: mesh.devices.shape == shape, settings=many)


def test_mesh_shrinks_to_one_axis_in_device_order():
    mesh = find(meshes(), lambda mesh: mesh.size == 4, settings=many)
    assert mesh.devices.shape == (4,)
    assert [d.id for d in mesh.devices] == [0, 1, 2, 3]


def test_order_of_devices_is_shuffled():
    find(meshes(), lambda mesh: mesh.devices.flat[0].id != 0, settings=many)


@quick
@given(
    meshes(jax.devices()[2:], axis_names="ab", max_axes=2, min_size=2, max_size=4, shuffle=False)
)
def test_mesh_limits(mesh):
    assert 2 <= mesh.size <= 4
    assert set(mesh.axis_names) <= {"a", "b"}
    assert [d.id for d in mesh.devices.flat] == list(range(2, 2 + mesh.size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_axes": 4}, "meshes: max_axes=4 must be from 1 to the number of axis names, 3"),
        ({"max_axes": 0}, "meshes: max_axes=0 must be from 1 to"),
        ({"min_size": 3, "max_size": 2}, "min_size=3 must be at least 1, and at most max_size=2"),
        ({"min_size": 0}, "min_size=0 must be at least 1"),
    ],
)
def test_mesh_errors(options, message):
    with pytest.raises(ValueError, match=message):
        meshes(**options)


def test_too_few_devices():
    with pytest.raises(ValueError, match="min_size=9 must be at most the 8 devices at hand"):
        find(meshes(min_size=9), lambda _: True, settings=many)


@quick
@given(meshes(), st.data())
def test_axis_orders_name_axes_of_the_mesh_once(mesh, data):
    axes = data.draw(axis_orders(mesh))
    names = (axes,) if isinstance(axes, str) else axes
    assert 1 <= len(set(names)) == len(names)
    assert set(names) <= set(mesh.axis_names)


@pytest.fixture
def cube():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))


@pytest.mark.parametrize("axes", ["y", ("y",), ("z", "x"), ("y", "z", "x")])
def test_every_form_of_axes_is_drawn(cube, axes):
    assert find(axis_orders(cube), lambda drawn: drawn == axes, settings=many) == axes


@quick
@given(st.data())
def test_axis_orders_limits(data):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    assert len(data.draw(axis_orders(mesh, min_axes=2, max_axes=2))) == 2


@pytest.mark.parametrize("limits", [{"min_axes": 4}, {"min_axes": 0}, {"max_axes": 0}])
def test_axis_orders_errors(cube, limits):
    with pytest.raises(ValueError, match=r"axis_orders: min_axes=.* must be from 1 to"):
        axis_orders(cube, **limits)


@quick
@given(meshes(), st.lists(st.integers(1, 24), max_size=3), st.data())
def test_specs_fit_the_shape(mesh, shape, data):
    spec = data.draw(specs(mesh, shape))
    assert len(spec) <= len(shape)
    local = NamedSharding(mesh, spec).shard_shape(tuple(shape))
    assert all(whole % part == 0 for whole, part in zip(shape, local, strict=True))


def test_several_axes_on_one_dimension_in_any_order(cube):
    for entry in [("x", "z"), ("z", "x")]:
        find(specs(cube, (4, 3)), lambda spec, entry=entry: entry in tuple(spec), settings=many)


def test_missing_hypothesis_names_the_remedy(monkeypatch, cube):
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    for make in (meshes, lambda: axis_orders(cube), lambda: specs(cube, (2,))):
        with pytest.raises(ImportError, match=r"needs hypothesis.*pip install 'hypothesis"):
            make()
