"""What is ordered for TPUs, run on CPU devices: values and gradients are the same.

They send each sum in two pieces that take turns, group the matmuls of a step in a conditional, and
slice operands inside it, or before it.
"""

from collections import Counter
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import (
    all_gather,
    all_gather_matmul,
    collective_einsum,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from jaxpar.ring.order import CpuOrder, TpuOrder
from jaxpar.testing import assert_matches_reference, count_collectives

ROWS, COLS, NONE = P("x"), P(None, "x"), P()


# Each form: a function of local blocks, the same in NumPy, shapes, specs. `length` is the local one
# along the dimension that is gathered or scattered.


def gather_rows(n, length, **how):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", **how),
        np.matmul,
        ((length * n, 4), (4, 2 * n)),
        ((ROWS, COLS), COLS),
    )


def gather_contracted(n, length, **how):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", dim=-1, **how),
        np.matmul,
        ((3, length * n), (length * n, 2 * n)),
        ((COLS, COLS), COLS),
    )


def gather_contracted_of_rhs(n, length, **how):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", gather="rhs", **how),
        np.matmul,
        ((2 * n, length * n), (length * n, 3)),
        ((ROWS, ROWS), ROWS),
    )


def gather_columns_of_rhs(n, length, **how):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", gather="rhs", dim=1, **how),
        np.matmul,
        ((2 * n, 4), (4, length * n)),
        ((ROWS, COLS), ROWS),
    )


def gather_rows_for_two(n, length, **how):
    return (
        lambda x, w, v: all_gather_matmul(x, (w, v), "x", **how),
        lambda x, w, v: (x @ w, x @ v),
        ((length * n, 4), (4, 2 * n), (4, n)),
        ((ROWS, COLS, COLS), COLS),
    )


def gather_contracted_for_two(n, length, **how):
    return (
        lambda x, w, v: all_gather_matmul(x, (w, v), "x", dim=1, **how),
        lambda x, w, v: (x @ w, x @ v),
        ((3, length * n), (length * n, 2 * n), (length * n, n)),
        ((COLS, COLS, COLS), COLS),
    )


def gather_batch(n, length, **how):
    return (
        lambda x, w: collective_einsum("bmk,bkn->bmn", x, w, "x", gather="b", **how),
        np.matmul,
        ((length * n, 2, 3), (length * n, 3, n)),
        ((ROWS, P(None, None, "x")), P(None, None, "x")),
    )


def scatter_rows(n, length, **how):
    return (
        lambda x, w: matmul_reduce_scatter(x, w, "x", **how),
        np.matmul,
        ((length * n, 2 * n), (2 * n, 3)),
        ((COLS, ROWS), ROWS),
    )


def scatter_columns(n, length, **how):
    return (
        lambda x, w: matmul_reduce_scatter(x, w, "x", dim=1, **how),
        np.matmul,
        ((4, 2 * n), (2 * n, length * n)),
        ((COLS, ROWS), COLS),
    )


def scatter_batch(n, length, **how):
    return (
        lambda x, w: collective_einsum("bmk,bkn->bmn", x, w, "x", scatter="b", **how),
        np.matmul,
        ((length * n, 2, n), (length * n, n, 3)),
        ((P(None, None, "x"), COLS), ROWS),
    )


def all_reduce(n, length, **how):
    return (
        lambda x, w: matmul_all_reduce(x, w, "x", **how),
        np.matmul,
        ((2, 2 * n), (2 * n, length * n)),
        ((COLS, ROWS), NONE),
    )


def all_reduce_that_is_padded(n, length, **how):
    return (
        lambda x, w: matmul_all_reduce(x, w, "x", **how),
        np.matmul,
        ((n + 1, n), (n, 2 * n + 1)),
        ((COLS, ROWS), NONE),
    )


def ring_scatter(n, length, **how):
    return (
        lambda x: reduce_scatter(x[0], "x", tiled=True, **how),
        lambda x: x.sum(0),
        ((n, length * n, 2),),
        ((ROWS,), ROWS),
    )


def ring_reduce(n, length, **how):
    return (
        lambda x: jaxpar.all_reduce(x, "x", **how),
        lambda x: x.reshape(n, -1).sum(0),
        ((n * (n * length + 1),),),
        ((ROWS,), NONE),
    )


def ring_gather(n, length, **how):
    mode = {"mode": how["mode"]}  # it adds nothing that could travel in another dtype
    return (
        lambda x: all_gather(x, "x", tiled=True, **mode),
        lambda x: np.concatenate([x] * n),
        ((length * n, 2),),
        ((ROWS,), ROWS),
    )


