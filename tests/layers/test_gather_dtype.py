"""Shards of float32 that are gathered and used in bfloat16: exact gradients, and what they send.

Gradients of each device are small integers, exact in bfloat16; their sums over devices are not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    LowBit,
    all_gather,
    all_gather_matmul,
    collective_einsum,
    make_mesh,
    matmul_reduce_scatter,
)
from jaxpar.layers import (
    column_parallel_linear,
    fsdp_gather,
    fsdp_linear,
    fsdp_scan,
    gated_mlp,
    parallel_attention,
    row_parallel_linear,
)
from jaxpar.moe import moe_layer, route
from jaxpar.testing import count_collectives

MODES = ("naive", "stationary", "chunked-2", "unidirectional", "bidirectional", "auto")
check = pytest.mark.parametrize("check_vma", [True, False])
K, M = 16, 32


def integers(*shape, below=16):
    rng = np.random.default_rng([*shape])
    return rng.integers(-below + 1, below, shape).astype("float32")


def weights(*shape):
    """A half ulp of bfloat16 beside integers."""
    return integers(*shape, below=4) * np.float32(1 + 2**-10)


def bf16(x):
    return jnp.asarray(x, "bfloat16")


def gathered(x, w, axis, dim):
    return x @ fsdp_gather({"w": w}, axis, dim=dim)["w"]


def matmul(x, w, axis, dim):
    return all_gather_matmul(x, w, axis, gather="rhs", dim=dim)


def einsum(x, w, axis, dim):
    return collective_einsum("bk,km->bm", x, w, axis, gather="km"[dim])


def linear(x, w, axis, dim):
    return fsdp_linear(x, w, axis, dim=dim)


def run(function, axis, dim, x, w, c, check_vma=True, sizes=(("f", 4),)):
    """Returns the local products, and the gradient of their sum, times c, with respect to w."""
    names, mesh = tuple(name for name, _ in sizes), dict(sizes)
    mapped = jax.shard_map(
        lambda x, w: function(x, w, axis, dim),
        mesh=make_mesh(mesh, devices=jax.devices()[: int(np.prod(list(mesh.values())))]),
        in_specs=(P(names), P(names) if dim == 0 else P(None, names)),
        out_specs=P(names),
        check_vma=check_vma,
    )

    def loss(w):
        y = mapped(bf16(x), w)
        return jnp.sum(y.astype("float32") * c), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    return y, gradient


@pytest.mark.parametrize(
    ("function", "mode", "dim", "check_vma"),
    [
        *((linear, mode, i % 2, i % 3 > 0) for i, mode in enumerate(MODES)),
        (linear, "naive", 1, False),
        (gathered, "naive", 0, True),
        (gathered, "unidirectional", 1, False),
        (matmul, "auto", 1, False),
        (matmul, "bidirectional", 0, True),
        (einsum, "naive", 1, True),
    ],
)
def test_values_and_gradients(function, mode, dim, check_vma):
    x, w, c = integers(4, K), weights(K, M), integers(4, M)
    axis = Axis("f", mode, gather_dtype="bfloat16")
    y, gradient = run(function, axis, dim, x, w, c, check_vma)
    assert (y.dtype, gradient.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(y, bf16(x @ np.asarray(bf16(w), "float32")))
    np.testing.assert_array_equal(gradient, x.T @ c)


@pytest.mark.parametrize("function", [gathered, linear])
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("unidirectional", (("b", 2), ("a", 2))),
        ("naive", (("a", 2), ("b", 2))),
        ("auto", (("f", 1),)),
    ],
)
def test_over_several_axes_and_one_device(function, mode, sizes):
    x, w, c = integers(4, K), weights(K, M), integers(4, M)
    axis = Axis(Axis([name for name, _ in sizes], gather_dtype="bfloat16"), mode)
    y, gradient = run(function, axis, 0, x, w, c, sizes=sizes)
    assert (y.dtype, gradient.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(y, bf16(x @ np.asarray(bf16(w), "float32")))
    # On one device autodiff's product is of bfloat16, as it is on each of several.
    one = function is gathered and len(sizes) == 1
    np.testing.assert_array_equal(gradient, bf16(x.T @ c).astype("float32") if one else x.T @ c)


@pytest.mark.parametrize("function", [gathered, linear])
def test_wire(function):
    """Sums in bfloat16 where that is asked for; gathers in 8 bits arrive in bfloat16."""
    x, w, c = integers(4, K), weights(K, M), integers(4, M)
    given = {"mode": "naive", "gather_dtype": "bfloat16"}
    _, gradient = run(function, Axis("f", wire_dtype="bfloat16", **given), 0, x, w, c)
    assert gradient.dtype == "float32"
    assert np.any(gradient != x.T @ c)
    np.testing.assert_allclose(gradient, x.T @ c, rtol=0, atol=8)
    y, gradient = run(function, Axis("f", wire_dtype=LowBit("int8"), **given), 0, x, w, c)
    assert (y.dtype, gradient.dtype) == ("bfloat16", "float32")
    np.testing.assert_allclose(y.astype("float32"), x @ w, rtol=0, atol=6)
    np.testing.assert_array_equal(gradient, x.T @ c)


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_kept(keep):
    axis = Axis("f", "unidirectional", gather_dtype="bfloat16", keep_gathered=keep)
    x, w, c = integers(2, K), weights(K, M), integers(2, M)
    y, gradient = run(linear, axis, 1, x, w, c, sizes=(("f", 2),))
    np.testing.assert_array_equal(y, bf16(x @ np.asarray(bf16(w), "float32")))
    np.testing.assert_array_equal(gradient, x.T @ c)


def test_what_is_sent():
    """Two bytes of each number that is gathered, four of each sum, or what the wire's dtype has."""

    def sent(function, **how):
        axis = Axis("f", gather_dtype="bfloat16", mode="naive", **how)
        mapped = jax.shard_map(
            lambda x, w: function(x, w, axis, 0),
            mesh=make_mesh("f=8"),
            in_specs=P("f"),
            out_specs=P("f"),
        )
        found = count_collectives(mapped, bf16(np.ones((8, K))), np.ones((K, M), "float32"))
        return found.forward_bytes, found.backward_bytes

    one = K * M * 7 / 8
    assert sent(gathered) == (2 * one, 4 * one)
    assert sent(gathered, wire_dtype="bfloat16") == (2 * one, 2 * one)
    assert sent(linear) == (2 * one, (2 + 4) * one)
    assert sent(linear, wire_dtype="bfloat16") == (2 * one, (2 + 2) * one)


