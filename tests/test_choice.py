"""mode="auto": a cost model over static shapes, the ring's size, the chip and its compiler."""

import inspect
import re
from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import ring_shift
from jaxpar.axis.axis import MODES, Ring
from jaxpar.axis.ring_order import AxisLinks
from jaxpar.choose.choice import choose_way, choose_ways
from jaxpar.choose.of_experts import applies_experts_in_stages
from jaxpar.choose.problem import Kind, Problem
from jaxpar.choose.row_chunks import choose_row_chunks
from jaxpar.choose.stages import choose_stages
from jaxpar.compiler.options import compiled_with, options_of
from jaxpar.layers import fsdp_linear
from jaxpar.matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxpar.matmul._product import Product
from jaxpar.matmul._work import flow_of
from jaxpar.platforms.chips import platforms, with_measured_links
from jaxpar.ring.chunked import InChunks
from jaxpar.ring.naive import Naive
from jaxpar.ring.order import Order, TpuOrder, traced_order
from jaxpar.ring.seconds import Flow, collective_time, copy_time, hop_time, joining_is_cheaper
from jaxpar.ring.staying import Stationary
from jaxpar.ring.steps import gather_steps
from jaxpar.ring.stepwise import Stepwise
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives

CHIPS = [known.chip for known in platforms()]
# On one of 8 devices, in bf16: FLOPs, and bytes of a block that travels.
LARGE = 2.0 * 8192**3 / 8, 8192 * 1024 * 2
TINY = 2.0 * 64**3 / 8, 64 * 8 * 2


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    """Described meshes look like those that other tests have made, whose links are noted."""
    monkeypatch.setattr("jaxpar.axis.ring_order._known", {})


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


NONE = frozenset()
ALL = frozenset({"all-gather", "reduce-scatter", "all-reduce"})


def ring(n, mode="auto", backward=None):
    return Ring(("x",), mode, None, backward, size=n)


def gather(flops, block_bytes, **more):
    return Flow("gather", flops, block_bytes, **more)


def problem(n, flops, block_bytes, mode="auto", beside=NONE):
    return Problem("matmul", ring(n, mode), (), (gather(flops, block_bytes),), told=beside)


def time_of(chip, flows, way, beside, *, kept=0, devices=1):
    """The seconds of flows by a way, on a chip whose links nothing else uses."""
    links = AxisLinks()
    asked = Problem("matmul", way.ring, chip=chip, devices=devices, told=beside, links=links)
    return way.seconds(asked, flows, kept)


def chosen(mesh, n, work, mode="auto", beside=NONE):
    return traced(lambda: choose_way(problem(n, *work, mode, beside)), mesh)


def named(way):
    if isinstance(way, Naive):
        return way.mode
    return {(1,): "unidirectional", (1, -1): "bidirectional"}[way.directions]


ONE = {"ring": 1, "rings": 1, "collective": 1}  # message on each link


def test_disjoint_rings_are_taken_where_axes_are_closed_rings_of_links_and_transfers_bound():
    def way(shared, flops, kind="matmul"):
        axes = Ring(("x", "y"), "auto", None, None, size=16)
        flow = gather(flops, 2**24)
        links = AxisLinks(messages=shared and (lambda _, how: shared[how]))
        return choose_way(Problem(kind, axes, (), (flow,), told=NONE, links=links))

    mesh = described("TPU v5", shape={"x": 4, "y": 4})
    bound, covered = 1e9, 1e13
    plane = traced(lambda: way(ONE, bound), mesh)
    assert plane.mode == "multi-ring"
    assert [ring.walk.size for ring in plane.rings] == [16, 16]
    # Attention does more than its FLOPs tell.
    alone = traced(lambda: way(ONE, bound, "attention"), mesh)
    assert alone.mode in ("naive", "bidirectional")
    # One ring is no faster than a collective, as neither has anything to hide behind.
    shared = {"ring": 1, "rings": 2, "collective": 1}
    assert traced(lambda: way(shared, bound), mesh).mode == "naive"
    assert traced(lambda: way(None, bound), mesh).mode == "naive"
    # Where matmuls cover the transfers, more and smaller pieces only cost.
    assert traced(lambda: way(ONE, covered), mesh).mode != "multi-ring"


