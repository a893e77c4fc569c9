"""Windows, capped scores, sinks and values of another size, against attention in NumPy."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, make_mesh
from jaxpar.layers import head_layout, parallel_attention, ring_attention, zigzag_order
from jaxpar.ring import run, stepwise
from jaxpar.testing import count_collectives, tolerance


def attention(q, k, v, ct, sinks=None, *, causal, window=None, softcap=None, ids=None):
    """On one device in float64: the result, and the gradients of q, k, v and sinks for `ct`."""
    heads, size = q.shape[-2:]
    group, places = heads // k.shape[-2], np.arange(q.shape[-3])
    wide_k, wide_v = (np.repeat(x, group, axis=-2) for x in (k, v))
    scores = np.einsum("...qhe,...khe->...hqk", q, wide_k) / np.sqrt(size)
    capped = scores if softcap is None else softcap * np.tanh(scores / softcap)
    slope = np.ones_like(scores) if softcap is None else 1 - np.tanh(scores / softcap) ** 2
    before = places[:, None] - places  # by how much a key is before a query
    left, right = (q.size, q.size) if window is None else window
    seen = (before <= left) & (before >= (0 if causal else -right))
    if ids is not None:
        seen = seen & (ids[..., None, :, None] == ids[..., None, None, :])
        seen &= (ids >= 0)[..., None, None, :]
    sink = np.full(heads, -np.inf) if sinks is None else sinks
    sink = np.broadcast_to(sink[:, None, None], (*scores.shape[:-1], 1))
    logits = np.concatenate([np.where(seen, capped, -np.inf), sink], axis=-1)
    weights = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), -1e300))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    weights, of_sink = weights[..., :-1], weights[..., -1]
    by_weight = np.einsum("...qhe,...khe->...hqk", ct, wide_v)
    inner = np.sum(weights * by_weight, axis=-1)
    by_score = weights * (by_weight - inner[..., None]) * slope / np.sqrt(size)

    def grouped(x):
        return x.reshape(*x.shape[:-2], -1, group, x.shape[-1]).sum(-2)

    return (
        np.einsum("...hqk,...khe->...qhe", weights, wide_v),
        np.einsum("...hqk,...khe->...qhe", by_score, wide_k),
        grouped(np.einsum("...hqk,...qhe->...khe", by_score, q)),
        grouped(np.einsum("...hqk,...qhe->...khe", weights, ct)),
        -np.sum(of_sink * inner, axis=(*range(inner.ndim - 2), -1)),
    )


def drawn(seed):
    """A call of ring_attention, its operands, and what of it the reference is told."""
    rng = np.random.default_rng(seed)
    n, chunk = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    order = str(rng.choice(["zigzag", "contiguous"]))
    local = 2 * chunk if order == "zigzag" else chunk
    batch, length = int(rng.integers(1, 3)), local * n
    kv_heads = int(rng.integers(1, 3))
    heads = kv_heads * int(rng.integers(1, 3))
    causal = bool(rng.integers(2))
    window = tuple(int(x) for x in rng.integers(0, max(2, length // 2), 2))
    how = {
        "causal": causal,
        "window": None if rng.random() < 0.15 else window,
        "softcap": float(rng.uniform(0.5, 3)) if rng.integers(2) else None,
    }
    size, of_value = (int(x) for x in rng.integers(1, 5, 2))
    q, ct = (rng.standard_normal((batch, length, heads, x)) for x in (size, of_value))
    k, v = (rng.standard_normal((batch, length, kv_heads, x)) for x in (size, of_value))
    sinks = rng.standard_normal(heads) if rng.integers(2) else None
    ids = None
    if rng.integers(2):
        ids = np.cumsum(rng.random((batch, length)) < 0.2, axis=1)
        ids = np.where(rng.random(ids.shape) < 0.1, -1, ids).astype(np.int32)
    mode = str(rng.choice(["naive", "unidirectional", "bidirectional", "auto"]))
    return n, mode, order, how, (q, k, v, ct, sinks, ids)


def check(n, mode, order, how, operands, *, dtype="float64", check_vma=True, wire=None):
    """Compares values and gradients."""
    q, k, v, ct, sinks, ids = operands
    q, k, v, ct = (np.asarray(jnp.asarray(x, dtype)) for x in (q, k, v, ct))
    expected = attention(*(np.asarray(x, np.float64) for x in (q, k, v, ct)), sinks, ids=ids, **how)
    places = zigzag_order(q.shape[1], n) if order == "zigzag" else np.arange(q.shape[1])
    rows, axis = P(None, "x"), Axis("x", mode=mode, wire_dtype=wire)
    given = {"sinks": (sinks, P()), "segments": (ids, rows)}
    given = {name: pair for name, pair in given.items() if pair[0] is not None}

    def local(q, k, v, options):
        return ring_attention(q, k, v, axis, order=order, **how, **options)

    mapped = jax.shard_map(
        local,
        mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
        in_specs=(rows, rows, rows, {name: spec for name, (_, spec) in given.items()}),
        out_specs=rows,
        check_vma=check_vma,
    )

    @jax.jit
    def both(q, k, v, ct, sinks):
        def whole(q, k, v, sinks):
            options = {name: x for name, (x, _) in given.items()}
            if ids is not None:
                options["segments"] = ids[:, places]
            if sinks is not None:
                options["sinks"] = sinks
            return mapped(q[:, places], k[:, places], v[:, places], options)[:, np.argsort(places)]

        out, pull = jax.vjp(whole, q, k, v, sinks)
        return out, *pull(ct)

    found = both(q, k, v, ct, sinks)
    for x, y in zip(found, expected, strict=True):
        if x is not None:
            allowed = tolerance(q.dtype, q.size) * max(1, np.max(np.abs(y)))
            np.testing.assert_allclose(np.asarray(x, "float64"), y, rtol=0, atol=allowed)


@pytest.mark.parametrize("seed", [0, 4, 15, 19])
def test_all_together(seed):
    """Ways, orders, options and sizes, as they are drawn."""
    with jax.enable_x64(True):
        check(*drawn(seed), check_vma=bool(seed % 2))


def operands(length, heads, kv_heads, sizes, batch=2):
    """Of sizes of q and k, and of v."""
    rng = np.random.default_rng(length)
    q, ct = (rng.standard_normal((batch, length, heads, size)) for size in sizes)
    k, v = (rng.standard_normal((batch, length, kv_heads, size)) for size in sizes)
    return q, k, v, ct, rng.standard_normal(heads), None


def test_16_bits_and_sums_in_them():
    how = {"causal": True, "window": (9, 0), "softcap": 2.0}
    given = operands(12, 4, 2, (8, 5))
    check(*(3, "bidirectional", "zigzag", how, given), dtype="bfloat16", wire="bfloat16")


def test_long_rings_run_loops(monkeypatch):
    monkeypatch.setattr(run, "UNROLLED", 1)
    monkeypatch.setattr(stepwise, "UNROLLED_CIRCULATING", 1)
    how = {"causal": False, "window": (3, 2)}
    with jax.enable_x64(True):
        check(8, "auto", "contiguous", how, operands(8, 1, 1, (2, 3), batch=1))


@pytest.mark.parametrize(
    ("window", "causal"), [(2, True), (5, False), ((4, 1), True), ((4, 1), False)]
)
def test_a_window_is_that_of_jax(window, causal):
    q, k, v, *_ = (np.asarray(x, "float32") for x in operands(8, 2, 1, (4, 4))[:3])
    how = {"is_causal": causal, "local_window_size": window}
    wanted = jax.jit(partial(jax.nn.dot_product_attention, **how))(q, k, v)
    both = window if isinstance(window, tuple) else (window, window)
    reference, *_ = attention(q, k, v, np.zeros_like(q), causal=causal, window=both)
    allowed = tolerance("float32", q.shape[-1] * q.shape[1])  # of logits, and of means of values
    np.testing.assert_allclose(reference, wanted, rtol=0, atol=allowed * np.max(np.abs(v)))
    found = on(2, q, k, v, causal=causal, window=window, order="contiguous")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed * np.max(np.abs(v)))


def on(n, q, k, v, **how):
    """Of whole operands on n devices."""
    mapped = jax.shard_map(
        lambda *args: ring_attention(*args, "x", **how),
        mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
    )
    return jax.jit(mapped)(q, k, v)


@partial(jax.jit, static_argnums=0)
def vjp(fn, ct, *args):
    out, pull = jax.vjp(fn, *args)
    return out, *pull(ct)


@pytest.mark.parametrize("check_vma", [True, False])
def test_sinks_of_many_devices(check_vma):
    """Their gradient is summed over batches and positions; one that is -inf is none."""
    q, k, v, ct, sinks, _ = operands(4, 2, 1, (3, 3), batch=4)
    sinks[1] = -np.inf
    _, *expected = attention(q, k, v, ct, sinks, causal=True, window=(2, 0))
    mapped = jax.shard_map(
        lambda q, k, v, sinks: ring_attention(
            q, k, v, "x", window=2, sinks=sinks, order="contiguous"
        ),
        mesh=make_mesh({"y": 2, "x": 2}, devices=jax.devices()[:4]),
        in_specs=(*(P("y", "x"),) * 3, P()),
        out_specs=P("y", "x"),
        check_vma=check_vma,
    )
    with jax.enable_x64(True):
        _, *found = vjp(mapped, ct, q, k, v, sinks)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


def test_rows_that_see_nothing_give_nothing_to_sinks():
    """Sinks of bfloat16 keep their dtype, and what does not count may hold NaN."""
    q, k, v, ct, sinks, _ = operands(8, 2, 2, (4, 2))
    sinks = jnp.asarray(sinks, "bfloat16")
    ids = np.full((2, 8), -1, np.int32)
    ids[0, 2:6] = 3
    _, *expected = attention(
        *(q, k, v, ct, np.asarray(sinks, "float64")), causal=True, window=(1, 0), ids=ids
    )
    q, k, v = (np.where(ids[..., None, None] < 0, np.nan, x).astype("float32") for x in (q, k, v))
    mapped = jax.shard_map(
        lambda q, k, v, ids, sinks: ring_attention(
            *(q, k, v, "x"), segments=ids, window=1, sinks=sinks, order="contiguous"
        ),
        mesh=make_mesh({"x": 2}, devices=jax.devices()[:2]),
        in_specs=(*(P(None, "x"),) * 4, P()),
        out_specs=P(None, "x"),
    )
    ct = ct.astype("float32")
    out, *found = vjp(lambda *args: mapped(*args[:3], ids, args[3]), ct, q, k, v, sinks)
    np.testing.assert_array_equal(np.asarray(out)[ids < 0], 0)
    for x, y in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert found[3].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found[3], "float32"), expected[3], rtol=1e-2)


def test_second_derivatives():
    q, k, v, *_, sinks, _ = operands(4, 2, 1, (2, 3), batch=1)
    places = zigzag_order(4, 2)
    before = places[:, None] - places
    seen = (before <= 2) & (before >= 0)
    mapped = jax.shard_map(
        lambda q, k, v, sinks: ring_attention(
            *(q, k, v, Axis("x", mode="unidirectional")),
            window=2,
            softcap=1.5,
            sinks=sinks,
        ),
        mesh=make_mesh({"x": 2}, devices=jax.devices()[:2]),
        in_specs=(*(P(None, "x"),) * 3, P()),
        out_specs=P(None, "x"),
    )

    def full(q, k, v, sinks):
        scores = jnp.einsum("bqhe,bke->bhqk", q, k[:, :, 0]) / np.sqrt(2)
        scores = jnp.where(seen, 1.5 * jnp.tanh(scores / 1.5), -jnp.inf)
        sinks = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
        return jnp.einsum("bhqk,bke->bqhe", weights, v[:, :, 0])

    def second(fn):
        def first(*args):
            grads = jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=range(4))(*args)
            return sum(jnp.sum(jnp.sin(g)) for g in grads)

        return jax.jit(jax.grad(first, argnums=range(4)))(q, k, v, sinks)

    with jax.enable_x64(True):
        for found, expected in zip(second(mapped), second(full), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


# -- what is sent, computed and kept ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "order", "how", "blocks"),
    [
        # Of eight devices: keys of one neighbour, or of two, or none.
        ("auto", "contiguous", {"window": 4}, 1),
        ("bidirectional", "contiguous", {"window": 5}, 2),
        ("unidirectional", "contiguous", {"window": 0}, 0),
        ("auto", "contiguous", {"window": (0, 4), "causal": False}, 1),
        ("unidirectional", "contiguous", {"window": (4, 3), "causal": False}, 2),
        # Late chunks have their neighbours on the other side.
        ("unidirectional", "zigzag", {"window": 2}, 2),
        ("auto", "zigzag", {"window": 5}, 6),
        # The whole ring.
        ("unidirectional", "zigzag", {"window": 7}, 7),
        ("unidirectional", "contiguous", {"window": 25}, 7),
    ],
)
def test_blocks_come_from_as_many_devices_as_a_window_reaches(mode, order, how, blocks):
    x = jax.ShapeDtypeStruct((32, 2, 8), "float32")
    value = jax.ShapeDtypeStruct((32, 2, 4), "float32")
    mapped = jax.shard_map(
        lambda *args: ring_attention(*args, Axis("x", mode=mode), order=order, **how),
        mesh=make_mesh({"x": 8}),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    found = count_collectives(mapped, x, x, value)
    block = 4 * 2 * (8 + 4) * 4  # bytes of a device's k and v
    assert dict(found.forward) == ({"ppermute": 2 * blocks} if blocks else {})
    assert dict(found.backward) == ({"ppermute": 4 * blocks} if blocks else {})
    assert found.forward_bytes == blocks * block
    assert found.backward_bytes == 2 * blocks * block
    # q, k; v, the result; two numbers a query and head
    assert found.residual_bytes == 4 * 2 * 4 * (2 * 8 + 2 * 4 + 2)


@pytest.mark.parametrize(("order", "causal"), [("zigzag", False), ("contiguous", True)])
def test_scores_outside_of_a_window_are_not_computed(order, causal):
    """Of 256 positions a device computes runs of 32 and 16, and 4 next to each other's."""
    q = jax.ShapeDtypeStruct((3 * 256, 1, 1), "float32")
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, "x", order=order, window=4, causal=causal),
        mesh=make_mesh({"x": 3}, devices=jax.devices()[:3]),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = str(jax.make_jaxpr(lambda q, k, v, ct: jax.vjp(fn, q, k, v)[1](ct))(q, q, q, q))
    shapes = {
        tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[1,1,(\d+,\d+)\]", text)
    }
    run = 32 if order == "contiguous" else 16
    assert {shape for shape in shapes if min(shape) > 1} == {(run, run), (4, 4)}


