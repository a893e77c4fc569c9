"""Names of what backward passes read, by which policies of `jax.checkpoint` keep it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, make_mesh
from jaxpar.layers import gated_mlp, ring_attention

AXIS = Axis("x", mode="unidirectional")


def attention(x, w, **how):
    q, k, v = jnp.split((x @ w[0]).reshape(*x.shape[:-1], 2, 12), [4, 8], axis=-1)
    return ring_attention(q, k, v, AXIS, **how).reshape(x.shape)


def attention_within(x, w):
    return attention(x, w, window=1, softcap=2.0, sinks=w[0][0, :2])


def mlp(x, w):
    return gated_mlp(x, w[1], w[1], w[2], AXIS)


@pytest.mark.parametrize(
    ("layer", "name", "check_vma"),
    [
        (attention, "attention", True),
        (attention_within, "attention", False),
        (mlp, "gated_mlp", True),
    ],
)
def test_what_is_kept_by_name_is_not_sent_again(layer, name, check_vma):
    """Under a policy that keeps it there are no more transfers than without `jax.checkpoint`."""
    w = jnp.ones((8, 24)), jnp.ones((8, 16)), jnp.ones((16, 8))

    def transfers(**checkpoint):
        block = jax.checkpoint(layer, **checkpoint) if checkpoint else layer
        mapped = jax.shard_map(
            lambda x, w: x + jnp.tanh(block(x, w)),
            mesh=make_mesh({"x": 2}, devices=jax.devices()[:2]),
            in_specs=(P(None, "x"), (P(), P(None, "x"), P("x"))),
            out_specs=P(None, "x"),
            check_vma=check_vma,
        )
        gradient = jax.jit(jax.grad(lambda *args: jnp.sum(mapped(*args)), argnums=(0, 1)))
        return gradient.lower(jnp.ones((2, 16, 8)), w).as_text().count("collective_permute")

    save = jax.checkpoint_policies.save_only_these_names
    kept = transfers(policy=save(name))
    assert kept == transfers()
    assert kept < transfers(policy=save("another name"))
