"""Sums of 16-bit floats are added in float32, and what travels is in the dtype asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, all_gather, all_reduce, make_mesh, reduce_scatter
from jaxpar.testing import assert_matches_reference

N = 8
both_rings = pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])
narrow = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def sums(mode, x, check_vma=True, wire_dtype=jnp.float32):
    """The sum of `x` over its first dimension by a reduce-scatter, an all-reduce and a gradient."""
    axis = Axis("x", mode=mode, wire_dtype=wire_dtype)

    def run(x):
        x = x[0]
        pull = jax.vjp(lambda block: all_gather(block, axis, tiled=True), x[: x.size // N])[1]
        return (
            reduce_scatter(x, axis, tiled=True),
            all_reduce(x, axis)[None],
            *pull(x),
        )

    mapped = jax.shard_map(
        run, mesh=make_mesh({"x": N}), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )
    scattered, reduced, *gradient = jax.jit(mapped)(x)
    return [scattered, *reduced, *gradient]


def rounding(found, x):
    """Largest error relative to the sum, in units of the last place."""
    exact = x.astype(np.float64).sum(0)
    error = np.abs(np.asarray(found, np.float64) - exact) / np.abs(exact)
    return error.max() / float(jnp.finfo(found.dtype).eps)


@both_rings
@narrow
def test_sums_are_rounded_once_with_a_wide_wire(mode, dtype):
    x = np.random.default_rng(0).uniform(0.5, 1.5, (N, 256)).astype(jnp.dtype(dtype))
    carried = x[0]
    for partial_sum in x[1:]:
        carried = carried + partial_sum
    assert rounding(carried, x) > 0.7  # what a ring that carries its sums in `dtype` does
    for found in sums(mode, x):
        assert found.dtype == x.dtype
        assert rounding(found, x) < 0.501


@both_rings
def test_partial_sums_may_exceed_the_largest_float16(mode):
    # Whichever way a ring adds, it passes three neighbours of one sign.
    x = np.repeat(np.float16([[6e4], [6e4], [6e4], [6e4], [-6e4], [-6e4], [-6e4], [-6e4]]), 16, 1)
    for found in sums(mode, x):
        np.testing.assert_array_equal(found, np.zeros(2 * N))


@both_rings
@pytest.mark.parametrize("check_vma", [True, False])
def test_narrow_wire(mode, check_vma):
    x = np.random.default_rng(0).uniform(0.5, 1.5, (N, 256)).astype(np.float32)
    for found in sums(mode, x, check_vma, jnp.bfloat16):
        assert found.dtype == np.float32
        error = rounding(found, x) * float(jnp.finfo(np.float32).eps / jnp.finfo(jnp.bfloat16).eps)
        assert 0.05 < error < N  # rounded on the way, and at most half a unit a hop


@both_rings
def test_narrow_wire_with_gradients(mode):
    x = np.random.default_rng(0).standard_normal((N, 16)).astype(np.float32)

    def both(x):
        scattered = reduce_scatter(x[0], "x", tiled=True, mode=mode, wire_dtype="bfloat16")
        return scattered, all_reduce(x, "x", mode=mode, wire_dtype="bfloat16")

    assert_matches_reference(
        both,
        lambda x: (x.sum(0), x.sum(0, keepdims=True)),
        x,
        mesh=make_mesh({"x": N}),
        in_specs=P("x"),
        out_specs=(P("x"), P()),
        rounding_dtype=jnp.bfloat16,
        check_vma=mode == "bidirectional",
    )
