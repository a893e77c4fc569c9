"""What is not finite stays so where numbers travel in 8 bits: a block with such a number is NaN.

Blocks have some thousand numbers: of fewer, XLA's maximum on CPU does not lose NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_bits import LIMITS
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    LowBit,
    Quantized,
    all_gather,
    all_gather_matmul,
    make_mesh,
    matmul_reduce_scatter,
    quantize,
    reduce_scatter,
)
from jaxpar.layers import copy_region, fsdp_gather, fsdp_linear, reduce_region
from jaxpar.moe import moe_layer, route

NAN, INF = np.float32(np.nan), np.float32(np.inf)
ROWS, LONG = 64, 2048
every = pytest.mark.parametrize("dtype", LIMITS)
checks = pytest.mark.parametrize("check_vma", [True, False])


def poisoned(shape=(ROWS, LONG), dtype="float32"):
    """Three numbers that are not finite, in rows 1, 30 and 63."""
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    x[1, 7], x[30, shape[1] // 2], x[63, -1] = NAN, INF, -INF
    return x


def rows_of(found):
    """The rows that are not finite: all of each of them."""
    lost = ~np.isfinite(np.float32(found))
    np.testing.assert_array_equal(lost.any(1), lost.all(1))
    return np.flatnonzero(lost.any(1)).tolist()


@pytest.mark.parametrize(
    ("dtype", "dim", "columns", "given"),
    [
        (dtype, *rows, ("float32", "bfloat16")[(at + number) % 2])
        for at, dtype in enumerate(LIMITS)
        for number, rows in enumerate([(1, None), (1, 128), (0, None), (0, 16)])
    ],
)
def test_quantized_blocks(dtype, given, dim, columns):
    x = poisoned(dtype=jnp.dtype(given))
    found = jax.jit(lambda x: quantize(x, dtype, dim=dim, columns=columns).dequantized())(x)
    blocks = np.moveaxis(np.float32(x), dim, -1)
    blocks = blocks.reshape(len(blocks), -1, columns or blocks.shape[1])
    wanted = np.broadcast_to(~np.isfinite(blocks).all(-1, keepdims=True), blocks.shape)
    wanted = np.moveaxis(wanted.reshape(np.moveaxis(x, dim, -1).shape), -1, dim)
    np.testing.assert_array_equal(np.isnan(np.float32(found)), wanted)
    assert np.all(np.isfinite(np.float32(found)) | wanted)


def test_blocks_that_are_rounded_by_chance():
    found = quantize(jnp.asarray(poisoned()), key=jax.random.key(0)).dequantized()
    assert rows_of(found) == [1, 30, 63]


def test_rounding_by_chance_stays_in_range(monkeypatch):
    """127 plus the largest number below 1 is 128 in float32, for which int8 has no room."""
    monkeypatch.setattr(jax.random, "uniform", lambda *_: jnp.float32(1 - 2**-24))
    q = quantize(jnp.array([[1.0, -1.0, 0.5]]), key=jax.random.key(0))
    np.testing.assert_array_equal(q.values, [[127, -126, 64]])


def over_devices(local, in_specs, out_specs, check_vma=True):
    return jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh("tp=4", devices=jax.devices()[:4]),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "mode", "check_vma"),
    [
        ("int8", "bidirectional", True),
        ("float8_e4m3fn", "naive", False),
        ("float8_e4m3fn", "unidirectional", False),
    ],
)
def test_gathered_rows(dtype, mode, check_vma):
    def local(x, w):
        axis = Axis("tp", mode=mode, wire_dtype=dtype)
        wholes = all_gather(x, axis, tiled=True), fsdp_gather(x, axis)
        return all_gather_matmul(x, w, axis), jnp.stack(wholes)[None]

    specs = (P("tp"), P(None, "tp")), (P(None, "tp"), P("tp"))
    product, wholes = over_devices(local, *specs, check_vma)(poisoned(), np.ones((LONG, 8), "f4"))
    assert rows_of(product) == [1, 30, 63]
    for found in wholes.reshape(-1, ROWS, LONG):
        assert rows_of(found) == [1, 30, 63]


@pytest.mark.parametrize(
    "wire", [LowBit("float8_e4m3fn"), LowBit("int8", sums="int8"), LowBit("int8", 64, "float32")]
)
def test_cotangents_and_sums(wire):
    """The backward pass of a scatter gathers cotangents; sums of 8 bits are rounded at each hop."""

    def local(x, w):
        return matmul_reduce_scatter(x, w, "tp", mode="unidirectional", wire_dtype=wire)

    product = over_devices(local, (P(None, "tp"), P("tp")), P("tp"))
    w = np.ones((8, LONG), "float32")
    out, pull = jax.vjp(lambda x: product(x, w), poisoned((ROWS, 8)))
    assert rows_of(out) == [1, 30, 63]
    assert rows_of(pull(jnp.asarray(poisoned()))[0]) == [1, 30, 63]


@every
def test_a_weight_that_is_gathered(dtype):
    """Its rows are blocks; each is a feature of x that reaches all results."""

    def local(x, w):
        return fsdp_linear(x, w, Axis("tp", mode="bidirectional", wire_dtype=dtype))

    run = over_devices(local, (P("tp"), P("tp")), P("tp"))
    for row, number in ((3, NAN), (60, INF)):
        w = np.ones((ROWS, LONG), "float32")
        w[row, 5] = number
        assert np.isnan(run(np.ones((8, ROWS), "float32"), w)).all()


@every
def test_scales_that_are_not_finite(dtype):
    """A checkpoint's weights, say: they multiply values that may be zeros."""
    scales = np.ones((ROWS, 1), "float32")
    scales[1], scales[30] = NAN, INF
    q = Quantized(jnp.zeros((ROWS, LONG), dtype), jnp.asarray(scales), dtype="float32")
    run = over_devices(
        lambda q, w: all_gather_matmul(q, w, "tp"),
        (Quantized(P("tp"), P("tp"), dtype="float32"), P(None, "tp")),
        P(None, "tp"),
    )
    assert rows_of(run(q, np.ones((LONG, 8), "float32"))) == [1, 30]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@checks
