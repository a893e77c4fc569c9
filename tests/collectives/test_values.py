"""The ring collectives return what their namesakes in `jax.lax` return, to the bit.

Entries are small integers, whose sums are exact in every dtype here, so that the order in which a
ring adds does not show.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather, all_reduce, make_mesh, reduce_scatter

RINGS = ("unidirectional", "bidirectional")
MODES = ("naive", "chunked-2", "auto", *RINGS)


def line(n):
    return make_mesh({"x": n}, devices=jax.devices()[:n])


def integers(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(jnp.dtype(dtype))


def all_three(axes, mode):
    """Our three collectives of a dict of local arrays, and lax's."""

    def ours(x):
        return (
            all_gather(x["gather"], axes, tiled=True, mode=mode),
            reduce_scatter(x["scatter"], axes, tiled=True, mode=mode),
            all_reduce(x["reduce"], axes, mode=mode),
        )

    def laxs(x):
        return (
            jax.tree.map(lambda leaf: lax.all_gather(leaf, axes, tiled=True), x["gather"]),
            jax.tree.map(lambda leaf: lax.psum_scatter(leaf, axes, tiled=True), x["scatter"]),
            lax.psum(x["reduce"], axes),
        )

    return ours, laxs


def with_gradients(function):
    """`function` and its gradients, for integer cotangents that differ between devices."""

    def run(x):
        out, pull = jax.vjp(function, x)
        return out, pull(
            jax.tree.map(lambda y: y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape), out)
        )

    return run


def assert_same(functions, x, *, mesh, axes="x", **options):
    """Asserts that two functions of a local pytree agree bitwise.

    `x` holds the local arrays of all devices along a new first dimension.
    """

    def run(x):
        local = jax.tree.map(lambda leaf: leaf[0], x)
        return jax.tree.map(lambda leaf: leaf[None], [function(local) for function in functions])

    spec = P(axes)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    found, wanted = jax.jit(mapped)(x)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("n", "mode"),
    [
        *((n, "unidirectional") for n in (1, 2, 3, 6)),
        *((n, "bidirectional") for n in (2, 3, 4, 5, 7, 8)),
    ],
)
def test_every_size_of_ring_with_gradients(n, mode):
    # Blocks of (5, 3) have halves of 3 and 2 rows, and (7, 1) is padded, or not on a ring of 7.
    x = {
        "gather": integers((n, 5, 3)),
        "scatter": integers((n, n, 3), seed=1),
        "reduce": integers((n, 7, 1), seed=2),
    }
    functions = map(with_gradients, all_three("x", mode))
    assert_same([*functions], x, mesh=line(n), check_vma=n % 2 == 0)


