"""Regions against NumPy, in types as well as in values, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import Axis, make_mesh
from jaxpar.layers import copy_region, gather_region, reduce_region, scatter_region
from jaxpar.testing import assert_matches_reference, count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])


def mesh_of(sizes):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("x", "y", "z")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def size_of(mesh, names):
    return int(np.prod([mesh.shape[name] for name in ([names] if names == "x" else names)]))


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("sizes", "names", "check_vma"), [((3,), "x", True), ((2, 3), ("y", "x"), False)], ids=str
)
def test_copy_and_reduce(sizes, names, check_vma):
    mesh = mesh_of(sizes)
    x, w = normal(2, 3), normal(3, 2 * size_of(mesh, names))

    def fn(x, w):
        x = copy_region({"x": x}, names)["x"]
        return reduce_region([jnp.sin(x @ w) @ w.T], names)

    assert_matches_reference(
        fn,
        lambda x, w: [np.sin(x @ w) @ w.T],
        *(x, w),
        mesh=mesh,
        in_specs=(P(), P(None, names)),
        out_specs=P(),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    ("sizes", "names", "dim", "check_vma"),
    [
        ((3,), "x", 0, False),
        ((2, 3), ("y", "x"), -1, True),
        ((2, 1, 2), ("x", "z"), 0, True),
        ((2, 1, 2), ("z", "x"), -1, False),
    ],
    ids=str,
)
def test_gather_and_scatter(sizes, names, dim, check_vma):
    """A block of a square of the whole; each goes into a sum, so that cotangents differ."""
    mesh = mesh_of(sizes)
    n = size_of(mesh, names)
    x = normal(2 * n, 3 * n)
    spec = P(names) if dim == 0 else P(None, names)

    def fn(x):
        whole = gather_region({"x": x}, names, dim=dim)["x"]
        return scatter_region(jnp.sin(whole) * jnp.sum(whole), names, dim=dim), whole

    assert_matches_reference(
        fn,
        lambda x: (np.sin(x) * np.sum(x), np.array(x)),
        x,
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec, P()),
        check_vma=check_vma,
        max_directions=8,
    )


def test_scatter_of_what_varies_over_one_of_two_axes():
    """Blocks are in logical order, and gradients of copies that differ stay apart."""
    mesh = mesh_of((2, 3))

    def fn(x, blocks):
        own = scatter_region(x[0], ("x", "y"))
        return reduce_region(jnp.vdot(own, blocks), ("x", "y"))

    assert_matches_reference(
        fn,
        lambda x, blocks: np.vdot(x.reshape(2, 2, 6)[[0, 1], [0, 1]], blocks),
        *(normal(2, 12), normal(12)),
        mesh=mesh,
        in_specs=(P("x"), P(("x", "y"))),
        out_specs=P(),
    )


def mapped(fn, in_specs, out_specs, check_vma=True):
    return jax.shard_map(
        fn, mesh=mesh_of((4, 2)), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def sent(fn, in_specs, out_specs, check_vma=True):
    counts = count_collectives(mapped(fn, in_specs, out_specs, check_vma), jnp.ones((8, 8)))
    return dict(counts.forward), dict(counts.backward)


def test_what_is_sent():
    """In a region each is communication one way only; copies and blocks are of a varying value."""
    assert sent(lambda x: reduce_region(x, "x"), P("x"), P()) == ({"psum": 1}, {})
    assert sent(lambda x: copy_region(x, "x"), P(), P("x")) == ({}, {"psum": 1})
    assert sent(lambda x: gather_region(x, "x"), P(None, "x"), P()) == ({"all_gather": 1}, {})
    blocks = sent(lambda x: scatter_region(x, "x"), P(), P(None, "x"))
    assert blocks == ({}, {"all_gather": 1})
    assert sent(lambda x: copy_region(x, "x"), P("x"), P("x")) == ({}, {})
    assert sent(lambda x: scatter_region(x, "x"), P("x", "y"), P("x", "y")) == ({}, {})


def test_gradients_inside_of_replicated_values(float64):
    """Under check_vma=True each derivative is the one that is named, inside too."""

    def body(x, w):
        def loss(x):
            return reduce_region(jnp.vdot(scatter_region(jnp.sin(x), "x", dim=0), w), "x")

        return jax.grad(loss)(x), jax.grad(lambda x: jnp.vdot(copy_region(x, "x")[:2], w))(x)

    x, w = wide((normal(8), normal(8)))
    cut, copied = jax.jit(mapped(body, (P(), P("x")), P()))(x, w)
    assert_alike((cut, copied[:2]), (np.cos(x) * w, np.sum(w.reshape(4, 2), axis=0)))


@pytest.mark.parametrize(
    ("wire", "forward", "backward"), [(None, 2, 2), ("float32", 4, 4), ("float16", 2, 4)]
)
def test_sums_travel_in_the_dtype_of_the_wire(wire, forward, backward):
    """A wire that does not hold what is copied would round it, and carries float32."""
    axis, x = Axis("x", wire_dtype=wire), jnp.ones(8, "bfloat16")
    reduce = count_collectives(mapped(lambda x: reduce_region(x, axis), P("x"), P()), x)
    copy = count_collectives(mapped(lambda x: copy_region(x, axis), P(), P("x")), x)
    assert reduce.forward_bytes == 2 * 3 / 4 * 2 * forward
    assert copy.backward_bytes == 2 * 3 / 4 * 8 * backward
    total = mapped(lambda x: reduce_region(x, axis), P("x"), P())(x)
    assert total.dtype == "bfloat16"


@pytest.mark.parametrize("region", [copy_region, reduce_region])
def test_a_wire_of_another_kind(region):
    with pytest.raises(TypeError, match="wire_dtype=int32 cannot carry sums of float32"):
        mapped(lambda x: region(x, Axis("x", wire_dtype="int32")), P(), P("x"))(jnp.ones(4))


@check
def test_twice_in_reverse(check_vma, float64):
    def fn(x, w):
        whole = gather_region(x, "x", dim=0)
        part = copy_region(jnp.sin(whole), "x") @ w
        total = reduce_region(part**2, "x")
        return scatter_region(total, "x", dim=0)

    fn = mapped(fn, (P("x"), P(None, "x")), P("x"), check_vma)

    def alone(x, w):
        return jnp.sum((jnp.sin(x) @ w).reshape(8, 4, 2) ** 2, axis=1)

    def second(f):
        def bend(x, w):
            return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.cos(f(x, w))))(x) ** 2)

        return jax.jit(jax.grad(bend, argnums=(0, 1)))

    args = wide((normal(8, 3), 0.3 * normal(3, 8)))
    assert_alike(second(fn)(*args), second(alone)(*args))


def test_integers_empty_arrays_and_vmap():
    ints = mapped(lambda x: reduce_region(copy_region(x, "x"), "x"), P(), P())
    np.testing.assert_array_equal(jax.jit(ints)(jnp.arange(4)), 4 * np.arange(4))
    none = mapped(lambda x: gather_region(x, "x"), P(None, "x"), P())
    assert jax.jit(none)(jnp.zeros((0, 8))).shape == (0, 8)
    each = mapped(jax.vmap(lambda x: scatter_region(x, "x", dim=0)), P(), P(None, "x"))
    np.testing.assert_array_equal(jax.jit(each)(normal(3, 8)), normal(3, 8))


# -- errors -------------------------------------------------------------------------------------


def error(fn):
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.eval_shape(
            jax.shard_map(
                lambda: (fn(jnp.ones((4, 6))), 0)[1],
                mesh=make_mesh("x=4,y=2"),
                in_specs=(),
                out_specs=P(),
            )
        )
    return str(caught.value)


def test_a_dimension_that_the_axis_does_not_divide():
    assert error(lambda x: scatter_region(x, "x")) == (
        "scatter_region: x has local shape (4, 6), whose dimension 1 axis 'x' (4) does not divide: "
        "6 = 1 x 4 + 2; pad it to 8, or choose another dimension"
    )


@pytest.mark.parametrize("fn", [gather_region, scatter_region], ids=lambda fn: fn.__name__)
def test_a_dimension_that_is_not_there(fn):
    assert error(lambda x: fn(x, "x", dim=2)) == (
        f"{fn.__name__}: dim=2 is out of range for a local shape (4, 6), which has 2 dimensions; "
        "choose from -2 to 1"
    )


@pytest.mark.parametrize(
    "fn", [copy_region, gather_region, reduce_region, scatter_region], ids=lambda fn: fn.__name__
)
def test_an_axis_that_is_not_bound(fn):
    assert error(lambda x: fn(x, "tp")) == (
        f"{fn.__name__}: axis 'tp' is not bound: the axes bound here are {{'x': 4, 'y': 2}}. "
        "Call it inside jax.shard_map over a mesh with an axis 'tp'"
    )
    with pytest.raises(ValueError, match="no mesh axis is bound here"):
        fn(jnp.ones(2), "x")
