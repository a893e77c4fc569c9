"""What is the same on all devices is refused where each needs its own, and nowhere else."""

import re
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Quantized, layers, make_mesh, moe

SIZES = {"x": 2, "y": 2, "one": 1, "other": 1}
ATTEND = {"heads": 8, "kv_heads": 8}


class Case(NamedTuple):
    """A call, the local shapes of its operands on n devices, and the names of those due."""

    call: Any  # (axis, *operands)
    shapes: Any  # of n
    due: dict[str, tuple[int, ...]]  # by name in the error, operands that are not all the same


def attend(q, k, v):
    return q


def layer_of_experts(axis, x, up, down, **options):
    routing = moe.route(x, 1)
    return moe.moe_layer(x, routing, {"up": up, "down": down}, axis, **options)


def of(function, *arguments, **options):
    """Has the axis come first."""
    return lambda axis, *operands: function(*operands, axis, *arguments, **options)


def loss(axis, x, w, labels, **options):
    options = {"sequence_dim": None, **options}
    return layers.vocab_parallel_cross_entropy(x, w, jnp.int32(labels), axis, **options)


def embedding(axis, tokens, table):
    return layers.vocab_parallel_embedding(jnp.int32(tokens), table, axis, sequence_dim=None)


def gathered_tree(axis, w, whole):
    return layers.fsdp_gather({"w": w, "whole": whole}, axis, dim={"w": 1, "whole": None})


def scanned(axis, w, x):
    step = lambda p, x: x @ p["w"]  # noqa: E731
    return layers.fsdp_scan(step, {"w": w}, x, axis)


def attention(axis, x, q, k, v, o, **options):
    return layers.parallel_attention(x, q, k, v, o, axis, attend, **{**ATTEND, **options})


def statistics(axis, logits):
    return moe.routing_statistics(moe.route(logits, 1), axis)


