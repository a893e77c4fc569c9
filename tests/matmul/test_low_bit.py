"""Matmuls of what travels in 8 bits: dtypes, transforms, and operands that come quantized."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_bits import gathered, rounded, travelling, with_gradients, without_ties
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    LowBit,
    Quantized,
    all_gather_matmul,
    collective_einsum,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
    quantize,
)
from jaxpar.ring import of_mode
from jaxpar.ring.order import CpuOrder, TpuOrder

MESH = make_mesh("tp=4", devices=jax.devices()[:4])
MODES = ("naive", "stationary", "chunked-2", "unidirectional", "bidirectional")
modes = pytest.mark.parametrize("mode", MODES)
RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(dtype)


def untied(*shape, dtype="float32", dim=-1, **how):
    return without_ties(normal(*shape, dtype=dtype), dim=dim, **how)


def exactly(x):
    return np.asarray(x).astype("float64")


def close(found, wanted, digits=2.0**-22):
    """Up to roundings of this many digits, of the largest number and of each one."""
    limit = digits * np.abs(wanted).max()
    np.testing.assert_allclose(exactly(found), wanted, rtol=digits, atol=limit)


def gathering(mode, wire="int8", out_specs=None, in_specs=None, **how):
    return jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tp", mode=mode, wire_dtype=wire, **how),
        mesh=MESH,
        in_specs=(P("tp"), P(None, "tp")) if in_specs is None else in_specs,
        out_specs=P(None, "tp") if out_specs is None else out_specs,
    )


# Values of 8 bits are exact in 16, and so are their products in 32: only scales are rounded.
DIGITS = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}


@pytest.mark.parametrize(
    ("mode", "dtype", "preferred"),
    [
        ("naive", "float32", None),
        ("naive", "bfloat16", "float32"),
        ("stationary", "bfloat16", None),
        ("chunked-2", "float16", None),
        ("unidirectional", "float32", "bfloat16"),
        ("bidirectional", "bfloat16", None),
        ("bidirectional", "float16", "float32"),
    ],
)
def test_dtypes(mode, dtype, preferred):
    x, w = untied(16, 48, dtype=dtype), normal(48, 16, dtype=dtype)
    ct = normal(16, 16, dtype=preferred or dtype)
    multiply = gathering(mode, preferred_element_type=preferred)
    found, (of_x, of_w) = with_gradients(multiply)(ct, x, w)
    assert (found.dtype, of_x.dtype, of_w.dtype) == (preferred or dtype, dtype, dtype)
    x, w, ct = map(exactly, (x, w, ct))
    there = x if mode == "stationary" else gathered(x, 0)
    digits = DIGITS[preferred or dtype]
    close(found, there @ w, digits)
    close(of_x, ct @ w.T, max(digits, DIGITS[dtype]))
    close(of_w, there.T @ ct, max(digits, DIGITS[dtype]))


# -- transforms ---------------------------------------------------------------------------------


def through(x, there):
    """Values as they arrive, and the derivative of x."""
    return x + lax.stop_gradient(there - x)


def assert_alike(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(np.abs(y).max(), 1))


EXACT_BACK = LowBit("int8", cotangents=False)


def penalty(network):
    """The second derivative of a loss, through the sum of squares of its gradients."""

    def loss(x, ws):
        return jnp.sum(network(x, ws) ** 2)

    return jax.grad(lambda x, ws: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, ws)), (0, 1))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("naive", "scan"),
        ("bidirectional", "checkpoint"),  # in a scan, too
        ("bidirectional", "second derivative"),
    ],
)
def test_layers(mode, kind):
    x, ws = normal(8, 40), untied(2, 40, 40, dim=1) / 6
    there = rounded(ws, dim=1).astype("float32")

    def local(x, ws):
        def layer(x, w):
            how = {"gather": "rhs", "dim": 1, "mode": mode, "wire_dtype": EXACT_BACK}
            return jnp.sin(all_gather_matmul(x, w, "tp", **how)), None

        if kind == "second derivative":
            for w in ws:
                x, _ = layer(x, w)
            return x
        return lax.scan(jax.checkpoint(layer) if kind == "checkpoint" else layer, x, ws)[0]

    mapped = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(P("tp"), P(None, None, "tp")),
        out_specs=P("tp"),
        check_vma=kind != "scan",
    )

    def plain(x, ws):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, through(ws, there))[0]

    if kind == "second derivative":
        assert_alike(jax.jit(penalty(mapped))(x, ws), jax.jit(penalty(plain))(x, ws))
    else:
        ct = normal(8, 40)
        assert_alike(with_gradients(mapped)(ct, x, ws), with_gradients(plain)(ct, x, ws))


@pytest.mark.parametrize("mode", ["chunked-2", "unidirectional"])
def test_vmap(mode):
    x, w = untied(3, 16, 40), normal(40, 16)
    there = rounded(x).astype("float32")

    def local(x, w):
        multiply = jax.vmap(
            lambda x: all_gather_matmul(x, w, "tp", mode=mode, wire_dtype="int8"), out_axes=1
        )
        return multiply(x)

    mapped = jax.shard_map(
        local, mesh=MESH, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None, "tp")
    )
    ct = normal(16, 3, 16)
    wanted = with_gradients(lambda x, w: jnp.einsum("bmk,kn->mbn", through(x, there), w))(ct, x, w)
    assert_alike(with_gradients(mapped)(ct, x, w), wanted)
    assert ("all_gather", "int8") in travelling(mapped, x, w) or mode == "unidirectional"


def test_each_block_goes_round_once_and_all_scales_in_one():
    assert travelling(gathering("bidirectional"), normal(16, 48), normal(48, 16)) == {
        ("ppermute", "int8"): 3,
        ("all_gather", "float32"): 1,
    }


# -- what is gathered, and what is not ----------------------------------------------------------


SHAPES = [
    ((512,), 0, None, "float32", False),  # no row
    ((16, 31), 0, None, "float32", False),  # short
    ((16, 32), 0, None, "float32", True),
    ((16, 37), 0, 20, "float32", False),  # prime: a scale for each number
    ((16, 36), 0, 5, "bfloat16", False),  # four of 8 bits and a scale are four of 16
    ((16, 36), 0, 6, "bfloat16", True),
    ((40, 8), 1, None, "float32", True),
    ((2, 16, 3, 40), 1, 20, "float32", True),
    ((2, 3, 40, 8), 3, 20, "float32", True),
    ((0, 40), 0, None, "float32", False),
    ((8, 1), 0, None, "float32", False),
]


@pytest.mark.parametrize(
    ("shape", "dim", "columns", "dtype", "coded", "mode"),
    [(*case, ("bidirectional", "chunked-2")[number % 2]) for number, case in enumerate(SHAPES)],
)
def test_shapes(shape, dim, columns, dtype, coded, mode):
    row = -1 if dim != len(shape) - 1 else -2
    how = {"dim": row, "columns": columns} if coded else {}
    x = untied(*shape, dtype=dtype, **how) if coded else normal(*shape, dtype=dtype)
    w = normal(shape[-1], 8, dtype=dtype)
    spec = [None] * len(shape)
    spec[dim] = "tp"
    mapped = gathering(
        mode,
        LowBit("int8", columns=columns),
        P(*[None] * (len(shape) - 1), "tp"),
        (P(*spec), P(None, "tp")),
        dim=dim,
        preferred_element_type="float32",
    )
    sent = {dtype for _, dtype in travelling(mapped, x, w)}
    assert ("int8" in sent) == coded
    there = rounded(x, **how) if coded else exactly(x)
    wanted = there @ exactly(w)
    # Scales along what is contracted are part of what is multiplied, in its own dtype.
    atol = 2.0**-7 * np.abs(wanted).max(initial=0) if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(jax.jit(mapped)(x, w), wanted, rtol=1e-5, atol=atol)


@modes
def test_a_number_that_is_not_finite_reaches_no_other_row(mode):
    x, w = untied(16, 40), normal(40, 16)
    there = rounded(x)
    for row, number in ((1, np.nan), (6, np.inf), (15, -np.inf)):
        x[row, 3], there[row] = number, np.nan
    found = np.asarray(jax.jit(gathering(mode))(x, w))
    if mode != "stationary":
        np.testing.assert_allclose(found, there @ w, rtol=1e-4, atol=1e-4)
    assert np.isfinite(found).all(1).tolist() == [row not in (1, 6, 15) for row in range(16)]


@pytest.mark.parametrize("mode", ["naive", "unidirectional"])
def test_cotangents_as_they_are(mode):
    x, w, ct = normal(16, 16), normal(16, 40), untied(16, 40)

    def scattering(cotangents):
        return with_gradients(
            jax.shard_map(
                lambda x, w: matmul_reduce_scatter(
                    x, w, "tp", mode=mode, wire_dtype=LowBit("int8", cotangents=cotangents)
                ),
                mesh=MESH,
                in_specs=(P(None, "tp"), P("tp")),
                out_specs=P("tp"),
            )
        )

    for cotangents, arriving in ((True, rounded(ct)), (False, ct)):
        found, (of_x, of_w) = scattering(cotangents)(ct, x, w)
        np.testing.assert_allclose(found, x @ w, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_x, arriving @ w.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(of_w, x.T @ arriving, rtol=1e-4, atol=1e-4)
        sent = travelling(scattering(cotangents), ct, x, w)
        assert ("int8" in {dtype for _, dtype in sent}) == cotangents


@pytest.mark.parametrize(
    ("mode", "check_vma"),
    [("naive", False), ("chunked-2", True), ("bidirectional", False)],
)
def test_an_all_reduce_is_as_without(mode, check_vma):
    def summing(wire):
        def local(x, w):
            y = matmul_all_reduce(x, w, "tp", mode=mode, wire_dtype=wire)
            return lax.pcast(y, "tp", to="varying")[None] if check_vma else y[None]

        return jax.shard_map(
            local,
            mesh=MESH,
            in_specs=(P(None, "tp"), P("tp")),
            out_specs=P("tp"),
            check_vma=check_vma,
        )

    x, w, ct = normal(16, 16), normal(16, 40), normal(4, 16, 40)
    sent = [travelling(with_gradients(summing(wire)), ct, x, w) for wire in (None, "int8")]
    found, plain = (jax.jit(summing(wire))(x, w) for wire in ("int8", None))
    np.testing.assert_array_equal(found, plain)
    assert sent[0] == sent[1]


# -- operands that come quantized ---------------------------------------------------------------

SCALES = {
    "of all": ((1, 1), P()),
    "of a device": ((4, 1), P("tp")),
    "of a row": ((16, 1), P("tp")),
    "of a block": ((16, 3), P("tp")),
    "of a column": ((1, 48), P()),
    "of a device's column": ((4, 48), P("tp")),
}


def codes(shape, scales_shape, dtype="float32", values="int8"):
    """Values, scales, and what they stand for."""
    most = 7 if "4" in values else 127
    x = np.clip(np.rint(normal(*shape) * most / 3), -most, most).astype(values)
    scales = (np.abs(normal(*scales_shape)) + 0.1).astype(dtype)
    wide = exactly(scales)
    for dim, (have, want) in enumerate(zip(scales_shape, shape, strict=True)):
        wide = np.repeat(wide, want // have, dim)
    return x, scales, exactly(x) * wide


@pytest.mark.parametrize(
    ("mode", "of"),
    [
        *(("bidirectional", of) for of in SCALES if of != "of a device"),
        *(("chunked-2", of) for of in ("of a device", "of a block")),
        *(("stationary", of) for of in ("of a row", "of a device's column")),
    ],
)
def test_scales(mode, of):
    shape, spec = SCALES[of]
    values, scales, there = codes((16, 48), shape)
    w, ct = normal(48, 16), normal(16, 16)
    mapped = gathering(mode, None, in_specs=(Quantized(P("tp"), spec), P(None, "tp")))
    x = Quantized(values, scales)
    found, (of_w,) = with_gradients(lambda w: mapped(x, w))(ct, w)
    close(found, there @ w)
    close(of_w, there.T @ ct)
    sent = travelling(mapped, x, w)
    floats = {key: times for key, times in sent.items() if key[1] == "float32"}
    assert mode == "stationary" or floats == {("all_gather", "float32"): 1}


@pytest.mark.parametrize(
    ("mode", "values"),
    [("naive", "int4"), ("bidirectional", "float4_e2m1fn"), ("stationary", "int4")],
)
def test_values_of_4_bits(mode, values):
    """They travel as they are, in half of the bytes."""
    values, scales, there = codes((16, 48), (16, 3), values=values)
    w = normal(48, 16)
    mapped = gathering(mode, None, in_specs=(Quantized(P("tp"), P("tp")), P(None, "tp")))
    x = Quantized(values, scales)
    close(jax.jit(mapped)(x, w), there @ w)
    kinds = {dtype for _, dtype in travelling(mapped, x, w)}
    assert mode == "stationary" or str(values.dtype) in kinds


@pytest.mark.parametrize(("dtype", "values"), [("bfloat16", "float8_e4m3fn"), ("float16", "int8")])
def test_scales_of_16_bits(dtype, values):
    """Times values they are exact in 32."""
    values, scales, there = codes((16, 48), (16, 3), dtype, values)
    w = normal(48, 16)
    x = Quantized(values, scales)
    mapped = gathering("bidirectional", None, in_specs=(Quantized(P("tp"), P("tp")), P(None, "tp")))
    close(jax.jit(mapped)(x, w), there @ w)
    large = Quantized(jnp.full((1, 2), 127, "int8"), jnp.full((1, 1), 2.0**10, "float16"))
    assert large.dequantized("float32").tolist() == [[127 * 2.0**10] * 2]


@pytest.mark.parametrize(
    ("dim", "shape", "mode"),
    [
        (0, (48, 1), "naive"),
        (0, (48, 4), "bidirectional"),
        (1, (1, 16), "bidirectional"),
        (1, (6, 16), "naive"),
    ],
)
def test_a_quantized_weight_of_a_tuple_of_operands(mode, dim, shape):
    values, scales, there = codes((48, 16), shape)
    x, ct = normal(16, 48), normal(16, 16)
    spec = P("tp") if dim == 0 else P(None, "tp")
    mapped = gathering(mode, None, P("tp"), (P("tp"), Quantized(spec, spec)), gather="rhs", dim=dim)
    w = Quantized(values, scales)
    found, (of_x,) = with_gradients(lambda x: mapped(x, w))(ct, x)
    close(found, x @ there)
    close(of_x, ct @ there.T)


def test_it_is_not_rounded_again():
    """A wire of 8 bits leaves it, and a matmul reads it in the dtype of its partner."""
    x, w = jax.jit(lambda x: quantize(x, columns=16))(untied(16, 48)), normal(48, 16)
    specs = Quantized(P("tp"), P("tp"), dtype="float32"), P(None, "tp")
    programs = [gathering("bidirectional", wire, in_specs=specs) for wire in (None, "int8")]
    plain, coded = (jax.jit(program)(x, w) for program in programs)
    np.testing.assert_array_equal(plain, coded)
    narrow = jax.jit(programs[0])(x, w.astype("bfloat16"))
    assert narrow.dtype == "bfloat16"


def test_it_has_no_derivative():
    x, w = jax.jit(quantize)(normal(16, 48)), normal(48, 16)
    specs = Quantized(P("tp"), P("tp"), dtype="float32"), P(None, "tp")
    mapped = gathering("unidirectional", in_specs=specs)
    of_x = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, w)), allow_int=True))(x)
    assert of_x.values.dtype == jax.dtypes.float0
    assert not np.any(of_x.scales)


MKN = "mk,kn->mn"
W = normal(48, 16)
CODES = Quantized(np.ones((8, 48), "int8"), np.ones((8, 1), "float32"))
ROWS = Quantized(P("tp"), P("tp"))


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (
            Quantized(np.ones((8, 48), "int16"), CODES.scales),
            TypeError,
            r"lhs.values are int16\[2, 48\]; give numbers of 8 or 4 bits, or the array",
        ),
        (
            Quantized(CODES.values, np.ones((8, 1), "int32")),
            TypeError,
            "lhs.scales are int32; give floats, float32 say",
        ),
        (
            Quantized(CODES.values, np.ones((8, 7), "float32")),
            ValueError,
            r"lhs.scales have local shape \(2, 7\) for values of \(2, 48\): 7 for 48 entries along "
            "dimension 1 are no blocks; give one scale, one for each entry, or one for each block",
        ),
        (
            Quantized(CODES.values, np.ones(8, "float32")),
            ValueError,
            r"lhs.scales have local shape \(2,\) for values of \(2, 48\): 1 dimensions for 2; "
            r"reshape them to \(2, 1\) if they are along dimension 0",
        ),
    ],
)
def test_what_is_no_quantized_array(x, error, text):
    mapped = gathering("naive", None, in_specs=(ROWS, P(None, "tp")))
    with pytest.raises(error, match=f"^all_gather_matmul: {text}"):
        jax.eval_shape(mapped, x, W)


@pytest.mark.parametrize(
    ("function", "name", "argument"),
    [
        (lambda q: all_gather_matmul(W[:, :2], q, "tp"), "all_gather_matmul", "rhs"),
        (lambda q: all_gather_matmul(W, (W.T, q), "tp"), "all_gather_matmul", "rhs"),
        (lambda q: all_gather_matmul(q, W, "tp", gather="rhs"), "all_gather_matmul", "lhs"),
        (lambda q: collective_einsum(MKN, q, W, "tp", scatter="m"), "collective_einsum", "lhs"),
        (lambda q: collective_einsum(MKN, q, W, "tp", gather="n"), "collective_einsum", "lhs"),
    ],
)
def test_where_nothing_is_gathered(function, name, argument):
    mapped = jax.shard_map(
        function, mesh=MESH, in_specs=(ROWS,), out_specs=P("tp"), check_vma=False
    )
    text = (
        rf"^{name}: {argument} is Quantized\[2, 48\], which only an operand that is gathered "
        rf"may be; pass {argument}.dequantized\(\)"
    )
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(mapped, CODES)


@pytest.mark.parametrize(
    ("wire", "dtype", "text"),
    [
        (LowBit("int8", sums="int32"), "float32", "wire_dtype=int32 cannot carry sums of float32"),
        (
            "float8_e4m3fn",
            "int32",
            "wire_dtype=float8_e4m3fn cannot carry sums of int32; choose an",
        ),
        (LowBit("int8", sums="bfloat16"), "int32", "wire_dtype=bfloat16 cannot carry sums of int"),
    ],
)
def test_a_wire_of_another_kind(wire, dtype, text):
    x, w = np.ones((16, 48), dtype), np.ones((48, 16), dtype)
    with pytest.raises(TypeError, match=f"^all_gather_matmul: {text}"):
        jax.eval_shape(gathering("naive", wire), x, w)


def test_integers_travel_as_they_are():
    x, w = np.full((16, 48), 1000, "int32"), np.full((48, 16), 3, "int32")
    found = jax.jit(gathering("bidirectional", LowBit("int8")))(x, w)
    np.testing.assert_array_equal(found, x @ w)


def test_over_an_axis():
    """The wire of an Axis is that of all that it names, and one that is given goes before."""
    x, w = untied(16, 48), normal(48, 16)
    axis = Axis("tp", mode="bidirectional", wire_dtype="int8")

    def over(axis, **how):
        return jax.shard_map(
            lambda x, w: all_gather_matmul(x, w, axis, **how),
            mesh=MESH,
            in_specs=(P("tp"), P(None, "tp")),
            out_specs=P(None, "tp"),
        )

    close(jax.jit(over(axis))(x, w), rounded(x) @ exactly(w))
    close(jax.jit(over(axis, wire_dtype="float32"))(x, w), exactly(x) @ exactly(w))


@pytest.mark.parametrize(("mode", "columns"), [("naive", 16), ("bidirectional", None)])
def test_rows_that_explicit_axes_shard(mode, columns):
    """Their scales are sharded as they are."""
    mesh = make_mesh("dp=2,tp=4", axis_types=AxisType.Explicit)
    x, w = untied(2, 16, 64, columns=columns), normal(64, 16)
    mapped = jax.shard_map(
        lambda x, w: all_gather_matmul(
            x, w, "tp", dim=1, mode=mode, wire_dtype=LowBit("int8", columns=columns)
        ),
        in_specs=(P(None, "tp"), P(None, "tp")),
        out_specs=P(None, None, "tp"),
        axis_names={"tp"},
    )
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("dp", "tp", None)))
        found = jax.jit(mapped)(rows, jax.device_put(w, NamedSharding(mesh, P(None, "tp"))))
    close(found, rounded(x, columns=columns) @ exactly(w))


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        ("naive", None),
        ("chunked-2", None),
        ("unidirectional", TpuOrder(delays_transfers=True)),
        ("bidirectional", CpuOrder()),
    ],
)
def test_sums_in_8_bits_on_request(mode, order, monkeypatch):
    """Rounded once by a collective, at every hop of a ring; in one and in two pieces."""
    if order is not None:
        monkeypatch.setattr(of_mode, "traced_order", lambda: order)
    wire = LowBit("int8", sums="int8")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((64, 64), (64, 96)))

    def local(x, w):
        return matmul_reduce_scatter(x, w, "tp", mode=mode, wire_dtype=wire)

    mapped = jax.shard_map(
        local, mesh=make_mesh("tp=8"), in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp")
    )

    @jax.jit
    def both(x, w):
        out, pull = jax.vjp(mapped, x, w)
        return out, pull(out)

    out, gradients = both(x, w)
    exact = np.float64(x) @ w
    off = np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2))
    assert 0.003 < off < (0.008 if mode in ("naive", "chunked-2") else 0.014)
    for gradient, wanted in zip(gradients, (exact @ w.T, x.T @ exact), strict=True):
        off = np.sqrt(np.mean((gradient - wanted) ** 2) / np.mean(wanted**2))
        assert off < 0.016


@pytest.mark.parametrize("mode", ["naive", "multi-ring"])
def test_nothing_is_rounded_on_a_device_alone(mode):
    wire, mesh = LowBit("int8", sums="int8"), make_mesh("tp=1", devices=jax.devices()[:1])
    x, w = normal(4, 48), normal(48, 40)

    def local(x, w):
        gathered = all_gather_matmul(x, w, "tp", mode=mode, wire_dtype=wire)
        return gathered, matmul_reduce_scatter(x, w, "tp", mode=mode, wire_dtype=wire)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))

    @jax.jit
    def both(x, w):
        out, pull = jax.vjp(mapped, x, w)
        return out, pull(out)

    out, (dx, dw) = both(x, w)
    exact = np.float64(x) @ w
    for found in out:
        close(found, exact)
    close(dx, 2 * exact @ w.T, 2.0**-20)
    close(dw, 2 * np.float64(x).T @ exact, 2.0**-20)
