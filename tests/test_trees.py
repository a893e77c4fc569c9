"""What is no array is named: leaves of pytrees by their paths, other operands by their names."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
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
    return layers.mean_value_and_grad(lambda p, x: (jnp.sum(x), 1), "x", specs=P())(t, jnp.ones(8))


def batched(t):
    grad = layers.mean_value_and_grad(lambda p, b: (jnp.sum(p), 1), "x", specs=P(), microbatches=2)
    return grad(jnp.ones(8), t)


def with_aux(t):
    grad = layers.mean_value_and_grad(lambda p: ((jnp.sum(p), 1), t), "x", specs=P(), has_aux=True)
    return grad(jnp.ones(8))


def dispatched(t):
    plan = moe.RaggedDispatcher.from_target_device_ids(jnp.zeros(2, "int32"), axis="x")
    return plan.dispatch(t, 2)


def combined(t):
    plan = moe.RaggedDispatcher.from_target_device_ids(jnp.zeros(2, "int32"), axis="x")
    return plan.combine(t, 2)


FUNCTIONS = {
    "ring_shift": ("x", lambda t: jaxpar.ring_shift(t, "x")),
    "all_gather": ("x", lambda t: jaxpar.all_gather(t, "x")),
    "reduce_scatter": ("x", lambda t: jaxpar.reduce_scatter(t, "x", tiled=True)),
    "all_reduce": ("x", lambda t: jaxpar.all_reduce(t, "x")),
    "copy_region": ("x", lambda t: layers.copy_region(t, "x")),
    "reduce_region": ("x", lambda t: layers.reduce_region(t, "x")),
    "gather_region": ("x", lambda t: layers.gather_region(t, "x")),
    "scatter_region": ("x", lambda t: layers.scatter_region(t, "x")),
    "fsdp_gather": ("tree", lambda t: layers.fsdp_gather(t, "x")),
    "fsdp_scan": ("stacked_params", scanned),
    "mean_value_and_grad": ("params", stepped),
    "mean_value_and_grad of a batch": ("batch[0]", batched),
    "mean_value_and_grad with aux": ("aux", with_aux),
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
    (np.array(["a text"]), "of type ndarray of <U6"),
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
            ", and no array of JAX; remove leaves that are no arrays first, as equinox.partition("
            "tree, equinox.is_array) does, and let functions close over it"
        )


SUMS = {
    "reduce_scatter": "sum",
    "all_reduce": "sum",
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


def attention(x, w_q, w_k, w_v, w_o):
    return layers.parallel_attention(
        x, w_q, w_k, w_v, w_o, "x", lambda q, k, v: q, heads=2, kv_heads=2
    )


def ring_attention(q, k, v, sinks):
    return layers.ring_attention(q, k, v, "x", sinks=sinks)


def loss(x, w, labels, bias):
    return layers.vocab_parallel_cross_entropy(x, w, labels, "x", bias=bias, sequence_dim=None)


def layer_of_experts(tokens, up, down):
    routing = moe.route(jnp.ones((2, 2)), 1)
    return moe.moe_layer(tokens, routing, {"up": up, "down": down}, "x")


J, L, M, X = jaxpar, layers, moe, {"axis": "x"}
SQUARE, ROW, COUNTS = np.ones((2, 2), "f"), np.ones(2, "f"), np.array([1, 1])
HEADS = np.ones((4, 2, 2), "f")
EXPERTS = np.ones((1, 2, 2), "f")
# By name: the function, its operands, and what errors call them.
OPERANDS = {
    "all_gather_matmul": (partial(J.all_gather_matmul, **X), [SQUARE] * 2, "lhs,rhs"),
    "matmul_reduce_scatter": (partial(J.matmul_reduce_scatter, **X), [SQUARE] * 2, "lhs,rhs"),
    "matmul_all_reduce": (partial(J.matmul_all_reduce, **X), [SQUARE] * 2, "lhs,rhs"),
    "collective_einsum": (
        lambda lhs, rhs: J.collective_einsum("ab,bc->ac", lhs, rhs, "x", gather="a"),
        [SQUARE] * 2,
        "lhs,rhs",
    ),
    "column_parallel_linear": (
        lambda x, w, b: L.column_parallel_linear(x, (w,), "x", bias=(b,)),
        [SQUARE, SQUARE, ROW],
        "x,w[0],the bias of w[0]",
    ),
    "row_parallel_linear": (
        lambda x, w, b: L.row_parallel_linear(x, w, "x", bias=b),
        [SQUARE, SQUARE, ROW],
        "x,w,the bias of w",
    ),
    "gated_mlp": (partial(L.gated_mlp, **X), [SQUARE] * 4, "x,w_gate,w_up,w_down"),
    "fsdp_linear": (
        lambda x, w, b: L.fsdp_linear(x, w, "x", bias=b, dim=1),
        [SQUARE, SQUARE, ROW],
        "x,w,the bias of w",
    ),
    "parallel_attention": (attention, [SQUARE] * 5, "x,w_q,w_k,w_v,w_o"),
    "ring_attention": (ring_attention, [HEADS] * 3 + [ROW], "q,k,v,sinks"),
    "rms_norm": (L.rms_norm, [SQUARE, ROW], "x,scale"),
    "layer_norm": (L.layer_norm, [SQUARE, ROW, ROW], "x,scale,bias"),
    "vocab_parallel_embedding": (
        partial(L.vocab_parallel_embedding, sequence_dim=None, **X),
        [COUNTS, SQUARE],
        "tokens,table",
    ),
    "vocab_parallel_cross_entropy": (
        loss,
        [SQUARE, SQUARE, COUNTS, ROW],
        "x,w,labels,bias",
    ),
    "mean_loss": (partial(L.mean_loss, **X), [np.float32(1)] * 2, "loss_sum,weight"),
    "quantize": (J.quantize, [SQUARE], "x"),
    "route": (lambda logits: M.route(logits, 1), [SQUARE], "logits"),
    "moe_layer": (layer_of_experts, [SQUARE, EXPERTS, EXPERTS], "tokens,experts.up,experts.down"),
    "grouped_matmul": (M.grouped_matmul, [SQUARE, EXPERTS, COUNTS[:1]], "lhs,rhs,group_sizes"),
    "apply_experts": (
        lambda x, up, sizes: M.apply_experts(x, {"up": up, "down": EXPERTS}, sizes),
        [SQUARE, EXPERTS, COUNTS[:1]],
        "x,experts.up,group_sizes",
    ),
}
IN_PLACE_OF_ONE = [
    (jnp.tanh, " is tanh, of type PjitFunction, and no array of JAX; pass one"),
    ({"w": 1.0}, " is of type dict, and no array of JAX; pass one"),
    (
        jax.ShapeDtypeStruct((2, 2), "float32"),
        " is of type ShapeDtypeStruct, and no array of JAX; pass",
    ),
]


def test_a_key_is_no_operand():
    key = jax.random.key(0)
    with pytest.raises(TypeError, match=r"rhs is key<fry>\[\], which has no product; give numbers"):
        call(lambda _: J.all_gather_matmul(SQUARE, key, "x"), 0)


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_that_is_no_array_is_named(name, monkeypatch):
    # As users have it: a checker of types in front of the package would say less.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    function, operands, names = OPERANDS[name]
    call(lambda _: function(*operands), 0)
    for place, argument in enumerate(names.split(",")):
        for given, kind in IN_PLACE_OF_ONE:
            wrong = [*operands[:place], given, *operands[place + 1 :]]
            with pytest.raises(TypeError, match=re.escape(f"{name}: {argument}{kind}")):
                call(lambda _, wrong=wrong: function(*wrong), 0)


@pytest.mark.parametrize("name", ["ring_shift", "copy_region", "reduce_gradients", "global_norm"])
def test_numbers_are_arrays(name):
    for leaf in (1, 2.5, np.float32(3), np.ones(2)):
        call(FUNCTIONS[name][1], leaf)