def test_sinks_of_sharded_heads():
    """With padding among them, and values of another size."""
    rng, layout = np.random.default_rng(0), head_layout(heads=3, kv_heads=1, shards=2)
    shapes = (1, 8, 4), (4, 3 * 2), (4, 2), (4, 5), (3 * 5, 4), (1, 8, 4)
    x, w_q, w_k, w_v, w_o, ct = (rng.standard_normal(shape) for shape in shapes)
    sinks = rng.standard_normal(3)
    q, k, v = ((x @ w).reshape(1, 8, heads, -1) for w, heads in ((w_q, 3), (w_k, 1), (w_v, 1)))
    by_out = (ct @ w_o.T).reshape(1, 8, 3, 5)
    out, *_, of_sinks = attention(q, k, v, by_out, sinks, causal=True, window=(2, 0))

    def layer(x, w_q, w_k, w_v, w_o, sinks):
        def attend(q, k, v):
            return ring_attention(q, k, v, "cp", order="contiguous", window=2, sinks=sinks)

        return parallel_attention(
            *(x, w_q, w_k, w_v, w_o, "tp", attend), heads=3, kv_heads=1, sequence_dim=None
        )

    mapped = jax.shard_map(
        layer,
        mesh=make_mesh({"cp": 2, "tp": 2}, devices=jax.devices()[:4]),
        in_specs=(P(None, "cp"), P(None, "tp"), P(), P(), P("tp"), P("tp")),
        out_specs=P(None, "cp"),
    )

    def padded(x, w_q, w_k, w_v, w_o, sinks):
        return mapped(x, layout.pad_query(w_q), w_k, w_v, layout.pad_output(w_o), sinks)

    with jax.enable_x64(True):
        sinks = jax.jit(layout.pad_query)(sinks)
        found, *gradients = vjp(padded, ct, x, w_q, w_k, w_v, w_o, sinks)
        np.testing.assert_allclose(found, out.reshape(1, 8, -1) @ w_o, rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradients[-1], [*of_sinks, 0], rtol=0, atol=1e-12)
