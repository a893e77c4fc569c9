"""Arrays of 8-bit numbers with scales: their roundings, limits and errors."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_bits import LIMITS, rounded, without_ties

from jaxpar import Axis, LowBit, Quantized, quantize

DTYPES = tuple(LIMITS)
every = pytest.mark.parametrize("dtype", DTYPES)
RNG = np.random.default_rng(0)


def exactly(x):
    return np.asarray(x).astype("float64")


GIVEN = ("float16", "float32", "bfloat16", "float64")
BLOCKS = [
    ((6, 30), -1, None, (6, 1)),
    ((6, 30), 0, None, (1, 30)),
    ((6, 30), 1, 8, (6, 5)),  # the longest part of a row, up to 8, of which it is a multiple
    ((6, 31), 1, 8, (6, 31)),
    ((2, 5, 4), 1, 99, (2, 1, 4)),
    ((7,), 0, 3, (7,)),
    ((1, 1), 0, 1, (1, 1)),
]


@pytest.mark.parametrize(
    ("dtype", "given", "shape", "dim", "columns", "scales"),
    [
        (dtype, given, *blocks)
        for at, dtype in enumerate(DTYPES)
        for number, blocks in enumerate(BLOCKS)
        for given in GIVEN[(at + number) % 2 :: 2]
    ],
)
def test_values_and_scales(dtype, given, shape, dim, columns, scales):
    x = without_ties(RNG.standard_normal(shape).astype(given), dtype, dim=dim, columns=columns)
    with jax.enable_x64(True):
        q = jax.jit(lambda x: quantize(x, dtype, dim=dim, columns=columns))(x)
        found = q.dequantized("float64")
        assert q.dequantized().dtype == given
    assert (q.values.dtype, q.dtype, q.scales.shape) == (dtype, given, scales)
    assert q.scales.dtype == ("float64" if given == "float64" else "float32")
    digits = 1e-15 if given == "float64" else 2e-7
    np.testing.assert_allclose(found, rounded(exactly(x), dtype, dim=dim, columns=columns), digits)


@every
def test_the_largest_number_of_a_block_is_kept(dtype):
    x = RNG.standard_normal((50, 64)).astype("float32") * np.logspace(-30, 30, 50)[:, None]
    x = x.astype("float32")
    q = quantize(jnp.asarray(x), dtype)
    largest = np.abs(x).argmax(1)[:, None]
    top = np.take_along_axis(exactly(q.values), largest, 1)
    np.testing.assert_array_equal(np.abs(top), LIMITS[dtype])
    found = np.take_along_axis(np.asarray(q.dequantized()), largest, 1)
    np.testing.assert_allclose(found, np.take_along_axis(x, largest, 1), rtol=2e-7)


@every
def test_blocks_that_are_not_finite_arrive_as_nan_and_no_other_does(dtype):
    x = np.ones((4, 6), "float32")
    x[0, 0], x[1, 3], x[2, 5] = np.nan, np.inf, -np.inf
    found = np.asarray(quantize(jnp.asarray(x), dtype, columns=3).dequantized())
    wanted = np.ones((4, 6))
    wanted[0, :3] = wanted[1, 3:] = wanted[2, 3:] = np.nan
    np.testing.assert_array_equal(found, wanted)


@every
def test_zeros_and_numbers_at_the_ends_of_float32(dtype):
    top, tiny = np.finfo("float32").max, np.finfo("float32").tiny
    x = np.array([[0, 0], [0, -0.0], [top, -top], [tiny, 0], [tiny / 4, 0]], "float32")
    q = quantize(jnp.asarray(x), dtype)
    assert np.all(np.asarray(q.scales) >= tiny)  # no scale is zero to hardware without denormals
    found = np.asarray(q.dequantized())
    assert np.all(np.isfinite(found))
    np.testing.assert_array_equal(found[:2], 0)
    np.testing.assert_allclose(found[2:], x[2:], rtol=4e-7, atol=tiny / 2)
    alone = quantize(jnp.asarray(x[2:3]), dtype).dequantized()  # another kernel, that rounds up
    np.testing.assert_allclose(alone, x[2:3], rtol=4e-7)


@pytest.mark.parametrize("given", ["float16", "bfloat16"])
def test_numbers_at_the_ends_of_16_bits(given):
    info = jnp.finfo(given)
    x = jnp.array([[info.max, 0], [info.smallest_subnormal, 0]], given)
    q = quantize(x)
    assert np.all(np.isfinite(exactly(q.dequantized())))
    assert float(q.dequantized()[0, 0]) == float(info.max)
    if given == "float16":  # its smallest numbers are normal ones of float32
        assert float(q.dequantized()[1, 0]) == float(info.smallest_subnormal)


@every
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_nothing(dtype, shape):
    q = quantize(jnp.zeros(shape), dtype)
    assert (q.shape, q.ndim, q.size) == (shape, len(shape), 0)
    assert q.dequantized().shape == shape


def test_rounding_by_chance_has_the_right_mean():
    x = jnp.asarray(RNG.uniform(-1, 1, (3, 20)), "float32")
    keys = jax.random.split(jax.random.key(0), 4000)
    found = exactly(jax.jit(jax.vmap(lambda key: quantize(x, key=key).dequantized()))(keys))
    scales = exactly(quantize(x).scales)
    # Each one is a neighbour of x, and the mean of n of them is off by 1/2 sqrt(n) of a scale.
    assert np.all(np.abs(found - exactly(x)) < scales * 1.001)
    assert np.abs((found.mean(0) - exactly(x)) / scales).max() < 5 * 0.5 / np.sqrt(4000)
    nearest = exactly(quantize(x).dequantized())
    assert np.abs((nearest - exactly(x)) / scales).max() > 5 * 0.5 / np.sqrt(4000)


def test_a_key_names_its_roundings():
    x = jnp.asarray(RNG.standard_normal((8, 64)), "float32")
    one, same, other = (quantize(x, key=jax.random.key(seed)).values.tolist() for seed in (0, 0, 1))
    assert one == same != other


# -- Quantized ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [(1, 1), (4, 1), (2, 1), (1, 6), (4, 2), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_hold_for_neighbours(scales, dtype):
    values, s = RNG.integers(-127, 128, (4, 6)), RNG.uniform(1, 2, scales).astype(dtype)
    wide = np.repeat(np.repeat(exactly(s), 4 // scales[0], 0), 6 // scales[1], 1)
    q = Quantized(jnp.asarray(values, "int8"), jnp.asarray(s), dtype="float32")
    np.testing.assert_allclose(q.dequantized(), values * wide, rtol=2e-7)
    assert q.dequantized("float16").dtype == "float16"


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_a_last_block_that_is_not_full(block):
    """As in published files: DeepSeek-V3 has 5 scales for 576 rows."""
    rows = 4 * block + block // 2
    values, s = RNG.integers(-127, 128, (rows, 6)), RNG.uniform(1, 2, (5, 1))
    wide = np.repeat(s, block, 0)[:rows]
    q = Quantized(jnp.asarray(values, "int8"), jnp.asarray(s, "float32"), dtype="float32")
    np.testing.assert_allclose(jax.jit(lambda q: q.dequantized())(q), values * wide, rtol=2e-7)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), q).dequantized()
    np.testing.assert_array_equal(stacked, np.stack([q.dequantized()] * 2))
    columns = jax.tree.map(jnp.transpose, q).dequantized()
    np.testing.assert_array_equal(columns, q.dequantized().T)


@pytest.mark.parametrize(
    ("values", "scales", "block"),
    [("float4_e2m1fn", "float8_e8m0fnu", 32), ("float4_e2m1fn", "float8_e4m3fn", 16)],
)
def test_formats_of_4_bits(values, scales, block):
    """MXFP4, and NVFP4 with its second scale multiplied into the first ones."""
    rows = 4 * block
    v = RNG.choice([-6, -1.5, -0.5, 0, 0.5, 1, 2, 3, 4, 6], (rows, 3)).astype(values)
    s = (2.0 ** RNG.integers(-3, 4, (4, 3))).astype(scales)
    second = np.float32(1 / 3)
    both = jnp.asarray(s).astype("float32") * second
    q = Quantized(jnp.asarray(v), both, dtype="float32")
    wanted = exactly(v) * np.repeat(exactly(s), block, 0) * second
    np.testing.assert_allclose(q.dequantized(), wanted, rtol=2e-7)
    alone = Quantized(jnp.asarray(v), jnp.asarray(s), dtype="float32").dequantized()
    np.testing.assert_array_equal(alone, exactly(v) * np.repeat(exactly(s), block, 0))


@pytest.mark.parametrize(
    ("length", "columns", "block"), [(300, 128, 100), (512, 128, None), (24, 12, 12), (24, 1, None)]
)
def test_quantize_tells_its_blocks(length, columns, block):
    """Where shapes alone would allow blocks of 128, or would in a part."""
    x = jnp.asarray(RNG.standard_normal((2, length)), "float32")
    q = jax.jit(lambda x: quantize(x, columns=columns))(x)
    assert q.block == block
    np.testing.assert_allclose(
        q.dequantized(), rounded(exactly(x), "int8", dim=1, columns=columns), 1e-6
    )


def test_a_pytree_of_two_leaves():
    q = quantize(jnp.ones((4, 8), "bfloat16"))
    leaves, treedef = jax.tree.flatten(q)
    assert [x.shape for x in leaves] == [(4, 8), (4, 1)]
    assert treedef.unflatten(leaves).dtype == "bfloat16"
    assert jax.jit(lambda q: q)(q).values.dtype == "int8"
    assert jax.eval_shape(lambda: q).shape == (4, 8)
    assert jax.tree.map(lambda x: None, q).values is None


def test_quantize_has_no_derivative_of_rounding():
    """Values have none; scales have that of the largest number."""
    x = jnp.array([[1.0, -3.0, 2.0]])
    grad = jax.grad(lambda x: quantize(x).scales.sum())(x)
    np.testing.assert_allclose(grad, [[0, -1 / 127, 0]], rtol=1e-6)


# -- LowBit, and an Axis that has one -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.int8, np.dtype("int8")])
def test_a_wire_of_8_bits(dtype):
    wire = LowBit(dtype, columns=64)
    assert wire == LowBit(jnp.dtype(dtype), 64)
    assert hash(wire) == hash(LowBit(jnp.dtype(dtype), 64))
    assert (wire.sums, wire.cotangents) == (None, True)


def test_an_axis_with_a_wire_of_8_bits():
    wire = LowBit("int8", columns=64, sums="bfloat16")
    axis = Axis("tp", wire_dtype=wire)
    assert axis == Axis(Axis("tp", wire_dtype=LowBit("int8", 64, "bfloat16")))
    assert len({axis, Axis("tp", wire_dtype=wire), Axis("tp", wire_dtype="int8"), Axis("tp")}) == 3
    assert pickle.loads(pickle.dumps(axis)) == axis
    assert repr(axis) == (
        "Axis(names=('tp',), mode='auto', wire_dtype=LowBit(dtype=dtype('int8'), columns=64, "
        "sums=dtype(bfloat16), cotangents=True), backward=None, "
        "keep_gathered=None, gather_dtype=None)"
    )


# -- errors -------------------------------------------------------------------------------------

X = jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda: LowBit("int4"), TypeError, "LowBit: dtype=int4 must be one of int8, float8_e4m3f"),
        (lambda: LowBit("bfloat16"), TypeError, "LowBit: dtype=bfloat16 must be one of int8"),
        (lambda: LowBit("eight"), TypeError, "LowBit: dtype='eight' is not a dtype; pass one such"),
        (
            lambda: LowBit("int8", 0),
            ValueError,
            "LowBit: columns must be 1 or more, got 0; None: a",
        ),
        (lambda: LowBit("int8", 2.5), TypeError, "LowBit: columns must be an integer or None, got"),
        (
            lambda: LowBit("int8", True),
            TypeError,
            "LowBit: columns must be an integer or None, got",
        ),
        (
            lambda: LowBit("float8_e4m3fn", sums="int8"),
            TypeError,
            "LowBit: sums=int8 cannot have scales beside dtype=float8_e4m3fn; choose float8_e4m3fn",
        ),
        (
            lambda: quantize(X, "float8_e5m2"),
            TypeError,
            "quantize: dtype=float8_e5m2 must be one of int8, float8_e4m3fn",
        ),
        (
            lambda: Axis("x", wire_dtype="float8_e5m2"),
            TypeError,
            "Axis: wire_dtype=float8_e5m2 has no scales; choose int8, float8_e4m3fn, or 16 bits",
        ),
        (lambda: quantize(X, columns=0), ValueError, "quantize: columns must be 1 or more, got 0"),
        (
            lambda: quantize(X, dim=2),
            ValueError,
            "quantize: dim=2 is out of range for a local shap",
        ),
        (lambda: quantize(X.astype("int32")), TypeError, "quantize: x is int32[3, 4]; give floats"),
        (
            lambda: quantize(X, "float8_e4m3fn", key=jax.random.key(0)),
            TypeError,
            "quantize: a key rounds int8 by chance, and not float8_e4m3fn; leave it out",
        ),
        (
            lambda: Quantized(X, X, dtype="eight"),
            TypeError,
            "Quantized: dtype='eight' is not a dtype; pass one such as",
        ),
        (lambda: Quantized(X, X, block=0), ValueError, "Quantized: block=0 must be at least 1"),
        (lambda: Quantized(X, X, block=(1, 2.5)), TypeError, "Quantized: block must be an integer"),
        (
            lambda: Quantized(X, X[0]).dequantized(),
            ValueError,
            "Quantized.dequantized: scales have local shape (4,) for values of (3, 4): 1 dim",
        ),
    ],
)
def test_errors(function, error, text):
    with pytest.raises(error) as raised:
        function()
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(
    ("shape", "scales", "block", "told"),
    [
        ((8, 480), (1, 10), 64, "dimension 1 are no blocks of 64, but of 48, which"),
        ((8, 480), (8, 10), (1, 64), r"dimension 1 are no blocks of \(1, 64\), but of 48, which"),
        ((96, 480), (3, 10), 48, "dimension 0 are no blocks of 48, but of 32, which"),
        ((8, 192), (1, 2), 48, "dimension 1 are no blocks of 48, but of 96 or 128, which"),
        ((8, 480), (1, 9), 64, "dimension 1 are no blocks of 64; give"),
    ],
)
def test_a_told_block_is_not_read_as_another(shape, scales, block, told):
    x = Quantized(jnp.ones(shape, "int8"), jnp.ones(scales), block=block)
    with pytest.raises(ValueError, match=told):
        x.dequantized()
