"""Gradients taken inside `shard_map`, and second derivatives in reverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

check = pytest.mark.parametrize("check_vma", [True, False])
RINGS = ((3, "unidirectional"), (4, "bidirectional"))

# All compute x @ w: name, call, specs of x, of w and of the result.
FORMS = {
    "gather rows": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", mode=mode),
        (P("x"), P(None, "x"), P(None, "x")),
    ),
    "gather k of lhs": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", dim=-1, mode=mode),
        (P(None, "x"), P(None, "x"), P(None, "x")),
    ),
    "gather k of rhs": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", gather="rhs", mode=mode),
        (P("x"), P("x"), P("x")),
    ),
    "gather columns": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", gather="rhs", dim=1, mode=mode),
        (P("x"), P(None, "x"), P("x")),
    ),
    "scatter rows": (
        lambda x, w, mode: matmul_reduce_scatter(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P("x")),
    ),
    "scatter columns": (
        lambda x, w, mode: collective_einsum("mk,kn->nm", x, w, "x", scatter="n", mode=mode).T,
        (P(None, "x"), P("x"), P(None, "x")),
    ),
    "all-reduce": (
        lambda x, w, mode: matmul_all_reduce(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P()),
    ),
}


def line(n):
    return Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape).astype("float32")


def close(found, expected, scale=1.0):
    """Within 1e-5 of the largest entry: float32, sums of some 30 terms."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b)) * scale)


def inside(fn, specs, n, mode, check_vma, summed):
    """The gradients of sum(sin(y)), taken in the body of shard_map."""

    def local(x, w):
        def loss(x, w):
            total = jnp.sum(jnp.sin(fn(x, w, mode)))
            return lax.psum(total, "x") if summed else total

        return jax.grad(loss, argnums=(0, 1))(x, w)

    return jax.jit(
        jax.shard_map(
            local, mesh=line(n), in_specs=specs[:2], out_specs=specs[:2], check_vma=check_vma
        )
    )


@pytest.mark.parametrize(
    ("form", "check_vma", "n", "mode"),
    [
        (form, check_vma, *RINGS[(at + check_vma) % 2])
        for at, form in enumerate(FORMS)
        for check_vma in (True, False)
        if form in ("gather rows", "scatter rows", "all-reduce") or check_vma == (at % 4 < 2)
    ],
)
def test_gradients_inside_are_those_of_naive(form, check_vma, n, mode):
    """What a gradient in the body means depends on check_vma, but not on the mode."""
    fn, specs = FORMS[form]
    args = normal(n, 2 * n), normal(2 * n, 3 * n)
    summed = specs[2] != P()  # a psum of what is replicated already would count it n times
    found = inside(fn, specs, n, mode, check_vma, summed)(*args)
    close(found, inside(fn, specs, n, "naive", check_vma, summed)(*args))


some_modes = pytest.mark.parametrize(
    ("mode", "check_vma"),
    [
        *(("unidirectional", False), ("bidirectional", True), ("chunked-2", False)),
        *(("naive", True), ("naive", False)),
    ],
)


@some_modes
def test_gradients_inside_are_the_true_ones(mode, check_vma):
    """With the loss summed inside under check_vma=True, and with the local loss without it."""
    x, w = normal(4, 8), normal(8, 12)
    slope = np.cos(x @ w)
    names = ("gather rows", "scatter rows")
    if mode != "naive":  # as which all are: see above
        names = (names[check_vma == (mode == "bidirectional")],)
    for name in names:
        found = inside(*FORMS[name], 4, mode, check_vma, check_vma)(x, w)
        close(found, (slope @ w.T, x.T @ slope))


