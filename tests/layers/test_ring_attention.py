"""Ring attention against full attention, in values, gradients, and what is sent and kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from wide import assert_alike

from jaxpar import Axis
from jaxpar.axis.vma import vary_over
from jaxpar.layers import ring_attention, zigzag_order
from jaxpar.ring import run, stepwise
from jaxpar.testing import assert_matches_reference, count_collectives, tolerance


def normal(*shape, dtype="float32"):
    rng = np.random.default_rng([*shape])
    return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))


def make(sizes, names=("x", "y"), step=1):
    devices = np.array(jax.devices()[: np.prod(sizes)])[::step].reshape(sizes)
    return Mesh(devices, names[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def line(n):
    return make((n,))


class FullAttention:
    """Full attention in NumPy, with its gradients; `places` are the positions of the rows."""

    def __init__(self, places=None, scale=None):
        self.places, self.scale = places, scale

    def weights(self, q, k):
        k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = np.einsum("...qhe,...khe->...hqk", q, k) * scale
        if self.places is not None:
            scores = np.where(self.places[:, None] >= self.places, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True), k, scale

    def __call__(self, q, k, v):
        weights, _, _ = self.weights(q, k)
        v = np.repeat(v, q.shape[-2] // v.shape[-2], axis=-2)
        return np.einsum("...hqk,...khe->...qhe", weights, v)

    def vjp(self, args, ct):
        q, k, v = args
        group = q.shape[-2] // k.shape[-2]
        weights, k, scale = self.weights(q, k)
        by_weight = np.einsum("...qhe,...khe->...hqk", ct, np.repeat(v, group, axis=-2))
        by_score = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True)) * scale

        def ungroup(x):
            return x.reshape(*x.shape[:-2], -1, group, x.shape[-1]).sum(-2)

        return (
            np.einsum("...hqk,...khe->...qhe", by_score, k),
            ungroup(np.einsum("...hqk,...qhe->...khe", by_score, q)),
            ungroup(np.einsum("...hqk,...qhe->...khe", weights, ct)),
        )


def places_of(order, length, size):
    return zigzag_order(length, size) if order == "zigzag" else np.arange(length)


def check(mesh, axis, shape, kv_heads, *, order="zigzag", causal=True, dtype="float64", **how):
    """Compares values and gradients; `shape` is [batch, local length, heads, size]."""
    batch, length, heads, size = shape
    names = axis.names
    devices = int(np.prod([mesh.shape[name] for name in names]))
    check_vma = how.pop("check_vma")
    length *= devices
    full = FullAttention(places_of(order, length, devices) if causal else None, how.get("scale"))
    with jax.enable_x64(True):
        q, ct = normal(2, batch, length, heads, size, dtype=dtype)
        k, v = normal(2, batch, length, kv_heads, size, dtype=dtype)
        wide = [np.asarray(x, "float64") for x in (q, k, v)]
        expected = [full(*wide), *full.vjp(wide, np.asarray(ct, "float64"))]
        for vma in (check_vma,) if isinstance(check_vma, bool) else check_vma:
            fn = jax.shard_map(
                lambda *args: ring_attention(*args, axis, causal=causal, order=order, **how),
                mesh=mesh,
                in_specs=P(None, names),
                out_specs=P(None, names),
                check_vma=vma,
            )
            compare(jax.jit(vjp, static_argnums=0)(fn, ct, q, k, v), expected)


def vjp(fn, ct, *args):
    out, pull = jax.vjp(fn, *args)
    return out, *pull(ct)


def compare(found, expected):
    """To rounding of the largest entry: of float64, what a wrong term would exceed by far."""
    for x, y in zip(found, expected, strict=True):
        allowed = tolerance(x.dtype, y.size) * np.max(np.abs(y))
        np.testing.assert_allclose(np.asarray(x, "float64"), y, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("size", "length", "order", "mode", "check_vma"),
    [
        (1, 3, "zigzag", "unidirectional", True),
        (3, 2, "zigzag", "unidirectional", True),
        (3, 4, "zigzag", "naive", False),
        (2, 4, "contiguous", "bidirectional", True),
        (2, 3, "contiguous", "naive", True),
        (4, 4, "zigzag", "bidirectional", False),
    ],
)
def test_causal(size, length, order, mode, check_vma):
    axis = Axis("x", mode=mode)
    check(line(size), axis, (2, length, 4, 3), 2, order=order, check_vma=check_vma)


@pytest.mark.parametrize(
    ("size", "length", "mode"),
    [(1, 1, "unidirectional"), (3, 1, "naive"), (4, 2, "bidirectional")],
)
def test_not_causal(size, length, mode):
    """The order does not matter, nor an odd length; scale is what is given."""
    how = {"scale": 0.3, "check_vma": size == 4}
    check(line(size), Axis("x", mode=mode), (1, length, 2, 3), 1, causal=False, **how)


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [((2, 3), "naive"), ((2, 2), "unidirectional")],
)
def test_several_axes_in_any_order(sizes, mode):
    """Over shuffled devices, too."""
    mesh = make(sizes, step=-1)
    axis = Axis(("y", "x"), mode=mode)
    check(mesh, axis, (1, 2, 2, 2), 1, order="contiguous", check_vma=mode == "unidirectional")


def test_long_rings_run_loops(monkeypatch):
    monkeypatch.setattr(run, "UNROLLED", 1)
    monkeypatch.setattr(stepwise, "UNROLLED_CIRCULATING", 1)
    check(line(7), Axis("x", mode="bidirectional"), (1, 4, 2, 2), 1, check_vma=True)


@pytest.mark.parametrize(("dtype", "mode"), [("float16", "naive"), ("bfloat16", "unidirectional")])
def test_16_bits(dtype, mode):
    """`test_attention_options.py` has sums that travel in them, both ways round."""
    check(line(3), Axis("x", mode=mode), (1, 4, 2, 8), 1, dtype=dtype, check_vma=True)


@pytest.mark.parametrize("mode", ["naive", "unidirectional"])
def test_scores_and_sums_are_float32(mode):
    """With inputs that bfloat16 holds exactly, the result is float32's but for what is rounded."""
    q, k = jnp.ones((32, 1, 4), "bfloat16"), jnp.ones((32, 1, 4), "bfloat16")
    v = jnp.ones((32, 1, 4), "bfloat16") * jnp.bfloat16(1 / 3)

    def local(q, k, v):
        return ring_attention(q, k, v, Axis("x", mode=mode), causal=False)

    fn = jax.shard_map(local, mesh=line(2), in_specs=P("x"), out_specs=P("x"))
    out, *grads = jax.jit(vjp, static_argnums=0)(fn, jnp.ones_like(v), q, k, v)
    np.testing.assert_array_equal(out, v)  # a mean of 32, in bfloat16 not exact
    np.testing.assert_array_equal(grads[2], jnp.ones_like(v))


