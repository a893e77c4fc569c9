"""The page of numbers: its program prints what it shows, and the advice beside it is right."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from programs import printed

from jaxpar import make_mesh
from jaxpar.layers import vocab_parallel_cross_entropy

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_its_program_runs_as_pasted():
    [(program, shown)] = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    assert printed(program) == shown


def test_float32_logits_are_the_edit():
    """Of the plain loss and the sharded one, against float64."""
    mesh = make_mesh("tp=8")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(32, 4096)) / 4, jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, 4096, 64))
    logits = np.asarray(x, "d") @ np.asarray(head, "d")
    wanted = np.log(np.exp(logits).sum(1)) - logits[np.arange(64), labels]

    def plain(dtype):
        made = jnp.matmul(x, head, preferred_element_type=dtype)
        of_label = jnp.take_along_axis(made, labels[:, None], 1)[:, 0]
        return jax.nn.logsumexp(made, axis=1) - of_label

    def sharded(x, head):
        return jnp.mean(vocab_parallel_cross_entropy(x, head, labels, "tp", sequence_dim=None))

    specs = (P(), P(None, "tp"))
    parallel = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=P())(x, head)
    for found in (jnp.mean(plain(jnp.float32)), parallel):
        np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-5)
    assert np.abs(np.asarray(plain(jnp.bfloat16), "d") - wanted).max() > 1e-2


@pytest.mark.parametrize(
    ("lookup", "dtype", "wanted"),
    [
        (lambda t, i: t[i], jnp.bfloat16, 256),
        (lambda t, i: t[i].astype(jnp.bfloat16), jnp.float32, 1000),
        (lambda t, i: t.astype(jnp.bfloat16)[i], jnp.float32, 256),
    ],
)
def test_the_gradient_of_a_table(lookup, dtype, wanted):
    table = jnp.arange(32, dtype=dtype).reshape(8, 4)

    def loss(table):
        return jnp.sum(lookup(table, jnp.full(1000, 5)).astype(jnp.float32))

    assert jax.jit(jax.grad(loss))(table)[5].tolist() == [wanted] * 4


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.relu, jnp.exp])
def test_a_name_stands_before_the_activation(activation):
    """Behind it the matmul is repeated, as without a name."""
    x, w = jnp.arange(12.0).reshape(3, 4) / 10, jnp.arange(16.0).reshape(4, 4) / 10
    policy = jax.checkpoint_policies.save_only_these_names("h")
    layers = {
        "before": lambda w: activation(checkpoint_name(x @ w, "h")) @ w,
        "behind": lambda w: checkpoint_name(activation(x @ w), "h") @ w,
        "without": lambda w: activation(x @ w) @ w,
    }
    matmuls = {
        where: str(
            jax.make_jaxpr(
                jax.grad(lambda w, f=f: jnp.sum(jax.checkpoint(f, policy=policy)(w) ** 2))
            )(w)
        ).count("dot_general")
        for where, f in layers.items()
    }
    assert matmuls["before"] + 1 == matmuls["behind"] == matmuls["without"]
