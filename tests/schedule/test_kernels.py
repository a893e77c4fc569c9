"""Pallas kernels: what they multiply, from their own traced programs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, program_floor, target, timeline
from jaxpar.tools.explain.explained import at_least

TILE, SIZE = 256, 4096


def multiply(x, y, out):
    product = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
    out[...] = product.astype(out.dtype)


def add(x, y, out):
    out[...] = x[...] + y[...]


def kernel(body, x, y, **more):
    rows, columns = pl.BlockSpec((TILE, SIZE), lambda i, j: (i, 0)), (SIZE, TILE)
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // TILE, y.shape[1] // TILE),
        in_specs=[rows, pl.BlockSpec(columns, lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        **more,
    )(x, y)


def compiled(function, rows=SIZE):
    found = target("v6e:2x2", "x=4")
    mapped = jax.shard_map(function, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    shapes = ((4 * rows, SIZE), P("x")), ((SIZE, SIZE), P())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec) for shape, spec in shapes]
    return compile_for(mapped, found, *args)


@pytest.mark.parametrize("times", [1, 3])
def test_a_kernel_takes_what_its_grid_multiplies(times):
    """Also in a loop."""

    def repeated(x, y):
        return jax.lax.fori_loop(0, times, lambda _, x: kernel(multiply, x, y), x)

    program = compiled(repeated)
    played, chip = timeline(program), program.target.chip
    flops = times * 2 * SIZE**3
    multiplied = sum(event.seconds for event in played.events if event.is_matmul)
    assert multiplied == pytest.approx(flops / chip.flops)
    assert program_floor(program).compute == pytest.approx(flops / chip.flops)
    assert played.kernels_of_unknown_cost == ()


def test_an_estimate_of_its_own_counts():
    estimate = pl.CostEstimate(flops=8 * 2 * SIZE**3, bytes_accessed=0, transcendentals=0)
    program = compiled(partial(kernel, multiply, cost_estimate=estimate))
    assert timeline(program).compute == pytest.approx(
        8 * 2 * SIZE**3 / program.target.chip.flops, rel=0.1
    )


def test_kernels_that_cannot_be_told_apart_are_named():
    """Of the same shapes, one that multiplies and one that does not."""

    def both(x, y):
        def sums(x, y, out):
            out[...] = x[:, :TILE] + y[:TILE, :]

        return kernel(multiply, x, y) + kernel(sums, x, y)

    program = compiled(both)
    (name,) = timeline(program).kernels_of_unknown_cost
    assert name.endswith("pallas_call")
    text = str(explain(program))
    assert " ".join(at_least(name).split()[:8]) in " ".join(text.split())