@pytest.mark.parametrize(("mode", "check_vma"), [("naive", True), ("unidirectional", False)])
def test_scan(mode, check_vma):
    """Layers that permute features keep integers; a bias that is whole is float32 in them."""
    rng = np.random.default_rng(0)
    first, second = (np.eye(K, dtype="float32")[rng.permutation(K)] for _ in range(2))
    stack = {"w": np.stack([first, second]), "b": np.zeros((2, K), "float32")}
    x, c = integers(4, K), integers(4, K)

    def layer(params, x):
        assert (params["w"].dtype, params["b"].dtype) == ("bfloat16", "float32")
        return x @ params["w"] + params["b"].astype(x.dtype)

    axis = Axis("f", mode, gather_dtype="bfloat16")
    mapped = jax.shard_map(
        lambda stack, x: fsdp_scan(layer, stack, x, axis, dim={"w": 0, "b": None}),
        mesh=make_mesh("f=4", devices=jax.devices()[:4]),
        in_specs=({"w": P(None, "f"), "b": P()}, P("f")),
        out_specs=P("f"),
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(lambda s: jnp.sum(mapped(s, bf16(x)).astype("float32") * c)))(stack)
    wanted = {
        "w": np.stack([x.T @ c @ second.T, first.T @ x.T @ c]),
        "b": np.stack([np.sum(c @ second.T, 0), np.sum(c, 0)]),
    }
    for name, want in wanted.items():
        assert found[name].dtype == "float32"
        np.testing.assert_array_equal(found[name], want)