def test_operands_that_vary_over_different_axes():
    """Queries vary over a batch axis, and keys do not: their gradient is summed over it."""
    full = FullAttention(zigzag_order(8, 2))

    def reference(q, k, v):
        return np.stack([full(part, k, v) for part in q])

    def reference_vjp(args, ct):
        q, k, v = args
        parts = [full.vjp((part, k, v), g) for part, g in zip(q, ct, strict=True)]
        q, k, v = zip(*parts, strict=True)
        return np.stack(q), sum(k), sum(v)

    def local(q, k, v):
        return ring_attention(q[0], k, v, Axis("x", mode="unidirectional"))[None]

    kv = normal(2, 8, 1, 3)
    assert_matches_reference(
        local,
        reference,
        normal(3, 8, 2, 3),
        kv[0],
        kv[1],
        mesh=make((2, 3)),
        in_specs=(P("y", "x"), P("x"), P("x")),
        out_specs=P("y", "x"),
        check_vma=True,
        reference_vjp=reference_vjp,
    )


def test_scan_checkpoint_and_vmap():
    """Layers in a scan, rematerialised; one operand of a vmap is not batched."""
    full = FullAttention(np.arange(8))

    def fn(x, scales):
        @jax.checkpoint
        def layer(x, scale):
            attend = jax.vmap(
                lambda *args: ring_attention(
                    *args, Axis("x", mode="unidirectional"), order="contiguous"
                ),
                in_axes=(1, None, 1),
                out_axes=1,
            )
            return x + attend(x * scale, x[:, 0], x), None

        return lax.scan(layer, x, scales)[0]

    def reference(x, scales):
        for scale in scales:
            parts = [full(x[:, i] * scale, x[:, 0], x[:, i]) for i in range(x.shape[1])]
            x = x + np.stack(parts, axis=1)
        return x

    assert_matches_reference(
        fn,
        reference,
        normal(8, 2, 2, 2),  # positions, batch, heads, size
        np.array([0.5, 1.5], "float32"),
        mesh=line(2),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        check_vma=True,
        max_directions=4,
    )


