"""Dtypes of sums, of results and of what travels: the numerical contract, forward and backward."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxpar.matmul._product import Product
from jaxpar.matmul._work import flow_of
from jaxpar.ring import run
from jaxpar.schedule import compile_for, target
from jaxpar.testing import assert_matches_reference, tolerance

rings = pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])

GATHER = {"in_specs": (P("x"), P(None, "x")), "out_specs": P(None, "x")}
GATHER_K = {"in_specs": (P(None, "x"), P(None, "x")), "out_specs": P(None, "x")}
SCATTER = {"in_specs": (P(None, "x"), P("x")), "out_specs": P("x")}
REDUCE = {"in_specs": (P(None, "x"), P("x")), "out_specs": P()}


def shard(fn, where, n=8, **options):
    mesh = Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(lambda x, w: fn(x, w, "x", **options), mesh=mesh, **where))


def normal(shape, dtype):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(jnp.dtype(dtype))


def roundings(found, left, right):
    """The largest error in units of one rounding to the dtype of `found`, of float32 sums."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    exact = left @ right
    terms = np.sqrt(left**2 @ right**2)
    unit = float(jnp.finfo(found.dtype).eps) / 2
    error = np.abs(np.asarray(found, np.float64) - exact)
    # A power of two above an entry rounds in steps twice as large: hence |exact| and a little.
    return np.max((error - tolerance(np.float32, left.shape[1]) * terms) / (unit * np.abs(exact)))


@partial(jax.jit, static_argnums=0)
def value_and_pullback(fn, x, w, ct):
    y, pull = jax.vjp(fn, x, w)
    return y, *pull(ct)


CALLS = {
    "gather k": (all_gather_matmul, GATHER_K, {"dim": 1}),
    "scatter": (matmul_reduce_scatter, SCATTER, {}),
    "all-reduce": (matmul_all_reduce, REDUCE, {}),
}


@pytest.mark.parametrize(
    ("dtype", "mode", "wide"),
    [
        *(("int4", "naive", "int32"), ("int4", "chunked-2", "int32"), ("int4", "auto", "int32")),
        *(("uint4", "bidirectional", "uint32"), ("uint4", "stationary", "uint32")),
        *(("float4_e2m1fn", "naive", "float32"), ("float4_e2m1fn", "multi-ring", "float32")),
    ],
)
@pytest.mark.parametrize("call", ["gather", "scatter", "all-reduce"])
def test_products_of_4_bits(call, dtype, mode, wide):
    """Sums are wide: no 4-bit number holds these. XLA's CPU compiles such products with a cast."""
    calls = {**CALLS, "gather": (all_gather_matmul, GATHER, {})}
    fn, where, options = calls[call]
    least = 0 if dtype == "uint4" else -3
    draw = np.random.default_rng([*map(ord, dtype)])
    x, w = (draw.integers(least, 4, shape) for shape in ((8, 16), (16, 8)))
    options = {**options, "preferred_element_type": wide}
    mode = "naive" if call == "all-reduce" and mode == "stationary" else mode
    found = shard(fn, where, 4, mode=mode, **options)(x.astype(dtype), w.astype(dtype))
    assert found.dtype == wide
    np.testing.assert_array_equal(found, (x @ w).astype(wide))


@pytest.mark.parametrize("device", ["v5e:2x2", "h100:4"])
def test_4_bits_on_tpus_and_gpus(device):
    """TPUs multiply int4 itself, GPUs int8 by tensor cores, not a loop over int32."""
    chips = target(device, "x=4")
    step = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "x", mode="naive"), mesh=chips.mesh, **GATHER
    )
    shapes = zip(((1024, 512), (512, 1024)), GATHER["in_specs"], strict=True)
    args = [
        jax.ShapeDtypeStruct(shape, "int4", sharding=NamedSharding(chips.mesh, spec))
        for shape, spec in shapes
    ]
    text = compile_for(step, chips, *args).text
    assert "s32[1024,512]" not in text
    if device == "h100:4":
        assert "gemm_fusion" in text  # which converts its tiles
    else:
        assert "s4[1024,512]" in text
        assert "s8[1024,512]" not in text


def test_4_bits_hold_no_sums_of_8():
    x, w = np.ones((8, 16), "int8"), np.ones((16, 8), "int8")
    with pytest.raises(TypeError, match="preferred_element_type=int4 cannot hold products of int8"):
        shard(all_gather_matmul, GATHER, 4, preferred_element_type="int4")(x, w)


