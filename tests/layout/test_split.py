"""Actions: shards of arrays and back, on the host, under jit and inside of shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from wide import assert_alike

from jaxpar import make_mesh
from jaxpar.axis.padding import PaddedDim
from jaxpar.layout import LayoutMap, Padded, Replicate, Split


@pytest.mark.parametrize(
    ("size", "count", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 3, [4, 3, 3]),
        (11, 4, [3, 3, 3, 2]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
    ],
)
def test_the_remainder_goes_to_the_first(size, count, sizes):
    shards = Split(count, 0)(jnp.zeros((size, 2)))
    assert [shard.shape for shard in shards] == [(n, 2) for n in sizes]


@examples(40)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(-4, 3),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
    st.booleans(),
)
def test_undo_gives_exactly_the_array(shape, count, dim, dtype, numpy):
    dim = dim % len(shape) - len(shape) * (dim < 0)
    x = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    x = x if numpy else jnp.asarray(x)
    action = Split(count, dim)
    shards = action(x)
    expected = np.array_split(np.asarray(x), count, axis=dim)
    assert [s.shape for s in shards] == [e.shape for e in expected]
    back = action.undo(shards)
    assert type(back) is type(x) or not numpy
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


def test_inside_of_jit_and_of_derivatives():
    action = Split(3, -1)
    x = jnp.arange(20.0).reshape(2, 10)
    np.testing.assert_array_equal(jax.jit(lambda x: action.undo(action(x)))(x), x)

    def weighted(x):
        return sum((n + 1) * jnp.sum(shard) for n, shard in enumerate(action(x)))

    gradient = jax.grad(weighted)(x)
    np.testing.assert_array_equal(
        gradient, action.undo([jnp.full_like(s, n + 1) for n, s in enumerate(action(x))])
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Split(0, 0), ValueError, "Split: count=0 must be at least 1"),
        (lambda: Split(2.5, 0), TypeError, "Split: count must be a mesh axis name, a tuple"),
        (lambda: Split(True, 0), TypeError, "Split: count must be a mesh axis name"),
        (lambda: Split(2, "row"), TypeError, "Split: dim must be an integer, got 'row'"),
        (lambda: Replicate(0), ValueError, "Replicate: count=0 must be at least 1"),
        (lambda: Padded(3), TypeError, "Padded: axes must be a mesh axis name"),
        (
            lambda: Padded("tp", size=12).blocks(9, 8),
            ValueError,
            "Padded: size=12 must be at least the dimension's 9, and a multiple of 8 devices x 1",
        ),
        (lambda: Padded("tp", multiple=0), ValueError, "Padded: multiple=0 must be at least 1"),
        (
            lambda: Split(2, 3)(jnp.ones((2, 2))),
            ValueError,
            "dim=3 is out of range for a local sha",
        ),
        (
            lambda: Split("tp", 0)(jnp.ones(2)),
            ValueError,
            "is over mesh axes, and a mesh knows the",
        ),
        (lambda: Split(2, 0).local(jnp.ones(2)), ValueError, "has no mesh axis, which alone has a"),
        (lambda: Split(2, 0)("text"), TypeError, "this must be an array, got 'text' of type str"),
        (lambda: Split(3, 0).undo([jnp.ones(1)] * 2), ValueError, "has 3 shards, got 2; give all"),
        (lambda: Split(2, 0).undo([jnp.ones(1)] * 3), ValueError, "has 2 shards, got 3; give all"),
        (
            lambda: Split(2, 0).undo([jnp.ones(1), jnp.ones(2)]),
            ValueError,
            "(1, 2) entries along dimension 0, but 3 entries in 2 shards are (2, 1)",
        ),
        (
            lambda: Split(2, 0).undo([jnp.ones((1, 2)), jnp.ones((1, 3))]),
            ValueError,
            "differ in dimension 0 alone, got float32[1, 2], float32[1, 3]",
        ),
        (lambda: Replicate(2).undo([jnp.ones(1)]), ValueError, "must have 2 copies, got 1"),
        (
            lambda: Replicate(2).undo([jnp.ones(1), jnp.ones(2)]),
            ValueError,
            "copies must have one shape and dtype, got float32[1], float32[2]",
        ),
    ],
)
def test_refused(make, error, text):
    with pytest.raises(error) as found:
        make()
    assert text in str(found.value)


def test_replicated():
    action, x = Replicate(3), jnp.arange(4)
    assert len(action(x)) == 3
    np.testing.assert_array_equal(action.undo(action(x)), x)


def test_equal_by_value():
    assert Split(2, 0) == Split(2, 0)
    assert Split("tp", 0) == Split(("tp",), 0)
    assert len({Split(2, 0), Split(2, 0), Split(2, 1), Replicate(2), Replicate(2)}) == 3


@pytest.mark.parametrize(("axes", "names"), [("tp=8", "tp"), ("dp=2,tp=4", ("tp", "dp"))])
@pytest.mark.parametrize("size", [8, 11, 3])
@pytest.mark.parametrize("dim", [0, -1])
def test_devices_have_their_own_shards(axes, names, size, dim):
    mesh = make_mesh(axes)
    action = Split(names, dim)
    shape = (size, 3) if dim == 0 else (3, size)
    x = jnp.arange(3.0 * size).reshape(shape)

    def own(x):
        shard = action.local(x)
        mask = action.local_mask(size)
        return (
            shard[None],
            action.local_size(size)[None],
            mask[None],
        )

    spec = P(names)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=(spec,) * 3)
    found = map(np.asarray, jax.jit(mapped)(x))
    expected = jax.jit(Split(8, dim))(x)
    for shard, own_size, mask, wanted in zip(*found, expected, strict=True):
        assert own_size == wanted.shape[dim] == mask.sum()
        kept = np.take(shard, range(own_size), axis=dim)
        np.testing.assert_array_equal(kept, wanted)
        assert shard.sum() == wanted.sum()  # the rest is zeros


@pytest.mark.parametrize("size", [1, 5, 8, 11, 13])
def test_as_rules_padding_reaches_no_loss_gradient_or_norm(size, float64):
    """A layer over shards that do not divide, next to the layer on one device."""
    mesh, action = make_mesh("tp=8"), Split("tp", 1)
    rng = np.random.default_rng(size)
    params = {
        "up": rng.normal(size=(6, size)),
        "bias": rng.normal(size=size),
        "down": rng.normal(size=(size, 6)),
    }
    rules = LayoutMap({"up": action, "bias": Split("tp", -1), "down": Split("tp", 0)})
    layout = rules.layout(params, mesh)
    x = rng.normal(size=(4, 6))

    def block(params, x):
        # exp(0) is not 0: what is computed of padding must be masked.
        h = jnp.exp(x @ params["up"] + params["bias"]) * action.local_mask(size).astype(x.dtype)
        return lax.psum(h @ params["down"], "tp")

    def loss(params, x):
        y = jax.shard_map(block, mesh=mesh, in_specs=(layout.specs, P()), out_specs=P())(params, x)
        return jnp.mean(y**2)

    def reference(params, x):
        return jnp.mean((jnp.exp(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)

    placed = layout.place(params)
    value, gradients = jax.jit(jax.value_and_grad(loss))(placed, x)
    expected, wanted = jax.jit(jax.value_and_grad(reference))(params, x)
    norm, got = jax.jit(optax.tree.norm), layout.gather(gradients)
    assert_alike((value, norm(gradients), got), (expected, norm(wanted), wanted))
    for name in params:
        shards = Split(8, {"up": 1, "bias": 0, "down": 0}[name])(params[name])
        for device, shard in zip(mesh.devices.flat, shards, strict=True):
            (own,) = [s for s in placed[name].addressable_shards if s.device == device]
            index = tuple(slice(n) for n in shard.shape)
            np.testing.assert_array_equal(np.asarray(own.data)[index], shard)


@examples(80)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.booleans())
def test_blocks_pad_and_unpad(size, parts, multiple, extra, evenly):
    unit = parts * multiple
    block = (-(-size // unit) + extra) * multiple
    blocks = PaddedDim.evenly(size, parts) if evenly else PaddedDim.at_the_end(size, parts, block)
    assert sum(blocks.sizes) == size
    assert len(blocks.sizes) == parts
    assert all(n <= blocks.block for n in blocks.sizes)
    x = np.arange(2.0 * size * 3).reshape(2, size, 3) + 1
    padded = blocks.pad(x, 1)
    assert padded.shape == (2, blocks.padded, 3)
    np.testing.assert_array_equal(blocks.unpad(padded, 1), x)
    assert padded.sum() == x.sum()
    start = 0
    for index, n in enumerate(blocks.sizes):
        own = padded[:, index * blocks.block :][:, :n]
        np.testing.assert_array_equal(own, x[:, start : start + n])
        start += n