def test_disjoint_rings_of_axes_that_have_none():
    def both(mode):
        axes = Ring(("x", "y"), mode, None, None, size=8)
        return choose_way(Problem("matmul", axes, (), (gather(*TINY),), told=NONE))

    with pytest.raises(ValueError, match=r"mode='multi-ring' over axes of sizes \{'x': 4, 'y': 2"):
        traced(lambda: both("multi-ring"), described("TPU v5", shape={"x": 4, "y": 2}))
    names = tuple("abcde")

    def five():
        return Ring(names, "multi-ring", None, None, size=32).disjoint()

    with pytest.raises(ValueError, match="over 5 axes of 2: a cube has at most 4; leave some out"):
        traced(five, described("TPU v5", shape=dict.fromkeys(names, 2)))
    one = traced(lambda: both("multi-ring"), described("TPU v5", shape={"x": 8, "y": 1}))
    assert len(one.rings) == 1  # one axis is one ring


def chip(kind):
    return next(chip for chip in CHIPS if chip.kind == kind)


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
    assert choose_way(problem(8, *LARGE, both)) == Stepwise(ring(8, both), (1, -1), Order())


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("TPU v4", TpuOrder(delays_transfers=True)),
        ("TPU v5 lite", TpuOrder()),
        ("TPU v5", TpuOrder(delays_transfers=True, cuts_first=True)),
        ("TPU v6 lite", TpuOrder(delays_transfers=True, cuts_first=True)),
        ("TPU7x", TpuOrder(cuts_first=True)),
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
    transfer = hop_time(with_measured_links(chip(kind)), 1e9)
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
    large, small = 2**30, 2**20  # bytes of sums
    assert traced(lambda: joining_is_cheaper(limit - 1, large), mesh)
    assert not traced(lambda: joining_is_cheaper(limit + 1, large), mesh)
    # Sums that stay on the chip: joining copies what blocks are multiplied by, if no cut does.
    cut_anyway = kind in ("TPU v5", "TPU v6 lite", "TPU7x")
    assert traced(lambda: joining_is_cheaper(limit - 1, small), mesh) == cut_anyway


@pytest.mark.parametrize("kind", ["NVIDIA H100", "cpu", None])
def test_arrivals_are_not_joined_elsewhere(kind):
    assert not traced(lambda: joining_is_cheaper(1, 2**30), described(kind))
    assert not joining_is_cheaper(1, 2**30)


# Synchronous are rings that close over the wrap-around links of a dimension of 16, on v5e.
@pytest.mark.parametrize(
    ("slice_", "shape", "synchronous"),
    [
        ("v5p:8x8x8", {"d": 64, "x": 8}, False),
        ("v5e:4x8", {"d": 4, "x": 8}, False),
        ("v5e:8x8", {"d": 8, "x": 8}, False),
        ("v5e:8x8", {"d": 4, "x": 16}, False),
        ("v5e:16x16", {"d": 32, "x": 8}, False),
        ("v5e:16x16", {"d": 8, "x": 32}, False),
        ("v5e:8x16", {"d": 8, "x": 16}, True),
        ("v5e:16x16", {"x": 16, "d": 16}, True),
        ("v5e:16x16", {"d": 2, "x": 8, "e": 16}, True),
    ],
)
def test_no_ring_where_permutes_are_synchronous(slice_, shape, synchronous):
    """As the compiler makes them, and as the choice takes them to be."""
    slices = target(slice_, ",".join(f"{name}={size}" for name, size in shape.items()))
    x = jax.ShapeDtypeStruct((8 * shape["x"], 128), jnp.bfloat16, sharding=P("x"))
    shifted = jax.shard_map(lambda x: ring_shift(x, "x"), in_specs=P("x"), out_specs=P("x"))
    [transfer] = timeline(compile_for(shifted, slices, x)).transfers
    assert transfer.synchronous == synchronous
    kind = slices.mesh.devices.flat[0].device_kind
    mesh = described(kind, shape=shape)
    expected = "naive" if synchronous else "bidirectional"
    assert named(chosen(mesh, shape["x"], LARGE)) == expected


@given(
    st.sampled_from(CHIPS),
    st.integers(1, 64),
    st.floats(1.0, 1e15),
    st.integers(1, 10**10),
    st.sampled_from([NONE, ALL]),
)
def test_the_choice_is_never_predicted_to_be_slower_than_naive(chip, n, flops, block_bytes, beside):
    mesh = described(chip.kind, n)
    way = chosen(mesh, n, (flops, block_bytes), beside=beside)

    def time(way):
        return time_of(chip, (gather(flops, block_bytes),), way, beside)

    if way == Naive(ring(n)):
        return
    assert time(way) < time(Naive(ring(n)))
    assert named(way) != "bidirectional" or chip.torus
    assert not isinstance(way, InChunks) or "all-gather" in beside
    for mode in ("unidirectional", "bidirectional", "chunked-4") if chip.torus else ():
        other = chosen(mesh, n, (flops, block_bytes), mode)
        if not (isinstance(other, Stepwise) and n == 2):
            assert time(way) <= time(other) * (1 + 1e-9)


