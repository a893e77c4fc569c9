"""Copies of rows and their sums against NumPy, and what is nobody's copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.moe._copies import Copies, collect, copies_by_key, spread
from jaxpar.testing import assert_matches_reference


def expected_copies(keys, keys_count, capacity):
    """Source, places and sizes, one entry after another."""
    rows, k = keys.shape
    places = np.full((rows, k), capacity, np.int32)
    source = np.full(capacity, rows, np.int32)
    entries = sorted((key, e) for e, key in enumerate(keys.flat) if 0 <= key < keys_count)
    for place, (_, entry) in enumerate(entries[:capacity]):
        source[place], places.flat[entry] = entry // k, place
    return source, places, np.bincount([key for key, _ in entries], minlength=keys_count)


@pytest.mark.parametrize(
    ("rows", "k", "keys_count", "capacity"),
    [(7, 2, 3, 20), (7, 3, 4, 9), (5, 1, 1, 5), (4, 2, 3, 0), (0, 2, 3, 4), (3, 0, 2, 2)],
)
def test_order(rows, k, keys_count, capacity):
    keys = np.random.default_rng(rows).integers(-1, keys_count + 2, (rows, k), dtype=np.int32)
    copies, sizes = jax.jit(copies_by_key, static_argnums=(1, 2))(keys, keys_count, capacity)
    source, places, counted = expected_copies(keys, keys_count, capacity)
    np.testing.assert_array_equal(copies.source, source)
    np.testing.assert_array_equal(copies.places, places)
    np.testing.assert_array_equal(sizes, counted)
    assert {x.dtype for x in jax.tree.leaves((copies, sizes))} == {np.dtype("int32")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_spread_and_collect(dtype):
    """Both, and their gradients, of other rows on each device and of rows that all share."""
    rng = np.random.default_rng(0)
    rows, k, capacity = 5, 3, 8
    keys = rng.integers(-1, 4, (8, rows, k), dtype=np.int32)
    x, y = ((8 * rng.standard_normal(shape)).astype(dtype) for shape in ((rows, 2), (capacity, 2)))

    def both(keys, x, y):
        copies, _ = copies_by_key(keys[0], 4, capacity)
        return spread(copies, x)[None], collect(copies, y)[None]

    def reference(keys, x, y):
        spreads, sums = np.zeros((8, capacity, 2), x.dtype), np.zeros((8, rows, 2), y.dtype)
        for device in range(8):
            source, places, _ = expected_copies(keys[device], 4, capacity)
            spreads[device, source < rows] = x[source[source < rows]]
            for row, place in zip(*np.nonzero(places < capacity), strict=True):
                sums[device, row] += y[places[row, place]]
        return spreads, sums

    assert_matches_reference(
        both,
        reference,
        *(keys, x, y),
        mesh=make_mesh("x=8"),
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
    )


def test_sums_are_wide():
    """256 + 1 + 1 is 258 in bfloat16 too, if not rounded after each addition."""
    copies = Copies(jnp.zeros(3, "int32"), jnp.arange(3)[None])
    y = jnp.array([256, 1, 1], "bfloat16")
    assert collect(copies, y) == 258


def test_rows_of_nobody():
    """NaN outside of all copies reaches neither results nor gradients, first or second."""
    copies = Copies(jnp.array([1, 3, 3, 0, 3]), jnp.array([[3, 5], [5, 0], [5, 5]]))

    def cubes(y):
        return jnp.sum(collect(copies, y) ** 3)

    y = jnp.array([1.0, jnp.nan, jnp.nan, 2.0, jnp.nan])
    assert cubes(y) == 9
    np.testing.assert_array_equal(jax.grad(cubes)(y), [3, 0, 0, 12, 0])
    second = jax.grad(lambda y: jnp.sum(jax.grad(cubes)(y) ** 2))(y)
    np.testing.assert_array_equal(second, [2 * 3 * 6, 0, 0, 2 * 12 * 12, 0])
    _, pull = jax.vjp(lambda x: spread(copies, x), jnp.ones(3))
    np.testing.assert_array_equal(pull(y)[0], [2, 1, 0])
    unfilled = spread(copies, jnp.ones(3), fill=False)
    np.testing.assert_array_equal(unfilled, [1, jnp.nan, jnp.nan, 1, jnp.nan])


def test_no_scatters():
    copies = Copies(jnp.arange(4), jnp.arange(4)[:, None])
    text = jax.jit(jax.grad(lambda x: jnp.sum(spread(copies, x) ** 2))).lower(jnp.ones(4)).as_text()
    assert "gather" in text
    assert "scatter" not in text


def test_batches():
    keys = np.random.default_rng(1).integers(0, 3, (2, 4, 2), dtype=np.int32)
    x = np.random.default_rng(2).standard_normal((4, 2)).astype("float32")

    def run(keys, x):
        copies, _ = copies_by_key(keys, 3, 6)
        return jnp.sum(spread(copies, x) ** 2) + jnp.sum(collect(copies, spread(copies, x)) ** 3)

    grads = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(run, (0, None))(keys, x))))(x)
    each = jax.jit(jax.grad(run, 1))
    np.testing.assert_allclose(grads, sum(each(one, x) for one in keys), rtol=1e-6)
