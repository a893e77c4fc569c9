"""What is kept in the host's memory between the forward and the backward pass."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, target, timeline
from jaxpar.tools.timeline.shared_link import SharedLink

LAYERS, ROWS, SIZE = 4, 4096, 1024
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


@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2"])
def test_copies_to_the_host_go_over_its_link(name):
    """One a layer and way, each of one layer's rows."""
    described = target(name, "x=4")
    args = [
        jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.bfloat16, sharding=P()),
        jax.ShapeDtypeStruct((ROWS, SIZE), jnp.bfloat16, sharding=P("x")),
    ]
    played = timeline(compile_for(gradients, described, *args))
    seconds = ROWS // 4 * SIZE * 2 / described.chip.host
    for way in ("to the host", "from the host"):
        copies = [event for event in played.events if event.row == way]
        assert len(copies) == LAYERS, way
        assert all(event.seconds >= 0.999 * seconds for event in copies), way
        assert min(event.seconds for event in copies) == pytest.approx(seconds), way


def test_what_is_under_way_shares_a_link():
    link = SharedLink(speed=10.0)
    link.begin("long", 100.0, at=0.0)  # alone until 2: 80 are left
    link.begin("short", 20.0, at=2.0)  # both at half speed until 6: 60 are left
    assert link.end("short") == pytest.approx(6.0)
    link.begin("later", 10.0, at=20.0)
    assert link.end("long") == pytest.approx(12.0)
    assert link.end("later") == pytest.approx(21.0)
