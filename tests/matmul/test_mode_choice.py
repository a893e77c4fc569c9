"""mode="auto": a roofline over static shapes, the ring's size and the chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar._chips import CHIPS
from jaxpar.collectives._plan import make_plan
from jaxpar.collectives._ring import Ring
from jaxpar.matmul import (
    _mode,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    ring_einsum,
)
from jaxpar.matmul._mode import choose_plan, naive_time, ring_time
from jaxpar.testing import count_collectives

# On one of 8 devices, in bf16: FLOPs, and bytes of a block that travels.
LARGE = 2.0 * 8192**3 / 8, 8192 * 1024 * 2
TINY = 2.0 * 64**3 / 8, 64 * 8 * 2


def chip(kind):
    return next(c for c in CHIPS if c.kind == kind)


@pytest.fixture
def traced_for(monkeypatch):
    return lambda kind: monkeypatch.setattr(
        _mode, "traced_chip", lambda: None if kind is None else chip(kind)
    )


def ring(n):
    return Ring(("x",), n)


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
def test_choices(kind, n, work, mode, traced_for):
    traced_for(kind)
    assert choose_plan(ring(n), *work) == mode


@pytest.mark.parametrize(
    ("kind", "devices", "mode"),
    [
        ("TPU v5 lite", 64, "naive"),
        ("TPU v5 lite", 32, "bidirectional"),
        ("TPU v5", 512, "bidirectional"),
    ],
)
def test_no_ring_where_permutes_are_synchronous(kind, devices, mode, traced_for):
    """From 64 devices in the whole mesh on v5e, whatever the size of the ring."""
    traced_for(kind)
    mesh = AbstractMesh((devices // 8, 8), ("d", "x"), axis_types=(AxisType.Auto,) * 2)
    chosen = []

    def body(x):
        chosen.append(choose_plan(ring(8), *LARGE))
        return x

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert set(chosen) == {mode}


@settings(max_examples=200, deadline=None, database=None)
@given(st.sampled_from(CHIPS), st.integers(1, 64), st.floats(1.0, 1e15), st.integers(1, 10**10))
def test_the_choice_is_never_predicted_to_be_slower_than_naive(chip, n, flops, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mode, "traced_chip", lambda: chip)
        mode = choose_plan(ring(n), flops, block_bytes)
    naive = naive_time(chip, n, flops, block_bytes)
    assert mode in ("naive", "unidirectional", "bidirectional")
    assert mode != "bidirectional" or chip.torus
    if mode != "naive":
        assert ring_time(chip, make_plan(n, mode), flops, block_bytes) < naive


@settings(max_examples=50, deadline=None, database=None)
@given(st.sampled_from(CHIPS), st.integers(3, 64), st.integers(1, 10**10))
def test_no_time_is_below_the_floor(chip, n, block_bytes):
    """No plan computes faster than peak, or moves its bytes faster than the links do."""
    ways = {"unidirectional": 1, "bidirectional": 2}
    for mode, lanes in ways.items():
        plan = make_plan(n, mode)
        moved = (n - 1) * block_bytes / lanes / chip.link
        assert ring_time(chip, plan, 0.0, block_bytes) >= moved * (1 - 1e-9)
        assert ring_time(chip, plan, 1e15, 0) >= 1e15 / chip.flops * (1 - 1e-9)


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


def sharded(fn, specs, **options):
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
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
def test_auto_asks_for_each_call(fn, specs, kind, size, traced_for):
    """What a call hands to the roofline: its own FLOPs and bytes, and the mode is what runs."""
    traced_for(kind)
    mode = {"TPU v5": "bidirectional", "NVIDIA H100": "unidirectional"}[kind]
    args = [jax.ShapeDtypeStruct((size, size), jnp.bfloat16)] * 2
    auto, expected = (
        count_collectives(sharded(fn, specs, mode=mode), *args)
        for mode in ("auto", mode if size > 8 else "naive")
    )
    assert auto == expected


def test_what_the_roofline_is_asked(monkeypatch):
    """All products of a shared gather count, bytes are those of one hop in the wire's dtype."""
    asked = []

    def record(ring, flops, block_bytes):
        asked.append((ring.size, flops, block_bytes))
        return "naive"

    monkeypatch.setattr("jaxpar.matmul._einsum.choose_plan", record)
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