@examples(50)
@given(st.sampled_from(CHIPS), st.integers(3, 64), st.integers(1, 10**10))
def test_no_time_is_below_the_floor(chip, n, block_bytes):
    """No way computes faster than peak, or moves its bytes faster than the links do."""
    ways = [
        Stepwise(ring(n), directions, Order(), whole)
        for directions in ((1,), (1, -1))
        for whole in (False, True)
    ]
    for way in ways:
        steps = gather_steps(n, way.directions, whole_opposite=way.whole_opposite)
        by_first = sum(
            1.0 if hop.half is None else 0.5
            for step in steps
            for hop in step.blocks
            if hop.direction == 1
        )
        assert by_first >= (n - 1) / len(way.directions)
        moved = by_first * block_bytes / chip.link
        assert time_of(chip, (gather(0.0, block_bytes),), way, NONE) >= moved * (1 - 1e-9)
    for way in (*ways, Naive(ring(n)), InChunks(ring(n), 4)):
        for beside in (NONE, ALL):
            flow, links = gather(1e15, block_bytes), 2 if chip.torus else 1
            time = time_of(chip, (flow,), way, beside)
            assert time >= 1e15 / chip.flops * (1 - 1e-9)
            assert time >= (n - 1) / links * block_bytes / chip.link * (1 - 1e-9)


@pytest.mark.parametrize("mode", ["naive", "chunked-4", "bidirectional"])
def test_what_every_piece_reads_counts_for_every_piece(mode):
    """Of a weight that is read once in one matmul each step and chunk reads what is not kept."""
    v6e, size = chip("TPU v6 lite"), 10**8
    way = chosen(described("TPU v6 lite"), 8, TINY, mode)
    without, with_it = (
        time_of(v6e, (gather(1.0, 8, whole=whole),), way, ALL) for whole in (0, size)
    )
    pieces = {"naive": 1, "chunked-4": 4, "bidirectional": 8}[mode]
    beyond = size - v6e.vmem / 2
    read = size + (pieces - 1) * beyond
    assert with_it - without == pytest.approx(read / v6e.hbm, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "flow", "n", "flops", "share"),
    [
        ("TPU v5", "scatter", 8, 1e11, 0.5),
        ("TPU v6 lite", "scatter", 8, 1e11, 0.0),
        ("TPU v5 lite", "scatter", 8, 1e11, 0.0),
        ("TPU v5", "gather", 8, 1e11, 1.0),
        ("TPU v6 lite", "scatter", 8, 1e12, 1.0),
        ("TPU v5", "all-reduce", 8, 1e11, 0.5),
        ("TPU v5", "scatter", 64, 1e11, 1.0),  # a loop
    ],
)
def test_a_cut_is_a_pass_but_where_a_short_matmul_of_sums_makes_it(
    kind, flow, n, flops, share, monkeypatch
):
    monkeypatch.setattr("jaxpar.ring.order.cuts_within_matmuls", lambda: True)
    described_chip, cut = chip(kind), 10**8
    way = chosen(described(kind), n, TINY, "bidirectional")
    without, with_it = (
        time_of(described_chip, (Flow(flow, flops, 8, cut=size),), way, ALL) for size in (0, cut)
    )
    assert with_it - without == pytest.approx(share * copy_time(described_chip, cut))


def test_backward_what_is_gathered_hides_beside_the_other_gradient():
    """Both collectives of a gather's gradients are free where the compiler sends meanwhile."""
    v5p, n, block = chip("TPU v5"), 8, 10**8
    flows = Flow("scatter", 1e13, block), Flow("gather", 1e13, block)
    sent = (n - 1) / 2 * (block / v5p.link + v5p.latency)
    work = 2e13 / 0.9 / v5p.flops
    naive = Naive(ring(n))
    part = partial(time_of, v5p, flows, naive, devices=64)
    assert part(ALL) == pytest.approx(work)
    assert part(frozenset({"all-gather"})) == pytest.approx(work + sent)
    assert part(NONE) == pytest.approx(work + 2 * sent)
    assert part(NONE, kept=1) == pytest.approx(work + sent)


