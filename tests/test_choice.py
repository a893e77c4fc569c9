"""mode="auto": a roofline over static shapes, the ring's size and the chip."""

import inspect
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar._axis import MODES, Ring
from jaxpar._chips import CHIPS
from jaxpar.collectives._choice import (
    Kind,
    Problem,
    applies_experts_in_stages,
    choose_stages,
    choose_way,
    joining_is_cheaper,
    naive_time,
    time_in_turns,
)
from jaxpar.collectives._in_turns import InTurns
from jaxpar.collectives._order import Order, TpuOrder, traced_order
from jaxpar.collectives._turns import gather_turns
from jaxpar.collectives._ways import Naive
from jaxpar.matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    ring_einsum,
)
from jaxpar.testing import count_collectives

# On one of 8 devices, in bf16: FLOPs, and bytes of a block that travels.
LARGE = 2.0 * 8192**3 / 8, 8192 * 1024 * 2
TINY = 2.0 * 64**3 / 8, 64 * 8 * 2


def described(kind, n=8, shape=None):
    """A mesh of devices that are not there; None for a chip that no table has."""
    fields = inspect.signature(AbstractDevice).parameters
    known = {"device_kind": kind or "a chip", "num_cores": None, "platform": "tpu"}
    device = AbstractDevice(**{name: known[name] for name in fields})
    shape = {"x": n} if shape is None else shape
    return AbstractMesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        abstract_device=device,
    )


def traced(function, mesh):
    """What `function` returns where it is traced for `mesh`."""
    found = []

    def body():
        found.append(function())
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P()))
    return found[-1]


def ring(n, mode="auto"):
    return Ring(("x",), mode, size=n)


def problem(n, flops, block_bytes, mode="auto"):
    return Problem("matmul", ring(n, mode), (), flops, block_bytes)


def chosen(mesh, n, work, mode="auto"):
    return traced(lambda: choose_way(problem(n, *work, mode)), mesh)


def named(way):
    if isinstance(way, Naive):
        return "naive"
    return {(1,): "unidirectional", (1, -1): "bidirectional"}[way.directions]


def chip(kind):
    return next(c for c in CHIPS if c.kind == kind)


@pytest.mark.parametrize(
    ("kind", "n", "work", "mode"),
    [
        ("TPU v5", 8, LARGE, "bidirectional"),
        ("TPU v4", 8, LARGE, "bidirectional"),
        ("TPU v5 lite", 8, LARGE, "bidirectional"),
        ("TPU v6 lite", 8, LARGE, "bidirectional"),
        ("TPU7x", 8, LARGE, "bidirectional"),
        ("NVIDIA H100", 8, LARGE, "unidirectional"),
        ("NVIDIA A100", 8, LARGE, "unidirectional"),
        ("TPU v5", 8, TINY, "naive"),
        ("NVIDIA H100", 8, TINY, "naive"),
        ("TPU v5", 1, LARGE, "naive"),
        ("TPU v5", 2, LARGE, "naive"),
        ("NVIDIA H100", 2, LARGE, "naive"),
        (None, 8, LARGE, "naive"),
    ],
)
def test_choices(kind, n, work, mode):
    assert named(chosen(described(kind, n), n, work)) == mode


@pytest.mark.parametrize("kind", ["TPU v5", "NVIDIA H100", None])
@pytest.mark.parametrize("work", [LARGE, TINY])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_mode_that_is_asked_for_is_taken(n, work, kind):
    mesh = described(kind, n)
    for mode in ("naive", "unidirectional", "bidirectional"):
        assert named(chosen(mesh, n, work, mode)) == mode


def test_without_a_mesh_auto_is_naive_and_rings_are_plain():
    assert choose_way(problem(8, *LARGE)) == Naive(ring(8))
    both = "bidirectional"
    assert choose_way(problem(8, *LARGE, both)) == InTurns(ring(8, both), (1, -1), Order())


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("TPU v4", TpuOrder(delays_transfers=True)),
        ("TPU v5 lite", TpuOrder()),
        ("TPU v5", TpuOrder(delays_transfers=True, cuts_first=True)),
        ("TPU v6 lite", TpuOrder(delays_transfers=True)),
        ("TPU7x", TpuOrder()),
        ("TPU v9", TpuOrder()),  # not in the table of chips
        ("NVIDIA H100", Order()),
        (None, Order()),
    ],
)
@pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])
def test_the_order_is_that_of_the_chip(mode, kind, order):
    assert chosen(described(kind), 8, LARGE, mode).order == order
    assert traced(traced_order, described(kind)) == order


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "NVIDIA H100"])
def test_the_opposite_block_is_whole_where_two_matmuls_cover_it(kind):
    transfer = 1e9 / chip(kind).link
    two_blocks = transfer * chip(kind).flops * 8 / 2
    mesh = described(kind)

    def whole(flops):
        return chosen(mesh, 8, (flops, 10**9), "bidirectional").whole_opposite

    assert whole(two_blocks * 1.001)
    assert not whole(two_blocks * 0.999)


