"""Leaves of pytrees that are no arrays are named by their paths."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import layers, make_mesh, moe

W = np.ones((2, 8), np.float32)


def tree(leaf):
    return {"w": jnp.asarray(W), "none": None, "more": [leaf]}


def scanned(t):
    return layers.fsdp_scan(lambda p, x: x, t, jnp.ones(8), "x", dim=None)


def stepped(t):
    return layers.value_and_grad(lambda p, x: (jnp.sum(x), 1), "x", specs=P())(t, jnp.ones(8))


def batched(t):
    grad = layers.value_and_grad(lambda p, b: (jnp.sum(p), 1), "x", specs=P(), microbatches=2)
    return grad(jnp.ones(8), t)


def with_aux(t):
    grad = layers.value_and_grad(lambda p: ((jnp.sum(p), 1), t), "x", specs=P(), has_aux=True)
    return grad(jnp.ones(8))


def dispatched(t):
    plan = moe.RaggedDispatcher.from_target_device_ids(jnp.zeros(2, "int32"), axis="x")
    return plan.dispatch(t, 2)


def combined(t):
    plan = moe.RaggedDispatcher.from_target_device_ids(jnp.zeros(2, "int32"), axis="x")
    return plan.combine(t, 2)


FUNCTIONS = {
    "ring_shift": ("x", lambda t: jaxpar.ring_shift(t, "x")),
    "ring_all_gather": ("x", lambda t: jaxpar.ring_all_gather(t, "x")),
    "ring_reduce_scatter": ("x", lambda t: jaxpar.ring_reduce_scatter(t, "x", tiled=True)),
    "ring_all_reduce": ("x", lambda t: jaxpar.ring_all_reduce(t, "x")),
    "copy_region": ("x", lambda t: layers.copy_region(t, "x")),
    "reduce_region": ("x", lambda t: layers.reduce_region(t, "x")),
    "gather_region": ("x", lambda t: layers.gather_region(t, "x")),
    "scatter_region": ("x", lambda t: layers.scatter_region(t, "x")),
    "fsdp_gather": ("tree", lambda t: layers.fsdp_gather(t, "x")),
    "fsdp_scan": ("stacked_params", scanned),
    "value_and_grad": ("params", stepped),
    "value_and_grad of a batch": ("batch[0]", batched),
    "value_and_grad with aux": ("aux", with_aux),
    "reduce_gradients": ("grads", lambda t: layers.reduce_gradients(t, "x")),
    "reduce_compressed_gradients": ("grads", lambda t: layers.reduce_compressed_gradients(t, "x")),
    "global_norm": ("tree", lambda t: layers.global_norm(t, specs=P())),
    "RaggedDispatcher.dispatch": ("data", dispatched),
    "RaggedDispatcher.combine": ("data", combined),
}
NO_ARRAYS = [
    (jnp.tanh, "tanh, of type "),
    ("adam", "of type str"),
    (jax.ShapeDtypeStruct((2,), "float32"), "of type ShapeDtypeStruct"),
    (object(), "of type object"),
]


def call(function, leaf):
    mapped = jax.shard_map(
        lambda: function(tree(leaf)),
        mesh=make_mesh("x=2", devices=jax.devices()[:2]),
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    return jax.eval_shape(mapped)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_array_is_named(name):
    argument, function = FUNCTIONS[name]
    for leaf, kind in NO_ARRAYS:
        with pytest.raises(
            TypeError, match=re.escape(f"{argument}['more'][0] is {kind}")
        ) as caught:
            call(function, leaf)
        text = str(caught.value)
        assert text.startswith(f"{name.split(' ')[0]}: ")
        assert text.endswith(
            ", and no array; take out what is none before the call, as equinox.partition(tree, "
            "equinox.is_array) does, and let functions close over it"
        )


SUMS = {
    "ring_reduce_scatter": "sum",
    "ring_all_reduce": "sum",
    "reduce_region": "sum",
    "reduce_gradients": "sum",
    "reduce_compressed_gradients": "sum",
    "global_norm": "norm",
}


@pytest.mark.parametrize("name", SUMS)
def test_keys_have_no_sum(name):
    argument, function = FUNCTIONS[name]
    wrong = rf"^{name}: {argument}\['more'\]\[0\] is key<fry>\[\], which has no {SUMS[name]}; leave"
    with pytest.raises(TypeError, match=wrong):
        call(function, jax.random.key(0))


@pytest.mark.parametrize("name", ["ring_shift", "copy_region", "reduce_gradients", "global_norm"])
def test_numbers_are_arrays(name):
    for leaf in (1, 2.5, np.float32(3), np.ones(2)):
        call(FUNCTIONS[name][1], leaf)