@pytest.mark.parametrize(
    ("mode", "length", "permutes"),
    # In the backward each way carries half of k, v and their gradients, where lengths allow.
    [("unidirectional", 8, (6, 12)), ("bidirectional", 8, (8, 24)), ("bidirectional", 2, (8, 12))],
)
def test_what_is_sent_and_kept(mode, length, permutes):
    """The forward sends n-1 blocks of k and v, the backward again, and their float32 gradients."""
    heads, size, n = 4, 8, 4
    q = jnp.ones((n * length, heads, size), "bfloat16")
    k = jnp.ones((n * length, 1, size), "bfloat16")
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, Axis("x", mode=mode)),
        mesh=line(n),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    found = count_collectives(fn, q, k, k)
    block = 2 * length * size  # numbers of k and v
    assert (dict(found.forward), dict(found.backward)) == (
        {"ppermute": permutes[0]},
        {"ppermute": permutes[1]},
    )
    assert found.forward_bytes == (n - 1) * block * 2
    assert found.backward_bytes == (n - 1) * block * (2 + 2)
    # q and the result, k and v, and the logarithm of each query's sum
    assert found.residual_bytes == length * (2 * heads * size * 2 + 2 * size * 2 + 2 * heads * 4)


def test_naive_gathers_and_scatters_once():
    q = jnp.ones((16, 4, 8), "bfloat16")
    k = jnp.ones((16, 1, 8), "bfloat16")
    for n in (4, 1):
        fn = jax.shard_map(
            lambda *args: ring_attention(*args, "x"),
            mesh=line(n),
            in_specs=P("x"),
            out_specs=P("x"),
        )
        found = count_collectives(fn, q, k, k)
        assert dict(found.forward) == ({"all_gather": 2} if n > 1 else {})
        assert dict(found.backward) == ({"all_gather": 2, "psum_scatter": 2} if n > 1 else {})
        assert found.residual_bytes == 16 // n * (2 * 4 * 8 * 2 + 2 * 8 * 2 + 2 * 4 * 4)


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        *((mode, "zigzag") for mode in ("naive", "bidirectional")),
        *((mode, "contiguous") for mode in ("naive", "unidirectional")),
    ],
)
def test_no_array_is_larger_than_one_block_of_scores(mode, order):
    n, length, heads = 4, 64, 2
    q = jax.ShapeDtypeStruct((n * length, heads, 1), jnp.float32)
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, Axis("x", mode=mode), order=order),
        mesh=line(n),
        in_specs=P("x"),
        out_specs=P("x"),
    )

    def both(q, k, v, ct):
        return jax.vjp(fn, q, k, v)[1](ct)

    text = str(jax.make_jaxpr(both)(q, q, q, q))
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    largest = max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)
    # In zigzag order no more than the products that are needed, a quarter at a time.
    assert largest == heads * (length**2 if order == "contiguous" else (length // 2) ** 2)


def test_nothing_to_attend_to():
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, "x"), mesh=line(2), in_specs=P("x"), out_specs=P("x")
    )
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(fn(*args)), argnums=(0, 1, 2)))
    for shape in ((0, 2, 3), (4, 0, 2, 3), (4, 2, 0)):
        x = jnp.ones(shape)
        assert [g.shape for g in gradients(x, x, x)] == [shape] * 3


