"""Lookups and their gradients, compiled for chips with SparseCores and without them."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh.chips import REACHED
from jaxpar.schedule import compile_for, explain, target, timeline

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
ROWS, LOOKED_UP, WIDTH = 131072, 8192, 1024
TABLE, MOVED = ROWS * WIDTH * 2, LOOKED_UP * WIDTH * 2  # bytes, of bfloat16


def looked_up(table, places):
    return table[places] * 2


def gradient(table, places):
    return jax.grad(lambda table: (table[places].astype(jnp.float32) ** 2).sum())(table)


@cache
def compiled(chip, function):
    table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=P())
    places = jax.ShapeDtypeStruct((LOOKED_UP,), jnp.int32, sharding=P())
    return compile_for(function, target(chip), table, places, compiler_options={})


def moved(program):
    """The bytes that HBM moves in a step's time."""
    return timeline(program).total * REACHED * program.target.chip.hbm


@pytest.mark.parametrize("chip", CHIPS)
def test_a_lookup_reads_its_rows_and_not_the_table(chip):
    """They are read and written, and the product, too, or from VMEM."""
    assert 2.5 * MOVED < moved(compiled(chip, looked_up)) < 5 * MOVED


@pytest.mark.parametrize("chip", CHIPS)
def test_the_gradient_of_a_lookup_is_as_large_as_the_table(chip):
    """Zeros are written in the whole of it, wherever they are made, and then rows are added."""
    assert TABLE + 2 * MOVED < moved(compiled(chip, gradient)) < 2.5 * TABLE


@pytest.mark.parametrize("chip", CHIPS)
def test_a_table_is_in_memory_once(chip):
    found = explain(compiled(chip, looked_up), tries=0)
    assert [one.array for one in found.at_peak].count(f"bf16[{ROWS},{WIDTH}]") == 1
    assert not [one for one in found.overheads if str(ROWS) in one.what]