def test_4_bits_count_half_of_8_in_the_cost_model():
    product, sizes = Product("ak", "kn", "an", "int32"), {"a": 64, "k": 32, "n": 256}
    narrow, byte = (flow_of("gather", "a", 4, [product], [sizes], n, n) for n in (4, 8))
    moved = narrow.block_bytes, narrow.whole, narrow.shared
    assert moved == (byte.block_bytes // 2, byte.whole // 2, byte.shared // 2)
    assert moved == (64 // 4 * 32 // 2, 32 * 256 // 2, (64 * 32 + 64 * 256) // 2)


@pytest.mark.parametrize(
    ("call", "mode", "dtype"),
    [
        *(("gather k", "bidirectional", "float16"), ("gather k", "naive", "bfloat16")),
        *(("scatter", "unidirectional", "float16"), ("scatter", "bidirectional", "bfloat16")),
        *(("scatter", "naive", "float16"), ("scatter", "chunked-2", "bfloat16")),
        *(("all-reduce", "unidirectional", "bfloat16"), ("all-reduce", "chunked-2", "float16")),
    ],
)
def test_16_bit_sums_are_rounded_once_with_a_wide_wire(call, mode, dtype):
    fn, where, options = CALLS[call]
    x, w = normal((8, 256), dtype), normal((256, 8), dtype)
    found = shard(fn, where, 4, mode=mode, wire_dtype="float32", **options)(x, w)
    assert found.dtype == dtype
    assert roundings(found, x, w) < 1.01


@pytest.mark.parametrize(
    ("call", "asked", "mode"),
    [
        ("scatter", {}, "unidirectional"),
        ("scatter", {"wire_dtype": "bfloat16"}, "bidirectional"),
        ("all-reduce", {}, "bidirectional"),
        ("all-reduce", {"preferred_element_type": jnp.bfloat16}, "bidirectional"),
    ],
)
def test_a_16_bit_wire_rounds_once_a_hop(call, asked, mode):
    fn, where, _ = CALLS[call]
    x, w = normal((8, 256), "bfloat16"), normal((256, 8), "bfloat16")
    found = shard(fn, where, mode=mode, **asked)(x, w)
    assert found.dtype == jnp.bfloat16
    assert roundings(found, x, w) > 2  # a sum that is nearly 0 has had larger partial sums
    terms = np.sqrt(np.asarray(x, "float64") ** 2 @ np.asarray(w, "float64") ** 2)
    error = np.abs(np.asarray(found, "float64") - np.asarray(x, "float64") @ w.astype("float64"))
    assert np.all(error < tolerance(jnp.bfloat16, 256) * terms)


# A way's error, at most, over that of partial sums rounded once each: rings round once a hop.
ERRORS = {"naive": 1.0, "chunked-4": 1.0, "bidirectional": 1.3, "unidirectional": 1.6}


@pytest.mark.parametrize("mode", ERRORS)
def test_the_error_of_both_wires_beside_partial_sums_that_are_rounded(mode):
    """NumPy rounds partial sums: a compiler may keep what a program rounds (XLA's on CPU does)."""
    x, w = normal((64, 512), "bfloat16"), normal((512, 64), "bfloat16")
    left, right = np.asarray(x, "float64"), np.asarray(w, "float64")
    partial_sums = [a @ b for a, b in zip(np.split(left, 8, 1), np.split(right, 8), strict=True)]
    exact, bfloat16 = sum(partial_sums), jnp.bfloat16.dtype
    sent = [partial_sum.astype(bfloat16).astype("float64") for partial_sum in partial_sums]

    def error(found):
        return np.sqrt(np.mean((np.asarray(found, "float64") - exact) ** 2))

    def error_of_way(**wire):
        return error(shard(matmul_reduce_scatter, SCATTER, mode=mode, **wire)(x, w))

    narrow, wide = error(sum(sent).astype(bfloat16)), error(exact.astype(bfloat16))
    assert error_of_way() <= ERRORS[mode] * narrow * 1.001
    assert error_of_way(wire_dtype="float32") <= wide * 1.01 < 0.8 * narrow


@pytest.mark.parametrize(
    ("dtype", "mode"), [("bfloat16", "bidirectional"), ("float16", "unidirectional")]
)
def test_16_bit_gradients_are_rounded_once_with_a_wide_wire(mode, dtype):
    """The gradient of the gathered operand is a reduce-scatter; of the scattered, a gather."""
    x, w, ct = normal((4, 16), dtype), normal((16, 256), dtype), normal((4, 256), dtype)
    for fn, where in ((all_gather_matmul, GATHER), (matmul_reduce_scatter, SCATTER)):
        wide = shard(fn, where, 4, mode=mode, wire_dtype="float32")
        _, gx, gw = value_and_pullback(wide, x, w, ct)
        assert gx.dtype == gw.dtype == dtype
        assert roundings(gx, ct, w.T) < 1.01
        assert roundings(gw, x.T, ct) < 1.01


@pytest.mark.parametrize(
    ("call", "mode"),
    [
        *(("gather k", "bidirectional"), ("gather k", "chunked-2")),
        *(("scatter", "unidirectional"), ("scatter", "naive")),
        *(("all-reduce", "bidirectional"), ("all-reduce", "naive")),
    ],
)
def test_wide_results_of_narrow_operands(call, mode):
    """preferred_element_type=float32: nothing is rounded; gradients have the operands' dtype."""
    fn, where, options = CALLS[call]
    x, w, ct = (normal((8, 8), dtype) for dtype in ("bfloat16", "bfloat16", "float32"))
    more = {"preferred_element_type": "float32", "wire_dtype": "float32", **options}
    wide = shard(fn, where, 4, mode=mode, **more)
    found, gx, gw = value_and_pullback(wide, x, w, ct)
    assert found.dtype == "float32"
    assert gx.dtype == gw.dtype == "bfloat16"
    assert roundings(found, x, w) < 1.01
    if mode != "naive":  # whose gradients are summed as JAX does it
        assert roundings(gx, ct, w.T) < 1.01
        assert roundings(gw, x.T, ct) < 1.01


def wires(fn, *args):
    """The dtypes that ppermutes carry, in order."""
    jaxpr = str(jax.make_jaxpr(fn)(*args))
    return re.findall(r":(\w+)\[[^\]]*\](?:\{[^}]*\})? = ppermute\[", jaxpr)


@pytest.mark.parametrize(
    ("options", "sums"),
    [({}, "bf16"), ({"wire_dtype": "bfloat16"}, "bf16"), ({"wire_dtype": "float32"}, "f32")],
)
def test_what_travels(options, sums):
    """Gathered blocks in their own dtype, sums in the wire's."""
    x, w = normal((8, 8), "bfloat16"), normal((8, 8), "bfloat16")
    gather = shard(all_gather_matmul, GATHER, 4, mode="unidirectional", **options)
    scatter = shard(matmul_reduce_scatter, SCATTER, 4, mode="unidirectional", **options)
    assert wires(gather, x, w) == ["bf16"] * 3
    assert wires(scatter, x, w) == [sums] * 3

    def pull(fn):
        return lambda x, w, ct: jax.vjp(fn, x, w)[1](ct)

    assert sorted(wires(pull(gather), x, w, x)) == sorted(["bf16"] * 6 + [sums] * 3)
    assert sorted(wires(pull(scatter), x, w, x)) == sorted([sums] * 3 + ["bf16"] * 3)


@pytest.mark.parametrize(
    ("dtype", "asked", "result", "modes"),  # of a gather, a scatter, an all-reduce
    [
        ("int8", None, "int32", ("unidirectional", "bidirectional", "naive")),
        ("int8", "int32", "int32", ("bidirectional", "naive", "unidirectional")),
        ("int8", "float32", "float32", ("naive", "unidirectional", "bidirectional")),
        ("uint8", None, "uint32", ("bidirectional", "naive", "unidirectional")),
    ],
)
def test_integers_are_exact(dtype, asked, result, modes):
    """Products of 127 by 127 over 64 terms: any sum kept in 8 or 16 bits would wrap."""
    low = 0 if dtype == "uint8" else -127
    x = np.random.default_rng(0).integers(low, 127, (8, 64)).astype(dtype)
    x[0] = 127
    w = np.ascontiguousarray(x.T)
    expected = x.astype("int64") @ w.astype("int64")
    for (fn, where, options), mode in zip(CALLS.values(), modes, strict=True):
        run = shard(fn, where, 4, mode=mode, preferred_element_type=asked, **options)
        found = run(x, w)
        assert found.dtype == result
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("mode", "n", "unrolled"),
    [
        ("bidirectional", 4, 16),
        ("unidirectional", 4, 1),
    ],
)
def test_float64(mode, n, unrolled, monkeypatch):
    """To the precision of float64, also where a loop counts in 64 bits."""
    monkeypatch.setattr(run, "UNROLLED", unrolled)
    mesh = Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))

    def fn(x, w, v):
        y = all_gather_matmul(x, w, "x", mode=mode)
        return matmul_reduce_scatter(y, v, "x", mode=mode), matmul_all_reduce(y, v, "x", mode=mode)

    with jax.enable_x64(True):
        x, w, v = (normal(shape, "float64") for shape in [(n, 2), (2, n), (n, 2)])
        assert jax.eval_shape(shard(all_gather_matmul, GATHER, n, mode=mode), x, w).dtype == "f8"
        assert_matches_reference(
            fn,
            lambda x, w, v: (x @ w @ v,) * 2,
            x,
            w,
            v,
            mesh=mesh,
            in_specs=(P("x"), P(None, "x"), P("x")),
            out_specs=(P("x"), P()),
            check_vma=unrolled == 1,
        )


@rings
def test_precision_reaches_every_product(mode):
    """Forward and backward: one product for each device, and as many again for each gradient."""
    fn = shard(all_gather_matmul, GATHER, 3, mode=mode, precision=lax.Precision.HIGHEST)
    x, w = normal((3, 2), "float32"), normal((2, 3), "float32")
    jaxpr = str(jax.make_jaxpr(lambda x, w, ct: jax.vjp(fn, x, w)[1](ct))(x, w, x @ w))
    assert jaxpr.count("dot_general[") == 9
    assert len(re.findall(r"precision=\(?Precision\.HIGHEST|precision=HIGHEST", jaxpr)) == 9
