"""Overlapped matmuls under jax.checkpoint, lax.scan, and jax.vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import Axis
from jaxpar.matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxpar.testing import assert_matches_reference


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape).astype("float32")


def line(n):
    return Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))


def layer(mode):
    """Sequence-parallel: rows gathered, hidden columns local, rows scattered again."""

    def apply(x, weights):
        up, down = weights
        h = jnp.sin(all_gather_matmul(x, up, "x", mode=mode))
        return x + matmul_reduce_scatter(h, down, "x", mode=mode)

    return apply


def layers_in_numpy(x, ups, downs):
    for up, down in zip(ups, downs, strict=True):
        x = x + np.sin(x @ up) @ down
    return x


def twice(fn):
    """The gradients of a function of gradients."""

    def once(*args):
        return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=tuple(range(5)))(*args)

    def again(*args):
        return sum(jnp.sum(jnp.sin(g)) for g in once(*args))

    return jax.jit(jax.grad(again, argnums=tuple(range(5))))


LAYERS = [
    *(normal(6, 6) / 4, normal(2, 6, 6) / 4),
    *(normal(2, 6, 8) / 4, normal(2, 8, 6) / 4, normal(2, 6, 6) / 8),
]


@pytest.fixture(scope="module")
def twice_plainly():
    def plain(x, ws):
        wide, up, down, last = ws
        x = jnp.sin(x @ wide)
        x = x + jnp.sin(x @ up) @ down
        above, below = jnp.split(x, 2)
        return x + jnp.tile(jnp.sin((above + below) @ last), (2, 1)), None

    return jax.device_get(twice(lambda x, *ws: lax.scan(plain, x, ws)[0])(*LAYERS))


@pytest.mark.parametrize(
    ("keep", "check_vma"), [(True, False), (False, True)], ids=["kept", "gathered again"]
)
def test_second_derivatives_of_a_scan(keep, check_vma, twice_plainly):
    """Residuals that are operands as they came in were mistaken for others."""
    axis = Axis("x", "bidirectional", keep_gathered=keep)

    def apply(x, ws):
        wide, up, down, last = ws
        x = jnp.sin(all_gather_matmul(x, wide, axis, gather="rhs", dim=1))
        h = jnp.sin(all_gather_matmul(x, up, axis))
        x = x + matmul_reduce_scatter(h, down, axis)
        return x + jnp.sin(matmul_all_reduce(x, last, axis)), None

    specs = (P(None, None, "x"), P(None, None, "x"), P(None, "x"), P())
    mapped = jax.shard_map(
        lambda x, *ws: lax.scan(apply, x, ws)[0],
        mesh=line(2),
        in_specs=(P("x"), *specs),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    for a, b in zip(twice(mapped)(*LAYERS), twice_plainly, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))


@pytest.mark.parametrize(
    ("mode", "remat"),
    [("unidirectional", True), ("bidirectional", False)],
)
def test_scan_over_layers(mode, remat):
    apply = jax.checkpoint(layer(mode)) if remat else layer(mode)  # or all is saved

    def fn(x, ups, downs):
        return lax.scan(lambda x, ws: (apply(x, ws), None), x, (ups, downs))[0]

    assert_matches_reference(
        fn,
        layers_in_numpy,
        normal(3, 2),
        normal(2, 2, 6) / 2,
        normal(2, 6, 2) / 2,
        mesh=line(3),
        in_specs=(P("x"), P(None, None, "x"), P(None, "x")),
        out_specs=P("x"),
        check_vma=remat,
    )


def test_checkpoint_around_shard_map():
    """And a policy that keeps nothing: the gather runs once more in the backward."""
    specs = {"in_specs": (P("x"), (P(None, "x"), P("x"))), "out_specs": P("x")}
    x, up, down = normal(3, 2), normal(2, 6), normal(6, 2)
    mapped = jax.shard_map(layer("bidirectional"), mesh=line(3), **specs)
    policy = jax.checkpoint_policies.nothing_saveable

    def loss(fn):
        return jax.jit(jax.grad(lambda x, ws: jnp.sum(fn(x, ws) ** 2), argnums=(0, 1)))

    found = loss(jax.checkpoint(mapped, policy=policy))(x, (up, down))
    expected = loss(mapped)(x, (up, down))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("in_axes", "mode"),
    [
        ((0, None), "bidirectional"),
        ((None, 0), "unidirectional"),
        ((0, 0), "bidirectional"),
    ],
)
def test_vmap_inside(in_axes, mode):
    def calls(x, w):
        h = all_gather_matmul(x, w, "x", gather="rhs", dim=0, mode=mode)
        return matmul_reduce_scatter(x.T, h, "x", mode=mode)

    left, right = ([2] if dim == 0 else [] for dim in in_axes)
    assert_matches_reference(
        jax.vmap(calls, in_axes=in_axes),
        lambda x, w: np.swapaxes(x, -1, -2) @ (x @ w),
        normal(*left, 3, 3),
        normal(*right, 3, 2),
        mesh=line(3),
        in_specs=(P(*[None for _ in left], "x"), P(*[None for _ in right], "x")),
        out_specs=P(None, "x"),
        check_vma=in_axes != (0, None),
    )


@pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])
def test_vmap_over_something_else(mode):
    """No operand of the two matmuls is batched: their gradients are summed over the batch once."""

    def calls(x, w, scale):
        scattered = matmul_reduce_scatter(x.T, x, "x", mode=mode)
        contracted = all_gather_matmul(x.T, w, "x", dim=1, mode=mode)
        return scale * scattered, scale * contracted

    def reference(x, w, scale):
        return scale[:, None, None] * (x.T @ x), scale[:, None, None] * (x.T @ w)

    assert_matches_reference(
        jax.vmap(calls, in_axes=(None, None, 0)),
        reference,
        normal(3, 3),
        normal(3, 3),
        normal(2),
        mesh=line(3),
        in_specs=(P("x"), P(None, "x"), P()),
        out_specs=(P(None, "x"), P(None, None, "x")),
        check_vma=mode == "bidirectional",
    )


@pytest.mark.parametrize(
    ("mode", "check_vma"), [("unidirectional", False), ("bidirectional", True)]
)
def test_vmap_of_all_reduce_and_einsum(mode, check_vma):
    def calls(x, w):
        return (
            matmul_all_reduce(x, w, "x", mode=mode),
            collective_einsum("mk,nk->nm", x, w.T, "x", scatter="m", mode=mode),
        )

    assert_matches_reference(
        jax.vmap(calls, in_axes=(1, None), out_axes=(0, 2)),
        lambda x, w: (
            np.einsum("mbk,kn->bmn", x, w),
            np.einsum("mbk,kn->nmb", x, w),
        ),
        normal(3, 2, 6),
        normal(6, 2),
        mesh=line(3),
        in_specs=(P(None, None, "x"), P("x")),
        out_specs=(P(), P(None, "x")),
        check_vma=check_vma,
    )


def test_vmap_around_shard_map():
    mapped = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "x", mode="bidirectional"),
        mesh=line(4),
        in_specs=(P("x"), P(None, "x")),
        out_specs=P(None, "x"),
    )
    x, w = normal(2, 4, 3), normal(3, 4)
    ct = normal(2, 4, 4)

    @jax.jit
    def run(x, w, ct):
        y, pull = jax.vjp(jax.vmap(mapped, in_axes=(0, None)), x, w)
        return y, *pull(ct)

    found, gx, gw = run(x, w, ct)
    np.testing.assert_allclose(found, x @ w, atol=1e-5)
    np.testing.assert_allclose(gx, ct @ w.T, atol=1e-5)
    np.testing.assert_allclose(gw, np.einsum("bmk,bmn->kn", x, ct), atol=1e-5)


def test_gradient_inside_vmap_inside_scan():
    """Per-example gradients in the body, one example after the other and all at once."""
    x, w = normal(5, 4, 2), normal(2, 8)

    def local(x, w):
        def gradient(x):
            return jax.grad(
                lambda w: lax.psum(
                    jnp.sum(all_gather_matmul(x, w, "x", mode="bidirectional") ** 2), "x"
                )
            )(w)

        one_by_one = lax.map(gradient, x)
        return one_by_one, jax.vmap(gradient)(x)

    mapped = jax.shard_map(
        local,
        mesh=line(4),
        in_specs=(P(None, "x"), P(None, "x")),
        out_specs=P(None, None, "x"),
    )
    expected = 2 * np.einsum("bmk,bmn->bkn", x, x @ w)
    for found in jax.jit(mapped)(x, w):
        np.testing.assert_allclose(found, expected, atol=1e-4)