def test_nothing_says_that_matmuls_of_an_unknown_chip_cover():
    assert not chosen(described(None), 8, (1e30, 1), "bidirectional").whole_opposite


def test_auto_takes_the_way_that_it_timed():
    """The opposite block as in the same mode asked for."""
    mesh = described("TPU v5")
    for scale in (1.0, 2.0, 8.0):
        work = LARGE[0] * scale, LARGE[1]
        auto, asked_for = chosen(mesh, 8, work), chosen(mesh, 8, work, "bidirectional")
        assert auto == replace(asked_for, ring=ring(8))


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_short_arrivals_are_joined_on_a_torus(kind):
    """From the length on whose FLOPs take twice as long as to read and write the sum, they add."""
    found = chip(kind)
    limit = int(8 * found.flops / found.hbm)
    mesh = described(kind)
    assert traced(lambda: joining_is_cheaper(limit - 1), mesh)
    assert not traced(lambda: joining_is_cheaper(limit + 1), mesh)


@pytest.mark.parametrize("kind", ["NVIDIA H100", "cpu", None])
def test_arrivals_are_not_joined_elsewhere(kind):
    assert not traced(lambda: joining_is_cheaper(1), described(kind))
    assert not joining_is_cheaper(1)


@pytest.mark.parametrize(
    ("kind", "devices", "mode"),
    [
        ("TPU v5 lite", 64, "naive"),
        ("TPU v5 lite", 32, "bidirectional"),
        ("TPU v5", 512, "bidirectional"),
    ],
)
def test_no_ring_where_permutes_are_synchronous(kind, devices, mode):
    """From 64 devices in the whole mesh on v5e, whatever the size of the ring."""
    mesh = described(kind, shape={"d": devices // 8, "x": 8})
    assert named(chosen(mesh, 8, LARGE)) == mode


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(CHIPS), st.integers(1, 64), st.floats(1.0, 1e15), st.integers(1, 10**10))
def test_the_choice_is_never_predicted_to_be_slower_than_naive(chip, n, flops, block_bytes):
    mesh = described(chip.kind, n)
    work = flops, block_bytes
    way = chosen(mesh, n, work)
    if isinstance(way, Naive):
        return
    time = time_in_turns(chip, way, problem(n, *work))
    assert time < naive_time(chip, problem(n, *work))
    assert named(way) != "bidirectional" or chip.torus
    for mode in ("unidirectional", "bidirectional") if chip.torus else ():
        assert time <= time_in_turns(chip, chosen(mesh, n, work, mode), problem(n, *work))


@settings(max_examples=50, deadline=None, database=None)
@given(st.sampled_from(CHIPS), st.integers(3, 64), st.integers(1, 10**10))
def test_no_time_is_below_the_floor(chip, n, block_bytes):
    """No way computes faster than peak, or moves its bytes faster than the links do."""
    for directions in ((1,), (1, -1)):
        for whole in (False, True):
            way = InTurns(ring(n), directions, Order(), whole)
            turns = gather_turns(n, directions, whole_opposite=whole)
            by_first = sum(
                1.0 if leg.half is None else 0.5
                for turn in turns
                for leg in turn.blocks
                if leg.direction == 1
            )
            assert by_first >= (n - 1) / len(directions)
            moved = by_first * block_bytes / chip.link
            assert time_in_turns(chip, way, problem(n, 0.0, block_bytes)) >= moved * (1 - 1e-9)
            at_peak = 1e15 / chip.flops
            assert time_in_turns(chip, way, problem(n, 1e15, 0)) >= at_peak * (1 - 1e-9)


CALLS = {
    "gather": (
        lambda x, w, mode: all_gather_matmul(x, w, "x", gather="rhs", mode=mode),
        (P("x"), P("x"), P("x")),
    ),
    "scatter": (
        lambda x, w, mode: matmul_reduce_scatter(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P("x")),
    ),
    "all-reduce": (
        lambda x, w, mode: matmul_all_reduce(x, w, "x", mode=mode),
        (P(None, "x"), P("x"), P()),
    ),
    "einsum": (
        lambda x, w, mode: ring_einsum("mk,kn->nm", x, w, "x", gather="m", mode=mode),
        (P("x"), P(None, "x"), P("x")),
    ),
}
calls = pytest.mark.parametrize(("fn", "specs"), CALLS.values(), ids=CALLS)


def sharded(fn, specs, mesh=None, **options):
    mesh = mesh or Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda x, w: fn(x, w, **options), mesh=mesh, in_specs=specs[:2], out_specs=specs[2]
    )


@calls
def test_auto_is_naive_on_cpu(fn, specs):
    args = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2
    auto, naive = (
        str(jax.make_jaxpr(sharded(fn, specs, mode=mode))(*args)) for mode in ("auto", "naive")
    )
    assert auto == naive