def test_each_pass_has_the_mode_that_is_named():
    flops, block = LARGE[0] * 8, LARGE[1]
    backward = Flow("scatter", flops, block), Flow("gather", flops, block)

    def ways(beside, **modes):
        def found():
            forward = (gather(flops, block),)
            asked = Problem("matmul", ring(8, **modes), (), forward, backward, told=beside)
            return tuple(map(named, choose_ways(asked)))

        return traced(found, described("TPU v5"))

    assert ways(ALL, backward="unidirectional")[1] == "unidirectional"
    assert ways(ALL, mode="chunked-2") == ("chunked-2", "chunked-2")
    assert ways(ALL, mode="chunked-2", backward="auto")[0] == "chunked-2"


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_rows_for_a_layer_go_round_a_ring_where_the_compiler_waits_for_nothing(kind):
    flops, block = LARGE[0] * 8, LARGE[1]

    def found(work, beside):
        forward = (gather(flops, block),)
        return named(choose_way(Problem(work, ring(8), (), forward, told=beside)))

    assert traced(lambda: found("projection", ALL), described(kind)) == "bidirectional"
    assert traced(lambda: found("projection", NONE), described(kind)) == "naive"
    assert traced(lambda: found("matmul", NONE), described(kind)) == "bidirectional"


@pytest.mark.parametrize(
    ("kind", "rows", "mode", "beside", "chunks"),
    [
        ("TPU v6 lite", 8192, "auto", ALL, 4),
        ("TPU v5", 8192, "auto", ALL, 4),
        ("TPU v6 lite", 128, "auto", ALL, 1),  # each chunk reads all weights
        ("TPU v6 lite", 8192, "auto", NONE, 1),
        ("TPU v6 lite", 8192, "naive", ALL, 1),
        ("NVIDIA H100", 8192, "auto", ALL, 1),
        (None, 8192, "auto", ALL, 1),
    ],
)
def test_the_rows_of_a_block_of_layers_go_in_chunks(kind, rows, mode, beside, chunks):
    """The gated MLP of Llama 3 8B over tp = 4."""
    width, hidden = 4096, 14336 // 4
    block, weight = rows // 4 * width * 2, width * hidden

    def found():
        flows = (
            gather(2 * 2.0 * rows * weight, block, whole=2 * weight * 2),
            Flow("scatter", 2.0 * rows * weight, block, weight * 2),
        )
        return choose_row_chunks(Problem("projection", ring(4, mode), (), flows, told=beside))

    assert traced(found, described(kind, 4)) == chunks


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
        lambda x, w, mode: collective_einsum("mk,kn->nm", x, w, "x", gather="m", mode=mode),
        (P("x"), P(None, "x"), P("x")),
    ),
}
calls = pytest.mark.parametrize(("fn", "specs"), CALLS.values(), ids=CALLS)