@given(size=st.integers(1, 9), chunk=st.integers(0, 5))
def test_zigzag_order(size, chunk):
    length = 2 * size * chunk
    order = zigzag_order(length, size)
    assert isinstance(order, np.ndarray)
    assert sorted(order) == list(range(length))
    rows = order.reshape(size, 2, chunk)
    for device, (early, late) in enumerate(rows):
        assert list(early) == list(range(device * chunk, (device + 1) * chunk))
        start = (2 * size - 1 - device) * chunk
        assert list(late) == list(range(start, start + chunk))
    # All devices' queries see as many keys, those of any other device taken alone: half.
    seen = rows.reshape(size, -1)
    for mine in range(size):
        for other in set(range(size)) - {mine}:
            assert np.sum(seen[mine][:, None] > seen[other]) == (2 * chunk) ** 2 // 2


def test_zigzag_order_of_one_device_is_the_order_itself():
    np.testing.assert_array_equal(zigzag_order(7, 1), np.arange(7))


@pytest.mark.parametrize(
    ("length", "size", "error", "text"),
    [
        (20, 4, ValueError, "length=20 must be a multiple of 2 x shards = 8, two chunks a device: "
         "20 = 2 x 8 + 4; pad it to 24, or use the contiguous order"),
        (8, 0, ValueError, "shards=0 must be at least 1"),
        (-8, 2, ValueError, "length=-8 must be at least 0"),
        (8.0, 2, TypeError, "length must be an integer, got 8.0 of type float"),
        (8, True, TypeError, "shards must be an integer, got True of type bool"),
    ],
)  # fmt: skip
def test_zigzag_order_says_what_is_wrong(length, size, error, text):
    with pytest.raises(error, match=re.escape(f"zigzag_order: {text}")):
        zigzag_order(length, size)


