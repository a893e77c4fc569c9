"""Windows, capped scores, sinks and values of another size, against attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, make_mesh
from jaxpar.layers import ring_attention, zigzag_order
from jaxpar.testing import tolerance


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
    expected = attention(
        *(np.asarray(x, np.float64) for x in (q, k, v, ct)), sinks, ids=ids, **how
    )
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
            allowed = tolerance(x.dtype, q.size) * max(1, np.max(np.abs(y)))
            np.testing.assert_allclose(np.asarray(x, "float64"), y, rtol=0, atol=allowed)


@pytest.mark.parametrize("seed", range(4))
def test_all_together(seed):
    with jax.enable_x64(True):
        check(*drawn(seed), check_vma=bool(seed % 2))