def test_sums_that_travel_in_16_bits(wire, check_vma):
    """What is beyond the wire's range is infinite, and the gradient of a copy likewise."""
    x = np.zeros((4, 4096), "float32")
    x[:, 0], x[2, 1], x[3, 2], x[:, 3] = 4e4, NAN, INF, (1, 2, 3, 4)
    axis = Axis("tp", wire_dtype=wire)
    scatter = over_devices(
        lambda x: (reduce_region(x[0], axis), reduce_scatter(x[0], axis, tiled=True)),
        *(P("tp"), (P(), P("tp")), check_vma),
    )
    for found in scatter(x):
        top = INF if wire == "float16" else jnp.bfloat16(16e4)
        np.testing.assert_allclose(found[:5], [top, NAN, INF, 10, 0], rtol=0.02)


@pytest.mark.parametrize("wire", ["int8", LowBit("float8_e4m3fn")])
def test_a_copy_over_a_wire_of_8_bits_sums_its_gradient_as_it_is(wire):
    copy = over_devices(lambda x: copy_region(x, Axis("tp", wire_dtype=wire)), P(), P("tp"))
    x = np.ones((2, 3), jnp.bfloat16)
    grad = jax.grad(lambda x: 2 * copy(x).sum().astype("float32"))(x)
    np.testing.assert_array_equal(np.float32(grad), np.full((2, 3), 8))


def test_tokens_in_8_bits():
    """Only their own results are NaN."""
    tokens = poisoned()
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((ROWS, 4)).astype("float32")
    up = rng.standard_normal((4, LONG, 8)).astype("float32")

    def local(tokens, logits, up, down):
        axis = Axis("tp", wire_dtype="int8")
        how = {"dispatch": "ragged", "implementation": "blocks"}
        out, _ = moe_layer(tokens, route(logits, 2), {"up": up, "down": down}, axis=axis, **how)
        return out

    run = over_devices(local, (P("tp"), P("tp"), P("tp"), P("tp")), P("tp"))
    assert rows_of(run(tokens, logits, up, up.swapaxes(1, 2))) == [1, 30, 63]


@pytest.mark.parametrize(
    "how",
    [
        {"scoring": "selected_softmax"},
        {"scoring": "softmax", "normalize": True, "groups": 4, "top_groups": 2},
        {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "scores_per_group": 3},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "bias": np.zeros(16, "f4"), "groups": 4, "top_groups": 2},
    ],
)
def test_a_token_whose_logits_are_nan_has_weights_that_are(how):
    """Whichever experts are chosen: NaN with and without a sign are sorted to either end."""
    logits = np.random.default_rng(0).standard_normal((512, 16)).astype("float32")
    logits[3, 5], logits[500, 2] = NAN, -NAN
    weights, pull = jax.vjp(jax.jit(lambda x: route(x, 2, **how).weights), logits)
    assert rows_of(weights) == [3, 500]
    assert {3, 500} == set(np.flatnonzero(np.isnan(pull(weights * 0 + 1)[0]).any(1)).tolist())
