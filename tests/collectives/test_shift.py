"""`ring_shift` is `np.roll` over the logical order of the ring."""

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

from jaxpar import make_mesh, ring_shift
from jaxpar.axis.vma import varying_axes
from jaxpar.testing import assert_matches_reference, axis_orders, count_collectives, dtypes, meshes

ALL_KINDS = ("bool", "int8", "uint8", "int32", "float16", "bfloat16", "float32", "complex64")


def shifted(offset, axes="x", mesh=None, **options):
    """`ring_shift` of pytrees of global arrays whose dimension 0 is sharded over `axes`."""
    return jax.shard_map(
        lambda x: ring_shift(x, axes, offset),
        mesh=make_mesh("x=8") if mesh is None else mesh,
        in_specs=P(axes),
        out_specs=P(axes),
        **options,
    )


def numbers(shape, dtype):
    return np.random.default_rng(0).integers(0, 100, shape).astype(jnp.dtype(dtype))


def has_two_axes(mesh):
    return sum(size > 1 for size in mesh.devices.shape) > 1  # one axis is tested below


@examples(12, derandomize=True)
@given(meshes().filter(has_two_axes), st.data())
def test_shift_is_roll_on_any_mesh(mesh, data):
    axes = data.draw(axis_orders(mesh, min_axes=min(2, mesh.devices.ndim)))
    offset = data.draw(st.integers(-20, 20))
    others = tuple(name for name in mesh.axis_names if name != axes and name not in axes)
    n = int(np.prod([mesh.shape[name] for name in mesh.axis_names if name not in others]))
    args = {  # dimension 0 is the ring, dimension 1 is several rings
        "a": numbers((n, mesh.size // n, 2), data.draw(dtypes(["float", "int", "uint", "bool"]))),
        "b": [numbers((n, mesh.size // n), data.draw(dtypes()))],
    }
    assert_matches_reference(
        lambda x: ring_shift(x, axes, offset),
        lambda x: jax.tree.map(lambda leaf: np.roll(leaf, offset, axis=0), x),
        args,
        mesh=mesh,
        in_specs=P(axes, others or None),
        out_specs=P(axes, others or None),
    )


@pytest.mark.parametrize("offset", [1, -3])
def test_shift_keeps_every_dtype(offset):
    x = {dtype: numbers((8, 1, 3), dtype) > 50 for dtype in ALL_KINDS}
    x = {dtype: leaf.astype(jnp.dtype(dtype)) for dtype, leaf in x.items()}
    for dtype, out in jax.jit(shifted(offset))(x).items():
        assert out.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(out, np.roll(x[dtype], offset, axis=0))


@pytest.mark.parametrize("offset", [0, 8, -16, 9, -1, 1_000_003, np.int64(3), np.uint8(250)])
def test_any_integer_offset(offset):
    x = np.arange(16)
    out = jax.jit(shifted(offset))(x)
    np.testing.assert_array_equal(out, np.roll(x, 2 * (int(offset) % 8)))


def test_default_offset_is_one():
    mapped = jax.shard_map(
        lambda x: ring_shift(x, "x"), mesh=make_mesh("x=8"), in_specs=P("x"), out_specs=P("x")
    )
    np.testing.assert_array_equal(jax.jit(mapped)(np.arange(8)), [7, 0, 1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("y", "x"), ("z", "x", "y"), ("z", "y")])
def test_tuples_in_any_order_on_a_shuffled_mesh(axes, check_vma):
    devices = np.random.default_rng(1).permutation(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    x = np.arange(2 ** len(axes))
    out = jax.jit(shifted(1, axes, mesh, check_vma=check_vma))(x)
    np.testing.assert_array_equal(out, np.roll(x, 1))


def test_explicit_axes():
    mesh = make_mesh("x=2,y=4", axis_types=AxisType.Explicit)
    axes = ("y", "x")
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, P(axes)))
    np.testing.assert_array_equal(jax.jit(shifted(1, axes, mesh))(x), np.roll(x, 1))


def test_mesh_that_is_manual_in_part():
    mesh = make_mesh("x=2,y=2,z=2")
    run = shifted(1, ("z", "x"), mesh, axis_names={"x", "z"})
    np.testing.assert_array_equal(jax.jit(run)(np.arange(8)), np.roll(np.arange(8), 2))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_leaf_varies_over_its_own_axes(offset):
    """A sum over y is replicated over y, whatever the leaf beside it is."""

    def local(x):
        shifted = ring_shift({"sum": lax.psum(x, "y"), "own": x}, "x", offset)
        assert varying_axes(shifted["own"]) == {"x", "y"}
        return shifted["sum"]

    mesh = make_mesh("x=4,y=2")
    total = jax.shard_map(local, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x"))
    x = numbers((4, 2), "float32")
    np.testing.assert_array_equal(
        jax.jit(total)(x), np.roll(x, offset, axis=0).sum(axis=1, keepdims=True)
    )


def test_under_vmap():
    x = numbers((8, 3, 2), "float32")
    run = jax.shard_map(
        jax.vmap(lambda row: ring_shift({"row": row}, "x", 3)["row"], in_axes=1, out_axes=2),
        mesh=make_mesh("x=8"),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    np.testing.assert_array_equal(jax.jit(run)(x), np.roll(x, 3, axis=0).transpose(0, 2, 1))


def test_under_scan():
    def steps(x):
        return lax.scan(lambda x, _: (ring_shift(x, "x", -2), x), x, length=3)

    run = jax.shard_map(
        steps, mesh=make_mesh("x=8"), in_specs=P("x"), out_specs=(P("x"), P(None, "x"))
    )
    x = numbers(8, "int32")
    last, seen = jax.jit(run)(x)
    np.testing.assert_array_equal(last, np.roll(x, -6))
    np.testing.assert_array_equal(seen, [x, np.roll(x, -2), np.roll(x, -4)])


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_is_the_opposite_shift(check_vma):
    def both(x, ct):
        return jax.vjp(lambda x: ring_shift(x, "x", 3), x)[1](ct)[0], ring_shift(ct, "x", -3)

    run = jax.shard_map(
        both, mesh=make_mesh("x=8"), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )
    ct = numbers((8, 2), "bfloat16")
    gradient, opposite = jax.jit(run)(ct, ct)
    np.testing.assert_array_equal(gradient, np.roll(ct, -3, axis=0))
    np.testing.assert_array_equal(gradient, opposite)


@pytest.mark.parametrize(("offset", "sends"), [(1, 1), (-1, 1), (7, 1), (0, 0), (8, 0), (-16, 0)])
def test_one_permute_a_leaf_and_none_for_a_whole_turn(offset, sends):
    x = [np.ones((8, 3), np.float32), {"b": np.ones(8, np.float16)}]
    counts = count_collectives(shifted(offset), x)
    assert counts.forward == counts.backward == ({"ppermute": 2} if sends else {})
    assert counts.forward_bytes == counts.backward_bytes == sends * (12 + 2)
    assert counts.residual_bytes == 0


@pytest.mark.parametrize("offset", [0, 1])
def test_what_was_replicated_varies_after_a_shift(offset):
    found = []
    run = jax.shard_map(
        lambda x: found.append(varying_axes(ring_shift([x, x], ("y", "x"), offset))),
        mesh=make_mesh("x=2,y=2,z=2"),
        in_specs=P(),
        out_specs=None,
    )
    jax.eval_shape(run, 1.0)
    assert found == [{"x", "y"}]