Q = (4, 2, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "error", "text"),
    [
        ((Q, Q, (4, 1, 8)), {}, ValueError, "q has local shape (4, 2, 8), k (4, 2, 8) and v (4, 1, "
         "8); k and v must agree in all dimensions but the last: [..., s, g, e] and [..., s, g, "
         "f]"),
        ((Q, (6, 2, 8), (6, 2, 8)), {}, ValueError, "all dimensions of q and k but the heads (the "
         "last but one) must agree"),
        (((4, 2, 0), (4, 2, 0), Q), {}, ValueError, "heads of q and k must have a size of 1 at "
         "least"),
        *(((Q,) * 3, {"window": window}, ValueError, "window must be an integer or two, (left, "
           f"right), of 0 or more, got {window!r}; give how many positions before its own a query "
           "sees, and how many after it; for a side without bound give the length of the sequence")
          for window in (-1, (-1, 0), (2, None), (1, 2, 3))),
        ((Q,) * 3, {"window": 1.5}, TypeError, "window must be an integer, got 1.5 of type float"),
        ((Q,) * 3, {"window": np.array([2, 1])}, TypeError, "window must be an integer, got array"),
        ((Q,) * 3, {"softcap": 0}, ValueError, "softcap=0 must be above 0; leave it out for scores "
         "as they are"),
        ((Q,) * 3, {"softcap": float("inf")}, ValueError, "softcap=inf must be finite; leave it "
         "out"),
        ((Q,) * 3, {"sinks": np.ones(3)}, ValueError, "sinks have local shape (3,), but must be "
         "(2,), one for each head of q of local shape (4, 2, 8)"),
        ((Q,) * 3, {"sinks": [1, 2]}, TypeError, "sinks are int32, but must be floats; cast them"),
        (((4, 8),) * 3, {}, ValueError, "each needs 3 dimensions at least, [..., s, heads, e]"),
        (((4, 5, 8), Q, Q), {}, ValueError, "the 2 kv heads do not divide the 5 query heads; "
         "choose"),
        ((Q, (4, 0, 8), (4, 0, 8)), {}, ValueError, "the 0 kv heads do not divide the 2 query "
         "heads; choose"),
        (((5, 2, 8),) * 3, {}, ValueError, "q has local shape (5, 2, 8), whose local length 5 over "
         "axis 'x' (2) is odd: zigzag order needs two chunks of one size a device, 5 = 2 x 2 + 1; "
         "pad the whole sequence from 10 to 12 before it is laid out, or pass order='contiguous'"),
        ((Q,) * 3, {"order": "striped"}, ValueError, "order must be 'zigzag' or 'contiguous', got "
         "'striped'"),
        ((Q,) * 3, {"scale": "1"}, TypeError, "scale must be a number known while tracing, got '1' "
         "of type str; multiply q by one that depends on data, and pass scale=1.0"),
        ((Q,) * 3, {"axis": Axis("x", wire_dtype="int32")}, TypeError, "wire_dtype=int32 cannot "
         "carry sums of float32"),
        ((Q,) * 3, {"precision": ("high", "high")}, TypeError, "precision must be one value"),
        ((Q,) * 3, {"axis": "y"}, ValueError, "axis 'y' is not bound"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(shapes, options, error, text):
    options = {"axis": "x", **options}
    fn = jax.shard_map(
        lambda *args: ring_attention(*vary_over(["x"], args), **options),
        mesh=line(2),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(error, match=re.escape(text)) as caught:
        jax.eval_shape(fn, *map(jnp.ones, shapes))
    assert str(caught.value).startswith("ring_attention: ")


def test_a_window_is_known_while_tracing():
    fn = jax.shard_map(
        lambda x, window: ring_attention(x, x, x, "x", window=window),
        mesh=line(2),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )
    text = "^ring_attention: window must be an integer known while tracing, got "
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(fn, jnp.ones((8, 2, 8)), 2)


def test_an_unknown_mode():
    with pytest.raises(
        ValueError, match=r"^Axis: mode must be one of naive, stationary, chunked-2"
    ):
        Axis("x", mode="ring")


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        (("float32", "bfloat16", "float32"), "q is float32, k bfloat16 and v float32, but all must "
         "be of one dtype; cast them first"),
        (("int32",) * 3, "q, k and v are int32, but must be floats; cast them first"),
    ],
)  # fmt: skip
def test_wrong_dtypes_are_said(dtypes, text):
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, "x"), mesh=line(2), in_specs=P(), out_specs=P()
    )
    with pytest.raises(TypeError, match=re.escape(f"ring_attention: {text}")):
        jax.eval_shape(fn, *(jax.ShapeDtypeStruct(Q, dtype) for dtype in dtypes))