def test_twice_in_reverse():
    """In float64 and float32, close enough to those of one device."""

    def second(multiply):
        def penalty(w):
            return jnp.sum(jax.grad(lambda w: jnp.sum(jnp.sin(multiply(w))))(w) ** 2)

        return jax.jit(jax.grad(penalty))

    with jax.enable_x64(True):
        x, w = np.random.default_rng(0).standard_normal((2, 4, 4))
        narrow, mesh = x.astype("float32"), make_mesh("f=4", devices=jax.devices()[:4])
        for function in (gathered, linear):
            axis = Axis("f", "naive", gather_dtype="float32")
            mapped = jax.shard_map(
                lambda x, w, f=function, axis=axis: f(x, w, axis, 0),
                mesh=mesh,
                in_specs=P("f"),
                out_specs=P("f"),
            )
            found = second(lambda w, mapped=mapped: mapped(narrow, w))(w)
            assert found.dtype == "float64"
            np.testing.assert_allclose(found, second(lambda w: x @ w)(w), rtol=1e-4, atol=1e-4)


# -- layers with an fsdp_axis ---------------------------------------------------------------------


def column(x, w, fsdp):
    return column_parallel_linear(x, w, "tp", sequence_dim=None, fsdp_axis=fsdp)


def row(x, w, fsdp):
    return row_parallel_linear(x, w, "tp", sequence_dim=None, fsdp_axis=fsdp, fsdp_dim=1)


@check
@pytest.mark.parametrize("layer", [column, row])
def test_projections(layer, check_vma):
    x, w, c = integers(4, K), weights(K, M), integers(4, M)
    columns = layer is column
    out = P("fsdp", "tp" if columns else None)
    mapped = jax.shard_map(
        lambda x, w: layer(x, w, Axis("fsdp", gather_dtype="bfloat16")),
        mesh=make_mesh("fsdp=4,tp=2"),
        in_specs=(
            P("fsdp", None if columns else "tp"),
            P("fsdp", "tp") if columns else P("tp", "fsdp"),
        ),
        out_specs=out,
        check_vma=check_vma,
    )
    loss = lambda w: jnp.sum(mapped(bf16(x), w).astype("float32") * c)  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(w)
    assert gradient.dtype == "float32"
    np.testing.assert_array_equal(gradient, x.T @ c)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def mlp(params, x, fsdp=None):
    return gated(x, *params) if fsdp is None else gated_mlp(x, *params, "tp", fsdp_axis=fsdp)


def attend(q, k, v):
    return q * k + v


def attention(params, x, fsdp=None):
    if fsdp is None:
        return attend(*(x @ w for w in params[:3])) @ params[3]
    heads = {"heads": 2, "kv_heads": 2}
    return parallel_attention(x, *params, "tp", attend, **heads, fsdp_axis=fsdp)


def experts(params, x, fsdp=None):
    if fsdp is None:
        shares, both = jax.nn.softmax(x[..., :2]), [gated(x, *w) for w in zip(*params, strict=True)]
        first = x[..., :1] >= x[..., 1:2]
        return jnp.where(first, shares[..., :1] * both[0], shares[..., 1:] * both[1])
    weights = dict(zip(("gate", "up", "down"), params, strict=True))
    how = {"implementation": "ragged_dot", "dispatch": "all_gather", "data_axis": "fsdp"}
    return moe_layer(x, route(x[0, :, :2], 1), weights, "tp", fsdp_axis=fsdp, **how)[0]