@pytest.mark.parametrize(
    ("mode", "check_vma"),
    [
        *[("naive", True), ("chunked-2", True), ("chunked-2", False), ("auto", False)],
        *[("unidirectional", False), ("bidirectional", True)],
    ],
)
def test_every_mode_over_a_tuple_on_a_shuffled_mesh(mode, check_vma):
    devices = np.random.default_rng(2).permutation(jax.devices())[:6]
    mesh = Mesh(devices.reshape(2, 1, 3), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    axes = ("z", "x", "y")
    x = {
        "gather": integers((6, 3)),
        "scatter": [integers((6, 6, 2), seed=1)],
        "reduce": (integers((6, 4), seed=2), integers(6, seed=3)),
    }
    functions = map(with_gradients, all_three(axes, mode))
    assert_same([*functions], x, mesh=mesh, axes=axes, check_vma=check_vma)


# Dimensions that are even, odd and 1: a block is halved in the middle, unevenly, or not at all.
GATHERS = [
    ((), {}),
    ((), {"dim": -1}),
    ((1,), {"tiled": True}),
    ((2, 3), {"dim": -1, "tiled": True}),
    ((3, 5), {"dim": -1}),
    ((1, 1), {"dim": -3}),
    ((5, 2, 1), {"dim": -2, "tiled": True}),
]
SCATTERS = [
    ((1,), {}),
    ((3,), {"tiled": True}),
    ((3, 2), {"dim": 1, "tiled": True}),
    ((1, 1, 3), {"dim": 1}),
    ((1, 1), {"dim": 0, "tiled": True}),
    ((5, 1, 3), {"dim": 2, "tiled": True}),
]  # the shape is that of the result, with 1 where the dimension goes
both_rings = pytest.mark.parametrize(("n", "mode"), [(4, "bidirectional"), (3, "unidirectional")])


@both_rings
def test_every_form_of_all_gather(n, mode):
    def every(gather, **mode):
        return lambda x: [
            gather(leaf, "x", **form, **mode) for leaf, (_, form) in zip(x, GATHERS, strict=True)
        ]

    x = [integers((n, *shape), seed=seed) for seed, (shape, _) in enumerate(GATHERS)]

    def laxs(x, axes, dim=0, **form):
        return lax.all_gather(x, axes, axis=dim, **form)

    functions = every(all_gather, mode=mode), every(laxs)
    assert_same(functions, x, mesh=line(n))


@both_rings
@pytest.mark.parametrize("negative", [False, True])
def test_every_form_of_reduce_scatter(n, mode, negative):
    def ours(x, dim=0, **form):
        return reduce_scatter(x, "x", dim=dim - x.ndim * negative, **form, mode=mode)

    def laxs(x, dim=0, **form):  # which takes no negative dimension
        return lax.psum_scatter(x, "x", scatter_dimension=dim, **form)

    def every(scatter):
        return lambda x: [scatter(leaf, **f) for leaf, (_, f) in zip(x, SCATTERS, strict=True)]

    x = []
    for seed, (shape, form) in enumerate(SCATTERS):
        whole = list(shape)
        whole[form.get("dim", 0)] *= n
        x.append(integers((n, *whole), seed=seed))
    assert_same((every(ours), every(laxs)), x, mesh=line(n))


@both_rings
def test_all_reduce_of_every_shape(n, mode):
    shapes = [(), (1,), (5,), (4, 2), (5, 3), (1, 7, 1), (2, 3, 4)]
    x = [integers((n, *shape), seed=seed) for seed, shape in enumerate(shapes)]
    functions = lambda x: all_reduce(x, "x", mode=mode), lambda x: lax.psum(x, "x")
    assert_same(functions, x, mesh=line(n))


@both_rings
def test_every_dtype(n, mode):
    kinds = ("int8", "uint8", "float16", "bfloat16", "complex64")
    x = {kind: np.abs(integers((n, n))).astype(jnp.dtype(kind)) for kind in kinds}
    x = {"gather": {"bool": integers((n, n)) > 0, **x}, "scatter": x, "reduce": x}
    assert_same(all_three("x", mode), x, mesh=line(n))


def test_sums_of_small_integers_wrap_as_in_lax():
    x = {
        "gather": (),
        "scatter": np.full((8, 8), 100, np.int8),
        "reduce": np.arange(-8, 0, 1, "i1"),
    }
    assert_same(all_three("x", "bidirectional"), x, mesh=line(8))


@pytest.mark.parametrize("manual", [{"x", "y", "z"}, {"x", "z"}])
def test_several_rings_and_a_mesh_that_is_manual_in_part(manual):
    axes = ("z", "x")
    x = {
        "gather": integers((4, 2, 3)),
        "scatter": integers((4, 8, 3), seed=1),
        "reduce": integers((4, 2, 2), seed=2),
    }
    rows = P(axes, "y") if "y" in manual else P(axes)
    mapped = jax.shard_map(
        lambda x: [
            jax.tree.map(lambda leaf: leaf[None], f(jax.tree.map(lambda leaf: leaf[0], x)))
            for f in all_three(axes, "bidirectional")
        ],
        mesh=make_mesh("x=2,y=2,z=2"),
        in_specs=rows,
        out_specs=rows,
        axis_names=manual,
    )
    found, wanted = jax.jit(mapped)(x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_all_reduce_is_typed_as_replicated(mode):
    run = jax.shard_map(
        lambda x: all_reduce({"x": x, "y": x[0, 0]}, ("y", "x"), mode=mode),
        mesh=make_mesh("x=2,y=4"),
        in_specs=P(("x", "y")),
        out_specs=P(),
        check_vma=True,
    )
    x = integers((8, 3))
    out = jax.jit(run)(x)
    np.testing.assert_array_equal(out["x"], x.sum(0, keepdims=True))
    assert out["y"] == x[:, 0].sum()


@pytest.mark.parametrize("mode", RINGS)
def test_gathered_blocks_are_not_typed_as_replicated(mode):
    run = jax.shard_map(
        lambda x: all_gather(x, "x", mode=mode), mesh=line(4), in_specs=P("x"), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(run, integers((4, 3)))


@pytest.mark.parametrize("mode", RINGS)
def test_empty_arrays(mode):
    def forms(x):
        return (
            all_gather(x, "x", mode=mode),
            reduce_scatter(x.T, "x", tiled=True, mode=mode),
        )

    run = jax.shard_map(forms, mesh=line(4), in_specs=P("x"), out_specs=P("x"))
    shapes = [out.shape for out in jax.jit(run)(np.ones((0, 4), np.float32))]
    assert shapes == [(16, 0, 4), (4, 0)]


@pytest.mark.parametrize("mode", RINGS)
def test_all_reduce_of_an_empty_array(mode):
    functions = lambda x: all_reduce(x, "x", mode=mode), lambda x: lax.psum(x, "x")
    assert_same(functions, np.ones((4, 0, 3), np.float32), mesh=line(4))