@some_modes
def test_gradient_of_a_weight_that_is_replicated_over_a_second_axis(mode, check_vma):
    """Under check_vma=True it is summed over that axis already; without it, by a psum."""
    x, w = normal(8, 3), normal(3, 8)
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("d", "x"), axis_types=(AxisType.Auto,) * 2)

    def local(x, w):
        def loss(w):
            total = jnp.sum(jnp.sin(all_gather_matmul(x, w, "x", mode=mode)))
            return lax.psum(total, ("d", "x")) if check_vma else total

        gradient = jax.grad(loss)(w)
        return gradient if check_vma else lax.psum(gradient, "d")

    specs = P(("d", "x")), P(None, "x")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=check_vma
    )
    close(jax.jit(mapped)(x, w), x.T @ np.cos(x @ w))


# -- twice in reverse ---------------------------------------------------------------------------


def second(fn):
    """The gradient, along a direction, of the gradients of sum(sin(fn(x, w)))."""

    def along(x, w, v, u):
        gx, gw = jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w))), argnums=(0, 1))(x, w)
        return jnp.vdot(gx, v) + jnp.vdot(gw, u)

    return jax.jit(jax.grad(along, argnums=(0, 1)))


def second_in_numpy(x, w, v, u):
    y = x @ w
    dy = v @ w + x @ u
    bend = -np.sin(y) * dy
    return bend @ w.T + np.cos(y) @ u.T, x.T @ bend + v.T @ np.cos(y)


@pytest.mark.parametrize(
    ("form", "n", "mode", "check_vma"),
    [(form, *RINGS[at % 2], at % 4 < 2) for at, form in enumerate(FORMS)],
)
def test_second_derivatives_outside(form, n, mode, check_vma):
    """test_tpu_order.py has some forms the other way round."""
    fn, specs = FORMS[form]
    args = normal(n, 2 * n), normal(2 * n, 3 * n), normal(n, 2 * n) + 1, normal(2 * n, 3 * n) - 1
    mapped = jax.shard_map(
        lambda x, w: fn(x, w, mode),
        mesh=line(n),
        in_specs=specs[:2],
        out_specs=specs[2],
        check_vma=check_vma,
    )
    wide = [np.asarray(a, np.float64) for a in args]
    close(second(mapped)(*args), second_in_numpy(*wide))


@pytest.mark.parametrize(
    ("mode", "check_vma"), [("unidirectional", True), ("unidirectional", False), ("naive", True)]
)
def test_second_derivatives_of_the_all_reduce(mode, check_vma):
    """Its derivatives have rules of their own under check_vma=True; here sizes do not divide."""
    fn, specs = FORMS["all-reduce"]
    args = normal(2, 3), normal(3, 4), normal(2, 3) + 1, normal(3, 4) - 1
    mapped = jax.shard_map(
        lambda x, w: fn(x, w, mode),
        mesh=line(3),
        in_specs=specs[:2],
        out_specs=specs[2],
        check_vma=check_vma,
    )
    wide = [np.asarray(a, np.float64) for a in args]
    close(second(mapped)(*args), second_in_numpy(*wide))


@check
def test_second_derivatives_of_several_weights_inside(check_vma):
    """A gather that feeds two weights, differentiated twice in the body."""

    def local(mode):
        def product(x, w, v):
            y, z = all_gather_matmul(x, (w, v), "x", mode=mode)
            total = jnp.sum(y * jnp.sin(z))
            return lax.psum(total, "x") if check_vma else total

        def along(x, w, v):
            gx, gw = jax.grad(product, argnums=(0, 1))(x, w, v)
            total = jnp.sum(gx**2) + jnp.sum(gw**3)
            return lax.psum(total, "x") if check_vma else total

        specs = P("x"), P(None, "x"), P(None, "x")
        mapped = jax.shard_map(
            jax.grad(along, argnums=(0, 1, 2)),
            mesh=line(3),
            in_specs=specs,
            out_specs=specs,
            check_vma=check_vma,
        )
        return jax.jit(mapped)(normal(3, 3), normal(3, 3), normal(3, 6))

    # Cubes of sums: errors grow threefold and more.
    close(local("bidirectional"), local("naive"), scale=10.0)