@pytest.fixture
def told():
    with compiled_with({}):
        yield


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
@pytest.mark.usefixtures("told")
def test_auto_asks_for_each_call(fn, specs, kind, size):
    """What a call hands to the model: its own FLOPs and bytes, and the mode is what runs.

    What does not travel is 8 times as large as what does, so that matmuls cover the ring.
    """
    mesh = described(kind)
    mode = {"TPU v5": "bidirectional", "NVIDIA H100": "naive"}[kind]
    # An all-reduce over 8 TPUs may have the links of three dimensions. Behind a switch permutes
    # are slow, and large sums go in two chunks.
    mode = "naive" if fn is CALLS["all-reduce"][0] else mode
    if fn is CALLS["scatter"][0] and kind == "NVIDIA H100":
        mode = "chunked-2"
    wide = fn is CALLS["einsum"][0]  # there it is x that travels
    shapes = [(size, size), (size, 8 * size)] if wide else [(8 * size, size), (size, size)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    auto, expected = (
        count_collectives(sharded(fn, specs, mesh, mode=mode), *args)
        for mode in ("auto", mode if size > 8 else "naive")
    )
    assert (auto.forward, auto.forward_bytes) == (expected.forward, expected.forward_bytes)


def test_what_the_model_is_asked(monkeypatch):
    """All products of a shared gather count, bytes are those of one hop in the wire's dtype."""
    asked = []

    def record(asked_for):
        assert asked_for.ring.mode == "auto"
        assert asked_for.kind == "matmul"
        if asked_for.backward:  # the forward pass is asked for alone, too
            flows = (asked_for.forward, asked_for.backward)
            plain = {"along": "", "length": 0, "across": ()}
            asked.append([tuple(replace(f, **plain) for f in some) for some in flows])
        return Naive(asked_for.ring), Naive(asked_for.ring)

    monkeypatch.setattr("jaxpar.matmul._einsum.choose_ways", record)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(8, 12), (12, 16)])

    def run(fn, *in_specs):
        jax.eval_shape(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P("x")), x, w)
        return asked.pop()

    (rows,), (for_x, for_w) = run(
        lambda x, w: all_gather_matmul(x, (w, w), "x")[0], P("x"), P(None, "x")
    )
    flops = 2 * 2.0 * 8 * 12 * 4
    whole, moving = 2 * 12 * 4 * 2, 2 * (8 * 12 + 8 * 4) * 2
    instead = {"partners": 2 * 12 * 4 * 2, "exchanged": 2 * 8 * 4 * 2}
    assert rows == Flow("gather", flops, 2 * 12 * 2, whole, moving, unaligned=128, **instead)
    assert for_x == Flow("scatter", flops, 2 * 12 * 2, whole, moving, cut=2 * 8 * 4 * 2)
    sums = 2 * 12 * 4 * 4
    assert for_w == Flow("gather", flops, 2 * 12 * 2, 0, moving, sums, cut=2 * 8 * 4 * 2, **instead)
    (columns,), _ = run(lambda x, w: all_gather_matmul(x, w, "x", gather="rhs"), P("x"), P("x"))
    assert columns == Flow(
        "gather", 2.0 * 2 * 12 * 16, 3 * 16 * 2, 0, (12 * 16 + 24) * 2, 128, 48, 48, 48, 64, 48
    )

    def scatter(**wire):
        return run(lambda x, w: matmul_reduce_scatter(x, w, "x", **wire), P(None, "x"), P("x"))

    (narrow,), (for_both,) = scatter()
    flops = 2.0 * 8 * 3 * 16
    moved = (8 * 3 + 8 * 16) * 2
    assert narrow == Flow("scatter", flops, 2 * 16 * 2, 3 * 16 * 2, moved, cut=8 * 3 * 2)
    shared = (8 * 16 + 8 * 3) * 2 + (8 * 16 + 8 * 3) * 2
    instead = {"partners": 2 * 3 * 16 * 2, "exchanged": 2 * 8 * 3 * 2, "unaligned": 8 * 3 * 2}
    assert for_both == Flow(
        "gather", 2 * flops, 2 * 16 * 2, 3 * 16 * 2, shared, 3 * 16 * 4, cut=8 * 3 * 2, **instead
    )
    (wide,), _ = scatter(wire_dtype=jnp.float32)
    assert wide == replace(narrow, block_bytes=2 * 16 * 4)


@pytest.mark.parametrize(
    ("kind", "chip_kind", "n", "mode"),
    [
        ("collective", "TPU v5", 8, "bidirectional"),
        ("collective", "NVIDIA H100", 8, "naive"),
        ("collective", None, 8, "unidirectional"),
        ("weights", "TPU v5", 8, "naive"),
        ("weights", "TPU v5 lite", 8, "naive"),
        ("weights", "NVIDIA H100", 8, "naive"),
        ("weights", None, 8, "naive"),
        ("loss", "TPU v5", 8, "naive"),
        ("experts", "TPU v5", 8, "naive"),
    ],
)
def test_other_kinds_of_work(kind, chip_kind, n, mode):
    mesh = described(chip_kind, n)
    assert named(traced(lambda: choose_way(Problem(kind, ring(n), told=NONE)), mesh)) == mode


@pytest.mark.parametrize(("rows", "mode"), [(4, "stationary"), (64, "stationary"), (8192, None)])
@pytest.mark.parametrize("kind", ["TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x", "NVIDIA H100"])
@pytest.mark.parametrize("contracted", [False, True])
def test_a_large_weight_stays_where_few_rows_meet_it(kind, rows, mode, contracted):
    """Rows of one device times a weight whose blocks are sharded, forward and backward."""
    k, spec = 8192, P("x") if contracted else P(None, "x")
    shapes = [(8 * rows, k), (k, k)]

    def loss(x, w):
        y = fsdp_linear(x, w, "x", dim=0 if contracted else 1)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32)), "x")

    mesh = described(kind, 8)
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), spec), out_specs=P())
    with compiled_with({}):
        jaxpr = str(jax.make_jaxpr(jax.grad(mapped, argnums=(0, 1)))(*args))
    assert ("all_to_all" in jaxpr) == (mode == "stationary")


