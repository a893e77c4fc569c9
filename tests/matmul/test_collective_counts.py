"""A ring mode sends ppermutes only, as many as planned, and keeps only shards, both ways."""

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
from jaxpar.mesh import make_mesh
from jaxpar.ring import run
from jaxpar.testing import count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])
MODES = ("unidirectional", "bidirectional")
modes = pytest.mark.parametrize("mode", MODES)
sizes = pytest.mark.parametrize("n", [2, 4])
M, K, N = 16, 24, 32  # global sizes
BATCH = "bmk,bkn->bmn"


def gathered(n, mode):
    """Transfers of a gather: n - 1, or pairs of whole blocks and, if n is even, two halves."""
    if mode == "unidirectional":
        return n - 1
    return (n - 1) // 2 * 2 + (2 if n % 2 == 0 else 0)


def scattered(n):
    """Transfers of a scatter: whole sums only, either way."""
    return n - 1


# Call, specs of operands and result, shapes; and folds in the forward and in the backward.
GATHERS = {
    "rows": (
        lambda x, w, mode, axis="x": all_gather_matmul(x, w, axis, mode=mode),
        (P("x"), P(None, "x"), P(None, "x")),
        ((M, K), (K, N)),
    ),
    "k of lhs": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", dim=1, mode=mode),
        (P(None, "x"), P(None, "x"), P(None, "x")),
        ((M, K), (K, N)),
    ),
    "k of rhs": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", gather="rhs", mode=mode),
        (P("x"), P("x"), P("x")),
        ((M, K), (K, N)),
    ),
    "columns": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", gather="rhs", dim=1, mode=mode),
        (P("x"), P(None, "x"), P("x")),
        ((M, K), (K, N)),
    ),
    "two weights": (
        lambda x, w, mode: all_gather_matmul(x, (w, w[:, :1]), "x", mode=mode),
        (P("x"), P(None, "x"), P(None, "x")),
        ((M, K), (K, N)),
    ),
    "batch": (
        lambda x, w, mode: collective_einsum(BATCH, x, w, "x", gather="b", mode=mode),
        (P("x"), P(None, None, "x"), P(None, None, "x")),
        ((8, M, K), (8, K, N)),
    ),
}
SCATTERS = {
    "rows": (
        lambda x, w, mode: matmul_reduce_scatter(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P("x")),
        ((M, K), (K, N)),
    ),
    "columns": (
        lambda x, w, mode: matmul_reduce_scatter(x, w, "x", dim=-1, mode=mode),
        (P(None, "x"), P("x"), P(None, "x")),
        ((M, K), (K, N)),
    ),
    "batch": (
        lambda x, w, mode: collective_einsum(BATCH, x, w, "x", scatter="b", mode=mode),
        (P(None, None, "x"), P(None, "x"), P("x")),
        ((8, M, K), (8, K, N)),
    ),
}


def covering(forms):
    """Parametrizes: each form on four devices in both modes, on two in one, under either check_vma.

    `test_other_ring_sizes` has more devices.
    """
    cases = [
        case
        for at, form in enumerate(forms)
        for case in (
            (form, 4, MODES[0], at % 2 == 0),
            (form, 4, MODES[1], at % 2 == 1),
            (form, 2, MODES[at % 2], at % 4 < 2),
        )
    ]
    return pytest.mark.parametrize(("form", "n", "mode", "check_vma"), cases)


