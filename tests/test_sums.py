"""Sums of booleans and integers mean the same in every function that sums over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    LowBit,
    all_gather_matmul,
    all_reduce,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from jaxpar.layers import (
    fsdp_linear,
    reduce_compressed_gradients,
    reduce_gradients,
    reduce_region,
    vocab_parallel_embedding,
)

SUMS = {
    "all_reduce": lambda x: all_reduce(x, "y"),
    "reduce_scatter": lambda x: reduce_scatter(x, "y", tiled=True),
    "reduce_region": lambda x: reduce_region(x, "y"),
    "reduce_gradients": lambda x: reduce_gradients(x, "y"),
    "reduce_compressed_gradients": lambda x: reduce_compressed_gradients(x, "y"),
    "vocab_parallel_embedding": lambda x: vocab_parallel_embedding(
        jnp.arange(3), x, "y", sequence_dim=None
    ),
    "all_gather_matmul": lambda x: all_gather_matmul(x, x, "y"),
    "matmul_reduce_scatter": lambda x: matmul_reduce_scatter(x, x, "y"),
    "matmul_all_reduce": lambda x: matmul_all_reduce(x, x, "y"),
    "fsdp_linear": lambda x: fsdp_linear(x, x, "y"),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_booleans_have_no_sums(name, check_vma):
    """Of JAX's own sums `psum` counts them, `psum_scatter` raises, and a matmul is an "or"."""
    mapped = jax.shard_map(
        lambda x: SUMS[name](x > 0),
        mesh=make_mesh("x=2,y=4"),
        in_specs=P(),
        out_specs=P(("x", "y")),
        check_vma=check_vma,
    )
    with pytest.raises(TypeError, match=rf"^{name}: .* bool\[4, 4\].* no sums?; cast"):
        jax.eval_shape(mapped, np.ones((4, 4), np.float32))


@pytest.mark.parametrize("wire", ["int8", LowBit("float8_e4m3fn"), LowBit("int8", sums="int8")])
def test_integers_travel_as_they_are_over_a_wire_of_8_bits(wire):
    axis = Axis("y", wire_dtype=wire)

    def local(x):
        whole = all_reduce(x, axis), reduce_region(x, axis), reduce_gradients(x, axis)
        return [reduce_scatter(x, axis), *(lax.slice_in_dim(y, 0, 1)[0] for y in whole)]

    mapped = jax.shard_map(
        local, mesh=make_mesh("x=2,y=4"), in_specs=P(), out_specs=P(), check_vma=False
    )
    for found in jax.jit(mapped)(np.full((4, 2), 10**6, np.int32)):
        np.testing.assert_array_equal(found, [4 * 10**6] * 2)


@pytest.mark.parametrize(("wire", "dtype"), [("int16", "int32"), ("int4", "int8")])
def test_a_wire_for_integers_that_is_too_narrow(wire, dtype):
    message = f"all_reduce: wire_dtype={wire} cannot carry sums of {dtype}, which would wrap around"
    mapped = jax.shard_map(
        lambda x: all_reduce(x, "y", wire_dtype=wire),
        mesh=make_mesh("x=2,y=4"),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(mapped, np.ones(4, dtype))