def packed(q, k, v, segments, *, causal):
    """Attention within segments, one device in float64; 0 where a query is of none."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    h, g = q.shape[-2], k.shape[-2]
    k, v = (np.repeat(x, h // g, axis=-2) for x in (k, v))
    scores = np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    if causal:
        seen &= np.tril(np.ones(scores.shape[-2:], bool))
    weights = np.where(seen[:, None], np.exp(scores), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhe->bqhe", weights / np.where(total > 0, total, 1), v)


@pytest.mark.parametrize(
    ("mode", "order", "causal", "n", "check_vma"),
    [
        ("naive", "contiguous", True, 3, True),
        ("bidirectional", "zigzag", True, 2, False),
        ("unidirectional", "contiguous", False, 3, True),
        ("unidirectional", "zigzag", False, 1, True),
    ],
)
def test_packed_documents_and_lengths(mode, order, causal, n, check_vma, float64):
    """Gradients too, with queries that see nothing and documents that end within a device."""
    s, rng = 8 * n, np.random.default_rng(n)
    q = rng.standard_normal((2, s, 4, 6))
    k, v = (rng.standard_normal((2, s, 2, 6)) for _ in range(2))
    starts = rng.random((2, s)) < 0.3
    segments = np.cumsum(starts, axis=1).astype(np.int32)
    segments[0, 3:5] = -1
    lengths = np.array([s - 3, 5], np.int32)
    counted = np.where(np.arange(s) < lengths[:, None], segments, -1)
    places = zigzag_order(s, n) if order == "zigzag" else np.arange(s)
    back = np.argsort(places)

    def ours(q, k, v):
        axis = Axis("x", mode=mode)
        attend = jax.shard_map(
            lambda q, k, v, ids: ring_attention(
                *(q, k, v, axis), segments=ids, lengths=lengths, causal=causal, order=order
            ),
            mesh=line(n),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
            check_vma=check_vma,
        )
        return attend(q[:, places], k[:, places], v[:, places], segments[:, places])[:, back]

    ct = rng.standard_normal(q.shape)
    found, *grads = jax.jit(vjp, static_argnums=0)(ours, ct, q, k, v)
    assert_alike(found, packed(q, k, v, counted, causal=causal))
    assert all(np.all(np.isfinite(g)) for g in grads)
    for at, (x, grad) in enumerate(zip((q, k, v), grads, strict=True)):
        direction = rng.standard_normal(x.shape)
        step = 1e-6

        def along(t, at=at, direction=direction):
            moved = [q, k, v]
            moved[at] = moved[at] + t * direction
            return np.sum(packed(*moved, counted, causal=causal) * ct)

        slope = (along(step) - along(-step)) / (2 * step)
        # Rounding of the sum is divided by the step.
        atol = 1e-16 * np.sum(np.abs(ct)) * np.max(np.abs(v)) / step + 1e-9 * np.abs(slope)
        np.testing.assert_allclose(np.sum(grad * direction), slope, rtol=0, atol=10 * atol)


def test_lengths_alone_are_one_document():
    q, k = (np.ones((2, 8, 2, 4), "float32") for _ in range(2))
    v = np.arange(8, dtype="float32")[None, :, None, None] * k
    out = ring_on_one(q, k, v, lengths=[8, 3], causal=False)
    np.testing.assert_allclose(out[0], 3.5, rtol=1e-6)
    np.testing.assert_allclose(out[1, :3], 1.0, rtol=1e-6)
    np.testing.assert_array_equal(out[1, 3:], 0)


def ring_on_one(q, k, v, **how):
    attend = jax.shard_map(
        lambda *args: ring_attention(*args, "x", **how),
        mesh=line(1),
        in_specs=P(),
        out_specs=P("x"),
    )
    return jax.jit(attend)(q, k, v)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"segments": np.zeros((2, 8))}, TypeError, "segments must be integers, got float32; cast"),
        (
            {"segments": np.zeros((2, 7), np.int32)},
            ValueError,
            r"segments has local shape \(2, 7\), but must be \(2, 8\), one for each local position",
        ),
        ({"lengths": [1, 2, 3]}, ValueError, r"lengths has local shape \(3,\), but must be \(2,\)"),
        (
            {"segments": np.zeros((2, 8), np.uint32)},
            TypeError,
            "segments are uint32, which int32 does not hold; number the documents anew",
        ),
        (
            {"segments": np.full((2, 8), 2**32 + 7)},
            ValueError,
            "segments are int64 from 4294967303 to 4294967303, of which int32 does not hold all",
        ),
        ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
    ],
)
def test_segments_lengths_and_flags_that_cannot_be(how, kind, message):
    x = jnp.ones((2, 8, 2, 4))
    with pytest.raises(kind, match=f"^ring_attention: {message}"):
        ring_on_one(x, x, x, **how)


@pytest.mark.parametrize("n", [1, 4])
def test_gradients_sum_to_0_where_scores_are_far_from_it(n):
    """Scores around -300, whose float32 logarithm has lost the digits by which weights sum to 1."""
    rng = np.random.default_rng(0)
    s, e = 8 * n, 16
    q, k, v, ct = (rng.standard_normal((s, 1, e)) for _ in range(4))
    q[..., 0], k[..., 0] = 17.3 * 4, -17.3

    def plain(q, k, v):
        scores = jnp.einsum("qhe,khe->hqk", q, k) / np.sqrt(e)
        scores = jnp.where(np.tril(np.ones((s, s), bool)), scores, -jnp.inf)
        return jnp.einsum("hqk,khe->qhe", jax.nn.softmax(scores, axis=-1), v)

    def gradients(f, dtype):
        args = [jnp.asarray(x, dtype) for x in (ct, q, k, v)]
        return jax.jit(vjp, static_argnums=0)(f, *args)[1:]

    with jax.enable_x64(True):
        wanted = [np.asarray(x) for x in gradients(plain, "float64")]
    mapped = jax.shard_map(
        lambda *args: ring_attention(*args, "x", order="contiguous"),
        mesh=line(n),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    found, naive = gradients(mapped, "float32"), gradients(plain, "float32")
    for got, other, want in zip(found, naive, wanted, strict=True):
        scale = np.max(np.abs(want))
        error, theirs = (np.max(np.abs(x - want)) / scale for x in (got, other))
        assert error < 2 * theirs + 1e-6


def test_a_length_beyond_the_sequence_is_all_of_it():
    x = normal(2, 8, 2, 4)
    most = np.array([2**32 - 1, 8], "uint32")
    np.testing.assert_array_equal(ring_on_one(x, x, x, lengths=most), ring_on_one(x, x, x))


def test_lengths_of_a_dtype_that_does_not_hold_the_sequence():
    x = normal(2, 264, 1, 2)
    lengths = np.array([100, 3])
    wanted = ring_on_one(x, x, x, lengths=lengths)
    for dtype in ("int8", "uint8", "int16"):
        found = ring_on_one(x, x, x, lengths=lengths.astype(dtype))
        np.testing.assert_array_equal(found, wanted, err_msg=dtype)


@pytest.mark.parametrize(("causal", "order"), [(True, "zigzag"), (False, "contiguous")])
def test_what_does_not_count_may_hold_anything(causal, order):
    places = zigzag_order(16, 2) if order == "zigzag" else np.arange(16)
    given = normal(16, 2, 4), 2 * normal(16, 2, 4), normal(16, 2, 4) + 1, np.ones((16, 2, 4), "f4")
    attend = jax.shard_map(
        lambda *args: ring_attention(*args, "x", lengths=9, causal=causal, order=order),
        mesh=line(2),
        in_specs=P("x"),
        out_specs=P("x"),
    )

    run = jax.jit(lambda q, k, v, ct: vjp(attend, ct, q, k, v))
    clean = [x[places] for x in given]
    dirty = [np.where(places[:, None, None] >= 9, np.float32("nan"), x) for x in clean]
    for found, wanted in zip(run(*dirty), run(*clean), strict=True):
        np.testing.assert_array_equal(found[places >= 9], 0)
        np.testing.assert_allclose(found[places < 9], wanted[places < 9], atol=1e-6)


def test_lengths_that_differ_over_the_ring():
    x = jnp.ones((8, 2, 4))
    attend = jax.shard_map(
        lambda x, lengths: ring_attention(x, x, x, "x", lengths=lengths[0]),
        mesh=line(4),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with pytest.raises(ValueError, match=r"^ring_attention: lengths of local shape \(\) vary over"):
        jax.eval_shape(attend, x, jnp.arange(4))
