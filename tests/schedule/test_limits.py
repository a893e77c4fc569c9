"""Predictions that no chip can keep are refused, and their texts kept for a report."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import Floor, compile_for, explain, program_floor, target, timeline
from jaxpar.tools.timeline.limits import require_possible


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
