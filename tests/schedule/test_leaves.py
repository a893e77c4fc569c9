"""Programs whose arguments, states and results have leaves that are no arrays."""

from dataclasses import replace
from functools import partial

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.layout import LayoutMap, infer_layout
from jaxpar.schedule import compile_for, explain, target
from jaxpar.tools.explain.edits import Edits

CHIPS = target("v5e:2x2", "dp=2,tp=2")


def of(*shape, spec=(), dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(CHIPS.mesh, P(*spec)))


# Of every kind of leaf one; `up` is sharded by the wrong dimension.
WEIGHTS = {"up": of(512, 4096, spec=("tp",)), "down": of(4096, 512, spec=("tp",))}
OTHERS = {
    "act": jax.nn.relu,
    "name": "mlp",
    "bias": None,
    "double": True,
    "scale": np.float32(0.5),
    "times": 2,
    "key": jax.eval_shape(lambda: jax.random.key(0)),
    "dtype": jnp.float32,
}
X = of(1024, 512, spec=("dp",))


def step(state, batch):
    assert state["name"] == "mlp"
    assert state["bias"] is None
    x = batch["x"]
    assert batch["mask"] is None
    hidden = state["act"](x @ state["up"])
    noise = jax.random.uniform(state["key"], (), state["dtype"])
    scale = jnp.asarray(state["scale"], x.dtype) * jnp.asarray(state["times"], x.dtype)
    x = hidden @ state["down"] * scale + noise.astype(x.dtype)
    return {**state, "up": 2 * state["up"]}, jnp.where(state["double"], 2 * x, x)


def right(edits):
    return [edit for edit in edits if "state['up'] by P(None, 'tp') in place of P('tp')" in edit]


def test_leaves_of_all_kinds():
    program = compile_for(step, CHIPS, WEIGHTS | OTHERS, {"x": X, "mask": None})
    names = list(Edits(program).arguments.leaves)
    assert names == [
        *(f"state['{name}']" for name in ("double", "down", "key", "scale", "times", "up")),
        "batch['x']",
    ]
    tried = []
    found = explain(program, tries=1, progress=tried.append)
    assert right(tried)
    assert found.findings[0].edit == tried[0]
    assert found.findings[0].gain > 0
    assert not found.refused


def test_static_arguments_of_a_jitted_function():
    """Between the others, by place; an edit that rewrites the program gets them, too."""

    @partial(jax.jit, static_argnums=(1, 3), donate_argnums=0)
    def step(state, act, x, name, rate):
        constrained = jax.lax.with_sharding_constraint(
            act(x @ state["up"]), NamedSharding(CHIPS.mesh, P(None, "tp"))
        )
        assert name == "mlp"
        return constrained @ state["down"] * rate, state["up"]

    program = compile_for(step, CHIPS, WEIGHTS, jax.nn.relu, X, "mlp", 0.5)
    assert list(Edits(program).arguments.leaves) == ["state['down']", "state['up']", "x", "rate"]
    tried = []
    found = explain(program, tries=4, progress=tried.append)
    assert right(tried)
    assert not found.refused
    (without,) = Edits(program).constraints()
    assert "state[\\'up\\']" in without.compiled().text  # its names stay


def test_static_numbers_beside_traced_ones():
    """They are told by what they are numbers of."""

    @partial(jax.jit, static_argnums=(0, 3))
    def step(double, rate, x, count, first):
        assert double is True
        constrained = jax.lax.with_sharding_constraint(x, NamedSharding(CHIPS.mesh, P()))
        return constrained * (rate * (first + count).astype(rate.dtype)).astype(x.dtype)

    program = compile_for(step, CHIPS, True, of(dtype=jnp.float32), X, 3, np.int32(1))
    arguments = Edits(program).arguments
    assert list(arguments.leaves) == ["rate", "x", "first"]
    assert [x.dtype for x in arguments.leaves.values()] == [jnp.float32, jnp.bfloat16, jnp.int32]
    (without,) = Edits(program).constraints()
    assert without.compiled() is not None


def test_arguments_that_are_not_those_of_the_program():
    program = compile_for(jax.jit(lambda x: x + 1), CHIPS, X)
    other = replace(program, args=(of(1024, 512, spec=("dp",), dtype=jnp.float32),))
    with pytest.raises(ValueError, match=r"argument 0 .* bfloat16\[1024, 512\], is none of those"):
        _ = Edits(other).arguments


def test_a_function_that_can_be_traced_once():
    """As a framework's step that makes a part of its state while it is traced."""
    traced = []

    def step(params, x):
        traced.append(None)
        assert len(traced) == 1
        h = jax.lax.with_sharding_constraint(x @ params["up"], NamedSharding(CHIPS.mesh, P()))
        return h @ params["down"]

    tried = []
    found = explain(compile_for(step, CHIPS, WEIGHTS, X), tries=4, progress=tried.append)
    assert not found.refused
    assert len(tried) >= 4  # those that change nothing are no tries
    assert any("remove with_sharding_constraint" in edit for edit in tried)


def test_a_module_with_functions():
    class Mlp(equinox.Module):
        up: jax.Array
        down: jax.Array
        act: object

        def __call__(self, x):
            return self.act(x @ self.up) @ self.down

    model = Mlp(WEIGHTS["up"], WEIGHTS["down"], jax.nn.relu)

    def train(model, x):
        gradients = equinox.filter_grad(lambda m, x: jnp.sum(m(x).astype(jnp.float32)))(model, x)
        return equinox.apply_updates(model, gradients)

    for function in (train, equinox.filter_jit(train)):
        (edit, *_) = Edits(compile_for(function, CHIPS, model, X)).mended([], ["tp"])
        assert edit.text == "shard model.up by P(None, 'tp') in place of P('tp')"


def test_layouts():
    """What `infer_layout` follows, and what `Layout.explain` compiles."""
    mesh = CHIPS.mesh

    def loss(params, batch):
        return jnp.sum(step({**params, "key": batch["key"]}, batch)[1].astype(jnp.float32))

    others = {name: leaf for name, leaf in OTHERS.items() if name not in ("key", "scale", "double")}
    params = WEIGHTS | others | {"scale": 1.0, "double": False}
    batch = {"x": X, "mask": None, "key": OTHERS["key"], "note": "as it came"}
    rules = infer_layout(loss, params, batch, mesh)
    assert (rules["up"], rules["down"]) == (P(None, "tp"), P("tp"))
    wrong = LayoutMap({"up": ("tp",), "down": ("tp",), "scale|times|double": ()}, batch=P("dp"))
    found = wrong.layout(params, mesh).explain(loss, CHIPS, batch, tries=1)
    assert found.tried[0].rule == "up"
    assert found.tried[0].after == P(None, "tp")