def test_weights_are_gathered_by_collectives_where_those_are_asynchronous():
    found = traced(lambda: choose_way(Problem("weights", ring(8), told=ALL)), described("TPU v5"))
    assert named(found) == "naive"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_work_has_a_rule(kind):
    for chip_kind in ("TPU v5", "NVIDIA H100", None):
        mesh = described(chip_kind)
        assert named(traced(lambda: choose_way(Problem(kind, ring(8), told=NONE)), mesh)) in MODES


@pytest.mark.parametrize(
    ("mode", "sizes", "stages"),
    [
        ("bidirectional", (4, 2), [("a", "bidirectional"), ("b", "bidirectional")]),
        ("bidirectional", (4, 1), [("a", "bidirectional")]),
        ("bidirectional", (1, 1), []),
        ("auto", (4, 2), [("ab", "naive")]),  # a collective takes all at once
    ],
)
def test_weights_stepwise_have_a_stage_for_each_axis(mode, sizes, stages):
    def found():
        over = Ring(("a", "b"), mode, size=sizes[0] * sizes[1])
        return [
            ("".join(way.ring.names), named(way))
            for way in choose_stages(Problem("weights", over, told=NONE))
        ]

    mesh = described("TPU v5", shape=dict(zip("ab", sizes, strict=True)))
    assert traced(found, mesh) == stages


@pytest.mark.parametrize(("kind", "stages"), [("TPU v5", True), ("NVIDIA H100", False)])
def test_experts_in_two_stages_where_one_exchange_is_under_way_at_a_time(kind, stages):
    mesh = described(kind)
    assert traced(lambda: applies_experts_in_stages(2), mesh) == stages
    assert not traced(lambda: applies_experts_in_stages(1), mesh)


@pytest.mark.parametrize(("rows", "block"), [(64, "8,512"), (65536, "8192,512")])
def test_chunks_of_a_scatter_are_columns(rows, block):
    """Each chunk reads its own columns of the weight, and rows of all devices are one product."""
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(rows, 4096), (4096, 1024)]]
    specs = (P(None, "x"), P("x"), P("x"))
    mode = {"mode": "chunked-2"}
    run = sharded(lambda x, w, mode: matmul_reduce_scatter(x, w, "x", mode=mode), specs, **mode)
    found = re.findall(r":bf16\[([\d,]+)\]\S* = reduce_scatter", str(jax.make_jaxpr(run)(*args)))
    assert found == [block] * 2


def test_flows_cut_along_other_labels():
    """Of a scatter along columns each piece has its own of the weight, and reads all rows."""
    product = Product("ak", "kn", "an", jnp.bfloat16)
    sizes = {"a": 64, "k": 8, "n": 32}
    for kind in ("scatter", "all-reduce"):
        rows = flow_of(kind, "a", 4, [product], [sizes], 16, 32)
        (columns,) = rows.across
        assert (rows.along, columns.along) == ("a", "n")
        assert (rows.whole, columns.whole) == (8 * 32 * 2, 64 * 8 * 2)
        assert columns.shared == (8 * 32 + 64 * 32) * 2
        assert columns.block_bytes == rows.block_bytes == 16 * 32 * 4
        assert columns.sums == columns.minor == 0
    gathered = flow_of("gather", "a", 4, [product], [sizes], 16, 16)
    (contracted,) = gathered.across
    assert (contracted.along, contracted.whole, contracted.sums) == ("k", 0, 64 * 32 * 4)


def test_chunks_of_a_gather_with_few_rows_are_cut_along_what_is_contracted():
    columns = Flow("gather", 1e9, 1, sums=10**6, along="k", length=6)
    few = Flow("gather", 1e9, 1, whole=10**8, along="a", across=(columns,))
    many = replace(few, across=(replace(columns, sums=10**8),))
    assert (few.in_chunks(2).along, many.in_chunks(2).along) == ("k", "a")
    assert few.in_chunks(4).along == "a"  # chunks that are no alike parts of what is contracted