def counts(form, n, mode, check_vma=True, devices=None):
    fn, specs, shapes = form
    mesh = Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x, w: fn(x, w, mode),
        mesh=mesh,
        in_specs=specs[:2],
        out_specs=specs[2],
        check_vma=check_vma,
    )
    return count_collectives(mapped, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def shard_bytes(form, n):
    return sum(int(np.prod(shape)) * 4 // n for shape in form[2])


@covering(GATHERS)
def test_gather(form, n, mode, check_vma):
    """Backward: one fold scatters the gathered operand's gradient, one gathers it for the rest."""
    second = 4 * K if form == "two weights" else 0  # its column
    form = GATHERS[form]
    found = counts(form, n, mode, check_vma)
    assert found.forward == {"ppermute": gathered(n, mode)}
    assert found.backward == {"ppermute": scattered(n) + gathered(n, mode)}
    assert found.residual_bytes <= shard_bytes(form, n) + second


@covering(SCATTERS)
def test_scatter(form, n, mode, check_vma):
    """Backward: one gather of the cotangent feeds the gradients of both operands."""
    form = SCATTERS[form]
    found = counts(form, n, mode, check_vma)
    assert found.forward == {"ppermute": scattered(n)}
    assert found.backward == {"ppermute": gathered(n, mode)}
    assert found.residual_bytes <= shard_bytes(form, n)


@pytest.mark.parametrize(
    ("forward", "backward", "kept"),
    [
        ("naive", "naive", M * K + K * N // 8),  # JAX's own derivative: the gathered operand
        ("naive", "unidirectional", (M * K + K * N) // 8),
        ("unidirectional", "naive", (M * K + K * N) // 8),
        ("chunked-2", "chunked-2", (M * K + K * N) // 8),
        ("stationary", "stationary", M * K // 8 + K * N),  # what travels in its place
        ("stationary", "bidirectional", (M * K + K * N) // 8),
    ],
)
def test_what_is_kept_from_forward_to_backward(forward, backward, kept):
    fn, specs, shapes = GATHERS["rows"]
    mapped = jax.shard_map(
        lambda x, w: fn(x, w, None, axis=Axis("x", forward, backward=backward)),
        mesh=make_mesh("x=8"),
        in_specs=specs[:2],
        out_specs=specs[2],
    )
    found = count_collectives(mapped, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert found.residual_bytes == 4 * kept


def all_reduce(n):
    return (
        lambda x, w, mode: matmul_all_reduce(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P()),
        ((n, 24), (24, 5)),
    )


@modes
@sizes
def test_all_reduce_that_is_typed_as_replicated(n, mode):
    """Only all_gather can type it so; the backward sends nothing, and keeps shards."""
    found = counts(all_reduce(n), n, mode)
    assert found.forward == {"ppermute": scattered(n), "all_gather": 1}
    assert found.backward == {}
    assert found.residual_bytes <= shard_bytes(all_reduce(n), n)


@modes
@sizes
def test_all_reduce_without_types(n, mode):
    """It scatters and gathers, and so does its derivative."""
    found = counts(all_reduce(n), n, mode, check_vma=False)
    assert found.forward == {"ppermute": scattered(n) + gathered(n, mode)}
    assert found.backward == {"ppermute": scattered(n) + gathered(n, mode)}
    assert found.residual_bytes <= shard_bytes(all_reduce(n), n)


@pytest.mark.parametrize("n", [3, 5, 6, 8])
def test_other_ring_sizes(n):
    for at, mode in enumerate(MODES):
        shapes, check_vma = ((n, 2), (2, n)), (n + at) % 3 == 0
        found = counts((*GATHERS["rows"][:2], shapes), n, mode, check_vma)
        assert found.forward["ppermute"] == gathered(n, mode)
        assert found.backward["ppermute"] == scattered(n) + gathered(n, mode)
        assert found.forward.keys() | found.backward.keys() <= {"ppermute"}


@pytest.mark.parametrize(
    ("mode", "check_vma"), [("unidirectional", False), ("bidirectional", True)]
)
def test_a_loop_sends_as_much(mode, check_vma, monkeypatch):
    unrolled = counts(GATHERS["rows"], 8, mode, check_vma)
    monkeypatch.setattr(run, "UNROLLED", 1)
    assert counts(GATHERS["rows"], 8, mode, check_vma) == unrolled


def test_nothing_is_sent_on_a_ring_of_one():
    for at, form in enumerate((*GATHERS.values(), *SCATTERS.values())):
        found = counts(form, 1, MODES[at % 2], check_vma=at % 4 < 2)
        assert found.forward == found.backward == {}


@pytest.mark.parametrize(
    ("form", "mode", "check_vma"),
    [
        (form, MODES[at % 2], at % 4 < 2)
        for at, form in enumerate([*GATHERS.values(), *SCATTERS.values()])
    ]
    + [(SCATTERS["rows"], MODES[1], False), (GATHERS["rows"], MODES[1], False)],
)
def test_gradients_inside_send_nothing_else(form, mode, check_vma):
    """Forward and backward of a gradient taken in the body."""
    fn, specs, shapes = form

    def loss(x, w):
        total = sum(jnp.sum(y) for y in jax.tree.leaves(fn(x, w, mode)))
        return lax.psum(total, "x") if check_vma else total

    mapped = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,)),
        in_specs=specs[:2],
        out_specs=specs[:2],
        check_vma=check_vma,
    )
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    sent = count_collectives(mapped, *args, grad=False).forward
    folds = 2 if form in GATHERS.values() else 1
    assert sent["ppermute"] == folds * gathered(4, mode) + scattered(4)
    assert sent.keys() <= {"ppermute", "psum"}  # the psum is the loss's own
    assert sent["psum"] <= 1


@check
def test_naive_is_what_lax_has(check_vma):
    gather = counts(GATHERS["rows"], 4, "naive", check_vma)
    assert gather.forward == {"all_gather": 1}
    assert gather.backward == {"psum_scatter": 1}
    scatter = counts(SCATTERS["rows"], 4, "naive", check_vma)
    assert scatter.forward == {"psum_scatter": 1}
    assert scatter.backward == {"all_gather": 1}
