"""Column- and row-parallel layers against NumPy, what they send, and what they keep."""

from collections import Counter
from dataclasses import replace
from functools import wraps
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import Axis, make_mesh, ring_shift
from jaxpar.choose.choice import choose_ways
from jaxpar.compiler.jaxprs import subjaxprs
from jaxpar.layers import (
    GatedActivation,
    column_parallel_linear,
    gated_mlp,
    row_parallel_linear,
)
from jaxpar.ring.order import Order, TpuOrder
from jaxpar.testing import assert_matches_reference, count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])
BOTH = ("tp", "fsdp"), ("fsdp", "tp")  # on one dimension


def mesh_of(axes):
    sizes = {name: int(size) for name, size in (part.split("=") for part in axes.split(","))}
    return make_mesh(sizes, devices=jax.devices()[: prod(sizes.values())])


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, gate, up, down, b_gate=0.0, b_up=0.0, b_down=0.0):
    return (silu(x @ gate + b_gate) * (x @ up + b_up)) @ down + b_down


def close(found, expected):
    """Within 2e-5 of the largest entry: float32, sums of some 50 terms."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))


# -- one layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "axis", "mode", "dim", "check_vma"),
    [
        ("tp=1", "tp", "unidirectional", -2, True),
        ("tp=3", "tp", "unidirectional", 0, False),
        ("a=2,b=2", ("b", "a"), "bidirectional", -2, True),
        ("b=3,a=2", ("b", "a"), "naive", None, False),
        ("tp=8", "tp", "auto", None, True),
    ],
)
def test_two_columns_and_a_row(axes, axis, mode, dim, check_vma):
    """Biases are added once; the sequence may be any dimension but the last."""
    mesh = mesh_of(axes)
    n = mesh.size
    tokens = P() if dim is None else P(axis) if dim == 0 else P(None, axis)

    def layers(x, w, b, v, c, u, d):
        over = Axis(axis, mode=mode)
        y, z = column_parallel_linear(x, (w, v), over, bias=(b, None), sequence_dim=dim)
        once = column_parallel_linear(x, w, over, bias=b, sequence_dim=dim)
        return row_parallel_linear(y, u, over, bias=d, sequence_dim=dim), z, once + c[0]

    def reference(x, w, b, v, c, u, d):
        return (x @ w + b) @ u + d, x @ v, x @ w + b + c[0]

    columns, parts = P(None, axis), P(axis)
    assert_matches_reference(
        layers,
        reference,
        normal(n if dim == 0 else 2, n, 3),
        *(normal(3, 2 * n), normal(2 * n), normal(3, n, seed=1), normal(1)),
        *(normal(2 * n, 5), normal(5)),
        mesh=mesh,
        in_specs=(tokens, columns, parts, columns, P(), parts, P()),
        out_specs=(tokens, P(None, None, axis), P(None, None, axis)),
        check_vma=check_vma,
        max_directions=2,
    )


@check
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_inside(whole, check_vma):
    """Those of the loss summed inside under check_vma=True, of the local share of it without."""
    x, gate, up, down = normal(4, 8, 3), normal(3, 8), normal(3, 8, seed=1), normal(8, 5)
    tokens, dim = (P(), None) if whole else (P(None, "tp"), -2)
    specs = (tokens, P(None, "tp"), P(None, "tp"), P("tp"))

    def local(*args):
        def loss(*args):
            total = jnp.sum(jnp.sin(gated_mlp(*args, "tp", sequence_dim=dim)))
            if check_vma:
                return total if whole else lax.psum(total, "tp")
            return total / lax.axis_size("tp") if whole else total

        grads = jax.grad(loss, argnums=(0, 1, 2, 3))(*args)
        return (lax.psum(grads[0], "tp") if whole and not check_vma else grads[0], *grads[1:])

    found = jax.jit(
        jax.shard_map(
            local, mesh=mesh_of("tp=4"), in_specs=specs, out_specs=specs, check_vma=check_vma
        )
    )(x, gate, up, down)

    def whole_loss(x, gate, up, down):
        return jnp.sum(jnp.sin((jax.nn.silu(x @ gate) * (x @ up)) @ down))

    close(found, jax.grad(whole_loss, argnums=(0, 1, 2, 3))(x, gate, up, down))


def test_float64_and_a_wider_result():
    mesh, specs = mesh_of("tp=2"), (P("tp"), P(None, "tp"), P(None, "tp"), P("tp"))

    def run(dtype, **how):
        mapped = jax.shard_map(
            lambda *args: gated_mlp(*args, "tp", **how),
            mesh=mesh,
            in_specs=specs,
            out_specs=P("tp"),
        )
        args = [jax.ShapeDtypeStruct(s, dtype) for s in ((4, 3), (3, 4), (3, 4), (4, 3))]
        return jax.eval_shape(mapped, *args)

    with jax.enable_x64(True):
        assert run("float64").dtype == jnp.float64
    assert run("bfloat16").dtype == jnp.bfloat16
    assert run("bfloat16", preferred_element_type="float32").dtype == jnp.float32


@pytest.mark.parametrize(("whole", "check_vma"), [(False, True), (True, False)])
def test_bfloat16(whole, check_vma):
    """Sums over devices, over tokens and over weights are in float32."""
    tokens, dim = (P(), None) if whole else (P(None, "tp"), -2)
    args = (
        normal(2, 16, 8),
        *(normal(8, 32), normal(8, 32, seed=1), normal(32, 8)),
        *(normal(32), normal(32, seed=1), normal(8)),
    )
    columns, parts = P(None, "tp"), P("tp")
    assert_matches_reference(
        lambda *args: gated_mlp(*args[:4], "tp", biases=args[4:], sequence_dim=dim),
        mlp,
        *(jnp.asarray(a, "bfloat16") for a in args),
        mesh=mesh_of("tp=8"),
        in_specs=(tokens, columns, columns, parts, parts, parts, P()),
        out_specs=tokens,
        max_directions=2,
        check_vma=check_vma,
    )


def clamped(np, gate, up):
    """That of gpt-oss, with lower bounds, by NumPy or by JAX; it is not 0 where up is."""
    gate, up = np.minimum(gate, 0.9), np.clip(up, -0.7, 0.7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


@pytest.mark.parametrize(("dim", "check_vma"), [(-2, True), (None, False)])
def test_an_activation_of_gate_and_up(dim, check_vma):
    def reference(x, gate, up, down, b_gate, b_up, b_down):
        return clamped(np, x @ gate + b_gate, x @ up + b_up) @ down + b_down

    joined = GatedActivation(lambda gate, up: clamped(jnp, gate, up))
    tokens, columns, parts = P() if dim is None else P("tp"), P(None, "tp"), P("tp")
    assert_matches_reference(
        lambda *args: gated_mlp(
            *args[:4], "tp", biases=args[4:], activation=joined, sequence_dim=dim
        ),
        reference,
        *(normal(8, 3), normal(3, 8), normal(3, 8, seed=1), normal(8, 5)),
        *(normal(8), normal(8, seed=1), normal(5)),
        mesh=mesh_of("tp=4"),
        in_specs=(tokens, columns, columns, parts, parts, parts, P()),
        out_specs=tokens,
        check_vma=check_vma,
        max_directions=4,
    )


# -- weights over a second axis -----------------------------------------------------------------


# Specs of gate and up, and of down; fsdp_dim; specs of the biases of gate and up.
WEIGHTS = {
    "tp, fsdp": (P(None, BOTH[0]), P(BOTH[0]), (1, 0), P("tp")),
    "fsdp, tp": (P(None, BOTH[1]), P(BOTH[1]), (1, 0), P(BOTH[1])),  # hidden columns permuted
    "apart": (P("fsdp", "tp"), P("tp", "fsdp"), (0, 1), P("tp")),
    "rows": (P("fsdp", "tp"), P(BOTH[0]), 0, P(BOTH[0])),
    "columns": (P(None, BOTH[0]), P("tp", "fsdp"), 1, P("tp")),
}


@pytest.mark.parametrize(
    ("weights", "mesh_axes", "mode", "dim", "check_vma"),
    [
        ("tp, fsdp", "fsdp=2,tp=2", "naive", -2, True),
        ("fsdp, tp", "fsdp=2,tp=3", "unidirectional", -2, False),
        ("fsdp, tp", "tp=2,fsdp=2", "naive", None, True),
        ("apart", "tp=2,fsdp=2", "bidirectional", None, False),
        ("columns", "tp=3,fsdp=2", "naive", -2, False),
        ("rows", "fsdp=1,tp=2", "unidirectional", -2, True),
    ],
)
def test_weights_over_two_axes(weights, mesh_axes, mode, dim, check_vma):
    """Tokens are sharded over fsdp along the batch; their gradients and all others are exact."""
    mesh = mesh_of(mesh_axes)
    into, out, axes, bias = WEIGHTS[weights]
    f, n = mesh.shape["fsdp"], mesh.shape["tp"]
    tokens = P("fsdp") if dim is None else P("fsdp", "tp")

    def layer(x, gate, up, down, *biases):
        return gated_mlp(
            *(x, gate, up, down, Axis("tp", mode=mode)),
            biases=biases,
            sequence_dim=dim,
            fsdp_axis=Axis("fsdp", mode=mode),
            fsdp_dim=axes,
        )

    k, h, m = 2 * f, 2 * f * n, 3 * f
    assert_matches_reference(
        layer,
        mlp,
        *(normal(f, 2 * n, k), normal(k, h), normal(k, h, seed=1), normal(h, m)),
        *(normal(h), normal(h, seed=1), normal(m)),
        mesh=mesh,
        in_specs=(tokens, into, into, out, bias, bias, P("fsdp") if axes == 1 else P()),
        out_specs=tokens,
        check_vma=check_vma,
        max_directions=2,
    )


@pytest.mark.parametrize(
    ("mode", "check_vma", "pieces"), [("unidirectional", True, 2), ("bidirectional", False, 1)]
)
def test_gathered_weights_are_not_kept(mode, check_vma, pieces, monkeypatch):
    """The backward gathers them again, and repeats nothing else of the forward.

    With two pieces as on TPUs, where residuals wait for a result: not for a dead one.
    """

    order = TpuOrder() if pieces == 2 else Order()
    monkeypatch.setattr(
        "jaxpar.matmul._einsum.choose_ways",
        lambda *asked: tuple(replace(way, order=order) for way in choose_ways(*asked)),
    )
    columns, tokens = P("fsdp", "tp"), P("fsdp", "tp")
    mapped = jax.shard_map(
        lambda *args: gated_mlp(*args, Axis("tp", mode=mode), fsdp_axis=Axis("fsdp", mode=mode)),
        mesh=mesh_of("fsdp=2,tp=4"),
        in_specs=(tokens, columns, columns, P(BOTH[0])),
        out_specs=tokens,
        check_vma=check_vma,
    )
    shapes = (4, 16, 8), (8, 64), (8, 64), (64, 8)
    found = count_collectives(mapped, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    hidden = 4 * 16 * 64
    assert found.residual_bytes == 4 * (sum(map(prod, shapes)) + 3 * hidden) // 8
    # Transfers of a gather over tp; a scatter over tp takes 3. Over fsdp each takes 1, and gate and
    # up travel as one array.
    gather = {"unidirectional": 3, "bidirectional": 4}[mode]
    assert found.forward == {"ppermute": gather + 3 * pieces + 2}
    assert found.backward == {"ppermute": 2 * 2 + 2 * gather + 3 * pieces}


@check
def test_matmuls_are_not_repeated(check_vma):
    """Backward: two for each of the three weights."""
    mapped = jax.shard_map(
        lambda *args: gated_mlp(
            *args, Axis("tp", mode="naive"), fsdp_axis=Axis("fsdp", mode="naive")
        ),
        mesh=mesh_of("fsdp=2,tp=4"),
        in_specs=(P("fsdp", "tp"), P("fsdp", "tp"), P("fsdp", "tp"), P(BOTH[0])),
        out_specs=P("fsdp", "tp"),
        check_vma=check_vma,
    )
    args = [jnp.ones(shape) for shape in ((2, 4, 2), (2, 8), (2, 8), (8, 2))]

    def both(ct, *args):
        return jax.vjp(mapped, *args)[1](ct)

    assert matmuls(jax.make_jaxpr(mapped)(*args).jaxpr) == 3
    assert matmuls(jax.make_jaxpr(both)(args[0], *args).jaxpr) == 3 + 6


def matmuls(jaxpr):
    inner = (sub for eqn in jaxpr.eqns for sub in subjaxprs(eqn.params))
    return Counter(eqn.primitive.name for eqn in jaxpr.eqns)["dot_general"] + sum(
        matmuls(sub) for sub in inner
    )


# -- what is sent -------------------------------------------------------------------------------


@check
@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [
        ("naive", {"all_gather": 1, "psum_scatter": 1}, {"all_gather": 1, "psum_scatter": 1}),
        ("unidirectional", {"ppermute": 3 + 3}, {"ppermute": 3 * 3}),
        ("bidirectional", {"ppermute": 4 + 3}, {"ppermute": 2 * 4 + 3}),
    ],
)
def test_gate_and_up_share_one_gather(mode, forward, backward, check_vma):
    """The backward gathers x, for the gradients of weights, and scatters its gradient, once too."""
    found = count_mlp(-2, mode, check_vma)
    assert found.forward == forward
    assert found.backward == backward


@check
def test_replicated_tokens_are_summed_once_each_way(check_vma):
    found = count_mlp(None, "naive", check_vma)
    assert found.forward == {"psum": 1}
    # Without types psum's transpose is psum; and shard_map sums the gradient of what is replicated.
    assert found.backward == {"psum": 1 if check_vma else 2}


def count_mlp(dim, mode, check_vma):
    tokens = P() if dim is None else P(None, "tp")
    mapped = jax.shard_map(
        lambda *args: gated_mlp(*args, Axis("tp", mode=mode), sequence_dim=dim),
        mesh=mesh_of("tp=4"),
        in_specs=(tokens, P(None, "tp"), P(None, "tp"), P("tp")),
        out_specs=tokens,
        check_vma=check_vma,
    )
    return count_collectives(
        mapped, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 4), (4, 8), (4, 8), (8, 4)))
    )


# -- errors -------------------------------------------------------------------------------------


def error(kind, fn, *args, **options):
    """What `fn` says of local arrays, on a mesh of fsdp=2, tp=4, after its own name."""

    def own(x):
        return jax.lax.pcast(x, ("fsdp", "tp"), to="varying") if isinstance(x, jax.Array) else x

    def body():
        fn(*jax.tree.map(own, args), **options)
        return jnp.zeros(8)

    with pytest.raises(kind) as caught:
        jax.eval_shape(
            jax.shard_map(
                body, mesh=mesh_of("fsdp=2,tp=4"), in_specs=(), out_specs=P(("fsdp", "tp"))
            )
        )
    name, _, text = str(caught.value).partition(": ")
    assert name == fn.__name__
    return text


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def test_errors():
    column, row = column_parallel_linear, row_parallel_linear
    assert error(ValueError, column, f32(), f32(3, 4), "tp") == (
        "x must be [..., k], got an array without dimensions"
    )
    assert error(ValueError, column, f32(2, 3), f32(3), "tp") == (
        "w must be [k, m], got local shape (3,) with 1 dimensions; reshape it"
    )
    assert error(ValueError, column, f32(2, 3), (), "tp") == (
        "w is an empty tuple; give at least one weight"
    )
    assert error(TypeError, row, f32(4, 3), f32(3, 4).astype("bfloat16"), "tp") == (
        "x is float32[4, 3] and w is bfloat16[3, 4]; cast one of them with .astype, and choose the "
        "dtype of the result with preferred_element_type"
    )
    integers = f32(2, 3).astype("int32"), f32(3, 4).astype("int32")
    assert error(TypeError, column, *integers, Axis("tp", wire_dtype="float32")) == (
        "wire_dtype=float32 cannot carry sums of int32; choose an integer dtype, or None"
    )
    assert error(ValueError, column, f32(2, 6), (f32(6, 4), f32(3, 4)), "tp") == (
        "x has local shape (2, 6) and w[1] (3, 4), but 6 columns of x cannot meet 3 rows of w[1]; "
        "they must be equal: check how both are sharded over axis 'tp' (4)"
    )
    assert error(ValueError, row, f32(4, 3), f32(3, 4), "tp", fsdp_axis="fsdp") == (
        "x has local shape (4, 3) and w (3, 4), but 3 columns of x cannot meet 3 x 2 = 6 gathered "
        "over axis 'fsdp' (2) rows of w; they must be equal: check how both are sharded over axis "
        "'tp' (4), or fsdp_dim=1"
    )
    assert error(ValueError, row, f32(4, 3), f32(3, 4), "tp", sequence_dim=1) == (
        "sequence_dim=1 is the last dimension of x, local shape (4, 3), which holds features; "
        "choose one before it, such as -2"
    )
    assert error(ValueError, row, f32(6, 3), f32(3, 4), "tp") == (
        "the result has local shape (6, 4), whose dimension 0 axis 'tp' (4) does not divide: "
        "6 = 1 x 4 + 2; pad it to 8, or choose another dimension"
    )
    assert error(ValueError, column, f32(2, 3), f32(3, 4), "tp", bias=f32(2)) == (
        "the bias of w has local shape (2,), but the result has 4 columns here; the bias needs as "
        "many"
    )
    assert error(ValueError, row, f32(4, 6), f32(3, 4), "tp", bias=f32(3), fsdp_axis="fsdp") == (
        "the bias of w has local shape (3,), but the result has 4 columns here; the bias needs as "
        "many, or 2 over axis 'fsdp' (2)"
    )
    assert error(TypeError, column, f32(2, 3), (f32(3, 4),), "tp", bias=f32(4)) == (
        "bias must be a tuple of 1, an array or None for each of w[0]; got ArrayImpl"
    )
    assert error(TypeError, column, f32(2, 3), [f32(3, 4)], "tp") == (
        "w is a list; pass one array, or a tuple of weights"
    )
    assert error(ValueError, column, f32(2, 3), f32(3, 4), "tp", fsdp_axis="tp") == (
        "fsdp_axis 'tp' and axis 'tp' share ['tp']; weights are sharded over both, so "
        "name different axes"
    )
    assert error(
        ValueError, gated_mlp, f32(2, 3), f32(3, 4), f32(3, 4), f32(4, 3), "tp", fsdp_dim=(0,)
    ) == (
        "fsdp_dim must be an integer, or a pair of them for the weights that are cut by columns "
        "and by rows over axis; got (0,)"
    )
    assert error(
        ValueError, gated_mlp, f32(2, 3), f32(3, 4), f32(3, 8), f32(4, 3), "tp", biases=(None,)
    ) == ("biases must be a tuple of 3, an array or None for each of w_gate, w_up, w_down; got 1")
    assert error(ValueError, gated_mlp, f32(2, 3), f32(3, 4), f32(3, 8), f32(4, 3), "tp") == (
        "w_gate has local shape (3, 4) and w_up (3, 8); both need as many columns"
    )


def test_an_activation_that_is_not_elementwise():
    x, w = jnp.zeros((1, 4, 2)), jnp.zeros((2, 3))
    wrong = {"activation": lambda x: jnp.sum(x, axis=-1, keepdims=True), "sequence_dim": None}
    assert error(ValueError, gated_mlp, x, w, w, w.T, "tp", **wrong) == (
        "activation returned local shape (1, 4, 1) for (1, 4, 3); it must keep the shape"
    )


def test_what_an_activation_returns():
    x, w = jnp.zeros((1, 4, 2)), jnp.zeros((2, 3))
    args = gated_mlp, x, w, w, w.T, "tp"
    assert error(ValueError, *args, activation=lambda h: (h, h), sequence_dim=None).startswith(
        "activation returned (JitTracer"
    )
    assert error(
        TypeError, *args, activation=lambda h: h.astype("complex64"), sequence_dim=None
    ) == ("activation returned complex64 for float32; cast it")


def test_what_is_no_activation_of_gate_and_up():
    with pytest.raises(TypeError, match=r"^GatedActivation: function must be one of gate and up"):
        GatedActivation("silu")
    x, w = jnp.zeros((1, 4, 2)), jnp.zeros((2, 3))

    def text(kind, activation):
        args = x, w, w, w.T, "tp"
        return error(kind, gated_mlp, *args, activation=activation, sequence_dim=None)

    assert text(ValueError, GatedActivation(lambda gate, up: gate @ up.swapaxes(1, 2))) == (
        "activation returned local shape (1, 4, 4) for (1, 4, 3); it must keep the shape"
    )

    def joined(gate, up):
        return gate * up

    assert text(TypeError, joined).endswith(
        "() missing 1 required positional argument: 'up'; wrap a function of gate and up in "
        "GatedActivation"
    )
    assert text(TypeError, GatedActivation(jax.nn.silu)) == (
        "activation is called with gate and up: silu() takes 1 positional argument but 2 were "
        "given; give GatedActivation a function of both, or leave it out"
    )
    # A function that bears the signature of another one is called as it can be.
    assert text(ValueError, wraps(joined)(lambda h: (h, h))).startswith("activation returned (")


def test_a_call_inside_an_activation_is_named():
    x, w = jnp.zeros((1, 4, 2)), jnp.zeros((2, 12))
    layer = jax.shard_map(
        lambda x, w: gated_mlp(x, w, w, w.T, "tp", activation=lambda h: ring_shift(h, "zz")),
        mesh=mesh_of("tp=4"),
        in_specs=(P(None, "tp"), P(None, "tp")),
        out_specs=P("tp"),
    )
    with pytest.raises(ValueError, match=r"^ring_shift: axis 'zz' is not bound"):
        jax.eval_shape(layer, x, w)


@pytest.mark.parametrize(
    ("tokens", "dim", "check_vma"), [((4, 16, 8), -2, True), ((16, 3, 8), 0, False)]
)
def test_rows_that_go_through_an_mlp_in_chunks(tokens, dim, check_vma, monkeypatch, float64):
    """Values and gradients of what `auto` does on TPU, with two collectives for each chunk."""
    shape = tokens
    args = wide([normal(*shape), normal(8, 12), normal(8, 12), normal(12, 8)])

    def spec(size):
        places = [None] * len(shape)
        places[dim] = size
        return P(*places)

    def mapped(axis):
        return jax.shard_map(
            lambda x, *w: gated_mlp(x, *w, axis, sequence_dim=dim),
            mesh=mesh_of("tp=4"),
            in_specs=(spec("tp"), P(None, "tp"), P(None, "tp"), P("tp")),
            out_specs=spec("tp"),
            check_vma=check_vma,
        )

    def with_gradients(axis):
        loss = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(mapped(axis)(*a))), range(4))
        return jax.jit(loss)

    wanted = with_gradients(Axis("tp", mode="naive"))(*args)
    monkeypatch.setattr("jaxpar.layers._projections.choose_row_chunks", lambda _: 2)
    assert count_collectives(mapped("tp"), *args).forward == {"all_gather": 2, "psum_scatter": 2}
    assert_alike(with_gradients("tp")(*args), wanted)