@pytest.mark.parametrize("call", [all_gather_matmul, matmul_reduce_scatter])
@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU7x"])
def test_a_batch_of_one_changes_no_choice(call, kind, monkeypatch):
    """No chunks are cut of a dimension that they do not divide, and none are reckoned with."""
    found, gathers = [], call is all_gather_matmul

    def spy(asked):
        found.append(choose_ways(asked))
        return found[-1]

    monkeypatch.setattr("jaxpar.matmul._einsum.choose_ways", spy)
    rows, narrow, wide = (16384, 8192, 28672) if kind == "TPU7x" else (16384, 4096, 14336)
    k, n = (narrow, wide) if gathers else (wide, narrow)

    def ways(*batch):
        deep = [None] * len(batch)
        apart, whole = P(*deep, "x"), P(*deep, None, "x")
        specs = (apart, P(None, "x"), whole) if gathers else (whole, P("x"), apart)
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((*batch, rows, k), (k, n))]
        fn = sharded(lambda x, w: call(x, w, "x", dim=-2), specs, described(kind))
        with compiled_with(options_of(kind)):
            jax.eval_shape(fn, *args)
        return [tuple(map(named, found.pop())) for _ in range(2)]

    assert ways() == ways(1) == ways(1, 1)


@pytest.mark.parametrize(
    ("kind", "devices", "size", "beside", "times"),
    [
        ("TPU v5 lite", 16, 4, NONE, 2),  # 4x4, along one dimension
        ("TPU v5 lite", 16, 16, NONE, 2.5),  # all of it: its corners have two links
        ("TPU v6 lite", 8, 8, ALL, 2),
        ("TPU v6 lite", 256, 16, ALL, 2),
        ("TPU v6 lite", 256, 256, ALL, 1.25),
        ("TPU v6 lite", 32, 8, ALL, 2),
        ("TPU v5", 64, 16, NONE, 1),
        ("TPU v5", 512, 8, ALL, 2),
        ("TPU v5", 8, 8, NONE, 5 / 3),  # a cube
        ("TPU v5", 4, 4, NONE, 2),
        ("TPU v5", 64, 8, NONE, 2),  # one side of 4, and half of another
        ("TPU7x", 16, 8, ALL, 2),
        ("NVIDIA H100", 8, 8, ALL, 2),
    ],
)
def test_an_all_reduce_has_the_links_of_all_dimensions_of_its_ring(
    kind, devices, size, beside, times
):
    """As XLA schedules `psum`, whose result a SparseCore leaves to be copied."""
    flow, way = Flow("all-reduce", 0.0, 2**20), Naive(ring(size))
    found = time_of(chip(kind), (flow,), way, beside, devices=devices)
    if beside and chip(kind).torus:
        found -= copy_time(chip(kind), size * 2**20)
    assert found == pytest.approx(times * collective_time(chip(kind), flow, size))


@pytest.mark.parametrize(
    ("kind", "size", "devices", "times"),
    [
        ("TPU v6 lite", 16, 16, 2.5),  # 4 x 4, all of it
        ("TPU v5 lite", 64, 64, 2.5),
        ("TPU v6 lite", 256, 256, 1.25),  # closed
        ("TPU v5", 8, 8, 5 / 3),  # 2 x 2 x 2
        ("TPU v5", 64, 64, 5 / 6),  # 4 x 4 x 4, closed
        ("TPU v6 lite", 8, 8, 1),  # 2 x 4
        ("TPU v6 lite", 16, 64, 1),
        ("NVIDIA H100", 8, 8, 1),
    ],
)
def test_sums_over_a_whole_slice_of_equal_sides_are_all_reduced(kind, size, devices, times):
    """As XLA schedules `psum_scatter`: over all links, and each device takes its own."""
    flow = Flow("scatter", 0.0, 2**20)
    once = collective_time(chip(kind), flow, size)
    found = time_of(chip(kind), (flow,), Naive(ring(size)), NONE, devices=devices)
    assert found == pytest.approx(times * once)
    # So do the sums of an operand that stays.
    stays = Flow("gather", 0.0, 8, sums=8, partners=2**20)
    alone = replace(stays, partners=0)
    with_it, without = (
        time_of(chip(kind), (f,), Stationary(ring(size)), NONE, devices=devices)
        for f in (stays, alone)
    )
    latency = times * collective_time(chip(kind), Flow("scatter", 0.0, 0), size)
    read = size * 2**20 / chip(kind).hbm
    assert with_it - without == pytest.approx(times * once - latency + read)


