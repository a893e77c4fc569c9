"""Predictions that no chip can keep are refused, and their texts kept for a report."""

import re
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxpar.layout import LayoutMap
from jaxpar.schedule import Floor, compile_for, explain, program_floor, target, timeline
from jaxpar.tools.cli import bench_figures
from jaxpar.tools.cli.bench_reasons import Host
from jaxpar.tools.cli.tune_worker import Predicted
from jaxpar.tools.explain.trials import Budget, Trials
from jaxpar.tools.timeline.links import Links


@pytest.fixture(scope="module")
def program():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P())
    return compile_for(jnp.matmul, target("v5e:2x2"), shape, shape)


def test_a_prediction_below_the_floor_is_refused(program):
    """As of a chip with fewer FLOPs a second than the compiler's cycles say."""
    slow = replace(program.target.chip, flops=program.target.chip.flops / 100)
    with pytest.raises(
        RuntimeError, match=r"^timeline: .* us are predicted of .* at least"
    ) as told:
        timeline(program, slow)
    assert "this is a fault of jaxpar; please report it" in str(told.value)
    file = Path(str(told.value).rpartition(" ")[2])
    assert file.read_text() == program.text


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


@pytest.mark.parametrize(("name", "links"), [("v5e:2x2", 2), ("h100:4", 1)])
def test_a_transfer_faster_than_its_links_is_refused(name, links, monkeypatch):
    shape = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=P("tp"))
    summed = jax.shard_map(lambda x: lax.psum(x, "tp"), in_specs=P("tp"), out_specs=P())
    program = compile_for(summed, target(name), shape)
    right = Links.transfer
    monkeypatch.setattr(
        Links, "transfer", lambda *args: replace(found := right(*args), sent=100 * found.sent)
    )
    said = rf"^timeline: .* sends .* over {links} links? of .*; this is a"
    with pytest.raises(RuntimeError, match=said):
        timeline(program)


# -- every command that plays a program refuses alike --------------------------------------------


@pytest.fixture
def slow_links(monkeypatch):
    """As if no link sent anything: then every transfer is too fast."""
    monkeypatch.setattr(Links, "least", lambda *_: inf)


V5E = target("v5e:2x2")
SHAPE = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=P("tp"))
FAULT = "timeline: .* sends .* this is a fault of jaxpar; please report"


def gathered(x):
    local = partial(lax.all_gather, axis_name="tp", tiled=True)
    return jax.shard_map(local, in_specs=P("tp"), out_specs=P(), check_vma=False)(x)


def test_edits(monkeypatch):
    program = compile_for(gathered, V5E, SHAPE)
    monkeypatch.setattr(Links, "least", lambda *_: inf)
    trials = Trials(None, None)
    trials.run(
        [(1.0, [[SimpleNamespace(text="x", disagrees="", compiled=lambda: program)]])],
        Budget(1, inf),
    )
    assert trials.done == {"x": None}
    assert re.match(f"RuntimeError: {FAULT}", trials.refused["x"])


@pytest.mark.usefixtures("slow_links")
def test_tune():
    tuned = Predicted(jax.jit(gathered), (SHAPE,), V5E.mesh, {}, V5E)
    with pytest.raises(RuntimeError, match=FAULT):
        tuned.time(tuned.lower({}))


@pytest.mark.usefixtures("slow_links")
def test_layouts():
    weight = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    layout = LayoutMap({"w": ("tp", None)}).layout({"w": weight}, V5E.mesh)
    with pytest.raises(RuntimeError, match=FAULT):
        layout.explain(lambda params, x: x @ params["w"], V5E, SHAPE, tries=0)


@pytest.mark.usefixtures("slow_links")
def test_bench():
    program = compile_for(gathered, V5E, SHAPE)
    found = bench_figures._predicted(program, Floor(1.0, 1.0), ("tp",), [1.0] * 3, Host())
    assert found["predicted"] is None
    assert re.match(f"no prediction: RuntimeError: {FAULT}", found["estimate"])
