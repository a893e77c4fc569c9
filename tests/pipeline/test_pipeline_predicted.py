"""Pipelines as compilers schedule them: their hops are hidden, and predictions know the bubble."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layers import fsdp_gather
from jaxpar.pipeline import interleaved_1f1b, value_and_grad
from jaxpar.schedule import compile_for, explain, target, timeline
from jaxpar.tools.explain.pipelines import pipeline_lines
from jaxpar.tools.program.operations import Collective, Loop
from jaxpar.tools.timeline.event import idle_share

WIDTH, HIDDEN, ROWS = 256, 4096, 1024  # compilers of TPUs take long for more
SCHEDULE = interleaved_1f1b(4, microbatches=8, virtual_stages=2)
TRIPS = 2 * 8 + 4 - 1  # with forward passes; as many have backward passes
HOP = 2 * ROWS * WIDTH  # bytes


def stage(layers, x, batch):  # x [1, s, d]
    for up, down in zip(layers["up"], layers["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return x


def last(shared, x, batch):  # x [1, s/4, d]
    return jnp.sum(jnp.square((x @ shared).astype("float32"))), x.size


def compiled(name):
    chips = target(name, "pp=4")
    step = value_and_grad(stage, lambda shared, batch: batch, last, SCHEDULE, "pp", last_dim=1)
    specs = {"up": P("pp"), "down": P("pp")}, P()
    local = jax.shard_map(step, mesh=chips.mesh, in_specs=(*specs, P()), out_specs=(P(), specs))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)

    layers = {"up": array(P("pp"), 8, WIDTH, HIDDEN), "down": array(P("pp"), 8, HIDDEN, WIDTH)}
    given = layers, array(P(), WIDTH, WIDTH), array(P(), 8, ROWS, WIDTH)
    return compile_for(jaxpar.jit(local, mesh=chips.mesh), chips, *given)


def half(one):
    """Of a matmul: the half of a trip."""
    if not one.work.is_matmul or not idle_share(one.op):
        return ""
    return "backward" if "transpose(" in one.op else "forward"


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2", "h100:4"])
def test_a_step(name):
    """One test, so that workers do not compile one program several times."""
    program = compiled(name)
    check_both_hops_start_before_the_other_half(program)
    check_passes_and_losses_that_are_played(program)
    check_gradients_and_residuals_are_updated_in_place(program)
    check_the_bubble_is_said(program)


def check_both_hops_start_before_the_other_half(program):
    loops = [one for one in program.module.entry.operations if isinstance(one, Loop)]
    bodies = [one.runs[1].operations for one in loops]
    (both,) = (body for body in bodies if {"forward", "backward"} <= set(map(half, body)))
    order = [
        "hop" if isinstance(one, Collective) and one.message.payload == HOP else half(one)
        for one in both
    ]
    matmuls_and_hops = [what for what in order if what]
    firsts = [a for a, b in zip(matmuls_and_hops, ["", *matmuls_and_hops], strict=False) if a != b]
    assert firsts == ["hop", "forward", "hop", "backward"]


def check_passes_and_losses_that_are_played(program):
    """Forward and backward passes are in as many trips as the formula says, losses in eight."""
    played = timeline(program)
    found = Counter()
    for event in played.events:
        if event.is_matmul:
            passes = "backward" if "transpose(" in event.op else "forward"
            found[passes if idle_share(event.op) else "loss"] += 1
    assert found["forward"] == 2 * TRIPS
    assert found["backward"] == 4 * TRIPS
    assert found["loss"] == 3 * 8
    share = 1 - 8 * 2 / TRIPS
    assert share == pytest.approx(SCHEDULE.bubble())
    assert idle_share("jit(f)/while/body/passes[bubble=0.1579]/dot") == pytest.approx(
        share, abs=1e-4
    )
    assert 0.5 * share * played.total < played.bubble < share * played.total
    assert not played.compute_by_place


def check_gradients_and_residuals_are_updated_in_place(program):
    """Copied are at most activations, and on GPUs gradients of shared parameters."""
    hlo = program.module.hlo
    inside = (i for c in hlo.computations.values() if c is not hlo.entry for i in c.instructions)
    copied = [i.bytes for i in inside if i.opcode == "copy"]
    assert max(copied, default=0) <= HOP


def check_the_bubble_is_said(program):
    text = " ".join(explain(program, tries=0).text().split())
    assert "a device of the pipeline is idle for" in text
    assert "microbatches or virtual stages make it shorter; behind one fast network, FSDP" in text


@pytest.mark.parametrize(
    ("name", "rows", "what"),
    [("2xv5e:2x2", 256, "2 slices"), ("h100:2x8", 512, "2 hosts"), ("h100:8", 512, "")],
)
def test_weights_that_a_slow_network_gathers_suggest_a_pipeline(name, rows, what):
    """From so many microbatches on that its bubble is a smaller share than the waits."""
    chips = target(name, "fsdp=-1")

    def loss(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ fsdp_gather(w, "fsdp"))
        return jax.lax.psum(jnp.sum(x.astype("float32")), "fsdp")

    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16, sharding=P("fsdp"))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=P("fsdp"))
    local = jax.shard_map(loss, mesh=chips.mesh, in_specs=P("fsdp"), out_specs=P())
    played = timeline(compile_for(local, chips, x, w, w))
    said = pipeline_lines(played, chips)
    assert bool(said) == bool(what)
    for line in said:
        assert f"between {what} take" in line
        share = int(re.search(r"(\d+)%\): a pipeline over", line)[1]) / 100
        found = re.search(r"faster from (\d+) microbatches on", line)
        count = int(found[1]) if found else 1
        assert found or "faster with any number of microbatches if" in line
        assert 1 / (count + 1) <= share + 0.005  # its bubble
        assert count == 1 or 1 / count >= share - 0.005  # that of one microbatch less