J, L = jaxpar, layers
QKV = [(2, 4, 2, 3)] * 3
HEADS = lambda n: [(2, 6), *[(6, 16 // n)] * 3, (16 // n, 6)]  # noqa: E731
WHOLE_HEADS = lambda n: [(2, 6), (6, 16 // n), *[(6, 2)] * 2, (16 // n, 6)]  # noqa: E731
CASES = {
    "all_gather": Case(of(J.all_gather, dim=1), lambda n: [(4, 3)], {"x": (0,)}),
    "reduce_scatter": Case(
        of(J.reduce_scatter, dim=-1, tiled=True), lambda n: [(3, n)], {"x": (0,)}
    ),
    "all_reduce": Case(of(J.all_reduce), lambda n: [(3,)], {"x": (0,)}),
    "all_gather_matmul": Case(of(J.all_gather_matmul), lambda n: [(4, 6), (6, 3)], {"lhs": (0,)}),
    "all_gather_matmul over k": Case(
        of(J.all_gather_matmul, dim=-1), lambda n: [(4, 6), (6 * n, 3)], {"lhs": (0,)}
    ),
    "all_gather_matmul of rhs": Case(
        of(J.all_gather_matmul, gather="rhs", dim=1), lambda n: [(4, 6), (6, 3)], {"rhs": (1,)}
    ),
    "matmul_reduce_scatter": Case(
        of(J.matmul_reduce_scatter, dim=1), lambda n: [(4, 6), (6, n)], {"lhs and rhs": (0, 1)}
    ),
    "matmul_all_reduce": Case(
        of(J.matmul_all_reduce), lambda n: [(4, 6), (6, 3)], {"lhs and rhs": (0, 1)}
    ),
    "collective_einsum": Case(
        lambda axis, a, b: J.collective_einsum("bsd,dh->bhs", a, b, axis, gather="s"),
        lambda n: [(2, 4, 6), (6, 3)],
        {"lhs": (0,)},
    ),
    "collective_einsum of a sum": Case(
        lambda axis, a, b: J.collective_einsum("bsd,dh->bhs", a, b, axis, scatter="b"),
        lambda n: [(n, 4, 6), (6, 3)],
        {"lhs and rhs": (0, 1)},
    ),
    "column_parallel_linear": Case(
        of(L.column_parallel_linear, sequence_dim=0),
        lambda n: [(2, 3, 6), (6, 3)],
        {"x": (0,), "w": (1,)},
    ),
    "column_parallel_linear of two": Case(
        lambda axis, x, v, w: L.column_parallel_linear(x, (v, w), axis, sequence_dim=None),
        lambda n: [(2, 6), (6, 3), (6, 5)],
        {"w[0]": (1,), "w[1]": (2,)},
    ),
    "column_parallel_linear over fsdp": Case(
        lambda axis, x, w: L.column_parallel_linear(x, w, "other", fsdp_axis=axis, fsdp_dim=1),
        lambda n: [(2, 6), (6, 3)],
        {"w": (1,)},
    ),
    "row_parallel_linear": Case(
        of(L.row_parallel_linear, sequence_dim=None), lambda n: [(2, 6), (6, 3)], {"w": (1,)}
    ),
    "gated_mlp": Case(
        of(L.gated_mlp),
        lambda n: [(n, 6), (6, 3), (6, 3), (3, 5)],
        {"x": (0,), "w_gate": (1,), "w_up": (2,), "w_down": (3,)},
    ),
    "parallel_attention": Case(
        attention, HEADS, {"x": (0,), "w_q": (1,), "w_k": (2,), "w_v": (3,), "w_o": (4,)}
    ),
    "parallel_attention of one kv head": Case(
        lambda axis, *xs: attention(axis, *xs, kv_heads=1),
        WHOLE_HEADS,
        {"x": (0,), "w_q": (1,), "w_o": (4,)},
    ),
    "fsdp_linear": Case(of(L.fsdp_linear, dim=1), lambda n: [(2, 6), (6, 3)], {"w": (1,)}),
    "fsdp_linear with a bias": Case(
        lambda axis, x, w, bias: L.fsdp_linear(x, w, axis, bias=bias),
        lambda n: [(2, 6 * n), (6, 4 * n), (4,)],
        {"w": (1,), "the bias of w": (2,)},
    ),
    "fsdp_gather": Case(gathered_tree, lambda n: [(6, 3), (5,)], {"tree['w']": (0,)}),
    "fsdp_scan": Case(
        scanned, lambda n: [(3, 2, 2 * n), (4, 2 * n)], {"stacked_params['w']": (0,)}
    ),
    "ring_attention": Case(of(L.ring_attention), lambda n: QKV, {"q": (0,), "k": (1,), "v": (2,)}),
    "ring_attention of all keys": Case(
        of(L.ring_attention, causal=False), lambda n: QKV, {"k": (1,), "v": (2,)}
    ),
    "vocab_parallel_embedding": Case(
        lambda axis, table: embedding(axis, jnp.zeros(4), table),
        lambda n: [(6, 3)],
        {"table": (0,)},
    ),
    "vocab_parallel_cross_entropy": Case(
        lambda axis, x, w, bias: loss(axis, x, w, jnp.zeros(4), bias=bias),
        lambda n: [(4, 6), (6, 3), (3,)],
        {"w": (1,), "bias": (2,)},
    ),
    "vocab_parallel_cross_entropy of a sequence": Case(
        lambda *args: loss(*args, sequence_dim=0),
        lambda n: [(4, 6), (6, 3), (4,)],
        {"x": (0,), "w": (1,), "labels": (2,)},
    ),
    "gather_region": Case(of(L.gather_region), lambda n: [(4, 3)], {"x": (0,)}),
    "reduce_region": Case(
        lambda axis, x, y: L.reduce_region([x, y], axis),
        lambda n: [(4, 3), ()],
        {"x[0]": (0,), "x[1]": (1,)},
    ),
    "mean_loss": Case(
        of(lambda x, axis: L.mean_loss(x, 3, axis)), lambda n: [()], {"loss_sum": (0,)}
    ),
    "moe_layer": Case(
        layer_of_experts,
        lambda n: [(4, n), (1, n, 3), (1, 3, n)],
        {"tokens": (0,), "experts.up": (1,), "experts.down": (2,)},
    ),
    "moe_layer over fsdp": Case(
        lambda axis, *xs: layer_of_experts("other", *xs, fsdp_axis=axis),
        lambda n: [(4, n), (n, 1, 3 * n), (n, 3, n)],
        {"experts.up": (1,), "experts.down": (2,)},
    ),
    "routing_statistics": Case(statistics, lambda n: [(4, 3)], {"routing": (0,)}),
}


def at_once(call, copied, axis):
    call(copied)


def as_parameters(call, copied, axis):
    """In a loss: each device differentiates a copy of its own, which types say varies."""
    layers.mean_value_and_grad(lambda copied: (call(copied) or jnp.sum(copied[0]), 1), axis)(copied)


def as_stacks(call, copied, axis):
    """In a layer of a scan: weights are made to vary over all that activations vary over."""
    state = lax.pcast(jnp.zeros(()), ("x", "y"), to="varying")
    stacked = [x[None] for x in copied]
    layers.fsdp_scan(lambda own, x: call(own) or x, stacked, state, "other", dim=None)


def traced(case, axis, copied, *, over=(), check_vma=True, within=at_once):
    """Traces a call whose operands vary over all axes, but those that are copied `over` some."""

    def body():
        def typed(at, shape):
            axes = tuple(over) if at in copied else ("x", "y")
            x = jnp.zeros(shape)
            return lax.pcast(x, axes, to="varying") if axes and check_vma else x

        n = prod(SIZES[name] for name in axis)
        operands = [typed(at, shape) for at, shape in enumerate(case.shapes(n))]

        def call(of_copied):
            given = iter(of_copied)
            case.call(axis, *(next(given) if at in copied else x for at, x in enumerate(operands)))

        within(call, [x for at, x in enumerate(operands) if at in copied], axis)
        return jnp.zeros(())

    mesh = make_mesh(SIZES, devices=jax.devices()[:4])
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(), check_vma=check_vma)
    jax.eval_shape(mapped)


@pytest.mark.parametrize(
    ("name", "axis", "over", "missing"),
    [
        *((name, ("y", "x", "one"), ("x",), "['y']") for name in CASES),
        ("gated_mlp", ("y",), (), "['y']"),
        ("gated_mlp", ("x", "y"), (), "['x', 'y']"),
    ],
    ids=str,
)
def test_an_operand_that_all_devices_share(name, axis, over, missing):
    for argument, places in CASES[name].due.items():
        with pytest.raises(ValueError, match=re.escape(f": {argument} of local shape")) as caught:
            traced(CASES[name], axis, places, over=over)
        text = str(caught.value)
        assert text.startswith(name.split(" ")[0])
        assert f"replicated over {missing}, but each device of " in text
        assert "jax.lax.pcast(..., (" in text


@pytest.mark.parametrize("within", [as_parameters, as_stacks])
@pytest.mark.parametrize(
    "name",
    [
        *("all_gather_matmul of rhs", "gated_mlp", "parallel_attention of one kv head"),
        *("fsdp_linear with a bias", "fsdp_gather", "vocab_parallel_cross_entropy"),
    ],
)
def test_an_operand_that_a_transform_copies_for_each_device(name, within):
    caller = {as_parameters: "mean_value_and_grad", as_stacks: "fsdp_scan"}[within]
    case = CASES[name]
    for argument, places in case.due.items():
        with pytest.raises(ValueError, match=re.escape(f": {argument} of local shape")) as caught:
            traced(case, ("y", "x", "one"), places, over=("x",), within=within)
        assert "replicated over ['y'], but each device of " in str(caught.value)
        assert f"say so before {caller} by jax.lax.pcast(..., ('y',), to=" in str(caught.value)
    whole = set(range(len(case.shapes(4)))) - set().union(*case.due.values())
    if whole:
        traced(case, ("x", "y"), whole, within=within)


@pytest.mark.parametrize("name", CASES)
def test_operands_that_all_devices_may_share(name):
    """All others, all of them on an axis of one device, and where types say nothing."""
    case, everything = CASES[name], set(range(5))
    traced(case, ("x", "y"), everything - set().union(*case.due.values()))
    traced(case, ("one",), everything)
    traced(case, ("x", "y"), (), check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_scales_that_all_devices_share(check_vma):
    """One scale for all blocks is gathered to one for each."""
    values = np.arange(-24, 24, dtype=np.int8).reshape(8, 6)

    def product(values, scales, w):
        return jaxpar.all_gather_matmul(Quantized(values, scales, dtype="float32"), w, "x")

    mapped = jax.shard_map(
        product,
        mesh=make_mesh("x=4", devices=jax.devices()[:4]),
        in_specs=(P("x"), P(), P()),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    w = np.ones((6, 2), np.float32)
    found = jax.jit(mapped)(values, np.full((1, 1), 0.5, np.float32), w)
    np.testing.assert_array_equal(found[:8], 0.5 * values.astype(np.float32) @ w)


def test_a_whole_weight_that_the_vocabulary_gives_away():
    def losses(x, w):
        return layers.vocab_parallel_cross_entropy(
            x, w, jnp.zeros(3, "int32"), "x", vocabulary=7, sequence_dim=None
        )

    mapped = jax.shard_map(
        losses,
        mesh=make_mesh("x=4", devices=jax.devices()[:4]),
        in_specs=(P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    whole = "w has local shape (5, 8), columns of all vocabulary=7 tokens on every device of axis "
    with pytest.raises(ValueError, match=re.escape(whole)):
        jax.eval_shape(mapped, jnp.ones((3, 5)), jnp.ones((5, 8)))
