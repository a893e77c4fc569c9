"""Tokens that travel to their experts in 8 bits, and back as they are."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_bits import rounded, travelling, without_ties
from jax import lax
from jax.sharding import PartitionSpec as P
from layer_reference import choose, mlp, weights_of

from jaxpar import Axis, LowBit, make_mesh
from jaxpar.moe import routed_moe_layer

D, F, EXPERTS, TOP_K = 128, 24, 8, 2
MESH = make_mesh("ep=8")
HOW = {"scoring": "softmax", "normalize": False, "scale": 1.0}


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"up": (D, F), "gate": (D, F), "down": (F, D)}
    return {
        "tokens": without_ties(rng.standard_normal((32, D)).astype("float32")),
        "router": rng.standard_normal((D, EXPERTS)).astype("float32"),
        "experts": {
            name: rng.standard_normal((EXPERTS, *shape)).astype("float32") / 4
            for name, shape in shapes.items()
        },
    }


def layer(dispatch, wire, mode="naive"):
    def local(params):
        out, _ = routed_moe_layer(
            params["tokens"],
            params["router"],
            params["experts"],
            axis=Axis("ep", mode=mode, wire_dtype=wire),
            top_k=TOP_K,
            dispatch=dispatch,
            implementation="blocks",
        )
        return out

    specs = {"tokens": P("ep"), "router": P(), "experts": P("ep")}
    return jax.shard_map(local, mesh=MESH, in_specs=(specs,), out_specs=P("ep"))


def with_gradients(fn):
    @jax.jit
    def run(ct, params):
        out, pull = jax.vjp(fn, params)
        return out, *pull(ct)

    return run


@pytest.fixture(scope="module")
def truth():
    """A cotangent, and results and gradients as if all tokens were rounded."""
    params = parameters()
    chosen, _ = choose(params, TOP_K, 8, None, "probability", None, None, **HOW)
    there = rounded(params["tokens"]).astype("float32")

    def plain(params):
        tokens = params["tokens"]
        weights = weights_of(tokens @ params["router"], chosen, **HOW)
        arriving = tokens + lax.stop_gradient(there - tokens)
        named = chosen[..., None] == np.arange(EXPERTS)
        shares = jnp.sum(jnp.where(named, weights[..., None], 0), axis=1)  # [t, E]
        each = jax.vmap(lambda w: mlp(arriving, w, jax.nn.silu))(params["experts"])
        return jnp.einsum("te,etd->td", shares, each)

    ct = np.random.default_rng(1).standard_normal((32, D)).astype("float32")
    return ct, *with_gradients(plain)(ct, params)


@pytest.mark.parametrize(
    ("dispatch", "mode", "cotangents"),
    [
        ("ragged", "naive", False),
        ("ragged", "naive", True),
        ("all_gather", "naive", True),
        ("all_gather", "bidirectional", False),
    ],
)
def test_experts_see_what_was_rounded_once(dispatch, mode, cotangents, truth):
    """Routers see tokens as they are; gradients are as if all did, but for rounded cotangents."""
    ct, wanted, gradients_wanted = truth
    mapped = layer(dispatch, LowBit("int8", cotangents=cotangents), mode)
    out, gradients = with_gradients(mapped)(ct, parameters())
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)
    leaves = (jax.tree.leaves(tree) for tree in (gradients, gradients_wanted))
    off = max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(*leaves, strict=True))
    assert off < 2e-5 if not cotangents else 2e-5 < off < 0.02


def test_what_travels():
    """Rows there in 8 bits, beside their scales, and back in float32."""
    params = parameters()
    plain, coded = (travelling(layer("ragged", wire), params) for wire in (None, "int8"))
    bits = {
        name: (plain["ragged_all_to_all", name], coded["ragged_all_to_all", name])
        for name in ("uint32", "uint8", "float32")
    }
    assert bits == {"uint32": (4, 0), "uint8": (0, 4), "float32": (4, 4)}
    plain, coded = (travelling(layer("all_gather", wire), params) for wire in (None, "int8"))
    # Of float32 are the weights of choices, and rows or the scales of rows.
    assert coded == plain + Counter({("all_gather", "int8"): 1})