@pytest.mark.parametrize(
    ("layer", "shapes", "specs", "check_vma"),
    [
        (
            mlp,
            ((K, M), (K, M), (M, K)),
            (P("fsdp", "tp"), P("fsdp", "tp"), P(("tp", "fsdp"))),
            True,
        ),
        (attention, ((K, K),) * 4, (*(P("fsdp", "tp"),) * 3, P(("tp", "fsdp"))), False),
        (experts, ((2, K, M), (2, K, M), (2, M, K)), (P("tp", "fsdp"),) * 3, True),
    ],
)
def test_layers(layer, shapes, specs, check_vma):
    """Gradients are sums of bfloat16 that are not rounded again, near those of one device."""
    rng = np.random.default_rng(0)
    params = tuple(rng.standard_normal(shape).astype("float32") / 4 for shape in shapes)
    x = bf16(rng.standard_normal((2, 8, K)))
    mapped = jax.shard_map(
        lambda params, x: layer(params, x, Axis("fsdp", "naive", gather_dtype="bfloat16")),
        mesh=make_mesh("fsdp=2,tp=2", devices=jax.devices()[:4]),
        in_specs=(specs, P("fsdp", "tp")),
        out_specs=P("fsdp", "tp"),
        check_vma=check_vma,
    )

    def loss(params, function, x):
        return jnp.sum(function(params, x).astype("float32") ** 2)

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    wide = [np.asarray(bf16(w), "float32") for w in params]
    truth = gradients(tuple(wide), layer, x.astype("float32"))
    for found, wanted in zip(gradients(params, mapped, x), truth, strict=True):
        assert found.dtype == "float32"
        assert np.mean(found != np.asarray(bf16(found), "float32")) > 0.25
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.max(np.abs(wanted)))


# -- errors ---------------------------------------------------------------------------------------


def test_where_nothing_is_gathered():
    axis = Axis("f", gather_dtype="bfloat16")
    text = r"axis has gather_dtype=bfloat16, which has no effect here; give its names"
    mesh = make_mesh("f=8")
    for function in (
        lambda x: all_gather(x, axis),
        lambda x: matmul_reduce_scatter(x, x.T, axis),
        lambda x: column_parallel_linear(x, x.T, axis),
        lambda x: collective_einsum("ab,cb->ac", x, x, axis, scatter="a"),
    ):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("f"), out_specs=P("f"))
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(mapped, np.ones((64, 8), "float32"))


def test_dtypes_that_do_not_fit():
    for wrong in ("int8", "float8_e4m3fn", "int32", "complex64"):
        with pytest.raises(TypeError, match=f"^Axis: gather_dtype={wrong} must be a float of 16"):
            Axis("f", gather_dtype=wrong)
    text = r"lhs is bfloat16\[1, 8\] and rhs is float16\[2, 4\], where rhs is as gather_dtype says"
    with pytest.raises(TypeError, match=text):
        run(matmul, Axis("f", gather_dtype="float16"), 0, *map(np.ones, ((4, 8), (8, 4), (4, 4))))


@pytest.mark.parametrize(
    ("layer", "shape", "text"),
    [
        (column, (4, 4), r"x is float32\[8, 4\] and w is float32\[2, 2\], gathered in bfloat16 as"),
        (
            lambda x, w, fsdp: experts((w, w, w), x[None], fsdp),
            (2, 4, 4),
            r"tokens are float32\[1, 4, 4\] and experts.up float32\[1, 2, 4\], gathered in",
        ),
    ],
)
def test_activations_that_were_not_cast(layer, shape, text):
    mapped = jax.shard_map(
        lambda x, w: layer(x, w, Axis("fsdp", gather_dtype="bfloat16")),
        mesh=make_mesh("fsdp=2,tp=2", devices=jax.devices()[:4]),
        in_specs=(P("fsdp"), P("fsdp", "tp"))
        if layer is column
        else (P(("fsdp", "tp")), P("tp", "fsdp")),
        out_specs=P("fsdp"),
    )
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(mapped, np.ones((16, 4), "float32"), np.ones(shape, "float32"))