OPS = (
    *(gather_rows, gather_contracted, gather_contracted_of_rhs, gather_columns_of_rhs),
    *(gather_rows_for_two, gather_contracted_for_two, gather_batch),
    *(scatter_rows, scatter_columns, scatter_batch, all_reduce, all_reduce_that_is_padded),
    *(ring_scatter, ring_reduce, ring_gather),
)
ONE_WAY, BOTH_WAYS = MODES = "unidirectional", "bidirectional"
ORDERS = ({"sliced": False}, {"sliced": True, "within": True}, {"sliced": True})


def in_turn(names, rows, first=0):
    """Parametrizes a test; the rows of each op have the three orders in turn.

    Which order an op has first depends on its place in `OPS`, and on `first`.
    """
    seen, ordered = Counter(), []
    for op, *rest in rows:
        ordered.append((op, *rest, ORDERS[(OPS.index(op) + first + seen[op]) % len(ORDERS)]))
        seen[op] += 1
    ids = ["-".join(str(getattr(x, "__name__", x)) for x in row[:-1]) for row in ordered]
    return pytest.mark.parametrize(f"op,{names},sliced", ordered, ids=ids, indirect=["sliced"])


def have_order(monkeypatch, *, sliced, whole=False, within=False):
    order = TpuOrder(delays_transfers=sliced, cuts_first=sliced)
    monkeypatch.setattr("jaxpar.ring.of_mode.traced_order", lambda: order)
    monkeypatch.setattr("jaxpar.ring.order.cuts_within_matmuls", lambda: within)
    if whole:
        monkeypatch.setattr("jaxpar.ring.of_mode._opposite_is_covered", lambda *_: True)


@pytest.fixture
def sliced(request, monkeypatch):
    """Has programs ordered as for a TPU: in one of three ways."""
    have_order(monkeypatch, **request.param)
    return request.param["sliced"]


@pytest.fixture
def loops(monkeypatch):
    monkeypatch.setattr("jaxpar.ring.run.UNROLLED", 1)


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def line(n):
    return make_mesh({"x": n}, devices=jax.devices()[:n])


def operands(shapes, dtype=np.float32):
    return [normal(shape, seed, dtype) for seed, shape in enumerate(shapes)]


def check(op, n, length, mode, check_vma, *, dtype=np.float32, rounding_dtype=None, **how):
    function, reference, shapes, (in_specs, out_specs) = op(n, length, mode=mode, **how)
    assert_matches_reference(
        function,
        reference,
        *operands(shapes, dtype),
        mesh=line(n),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
        max_directions=4,
        rounding_dtype=rounding_dtype,
    )


