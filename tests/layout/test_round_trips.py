"""What a layout accepts comes back: placed, gathered, saved and restored, on any mesh."""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, Phase, assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxpar import Quantized, make_mesh
from jaxpar.layout import LayoutMap, Padded, Split

MESHES = {"a=2,b=2": 4, "a=1,b=3": 3, "a=1,b=1": 1}
DTYPES = [
    *[bool, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.float64],
    *[np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int2, ml_dtypes.int4],
    *[ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz],
    *[ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e3m4],
    *[ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3, ml_dtypes.float4_e2m1fn],
    *[ml_dtypes.uint2, ml_dtypes.uint4],
]
NAMES = [
    *["", "a", "b", "a/b", "a/b/c", "a.b", "a b", "A", "0", "1", "01", "~", "mlp/~/linear_0", "%"],
    *["%2F", ".", "..", "/", "/a", "a/", "CON", "nul:", "*?", "\\", "'", '"', "\n", "\0", "é"],
    *["e\u0301", "权", "x" * 2000, "a" * 255 + "/b", "(1, 2)", "d"],
    *["manifest.ocdbt", "a/.zarray", "values"],
]  # fmt: skip


def array(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if dtype in (np.int64, np.float64):  # which JAX has in 32 bits
        return rng.integers(-(2**20), 2**20, shape).astype(dtype)
    if dtype in (bool, ml_dtypes.uint2, ml_dtypes.uint4):
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype in (ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        return rng.integers(-2, 2, shape).astype(dtype)
    bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return bits.view(dtype).reshape(shape)


def keys(impl, shape, seed):
    return jax.random.split(jax.random.key(seed, impl=impl), shape)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=3).map(tuple)
seeds = st.integers(0, 99)
arrays = st.builds(array, st.sampled_from(DTYPES), shapes, seeds)
leaves = st.one_of(
    arrays,
    arrays,
    st.builds(keys, st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]), shapes, seeds),
    st.builds(
        lambda shape, seed: Quantized(
            array(np.int8, shape, seed), array(np.float32, (*shape[:-1], 1), seed), dtype="float16"
        ),
        shapes.filter(len),
        seeds,
    ),
    st.sampled_from([None, jax.nn.relu, "text", True, 3, 2.5, 1j, np.float64(2), jnp.float32(7)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
        st.dictionaries(st.integers(0, 3), inner, max_size=2),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=10,
)


@st.composite
def rules(draw, layout):
    """Rules for the arrays of a layout, which shard and pad whatever they can."""
    found = {}
    for path, one in layout.items():
        if f"{path.removesuffix('scales')}values" in layout:
            continue  # scales are laid out as their values are
        axes = draw(st.permutations(["a", "b"]))
        entries = []
        for _ in one.shape:
            entry = draw(st.sampled_from([None, "axis", "more"]))
            axis = axes.pop() if entry and axes else None
            more = draw(st.sampled_from([1, 2]))
            entries.append(axis and Padded(axis, multiple=more) if entry else None)
        value = tuple(entries)
        if one.shape and draw(st.booleans()):
            value = Split("a", draw(st.integers(0, len(one.shape) - 1)))
        found[re.escape(path)] = value
    return LayoutMap(found)


def bits(x):
    x = jax.random.key_data(x) if isinstance(x, jax.Array) and "key" in str(x.dtype) else x
    x = np.atleast_1d(np.asarray(x))
    return x.dtype, x.shape, np.ascontiguousarray(x).view(np.uint8).tolist()


def as_jax(x):
    """The bits of what JAX makes of a leaf, or the leaf."""
    is_array = hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))
    return bits(jnp.asarray(x)) if is_array else x


few = examples(
    10,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking compiles for minutes
    suppress_health_check=list(HealthCheck),
)


@few
@given(tree=trees, data=st.data())
def test_trees(tree, data):
    kinds = st.sampled_from([AxisType.Auto, AxisType.Explicit])
    first, *others = MESHES
    meshes = [
        make_mesh(axes, devices=jax.devices()[: MESHES[axes]], axis_types=data.draw(kinds))
        for axes in (first, data.draw(st.sampled_from(others)))
    ]
    try:
        plain = LayoutMap({}).layout(tree, meshes[0], strict=False)
    except ValueError as refused:
        assume("two arrays of path" not in str(refused))
        raise
    layouts = [data.draw(rules(plain)).layout(tree, mesh, strict=False) for mesh in meshes]
    leaves, structure = jax.tree.flatten(tree)
    expected = [as_jax(x) for x in leaves]
    placed = layouts[0].place(tree)
    with tempfile.TemporaryDirectory() as folder:
        layouts[0].save(Path(folder) / "one", placed)
        for layout in layouts:
            params = layout.restore(Path(folder) / "one")
            assert jax.tree.structure(params) == structure
            on_mesh = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
            for x, one in zip(on_mesh, layout.values(), strict=True):
                assert x.sharding.is_equivalent_to(one.sharding, x.ndim)  # keys' specs are longer
            assert [x.dtype for x in on_mesh] == [one.dtype for one in layout.values()]
            found = [as_jax(x) for x in jax.tree.leaves(layout.gather(params))]
            assert found == expected


MIXED = [AxisType.Explicit, {"a": AxisType.Explicit}]


@pytest.mark.parametrize("types", MIXED, ids=["explicit", "mixed"])
def test_padding_in_programs_on_explicit_axes(types):
    mesh = make_mesh("a=2,b=2", devices=jax.devices()[:4], axis_types=types)
    w = np.random.default_rng(0).normal(size=(5, 3)).astype("f")
    layout = LayoutMap({"w": (Padded("a"), Padded("b"))}).layout({"w": w}, mesh)
    placed = layout.place({"w": w})

    def squares(params):
        padded = layout.pad(layout.unpad(params))
        return jnp.sum(padded["w"] ** 2), padded

    gradient, padded = jax.jit(jax.grad(squares, has_aux=True))(placed)
    assert bits(padded["w"]) == bits(placed["w"])
    np.testing.assert_array_equal(gradient["w"], 2 * np.asarray(placed["w"]))


@pytest.mark.parametrize("dtype", [ml_dtypes.int2, ml_dtypes.uint2])
def test_numbers_of_2_bits_are_made(dtype):
    x = array(dtype, (5, 3), 1)
    mesh = make_mesh("a=2,b=2", devices=jax.devices()[:4])
    layout = LayoutMap({"x": (Padded("a"), Padded("b"))}).layout({"x": x}, mesh)
    made = layout.init(lambda: {"x": jnp.asarray(x)})
    assert bits(made["x"]) == bits(layout.place({"x": x})["x"])
