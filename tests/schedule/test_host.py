"""What is kept in the host's memory between the forward and the backward pass."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, target, timeline

LAYERS, ROWS, SIZE = 3, 1024, 256
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def gradients(weights, x):
    def layer(x, w):
        hidden = checkpoint_name(x @ w, "hidden")
        return jnp.sin(hidden) @ w, None

    def loss(weights):
        last, _ = jax.lax.scan(jax.checkpoint(layer, policy=OFFLOADED), x, weights)
        return last.astype(jnp.float32).sum()

    return jax.grad(loss)(weights)


def test_copies_to_the_host_go_over_its_link():
    """One a layer and way, each of one layer's rows; those of one way take turns."""
    described = target("v6e:2x2", "x=4")
    args = [
        jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.bfloat16, sharding=P()),
        jax.ShapeDtypeStruct((ROWS, SIZE), jnp.bfloat16, sharding=P("x")),
    ]
    played = timeline(compile_for(gradients, described, *args))
    seconds = ROWS // 4 * SIZE * 2 / described.chip.host
    for way in ("to the host", "from the host"):
        copies = [event for event in played.events if event.row == way]
        assert len(copies) == LAYERS, way
        assert [event.seconds for event in copies] == pytest.approx([seconds] * LAYERS), way
        assert all(b.start >= 0.999 * a.end for a, b in pairwise(copies)), way


def test_what_lies_on_the_host_takes_no_memory_of_the_chip():
    """Momentum that is fetched and put back: it is on the chip once, beside its weight."""
    described = target("v6e:2x2", "x=4")
    here = NamedSharding(described.mesh, P("x"))
    there = here.with_memory_kind("pinned_host")

    def update(w, momentum):
        momentum = 0.9 * jax.device_put(momentum, here) + w
        return w - momentum, jax.device_put(momentum, there)

    w, momentum = (
        jax.ShapeDtypeStruct((16384, 2048), jnp.float32, sharding=lies) for lies in (here, there)
    )
    program = compile_for(jax.jit(update, donate_argnums=(0, 1)), described, w, momentum)
    part = 16384 // 4 * 2048 * 4
    assert 2 * part <= program.memory.peak <= 3.1 * part
    names = [held.what for held in explain(program, tries=0).at_peak]
    assert "w" in names
    assert "momentum" not in names
