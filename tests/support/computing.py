"""A tiny call of every public function that computes, on four devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Axis, layers, moe
from jaxpar.moe import Experts, RaggedDispatcher

ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()
RING = Axis("x", mode="bidirectional")


class Case(NamedTuple):
    """A function of local blocks, and the global arrays that it is given."""

    call: Callable[..., Any]
    specs: Any
    out: Any
    arrays: tuple[Any, ...]
    differentiable: bool = True


def _draw(*shape: int) -> np.ndarray:
    """Numbers that are the same each time, of a size at which nothing saturates."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32") / 2


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function of arrays and an axis: by a collective, and around a ring."""
    return lambda *arrays: (function(*arrays, "x"), function(*arrays, RING))


def _value_and_grad(w: Any, x: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.square(x @ w)), x.shape[0]

    return layers.mean_value_and_grad(loss, "x", microbatches=2, specs=WHOLE)(w, x)


def _exchange(x: Any, axis: Any) -> Any:
    one = jnp.ones(4, "int32")
    at = jnp.arange(4, dtype="int32")
    places = jnp.broadcast_to(jax.lax.axis_index("x"), (4,)).astype("int32")
    return jaxpar.ragged_all_to_all(x, jnp.zeros_like(x), at, one, places, one, axis)


def _dispatch(x: Any, to: Any) -> Any:
    dispatcher = RaggedDispatcher.from_target_device_ids(to, axis="x")
    received, valid = dispatcher.dispatch(x, capacity=8)
    combined, _ = dispatcher.combine(2 * received, capacity=8)
    return combined, valid, dispatcher.overflow(8).reshape(1)


def _attention(x: Any, *weights: Any) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    biases = tuple(jnp.zeros(w.shape[1], w.dtype) for w in weights)
    return layers.parallel_attention(x, *weights, "x", attend, heads=4, kv_heads=2, biases=biases)


def _head_layout(w: Any) -> Any:
    layout = layers.head_layout(heads=3, kv_heads=3, shards=4)
    wide, tall = layout.pad_query(w), layout.pad_output(w)
    back = layout.unpad_query(wide), layout.unpad_output(tall)
    return wide, tall, back, layout.kv_heads_of(jax.lax.axis_index("x"))[None]


X, W, BIAS, QKV = _draw(8, 8), _draw(8, 16), _draw(16), _draw(2, 8, 4, 4)
TOKENS, LABELS = np.arange(8, dtype="int32") % 5, np.array([0, 3, 9, -1, 13, 2, 7, 1], "int32")
EXPERTS = {"up": _draw(8, 8, 6), "gate": _draw(8, 8, 6) / 3, "down": _draw(8, 6, 8)}
NO_GATES = {name: EXPERTS[name] for name in ("up", "down")}
BIASES = {"up_bias": _draw(8, 6), "gate_bias": _draw(8, 6), "down_bias": _draw(8, 8)}
SIZES = np.array([2, 0, 3, 1], "int32")
MLP_BIASES = (_draw(16), _draw(16) / 3, _draw(8))

CASES: dict[str, Case] = {
    "all_gather_matmul": Case(_both(jaxpar.all_gather_matmul), (ROWS, COLUMNS), COLUMNS, (X, W)),
    "matmul_all_reduce": Case(_both(jaxpar.matmul_all_reduce), (COLUMNS, ROWS), WHOLE, (X, W)),
    "matmul_reduce_scatter": Case(
        _both(jaxpar.matmul_reduce_scatter), (COLUMNS, ROWS), ROWS, (X, W)
    ),
    "quantize": Case(
        lambda x: (jaxpar.quantize(x), jaxpar.quantize(x).dequantized()), ROWS, ROWS, (X,)
    ),
    "ragged_all_to_all": Case(lambda x: _exchange(x, "x"), ROWS, ROWS, (_draw(16, 3),)),
    "all_gather": Case(_both(jaxpar.all_gather), ROWS, ROWS, (X,)),
    "all_reduce": Case(_both(jaxpar.all_reduce), ROWS, WHOLE, (X,)),
    "collective_einsum": Case(
        lambda x, w: jaxpar.collective_einsum("bsd,dh->bhs", x, w, RING, gather="s"),
        (COLUMNS, COLUMNS),
        COLUMNS,
        (_draw(2, 8, 8), W),
    ),
    "reduce_scatter": Case(
        lambda x: [jaxpar.reduce_scatter(x, a, tiled=True) for a in ("x", RING)],
        *(COLUMNS, ROWS, (X,)),
    ),
    "ring_shift": Case(lambda x: jaxpar.ring_shift(x, "x"), ROWS, ROWS, (X,)),
    "column_parallel_linear": Case(
        lambda x, w, b: layers.column_parallel_linear(x, w, "x", bias=b),
        *((ROWS, COLUMNS, ROWS), COLUMNS, (X, W, BIAS)),
    ),
    "copy_region": Case(lambda x: layers.copy_region(x, "x"), WHOLE, ROWS, (X,)),
    "fsdp_gather": Case(_both(layers.fsdp_gather), ROWS, ROWS, (X,)),
    "fsdp_linear": Case(
        lambda x, w, b: layers.fsdp_linear(x, w, "x", bias=b),
        *((ROWS, ROWS, ROWS), ROWS, (X, W, BIAS)),
    ),
    "fsdp_scan": Case(
        lambda w, x: layers.fsdp_scan(lambda w, x: jnp.tanh(x @ w), w, x, "x"),
        *((COLUMNS, ROWS), ROWS, (_draw(2, 8, 8), X)),
    ),
    "gated_mlp": Case(
        lambda x, g, u, d, *b: layers.gated_mlp(x, g, u, d, "x", biases=b),
        (ROWS, COLUMNS, COLUMNS, ROWS, ROWS, ROWS, WHOLE),
        ROWS,
        (X, W, W / 3, W.T, *MLP_BIASES),
    ),
    "gather_region": Case(lambda x: layers.gather_region(x, "x", dim=0), ROWS, WHOLE, (X,)),
    "global_norm": Case(
        lambda w, b: layers.global_norm((w, b), specs=(ROWS, WHOLE)),
        *((ROWS, WHOLE), WHOLE, (W, BIAS)),
    ),
    "head_layout": Case(_head_layout, WHOLE, (WHOLE, WHOLE, WHOLE, ROWS), (_draw(6, 6),)),
    "layer_norm": Case(layers.layer_norm, (ROWS, WHOLE, WHOLE), ROWS, (X, BIAS[:8], BIAS[8:])),
    "mean_loss": Case(
        lambda x: layers.mean_loss(jnp.sum(jnp.square(x)), x.size, "x"), ROWS, WHOLE, (X,)
    ),
    "parallel_attention": Case(
        _attention,
        (COLUMNS, COLUMNS, WHOLE, WHOLE, ROWS),
        COLUMNS,
        (_draw(2, 8, 8), _draw(8, 8), _draw(8, 4), _draw(8, 4) / 3, _draw(8, 8) / 3),
    ),
    "reduce_compressed_gradients": Case(
        lambda g: layers.reduce_compressed_gradients(g, "x"),
        *(ROWS, (WHOLE, ROWS), (_draw(512, 128),), False),
    ),
    "reduce_gradients": Case(
        lambda g: layers.reduce_gradients({"w": g, "b": 2 * g}, "x", bucket_bytes=64),
        *(ROWS, WHOLE, (X,)),
    ),
    "reduce_region": Case(lambda x: layers.reduce_region(x, "x"), ROWS, WHOLE, (X,)),
    "ring_attention": Case(_both(layers.ring_attention), (COLUMNS,) * 3, COLUMNS, (QKV,) * 3),
    "rms_norm": Case(
        lambda x, s: (layers.rms_norm(x, s), layers.rms_norm(x.T, s[:2], axis="x")),
        *((ROWS, WHOLE), (ROWS, COLUMNS), (X, BIAS[:8])),
    ),
    "row_parallel_linear": Case(
        lambda x, w, b: layers.row_parallel_linear(x, w, "x", bias=b),
        *((COLUMNS, ROWS, WHOLE), ROWS, (X, W, BIAS)),
    ),
    "scatter_region": Case(lambda x: layers.scatter_region(x, "x", dim=0), WHOLE, ROWS, (X,)),
    "mean_value_and_grad": Case(_value_and_grad, (WHOLE, ROWS), (WHOLE, WHOLE), (W, X), False),
    "vocab_parallel_cross_entropy": Case(
        lambda x, w, y: layers.vocab_parallel_cross_entropy(
            x, w, y, "x", vocabulary=14, chunk=2, label_smoothing=0.1, z_loss=0.1, sequence_dim=None
        ),
        *((WHOLE, COLUMNS, WHOLE), WHOLE, (X, W, LABELS)),
    ),
    "vocab_parallel_embedding": Case(
        lambda tokens, table: layers.vocab_parallel_embedding(
            tokens, table, "x", sequence_dim=None
        ),
        *((WHOLE, ROWS), WHOLE, (TOKENS, X)),
    ),
    "zigzag_order": Case(lambda x: x[layers.zigzag_order(8, 2)], COLUMNS, COLUMNS, (X,)),
    "Experts": Case(lambda w: Experts(**w), ROWS, ROWS, (EXPERTS,)),
    "RaggedDispatcher": Case(_dispatch, (ROWS, ROWS), ROWS, (X, LABELS[:, None] % 4)),
    "apply_experts": Case(
        lambda x, w: moe.apply_experts(x, w, jnp.array([1, 1], "int32")),
        *((ROWS, ROWS), ROWS, (X, EXPERTS | BIASES)),
    ),
    "as_experts": Case(moe.as_experts, ROWS, ROWS, (EXPERTS,)),
    "grouped_matmul": Case(
        lambda x, w, n: [
            moe.grouped_matmul(x, w, n, implementation=how) for how in ("ragged_dot", "blocks")
        ],
        *((ROWS, WHOLE, ROWS), ROWS, (_draw(24, 8), _draw(4, 8, 6), np.tile(SIZES, 4))),
    ),
    "limit_capacity": Case(
        lambda x: [
            moe.limit_capacity(moe.route(x, 2), 1, policy=policy)
            for policy in ("probability", "choice", "position")
        ],
        *(ROWS, ROWS, (X,)),
    ),
    "load_balance_loss": Case(
        lambda x: moe.load_balance_loss(moe.route(x, 2), "x"), ROWS, WHOLE, (X,)
    ),
    "moe_layer": Case(
        lambda x, r, w, shared, gate: moe.moe_layer(
            *(x, moe.route(x @ r, 2), w, "x"),
            dispatch="all_gather",
            shared=shared,
            shared_gate=gate,
        ),
        (ROWS, WHOLE, ROWS, WHOLE, WHOLE),
        (ROWS, WHOLE),
        (X, _draw(8, 8), EXPERTS | BIASES, {"up": _draw(8, 6), "down": _draw(6, 8)}, _draw(8, 1)),
    ),
    "pad_experts": Case(lambda w: moe.pad_experts(w, 3), ROWS, ROWS, (EXPERTS,)),
    "route": Case(
        lambda x, b: [
            moe.route(x, 2, bias=b),
            moe.route(x, 2, scoring="sigmoid", bias=b, groups=4, top_groups=2, normalize=True),
            moe.route(x, 2, scoring="selected_softmax", mask=jnp.arange(2) < 1),
            moe.route(x, 2, groups=2, top_groups=1, scores_per_group=2),
        ],
        *((ROWS, WHOLE), ROWS, (X, _draw(8))),
    ),
    "routed_moe_layer": Case(
        lambda x, r, w: moe.routed_moe_layer(
            *(x, r, w, "x"),
            top_k=2,
            capacity_factor=2.0,
            dispatch="ragged",
            chunks=2,
            buffer_factor=2.0,
            implementation="blocks",  # "auto" is what `moe_layer` has, and gates
        ),
        *((ROWS, WHOLE, ROWS), (ROWS, WHOLE), (X, _draw(8, 8), NO_GATES)),
    ),
    "router_z_loss": Case(lambda x: moe.router_z_loss(moe.route(x, 2), "x"), ROWS, WHOLE, (X,)),
    "routing_statistics": Case(
        lambda x: moe.routing_statistics(moe.route(x, 2), "x"), ROWS, WHOLE, (X,)
    ),
    "update_router_bias": Case(
        moe.update_router_bias, (WHOLE, WHOLE), WHOLE, (_draw(4), SIZES), False
    ),
}