@pytest.mark.parametrize(
    ("kind", "times"),
    [("TPU v6 lite", 1), ("TPU v5", 1), ("TPU v4", 1 + 7 * 0.7)],
)
def test_a_weight_that_stays_on_the_chip_is_read_once(kind, times):
    """Of 16 MiB, of which a v4 keeps 4.8, the rest is read for each of eight pieces."""
    ring_way = chosen(described(kind), 8, TINY, "unidirectional")
    without, with_it = (
        time_of(chip(kind), (gather(1.0, 8, whole=whole),), ring_way, NONE) for whole in (0, 2**24)
    )
    assert with_it - without == pytest.approx(times * 2**24 / chip(kind).hbm, rel=0.01)


@pytest.mark.parametrize(("kind", "copies"), [("TPU v5", 1), ("TPU v5 lite", 0)])
def test_operands_that_are_cut_by_an_instruction_of_their_own_are_copied(kind, copies):
    """A ring that gathers along k cuts the weight: on v5p before each matmul, on v5e within it."""
    ring_way = chosen(described(kind), 8, TINY, "unidirectional")
    without, with_it = (
        time_of(chip(kind), (gather(1.0, 8, cut=cut),), ring_way, NONE) for cut in (0, 2**24)
    )
    assert with_it - without == pytest.approx(copies * copy_time(chip(kind), 2**24))


@pytest.mark.parametrize(
    ("kind", "direction", "copies"),
    [
        ("TPU v5 lite", "scatter", 0),  # the matmul cuts by itself
        ("TPU v5 lite", "gather", 1),
        ("NVIDIA H100", "scatter", 1),
    ],
)
def test_columns_are_cut_by_the_matmul_of_a_scatter_on_a_tpu(kind, direction, copies):
    ring_way = chosen(described(kind), 8, TINY, "unidirectional")
    without, with_it = (
        time_of(chip(kind), (Flow(direction, 1.0, 8, sliced=sliced),), ring_way, NONE)
        for sliced in (0, 2**24)
    )
    assert with_it - without == pytest.approx(copies * copy_time(chip(kind), 2**24))


@pytest.mark.parametrize(("kind", "passes"), [("NVIDIA H100", 2), ("TPU v5 lite", 0)])
def test_a_gpu_adds_sums_by_passes_of_their_own(kind, passes):
    way = chosen(described(kind), 8, TINY, "unidirectional")
    # Of a transfer that work covers, a GPU writes and reads all devices' numbers of float32.
    (small, large) = (
        time_of(chip(kind), (Flow("scatter", 1e15, block),), way, NONE) for block in (8, 2**24)
    )
    assert large - small == pytest.approx(passes * 2 * 8 * 2**24 / chip(kind).hbm, abs=1e-9)


def test_chunks_place_what_is_no_whole_number_of_lanes_by_passes_of_their_own():
    """1728 columns are 13.5 x 128: a chunk is written, placed, and the whole copied."""
    product = Product("ak", "kn", "an", jnp.bfloat16)
    v5p, way = chip("TPU v5"), InChunks(ring(8), 4)

    def found(columns):
        sizes = {"a": 24576, "k": 5120, "n": columns}
        flow = flow_of("gather", "a", 8, [product], [sizes], 16, 16)
        return flow, time_of(v5p, (replace(flow, across=()),), way, ALL)

    (odd, slow), (even, _) = found(1728), found(1792)
    assert (odd.unaligned, even.unaligned) == (24576 * 1728 * 2, 0)
    alone = time_of(v5p, (replace(odd, unaligned=0, across=()),), way, ALL)
    assert slow - alone == pytest.approx(2 * copy_time(v5p, odd.unaligned))


@pytest.mark.parametrize(
    ("kind", "asynchronous", "chunked"),
    [
        ("TPU v6 lite", True, True),
        ("TPU v6 lite", False, False),
        ("NVIDIA H100", True, False),  # whose compiler joins them again
    ],
)
def test_sums_of_a_layer_go_in_chunks_where_they_hide(kind, asynchronous, chunked):
    """An output projection of Llama 3 8B over four devices; its backward pass is one collective."""
    rows, hidden, width = 8192, 1024, 4096
    columns = Flow("scatter", 2.0 * rows * hidden * width, rows * width // 2, along="n",
                   whole=2 * rows * hidden, shared=2 * (hidden + rows) * width)  # fmt: skip
    scattered = replace(columns, along="a", across=(columns,))
    backward = (Flow("gather", 2 * columns.flops, columns.block_bytes),)
    told = ALL if asynchronous else NONE

    def ways():
        return choose_ways(Problem("projection", ring(4), (), (scattered,), backward, told=told))

    forward, back = traced(ways, described(kind, 4))
    assert isinstance(forward, InChunks) == chunked
    assert (named(back) == "naive") or not asynchronous