def mapped(form, n, check_vma=True):
    function, _, _, (in_specs, out_specs) = form
    return jax.shard_map(
        function, mesh=line(n), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


@in_turn(
    "n,mode",
    [
        *((gather_rows, 3, BOTH_WAYS), (gather_contracted, 4, BOTH_WAYS)),
        *((gather_contracted, 3, ONE_WAY), (gather_contracted_of_rhs, 3, BOTH_WAYS)),
        *((gather_columns_of_rhs, 4, BOTH_WAYS), (gather_rows_for_two, 3, ONE_WAY)),
        *((gather_contracted_for_two, 3, BOTH_WAYS), (gather_batch, 2, BOTH_WAYS)),
        *((scatter_rows, 4, BOTH_WAYS), (scatter_rows, 3, ONE_WAY)),
        *((scatter_columns, 3, BOTH_WAYS), (scatter_batch, 2, BOTH_WAYS)),
        *((all_reduce, 1, BOTH_WAYS), (all_reduce, 4, BOTH_WAYS)),
        *((all_reduce_that_is_padded, 3, BOTH_WAYS), (ring_scatter, 4, BOTH_WAYS)),
        *((ring_reduce, 3, BOTH_WAYS), (ring_gather, 4, BOTH_WAYS)),
    ],
)
def test_values_and_gradients(op, n, mode, sliced):
    """With a length of 3 the two pieces of a sum differ in size."""
    check(op, n, 3, mode, check_vma=(n == 4) == (OPS.index(op) % 3 > 0))


@in_turn(
    "n,mode",
    [
        (gather_contracted, 7, BOTH_WAYS),
        (scatter_rows, 7, BOTH_WAYS),
        (ring_scatter, 4, ONE_WAY),
    ],
)
def test_loops(op, n, mode, sliced, loops):
    """On 8 devices no two pairs of turns of a scatter both ways round would be alike."""
    check(op, n, 2, mode, check_vma=(n == 7) != sliced)


@in_turn("n", [(gather_contracted, n) for n in (3, 5)])
def test_there_is_a_loop_with_conditionals(op, n, sliced, loops):
    form = op(n, 2, mode="unidirectional")  # adds, which is always grouped
    text = str(jax.make_jaxpr(mapped(form, n))(*operands(form[2])))
    assert "cond[" in text
    assert ("scan[" in text or "while[" in text) == (n > 3)


@dataclass(frozen=True)
class Asked(TpuOrder):
    """Notes the FLOPs of the sums that it is asked for."""

    asked: list = field(default_factory=list, compare=False)

    def for_sums(self, flops):
        self.asked.append(flops)
        return super().for_sums(flops)


@pytest.mark.parametrize(
    ("op", "flops"),
    [
        (scatter_rows, 2 * 24 * 2 * 3),  # the device's matmul of [24, 2] and [2, 3]
        (scatter_columns, 2 * 4 * 2 * 24),
        (gather_rows, 2 * 24 * 4 * 2),
        (gather_rows_for_two, 2 * 24 * 4 * (2 + 1)),
        (ring_scatter, 0),
    ],
)
def test_an_order_hears_what_a_sum_takes(op, flops, monkeypatch):
    """Of two pieces for each of four devices."""
    order = Asked()
    monkeypatch.setattr("jaxpar.ring.of_mode.traced_order", lambda: order)
    form = op(4, 6, mode="bidirectional")
    arrays = operands(form[2])

    def loss(*arrays):
        return sum(jnp.sum(out) for out in jax.tree.leaves(mapped(form, 4)(*arrays)))

    jax.eval_shape(jax.grad(loss, argnums=tuple(range(len(arrays)))), *arrays)
    assert set(order.asked) == {flops / 8}


def test_a_loop_keeps_the_order(monkeypatch, loops):
    order = Asked()
    monkeypatch.setattr("jaxpar.ring.of_mode.traced_order", lambda: order)
    form = scatter_rows(7, 2, mode="bidirectional")
    jax.eval_shape(mapped(form, 7), *operands(form[2]))
    assert not order.asked


@in_turn(
    "length,mode",  # the pieces of 1001 are whole tiles, and overlap
    [
        *((scatter_rows, 1, ONE_WAY), (scatter_rows, 1001, BOTH_WAYS)),
        *((scatter_columns, 2, BOTH_WAYS), (scatter_columns, 1001, ONE_WAY)),
        *((all_reduce, 1, BOTH_WAYS), (all_reduce, 1001, ONE_WAY)),
        *((ring_scatter, 2, ONE_WAY), (ring_scatter, 1001, BOTH_WAYS)),
    ],
)
def test_pieces_of_any_length(op, length, mode, sliced):
    check(op, 3, length, mode, check_vma=sliced)


def test_one_piece_of_a_long_block(monkeypatch):
    monkeypatch.setattr("jaxpar.ring.of_mode.traced_order", CpuOrder)
    check(scatter_rows, 3, 1001, BOTH_WAYS, check_vma=True)


@in_turn(
    "n",
    [
        *((gather_rows, 4), (gather_contracted, 4), (gather_columns_of_rhs, 2)),
        *((gather_contracted_for_two, 2), (gather_batch, 2), (ring_gather, 4)),
    ],
    first=2,
)
def test_a_whole_opposite_block(op, n, sliced, monkeypatch):
    have_order(monkeypatch, sliced=sliced, whole=True)
    check(op, n, 3, "bidirectional", check_vma=(n == 4) != sliced)


@in_turn(
    "n",
    [
        (gather_contracted, 4),
        (gather_contracted_of_rhs, 3),
        (gather_contracted_for_two, 3),
        (scatter_rows, 4),
    ],
)
def test_joined_arrivals(op, n, sliced, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "jaxpar.matmul._arrivals.joining_is_cheaper",
        lambda length, sums: not asked.append(length),
    )
    check(op, n, 3, "bidirectional", check_vma=(n == 4) != sliced)
    assert asked


@in_turn(
    "mode",
    [
        (gather_rows, BOTH_WAYS),
        (all_reduce, ONE_WAY),
        (ring_scatter, BOTH_WAYS),
    ],
)
def test_a_narrow_wire(op, mode, sliced):
    wire = {"wire_dtype": jnp.bfloat16, "rounding_dtype": jnp.bfloat16}
    check(op, 3, 3, mode, check_vma=sliced, **wire)


@in_turn(
    "dtype,mode",
    [
        (gather_rows, "bfloat16", ONE_WAY),
        (gather_contracted, "bfloat16", BOTH_WAYS),
        (gather_contracted, "int8", ONE_WAY),
        (scatter_rows, "int8", BOTH_WAYS),
        (all_reduce, "bfloat16", BOTH_WAYS),
    ],
)
def test_other_dtypes(op, dtype, mode, sliced):
    """What travels is wider than the operands, and the result of bfloat16 is narrower than that."""
    n = 3
    function, reference, shapes, (in_specs, out_specs) = op(n, 3, mode=mode)
    given = [(3 * x).astype(jnp.dtype(dtype)) for x in operands(shapes)]
    widened = (
        (lambda *xs: reference(*(x.astype(np.int32) for x in xs))) if dtype == "int8" else None
    )
    assert_matches_reference(
        function,
        widened or reference,
        *given,
        mesh=line(n),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=sliced,
        max_directions=4,
    )


@in_turn(
    "batched,mode",
    [
        (gather_rows, "lhs", ONE_WAY),
        (gather_contracted_of_rhs, "rhs", BOTH_WAYS),
        (gather_contracted_of_rhs, "both", ONE_WAY),
        (scatter_rows, "lhs", BOTH_WAYS),
        (all_reduce, "both", BOTH_WAYS),
    ],
)
def test_vmap(op, batched, mode, sliced):
    n = 3
    function, reference, shapes, (in_specs, out_specs) = op(n, 3, mode=mode)
    axes = {"lhs": (0, None), "rhs": (None, 0), "both": (0, 0)}[batched]
    given = [
        normal(shape if axis is None else (2, *shape), seed)
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    ]
    specs = [
        spec if axis is None else P(None, *spec) for spec, axis in zip(in_specs, axes, strict=True)
    ]
    assert_matches_reference(
        jax.vmap(function, in_axes=axes),
        reference,
        *given,
        mesh=line(n),
        in_specs=tuple(specs),
        out_specs=P(None, *out_specs),
        check_vma=sliced,
        max_directions=4,
    )


def test_vmap_over_something_else(monkeypatch):
    """No operand is batched: gradients are summed over the batch once."""
    have_order(monkeypatch, sliced=True)

    def calls(x, scale):
        return scale * matmul_reduce_scatter(x.T, x, "x", mode=BOTH_WAYS)

    assert_matches_reference(
        jax.vmap(calls, in_axes=(None, 0)),
        lambda x, scale: scale[:, None, None] * (x.T @ x),
        normal((6, 6)),
        normal((2,)),
        mesh=line(3),
        in_specs=(ROWS, NONE),
        out_specs=COLS,
        check_vma=True,
    )


def second(function):
    """The gradient, along a direction, of the gradients of sum(sin(function(x, w)))."""

    def along(x, w, v, u):
        gx, gw = jax.grad(lambda *xw: jnp.sum(jnp.sin(function(*xw))), argnums=(0, 1))(x, w)
        return jnp.vdot(gx, v) + jnp.vdot(gw, u)

    return jax.jit(jax.grad(along, argnums=(0, 1)))


@in_turn(
    "mode",  # test_gradients.py has each one the other way round, in the order of CPUs
    [
        (gather_contracted_of_rhs, BOTH_WAYS),
        (gather_columns_of_rhs, ONE_WAY),
        (scatter_columns, ONE_WAY),
        (all_reduce, BOTH_WAYS),
    ],
    first=1,
)
def test_second_derivatives(op, mode, sliced):
    n = 4 if mode == "bidirectional" else 3
    form = op(n, 3, mode=mode)
    x, w = operands(form[2])
    v, u = normal(x.shape, 2) + 1, normal(w.shape, 3) - 1
    found = second(mapped(form, n, check_vma=sliced))(x, w, v, u)
    x, w, v, u = (a.astype(np.float64) for a in (x, w, v, u))
    bend = -np.sin(x @ w) * (v @ w + x @ u)
    slope = np.cos(x @ w)
    wanted = bend @ w.T + slope @ u.T, x.T @ bend + v.T @ slope
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


@in_turn("n,rows", [(scatter_rows, *row) for row in ((2, 3), (3, 4), (5, 3))])
def test_what_is_sent(op, n, rows, sliced):
    """As many bytes as ever; sums in two pieces, which share what is left both ways."""
    sent = 4  # pieces are of one size
    for mode in MODES:
        form = op(n, rows, mode=mode)
        shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in form[2]]
        counts = count_collectives(mapped(form, n), *shapes)
        assert counts.forward == {"ppermute": 2 * (n - 1)}
        assert counts.forward_bytes == (n - 1) * sent * 3 * 4
        assert counts.backward_bytes == (n - 1) * rows * 3 * 4
