"""What a matmul gathered is kept for its derivative, or not: values, transfers, memory."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, compiled_with, compiler_options
from jaxpar.layers import fsdp_linear
from jaxpar.matmul import all_gather_matmul, collective_einsum
from jaxpar.mesh import make_mesh
from jaxpar.ring import run
from jaxpar.schedule import target
from jaxpar.testing import count_collectives

# Axes of the mesh, and how data travel over them: forward, and backward where that differs.
WAYS = {
    "one way": ({"x": 3}, "unidirectional", None),
    "both ways, halves": ({"x": 4}, "bidirectional", None),
    "a cube": ({"x": 2, "y": 2, "z": 2}, "multi-ring", None),
    "a ring, then at once": ({"x": 4}, "bidirectional", "naive"),
    "a ring, then chunks": ({"x": 4}, "unidirectional", "chunked-2"),
    "at once, then a ring": ({"x": 4}, "naive", "bidirectional"),
    "one device": ({"x": 1}, "bidirectional", "naive"),
    "a square": ({"x": 2, "y": 2}, "multi-ring", None),
}
# All compute x @ w: the call, and the dimension of x and of w that is sharded, and of the result.
FORMS = {
    "rows": (lambda x, w, axis: all_gather_matmul(x, w, axis), (0, 1, 1)),
    "k of lhs": (lambda x, w, axis: all_gather_matmul(x, w, axis, dim=1), (1, 1, 1)),
    "k of rhs": (lambda x, w, axis: all_gather_matmul(x, w, axis, gather="rhs"), (0, 0, 0)),
    "columns": (lambda x, w, axis: all_gather_matmul(x, w, axis, gather="rhs", dim=1), (0, 1, 0)),
    "two weights": (
        lambda x, w, axis: sum(all_gather_matmul(x, (w / 4, w * 0.75), axis)),
        (0, 1, 1),
    ),
}
M, K, N = 72, 144, 72


def normal(*shape):
    return (
        np.random.default_rng([*shape]).standard_normal(shape).astype("float32") / shape[0] ** 0.5
    )


def along(names, dim):
    return P(*[None] * dim, names)


def sharded(call, dims, axes, mode, backward, *, keep, check_vma, wire=None):
    mesh = make_mesh(axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    axis = Axis(tuple(axes), mode, wire, backward, keep_gathered=keep)
    *given, out = [along(tuple(axes), dim) for dim in dims]
    return jax.shard_map(
        lambda x, w: call(x, w, axis),
        mesh=mesh,
        in_specs=tuple(given),
        out_specs=out,
        check_vma=check_vma,
    )


def gradients(fn):
    """A function of x and w: the gradients of sum(sin(fn(x, w)))."""
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w))), argnums=(0, 1))


def twice(fn):
    """The gradients of sum(sin(x @ w)), and those of a function of them."""

    def again(x, w):
        of_x, of_w = once = gradients(fn)(x, w)
        return jnp.sum(jnp.cos(of_x)) + jnp.sum(jnp.sin(of_w)), once

    return jax.jit(jax.grad(again, argnums=(0, 1), has_aux=True))


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b)))


@cache
def plainly_twice():
    return jax.device_get(twice(jnp.matmul)(normal(M, K), normal(K, N)))


# Each form both ways round; all other ways with forms in turn.
PAIRS = [
    *((form, "both ways, halves") for form in FORMS),
    ("rows", "a ring, then at once"),
    ("two weights", "a ring, then at once"),
    ("rows", "one way"),
    ("columns", "a cube"),
    ("k of lhs", "a ring, then chunks"),
    ("two weights", "at once, then a ring"),
    ("columns", "one device"),
]


@pytest.mark.parametrize(("form", "way"), PAIRS)
def test_gradients_of_what_was_kept_and_theirs(form, way):
    check_vma = (list(FORMS).index(form) + list(WAYS).index(way)) % 2 == 0
    fn = sharded(*FORMS[form], *WAYS[way], keep=True, check_vma=check_vma)
    expected = plainly_twice()
    if way == "a cube":  # of some thousand instructions once
        close(jax.jit(gradients(fn))(normal(M, K), normal(K, N)), expected[1])
    else:
        close(twice(fn)(normal(M, K), normal(K, N)), expected)


@pytest.mark.parametrize(
    ("mode", "backward", "unrolled", "check_vma"),
    [
        ("unidirectional", None, 2, False),
        ("bidirectional", None, 1, True),
        ("naive", "unidirectional", 2, True),
    ],
)
def test_a_loop_keeps_the_whole_and_a_loop_that_scatters_is_after_it(
    mode, backward, unrolled, check_vma, monkeypatch
):
    monkeypatch.setattr(run, "UNROLLED", unrolled)
    x, w = normal(M, K), normal(K, N)
    how = {"keep": True, "check_vma": check_vma}
    fn = sharded(*FORMS["rows"], {"x": 8}, mode, backward, **how)
    close(twice(fn)(x, w), plainly_twice())


@pytest.mark.parametrize(
    "way", ["both ways, halves", "a ring, then at once", "at once, then a ring", "a square"]
)
def test_eight_bits_that_were_kept_are_those_that_would_be_gathered(way):
    differentiate = twice if way == "a ring, then at once" else gradients
    kept, again = (
        jax.jit(
            differentiate(
                sharded(*FORMS["rows"], *WAYS[way], keep=keep, check_vma=True, wire="int8")
            )
        )(normal(M, K), normal(K, N))
        for keep in (True, False)
    )
    close(kept, again)


def test_labels_of_a_batch_stay_apart():
    def call(x, w, axis):
        return collective_einsum("bmk,bkn->nbm", x, w, axis, gather="m")

    mesh = make_mesh("x=4", devices=jax.devices()[:4])
    x, w = normal(3, 16, 8), normal(3, 8, 5)
    fn = jax.shard_map(
        lambda x, w: call(x, w, Axis("x", "bidirectional", keep_gathered=True)),
        mesh=mesh,
        in_specs=(P(None, "x"), P()),
        out_specs=P("x"),
    )

    def loss(fn):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w))), argnums=(0, 1)))

    found = loss(lambda x, w: fn(x, w)[:5])(x, w)
    expected = loss(lambda x, w: jnp.einsum("bmk,bkn->nbm", x, w))(x, w)
    close(found, expected)


def counts(mode, keep, backward=None, wire=None):
    call, dims = FORMS["rows"]
    fn = sharded(call, dims, {"x": 4}, mode, backward, keep=keep, check_vma=True, wire=wire)
    return count_collectives(fn, normal(M, K), normal(K, N))


SHARDS, WHOLE = 4 * (M * K + K * N) // 4, 4 * (M * K + K * N // 4)  # bytes


@pytest.mark.parametrize(
    ("mode", "keep", "sent", "kept"),
    [
        ("unidirectional", True, {"ppermute": 3}, WHOLE),
        ("unidirectional", False, {"ppermute": 6}, SHARDS),
        ("unidirectional", None, {"ppermute": 6}, SHARDS),
        ("naive", True, {"psum_scatter": 1}, WHOLE),
        ("naive", None, {"psum_scatter": 1}, WHOLE),
        ("naive", False, {"psum_scatter": 1, "all_gather": 1}, SHARDS),
    ],
)
def test_what_is_kept_is_not_gathered_again(mode, keep, sent, kept):
    found = counts(mode, keep)
    assert (dict(found.backward), found.residual_bytes) == (sent, kept)


def test_of_what_was_gathered_at_once_a_ring_keeps_the_whole():
    found = counts("naive", True, "unidirectional")
    assert dict(found.forward) == {"all_gather": 1}
    assert (dict(found.backward), found.residual_bytes) == ({"ppermute": 3}, WHOLE + 4 * M * K // 4)


def test_eight_bits_are_kept_as_eight():
    values, scales, own = M * K, 4 * M, 4 * M * K // 4
    found = counts("unidirectional", True, wire="int8")
    assert found.residual_bytes <= values + 2 * scales + 2 * own + 4 * K * N // 4
    for mode, backward in (("naive", None), ("auto", None), ("auto", "naive"), ("naive", "auto")):
        naive = counts(mode, None, backward, wire="int8")  # as `auto` is on CPU devices
        assert dict(naive.backward) == {"psum_scatter": 1}
        assert naive.residual_bytes <= values + 2 * scales + 2 * own + 4 * K * N // 4


@pytest.mark.parametrize("mode", ["naive", "bidirectional"])
def test_weights_are_gathered_again_unless_they_are_asked_for(mode):
    mesh = make_mesh("x=4", devices=jax.devices()[:4])

    def residuals(mode, keep):
        axis = Axis("x", mode, keep_gathered=keep)
        fn = jax.shard_map(
            lambda x, w: fsdp_linear(x, w, axis),
            mesh=mesh,
            in_specs=(P("x"), P("x")),
            out_specs=P("x"),
        )
        return count_collectives(fn, normal(M, K), normal(K, N)).residual_bytes

    assert residuals(mode, None) == SHARDS
    assert residuals(mode, True) == 4 * (M * K // 4 + K * N)


@pytest.mark.parametrize("keep", [None, True, False])
def test_what_stays_is_sent_no_second_time(keep):
    mesh = make_mesh("x=4", devices=jax.devices()[:4])
    axis = Axis("x", "stationary", keep_gathered=keep)
    fn = jax.shard_map(
        lambda x, w: fsdp_linear(x, w, axis),
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
    )
    found = count_collectives(fn, normal(M, K), normal(K, N))
    assert dict(found.forward) == {"all_to_all": 1, "psum_scatter": 1}
    assert dict(found.backward) == {"all_gather": 1, "all_to_all": 1}


def sent_on_tpus(call, dims, axis, sizes, plane):
    """How often a program and its gradients, traced for TPUs with their options, send."""
    rows, across, *_ = specs = [along("tp", dim) for dim in dims]
    given = [
        jax.ShapeDtypeStruct(size, "bfloat16", sharding=NamedSharding(plane.mesh, spec))
        for size, spec in zip(sizes, specs, strict=False)
    ]
    fn = jax.shard_map(
        lambda x, w: call(x, w, axis),
        mesh=plane.mesh,
        in_specs=(rows, across),
        out_specs=specs[-1],
    )

    def gradients(x, w):
        y, pull = jax.vjp(fn, x, w)
        return pull(y)

    with jax.set_mesh(plane.mesh), compiled_with(compiler_options(plane)):
        text = str(jax.jit(gradients).trace(*given).jaxpr)
    return {name: text.count(f" {name}[") for name in ("all_gather", "reduce_scatter", "ppermute")}


def test_what_is_left_to_auto_goes_with_what_is_named():
    """The forward pass of which `auto` would think, if both were its own, keeps nothing here."""
    given = (*FORMS["rows"], Axis("tp", backward="naive"), ((16384, 8192), (8192, 8192)))
    found = sent_on_tpus(*given, target("v6e:16x16", "dp=16,tp=16"))
    assert found["ppermute"] > 0
    assert (found["all_gather"], found["reduce_scatter"]) == (0, 1)


def test_auto_reckons_with_a_weight_that_is_gathered_again():
    """It goes round by rings; a naive gather that is kept would be ahead of them."""
    plane = target("v5p:4x4x4", "dp=4,tp=16")
    found = sent_on_tpus(fsdp_linear, (0, 0, 0), Axis("tp"), ((4096, 4096),) * 2, plane)
    assert found["ppermute"] > 0
    assert found["all_gather"] == 0


def test_an_axis_says_what_it_keeps():
    assert Axis(Axis("x", keep_gathered=False)).keep_gathered is False
    with pytest.raises(TypeError, match="keep_gathered must be True, False or None, got 1"):
        Axis("x", keep_gathered=1)
