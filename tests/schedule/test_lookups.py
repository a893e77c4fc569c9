"""Lookups and their gradients, compiled for chips with SparseCores and without them."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.platforms.chips import REACHED
from jaxpar.schedule import compile_for, explain, target, timeline
from jaxpar.tools.program.operations import read

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


COMBINERS = {
    "replaced": ("  ROOT %r = f32[] bitcast(%new)\n", 1),
    "added": ("  ROOT %r = f32[] add(%old, %new)\n", 2),
    "greatest": ("  ROOT %r = f32[] maximum(%new, %old)\n", 2),
}


@pytest.mark.parametrize(("table", "rows"), [(4096, 64), (4096, 4096), (16, 65536)])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_scatter_changes_no_more_than_its_table(table, rows, combiner):
    """It reads all updates, and of the table what it adds to: rows that repeat count once."""
    combined, times = COMBINERS[combiner]
    text = (
        "HloModule test, is_scheduled=true\n"
        "%combiner (old: f32[], new: f32[]) -> f32[] {\n"
        f"  %old = f32[] parameter(0)\n  %new = f32[] parameter(1)\n{combined}}}\n"
        f"ENTRY %main (t: f32[{table},8]) -> f32[{table},8] {{\n"
        f"  %t = f32[{table},8] parameter(0)\n  %at = s32[{rows}] parameter(1)\n"
        f"  %u = f32[{rows},8] parameter(2)\n"
        f"  ROOT %s = f32[{table},8] scatter(%t, %at, %u), to_apply=%combiner\n}}\n"
    )
    moved = read(text).entry.operations[-1].work.moved
    assert moved == 4 * rows + 32 * rows + times * 32 * min(rows, table)


@pytest.mark.parametrize("chip", ["v5e:2x2", "tpu7x:2x2x1"])
def test_many_rows_are_summed_in_few(chip):
    """The data are read once; the sums, a sixteenth, are zeroed, read and written."""
    data = jax.ShapeDtypeStruct((65536, 512), jnp.float32, sharding=P())
    places = jax.ShapeDtypeStruct((65536,), jnp.int32, sharding=P())
    program = compile_for(
        lambda data, places: jax.ops.segment_sum(data, places, 4096),
        target(chip),
        data,
        places,
        compiler_options={},
    )
    assert 65536 * 512 * 4 < moved(program) < 1.3 * 65536 * 512 * 4
