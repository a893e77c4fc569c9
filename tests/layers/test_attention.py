"""Sharded heads, whatever their number, against attention on one device in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, make_mesh
from jaxpar.layers import head_layout, parallel_attention
from jaxpar.testing import assert_matches_reference, count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])
S, K, E, M = 8, 3, 2, 4  # tokens, features, a head's size, features of the result


def softmax_attention(xp, q, k, v):
    """Causal, of `xp` = NumPy or jax.numpy; query head j uses key and value head j // (h // g).

    Capped scores, without which a bias of keys would make no difference.
    """
    *_, s, h, e = q.shape
    q = q.reshape(*q.shape[:-2], k.shape[-2], h // k.shape[-2], e)
    scores = xp.einsum("...sgre,...tge->...grst", q, k) / np.sqrt(e).astype(q.dtype)
    scores = xp.tanh(scores)
    scores = xp.where(np.tri(s, dtype=bool), scores, xp.full_like(scores, -1e9))
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = xp.einsum("...grst,...tge->...sgre", weights, v)
    return out.reshape(*out.shape[:-3], h, v.shape[-1])


def attend(q, k, v):
    return softmax_attention(jnp, q, k, v)


def attention(heads, kv_heads):
    """On whole arrays; of padded ones, the first heads."""

    def reference(x, w_q, w_k, w_v, w_o, b_q=0.0, b_k=0.0, b_v=0.0, b_o=0.0):
        q, k, v = (
            y.reshape(*y.shape[:-1], -1, E) for y in (x @ w_q + b_q, x @ w_k + b_k, x @ w_v + b_v)
        )
        o = softmax_attention(np, q[..., :heads, :], k, v)
        return o.reshape(*o.shape[:-2], -1) @ w_o[: heads * E] + b_o

    return reference


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("float32")


def arrays(layout, *, biases=False, tokens=(1, S), k=K, m=M):
    """Weights whose padding is not zero, which must make no difference."""
    padded, kv = layout.padded_heads * E, layout.kv_heads * E
    weights = normal(k, padded), normal(k, kv, seed=1), normal(k, kv, seed=2), normal(padded, m)
    added = normal(padded), normal(kv, seed=1), normal(kv, seed=2), normal(m)
    return (normal(*tokens, k), *weights, *(added if biases else ()))


def line(n):
    return make_mesh({"tp": n}, devices=jax.devices()[:n])


def specs(layout, dim, biases=False):
    """Of x and weights, and of biases."""
    columns, rows, tokens = P(None, "tp"), P("tp"), P() if dim is None else P(None, "tp")
    kv = layout.kv_sharded
    weights = columns, columns if kv else P(), columns if kv else P(), rows
    added = rows, rows if kv else P(), rows if kv else P(), P()
    return (tokens, *weights, *(added if biases else ())), tokens


# -- which heads --------------------------------------------------------------------------------


def test_layouts():
    """Every query head is on one device, with its own key and value head."""
    for kv_heads in (1, 2, 3, 4):
        for group in (1, 2, 5):
            for shards in (1, 3, 4):
                layout = head_layout(kv_heads * group, kv_heads, shards)
                assert layout.padded_heads % shards == 0
                assert 0 <= layout.padded_heads - layout.heads < shards
                assert layout.local_heads % layout.local_kv_heads == 0
                repeat = layout.local_heads // layout.local_kv_heads
                found = np.arange(layout.padded_heads)
                for shard in range(shards):
                    queries = np.asarray(layout.query_heads_of(shard))
                    used = np.repeat(np.asarray(layout.kv_heads_of(shard)), repeat)
                    real = queries < layout.heads
                    np.testing.assert_array_equal(used[real], queries[real] // group)
                    found[queries] = -1
                    if layout.kv_sharded:
                        own = layout.kv_heads // shards
                        np.testing.assert_array_equal(used[::group], shard * own + np.arange(own))
                assert np.all(found == -1)


def test_padding():
    layout = head_layout(3, 1, 2)
    w, o = jnp.ones((5, 6)), jnp.ones((6, 5))
    padded = layout.pad_query(w)
    np.testing.assert_array_equal(padded, np.pad(w, ((0, 0), (0, 2))))
    np.testing.assert_array_equal(layout.unpad_query(padded), w)
    np.testing.assert_array_equal(layout.pad_output(o), np.pad(o, ((0, 2), (0, 0))))
    np.testing.assert_array_equal(layout.unpad_output(layout.pad_output(o)), o)
    np.testing.assert_array_equal(layout.pad_query(o[None], dim=1)[0], layout.pad_output(o))
    with pytest.raises(ValueError, match=r"^") as caught:
        layout.pad_query(o)
    assert str(caught.value) == (
        "HeadLayout.pad_query: w has shape (6, 5), whose dimension 1 is not a whole "
        "number of 3 heads: "
        "5 = 1 x 3 + 2; pass the unsharded array, and the dimension of its heads"
    )
    with pytest.raises(
        ValueError, match=r"HeadLayout\.pad_output: dim=2 is out of range for a local shape"
    ):
        layout.pad_output(o, dim=2)


def test_numbers_of_heads_are_integers():
    assert head_layout(np.int64(6), np.int64(2), np.int32(4)) == head_layout(6, 2, 4)
    for wrong in ((6.0, 2, 4), (6, True, 4)):
        with pytest.raises(TypeError, match=r"head_layout: .* must be an integer, got"):
            head_layout(*wrong)


# -- values and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "dim", "mode", "check_vma"),
    [
        (4, 2, 2, -2, "unidirectional", True),  # all sharded
        (8, 2, 4, -2, "naive", False),  # fewer key heads than devices
        (6, 2, 4, None, "naive", True),  # a device's two query heads use one key head, or two
        (6, 3, 2, -2, "naive", True),  # three query heads use two key heads, one of them twice
        (5, 5, 4, None, "naive", False),
        (1, 1, 4, -2, "naive", True),
        (2, 1, 1, -2, "naive", False),
    ],
)
def test_any_number_of_heads(heads, kv_heads, n, dim, mode, check_vma):
    """Entries of padding are among those whose gradients are compared: theirs are 0.

    In float64: the gradients of the keys' bias cancel, so that rounding is all that is left.
    """
    layout = head_layout(heads, kv_heads, n)
    in_specs, tokens = specs(layout, dim, biases=True)

    def layer(*args):
        options = {"heads": heads, "kv_heads": kv_heads, "sequence_dim": dim}
        axis = Axis("tp", mode=mode)
        return parallel_attention(*args[:5], axis, attend, biases=args[5:], **options)

    with jax.enable_x64(True):
        assert_matches_reference(
            layer,
            attention(heads, kv_heads),
            *map(np.float64, arrays(layout, biases=True)),
            mesh=line(n),
            in_specs=in_specs,
            out_specs=tokens,
            check_vma=check_vma,
            max_directions=2,
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "check_vma"), [(5, 5, True), (6, 2, False), (1, 1, False)]
)
def test_padding_gets_no_gradient(heads, kv_heads, check_vma):
    layout = head_layout(heads, kv_heads, 4)
    in_specs, tokens = specs(layout, -2, biases=True)
    args = arrays(layout, biases=True)

    def layer(*args):
        return parallel_attention(
            *args[:5], "tp", attend, heads=heads, kv_heads=kv_heads, biases=args[5:]
        )

    mapped = jax.shard_map(
        layer, mesh=line(4), in_specs=in_specs, out_specs=tokens, check_vma=check_vma
    )
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(mapped(*a))), argnums=(1, 4, 5)))(*args)
    for gradient, axis in zip(gradients, (1, 0, 0), strict=True):
        real, padding = np.split(np.asarray(gradient), [heads * E], axis)
        assert padding.size
        assert not padding.any()
        assert real.all()


BOTH = ("tp", "fsdp"), ("fsdp", "tp")  # on one dimension


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mesh_axes", "w_q", "w_o", "axes", "first", "dim", "check_vma"),
    [
        # Blocks that cut heads, and are whole heads once gathered.
        (3, 1, (2, 2), P(None, BOTH[0]), P(BOTH[0]), (1, 0), False, -2, False),
        (2, 1, (2, 2), P("fsdp", "tp"), P("tp", "fsdp"), (0, 1), False, None, True),
        (4, 2, (2, 2), P("fsdp", "tp"), P(BOTH[0]), 0, False, -2, False),
        # Heads cut by fsdp first: a device has two blocks of them that are not neighbours.
        (4, 4, (2, 2), P(None, BOTH[1]), P(BOTH[1]), (1, 0), True, -2, True),
        (6, 2, (2, 2), P(None, BOTH[1]), P(BOTH[1]), (1, 0), True, None, False),
        (3, 1, (2, 2), P(None, BOTH[1]), P(BOTH[1]), (1, 0), True, -2, True),
    ],
)
def test_weights_over_two_axes(heads, kv_heads, mesh_axes, w_q, w_o, axes, first, dim, check_vma):
    f, n = mesh_axes
    layout = head_layout(heads, kv_heads, n * f if first else n)
    tokens = P("fsdp") if dim is None else P("fsdp", "tp")
    whole = P("fsdp") if w_q[0] else P(None, "fsdp")
    kv = w_q if layout.kv_sharded else whole
    mesh = make_mesh({"fsdp": f, "tp": n}, devices=jax.devices()[: f * n])
    b_q = P(BOTH[1]) if first else P("tp")

    def layer(*args):
        return parallel_attention(
            *args[:5],
            Axis("tp", mode="naive"),
            attend,
            heads=heads,
            kv_heads=kv_heads,
            biases=(args[5], None, None, None),
            sequence_dim=dim,
            fsdp_axis=Axis("fsdp", mode="naive"),
            fsdp_dim=axes,
            fsdp_first=first,
        )

    assert_matches_reference(
        layer,
        attention(heads, kv_heads),
        *arrays(layout, biases=True, tokens=(f, S), k=2 * f)[:6],
        mesh=mesh,
        in_specs=(tokens, w_q, kv, kv, w_o, b_q),
        out_specs=tokens,
        check_vma=check_vma,
        max_directions=2,
    )


@check
def test_bfloat16(check_vma):
    """The gradients of key weights that all devices have are summed in float32."""
    layout = head_layout(6, 3, 4)
    in_specs, tokens = specs(layout, -2)
    assert_matches_reference(
        lambda *args: parallel_attention(*args, "tp", attend, heads=6, kv_heads=3),
        attention(6, 3),
        *(jnp.asarray(a, "bfloat16") for a in arrays(layout)),
        mesh=line(4),
        in_specs=in_specs,
        out_specs=tokens,
        max_directions=2,
        check_vma=check_vma,
    )


def test_float64_and_heads_of_another_size_for_values():
    layout = head_layout(2, 1, 2)
    in_specs, tokens = specs(layout, -2)
    seen = []

    def attend(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return jax.nn.dot_product_attention(q, k, k) * v.sum(-1, keepdims=True)

    # It promotes float64 with float32 to float64, which strict promotion forbids.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x, w_q, w_k, _, w_o = (jnp.asarray(a, "float64") for a in arrays(layout))
        mapped = jax.shard_map(
            lambda *args: parallel_attention(*args, "tp", attend, heads=2, kv_heads=1),
            mesh=line(2),
            in_specs=in_specs,
            out_specs=tokens,
        )
        y = jax.eval_shape(mapped, x, w_q, w_k, jnp.ones((K, 3)), w_o)
        assert y.dtype == jnp.float64
    assert seen[-1] == ((1, S, 1, 2), (1, S, 1, 2), (1, S, 1, 3))


# -- what is sent and kept ----------------------------------------------------------------------


GATHERS = {"all_gather": 1, "psum_scatter": 1}, {"all_gather": 1, "psum_scatter": 1}
PERMUTES = {"ppermute": 3 + 3}, {"ppermute": 3 * 3}


@pytest.mark.parametrize(
    ("kv_heads", "mode", "counts", "check_vma"),
    [
        (1, "naive", GATHERS, True),
        (1, "unidirectional", PERMUTES, False),
        (4, "naive", GATHERS, False),
        (4, "unidirectional", PERMUTES, True),
    ],
)
def test_projections_share_one_gather(kv_heads, mode, counts, check_vma):
    """Weights of keys and values that all devices have get a sum of their gradients each."""
    forward, backward = counts
    layout = head_layout(4, kv_heads, 4)
    in_specs, tokens = specs(layout, -2)
    mapped = jax.shard_map(
        lambda *args: parallel_attention(
            *args, Axis("tp", mode=mode), attend, heads=4, kv_heads=kv_heads
        ),
        mesh=line(4),
        in_specs=in_specs,
        out_specs=tokens,
        check_vma=check_vma,
    )
    found = count_collectives(mapped, *arrays(layout))
    assert found.forward == forward
    assert found.backward == backward | ({} if layout.kv_sharded else {"psum": 2})


@check
def test_gathered_weights_are_not_kept(check_vma):
    """Nor those selected from them: only shards, x, q, k, v, and what follows."""
    layout = head_layout(4, 2, 4)
    mesh = make_mesh({"fsdp": 2, "tp": 4})

    def take_queries(q, k, v):  # keeps nothing
        return q + k + v

    mapped = jax.shard_map(
        lambda *args: parallel_attention(
            *args, "tp", take_queries, heads=4, kv_heads=2, fsdp_axis="fsdp"
        ),
        mesh=mesh,
        in_specs=(P("fsdp", "tp"), P("fsdp", "tp"), P("fsdp"), P("fsdp"), P(BOTH[0])),
        out_specs=P("fsdp", "tp"),
        check_vma=check_vma,
    )
    args = arrays(layout, tokens=(2, S), k=16, m=6)
    x, w_q, w_k, w_v, w_o = (a.size for a in args)
    attended = 2 * S * 4 * E  # the whole of o
    found = count_collectives(mapped, *args)
    assert found.residual_bytes == 4 * ((x + w_q + w_o + attended) // 8 + (w_k + w_v) // 2)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_no_tokens(kv_heads):
    layout = head_layout(4, kv_heads, 2)
    in_specs, out_specs = specs(layout, 1)
    mapped = jax.shard_map(
        lambda *args: parallel_attention(*args, "tp", attend, heads=4, kv_heads=kv_heads),
        mesh=line(2),
        in_specs=in_specs,
        out_specs=out_specs,
    )
    args = arrays(layout, tokens=(0, S))
    gradient = jax.grad(lambda *args: jnp.sum(mapped(*args)), argnums=tuple(range(len(args))))
    assert jax.eval_shape(mapped, *args).shape == (0, S, M)
    assert [g.shape for g in jax.eval_shape(gradient, *args)] == [x.shape for x in args]


# -- errors -------------------------------------------------------------------------------------


def error(*shapes, attend=attend, heads=4, kv_heads=2, **options):
    """What it says of local arrays, on a mesh of fsdp=2, tp=4, after its own name."""

    def body():
        args = [jax.lax.pcast(jnp.zeros(x), ("fsdp", "tp"), to="varying") for x in shapes]
        parallel_attention(*args, "tp", attend, heads=heads, kv_heads=kv_heads, **options)
        return jnp.zeros(8)

    mesh = make_mesh({"fsdp": 2, "tp": 4})
    with pytest.raises(ValueError, match=r"^") as caught:
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("fsdp", "tp"))))
    return str(caught.value)


def test_errors():
    x, q, kv, o = (1, 2, 3), (3, 2), (3, 4), (2, 3)
    assert error(x, q, kv, kv, o, heads=3) == (
        "parallel_attention: heads=3 is not a multiple of kv_heads=2: 3 = 1 x 2 + 1; "
        "every key and value "
        "head serves as many query heads"
    )
    assert error(x, q, kv, kv, o, kv_heads=0) == "parallel_attention: kv_heads=0 must be at least 1"
    assert error(x, q, (3, 3), kv, o) == (
        "parallel_attention: w_k has local shape (3, 3), 3 columns here, which are no 2 heads: "
        "3 = 1 x 2 + 1; head_layout(4, 2, 4) has 2 key and value heads replicated"
    )
    assert error(x, (3, 3), kv, kv, o, heads=8) == (
        "parallel_attention: w_q has local shape (3, 3), 3 columns here, which are no 2 heads: "
        "3 = 1 x 2 + 1; head_layout(8, 2, 4) has 8 query heads over 4 devices"
    )
    assert error(x, q, (3, 3), kv, o, heads=8, kv_heads=8) == (
        "parallel_attention: w_k has local shape (3, 3), 3 columns here, which are no 2 heads: "
        "3 = 1 x 2 + 1; head_layout(8, 8, 4) has 8 key and value heads over 4 devices"
    )
    assert error(x, q, (3, 2), kv, o) == (
        "parallel_attention: w_q has local shape (3, 2), 2 columns a head, and w_k (3, 2), 1; they "
        "must have as many"
    )
    assert error(x, q, kv, kv, o, attend=lambda q, k, v: q[0]) == (
        "parallel_attention: attend returned local shape (8, 1, 2) for q (1, 8, 1, 2), "
        "k (1, 8, 1, 2) and v (1, 8, 1, 2); it must be (1, 8, 1) and the size of a head"
    )
    assert error(x, q, kv, kv, o, fsdp_first=True) == (
        "parallel_attention: fsdp_first=True means that heads are sharded over fsdp_axis and "
        "axis in this order, but fsdp_dim is (0, 0) and fsdp_axis None; give "
        "fsdp_dim=(1, 0) and the axis, or leave it out"
    )
    assert error(x, q, kv, kv, (3, 3)) == (
        "parallel_attention: x has local shape (1, 8, 2) and w_o (3, 3), but 2 columns of x cannot "
        "meet 3 rows of w_o; they must be equal: check how both are sharded over axis 'tp' (4)"
    )