@calls
@pytest.mark.parametrize(("kind", "size"), [("TPU v5", 8192), ("NVIDIA H100", 8192), ("TPU v5", 8)])
def test_auto_asks_for_each_call(fn, specs, kind, size):
    """What a call hands to the roofline: its own FLOPs and bytes, and the mode is what runs."""
    mesh = described(kind)
    mode = {"TPU v5": "bidirectional", "NVIDIA H100": "unidirectional"}[kind]
    args = [jax.ShapeDtypeStruct((size, size), jnp.bfloat16)] * 2
    auto, expected = (
        count_collectives(sharded(fn, specs, mesh, mode=mode), *args)
        for mode in ("auto", mode if size > 8 else "naive")
    )
    assert auto == expected


def test_what_the_roofline_is_asked(monkeypatch):
    """All products of a shared gather count, bytes are those of one hop in the wire's dtype."""
    asked = []

    def record(asked_for):
        assert asked_for.ring.mode == "auto"
        assert asked_for.kind == "matmul"
        asked.append((asked_for.ring.size, asked_for.flops, asked_for.block_bytes))
        return Naive(asked_for.ring)

    monkeypatch.setattr("jaxpar.matmul._einsum.choose_way", record)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(8, 12), (12, 16)])

    def run(fn, *in_specs):
        jax.eval_shape(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P("x")), x, w)
        return asked.pop()

    rows = run(lambda x, w: all_gather_matmul(x, (w, w), "x")[0], P("x"), P(None, "x"))
    assert rows == (4, 2 * 2.0 * 8 * 12 * 4, 2 * 12 * 2)
    columns = run(lambda x, w: all_gather_matmul(x, w, "x", gather="rhs"), P("x"), P("x"))
    assert columns == (4, 2.0 * 2 * 12 * 16, 3 * 16 * 2)
    scatter = run(lambda x, w: matmul_reduce_scatter(x, w, "x"), P(None, "x"), P("x"))
    assert scatter == (4, 2.0 * 8 * 3 * 16, 2 * 16 * 4)
    narrow = run(
        lambda x, w: matmul_reduce_scatter(x, w, "x", wire_dtype=jnp.bfloat16), P(None, "x"), P("x")
    )
    assert narrow == (4, 2.0 * 8 * 3 * 16, 2 * 16 * 2)


@pytest.mark.parametrize(
    ("kind", "chip_kind", "n", "mode"),
    [
        ("collective", "TPU v5", 8, "bidirectional"),
        ("collective", "NVIDIA H100", 8, "unidirectional"),
        ("collective", None, 8, "unidirectional"),
        ("weights", "TPU v5", 8, "bidirectional"),
        ("weights", "TPU v5", 34, "bidirectional"),
        ("weights", "TPU v5", 35, "naive"),  # a loop, which has nothing beside it
        ("weights", "NVIDIA H100", 8, "naive"),
        ("weights", "TPU v5 lite", 64, "naive"),  # permutes are synchronous there
        ("weights", None, 8, "naive"),
        ("loss", "TPU v5", 8, "naive"),
        ("experts", "TPU v5", 8, "naive"),
    ],
)
def test_other_kinds_of_work(kind, chip_kind, n, mode):
    mesh = described(chip_kind, n)
    assert named(traced(lambda: choose_way(Problem(kind, ring(n))), mesh)) == mode


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_work_has_a_rule(kind):
    for chip_kind in ("TPU v5", "NVIDIA H100", None):
        mesh = described(chip_kind)
        assert named(traced(lambda: choose_way(Problem(kind, ring(8))), mesh)) in MODES


@pytest.mark.parametrize(
    ("chip_kind", "sizes", "stages"),
    [
        ("TPU v5", (4, 2), [("a", "bidirectional"), ("b", "bidirectional")]),
        ("TPU v5", (4, 1), [("a", "bidirectional")]),
        ("TPU v5", (1, 1), []),
        ("TPU v5", (36, 2), [("ab", "naive")]),  # one is too long: a collective takes all at once
        ("NVIDIA H100", (4, 2), [("ab", "naive")]),
    ],
)
def test_weights_over_several_axes_have_a_stage_for_each(chip_kind, sizes, stages):
    def found():
        over = Ring(("a", "b"), "auto", size=sizes[0] * sizes[1])
        return [
            ("".join(way.ring.names), named(way)) for way in choose_stages(Problem("weights", over))
        ]

    mesh = described(chip_kind, shape=dict(zip("ab", sizes, strict=True)))
    assert traced(found, mesh) == stages


@pytest.mark.parametrize(("kind", "stages"), [("TPU v5", True), ("NVIDIA H100", False)])
def test_experts_in_two_stages_where_one_exchange_is_under_way_at_a_time(kind, stages):
    mesh = described(kind)
    assert traced(lambda: applies_experts_in_stages(2), mesh) == stages
    assert not traced(lambda: applies_experts_in_stages(1), mesh)
