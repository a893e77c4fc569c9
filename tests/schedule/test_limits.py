"""Predictions that no chip can keep are refused, and their texts kept for a report."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import Floor, compile_for, explain, program_floor, target, timeline
from jaxpar.tools.timeline.floor import require_possible
from jaxpar.tools.timeline.links import Links


@pytest.fixture(scope="module")
def program():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P())
    return compile_for(jnp.matmul, target("v5e:2x2"), shape, shape)


def test_a_prediction_below_the_floor_is_refused(program):
    played = timeline(program)
    floor = Floor(compute=2 * played.total, transfer=0.0)
    with pytest.raises(
        RuntimeError, match=r"^timeline: .* us are predicted of .* at least"
    ) as told:
        require_possible(program, played, floor)
    assert "this is a fault of jaxpar; please report it" in str(told.value)
    file = Path(str(told.value).rpartition(" ")[2])
    assert file.read_text() == program.text


def test_what_was_measured_is_believed(program):
    played = replace(timeline(program), estimate="measured")
    require_possible(program, played, Floor(compute=2 * played.total, transfer=0.0))


def test_a_matmul_that_is_written_twice_is_computed_once():
    """Compilers do so: its floor is that of one, and the prediction is not refused."""
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=P())
    twice = compile_for(lambda x, y: x @ y + jnp.sin(x @ y), target("v5e:2x2"), shape, shape)
    chip = twice.target.chip
    assert program_floor(twice).compute == pytest.approx(2 * 2048**3 / 4 / chip.flops)
    assert explain(twice, tries=0).utilisation <= 1


def half(x, out):
    @pl.when(pl.program_id(0) % 2 == 0)
    def computes():
        out[...] = jnp.dot(x[...], x[...], preferred_element_type=jnp.float32)


def test_a_kernel_is_multiplied_as_often_as_it_says():
    """Its own estimate goes before what is traced, in the floor, too."""
    shape = jax.ShapeDtypeStruct((8 * 512, 512), jnp.bfloat16, sharding=P())
    rows = pl.BlockSpec((512, 512), lambda i: (i, 0))
    kernel = pl.pallas_call(
        half,
        grid=(8,),
        in_specs=[rows],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(shape.shape, jnp.float32),
        cost_estimate=pl.CostEstimate(flops=2 * 512**3, transcendentals=0, bytes_accessed=2**20),
    )
    mapped = jax.shard_map(kernel, in_specs=P(), out_specs=P(), check_vma=False)
    program = compile_for(mapped, target("v5e:2x2"), shape)
    floor = program_floor(program)
    assert floor.compute == pytest.approx(2 * 512**3 / program.target.chip.flops)
    assert floor.total <= timeline(program).total


def test_a_switch_that_adds_sends_each_byte_once():
    shape = jax.ShapeDtypeStruct((2**24,), jnp.float32, sharding=P("tp"))
    summed = jax.shard_map(lambda x: lax.psum(x, "tp"), in_specs=P("tp"), out_specs=P())
    program = compile_for(summed, target("h100:8"), shape)
    (sent,) = timeline(program).transfers
    assert program_floor(program).transfer == pytest.approx(
        sent.bytes / 2 / program.target.chip.link
    )


def test_a_transfer_faster_than_its_links_is_refused(monkeypatch):
    shape = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=P("tp"))
    summed = jax.shard_map(lambda x: lax.psum(x, "tp"), in_specs=P("tp"), out_specs=P())
    program = compile_for(summed, target("v5e:2x2"), shape)
    right = Links.transfer
    monkeypatch.setattr(
        Links, "transfer", lambda *args: replace(found := right(*args), sent=100 * found.sent)
    )
    with pytest.raises(RuntimeError, match=r"^timeline: .* sends .* over 2 links of .*; this is a"):
        timeline(program)
