"""The decoder transformer on one device's blocks: the same text for every mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar import Axis, LowBit
from jaxpar.layers import (
    fsdp_gather,
    fsdp_scan,
    gated_mlp,
    parallel_attention,
    ring_attention,
    rms_norm,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from jaxpar.layout import Layout
from jaxpar.moe import Statistics
from language_model.config import Model, Training
from language_model.data import IGNORE, PADDING
from language_model.experts import append, mixture, no_statistics, router_loss
from language_model.parallel import AXES, sequence_order

LossSum = Callable[[Any, Array, Array], tuple[tuple[Array, Array], Any]]


def loss_sum(
    model: Model,
    layout: Layout,
    mode: str = "auto",
    dispatch: str = "auto",
    training: Training | None = None,
    wire_dtype: LowBit | None = None,
) -> LossSum:
    """Returns the function of a device's blocks that `layers.mean_value_and_grad` differentiates.

    Args:
      model: the sizes.
      layout: of the weights, from `lay_out`.
      mode: how the matmuls and gathers run.
      dispatch: how tokens reach their experts.
      training: for the losses of the experts' routers, which are left out without.
      wire_dtype: how what is gathered travels; None: as it is.

    Returns:
      `(params, tokens, labels) -> ((loss, weight), statistics)`: the sums, over this device's own
      tokens, of the losses and of the labels that count; and `jaxpar.moe.Statistics` of each layer,
      stacked, or None. tokens are int32[b, s/cp], labels int32[b, s/(cp*tp)].
    """

    tp, fsdp = (Axis(name, mode=mode, wire_dtype=wire_dtype) for name in ("tp", "fsdp"))
    dims, dims_of_layers = layout.fsdp_dims(), layout.under("layers").fsdp_dims(stacked=1)

    def function(
        params: Any, tokens: Array, labels: Array
    ) -> tuple[tuple[Array, Array], Statistics | None]:
        routers = params["layers"].get("router")
        # Weights travel in the dtype of the arithmetic; their gradients are summed in float32.
        params = jax.tree.map(lambda w: w.astype(model.dtype), params)
        if model.experts:  # a choice between experts does not bear rounding
            params["layers"]["router"] = routers
        embedding = gather(params, "embedding")  # [V/tp, d]
        x = vocab_parallel_embedding(tokens, embedding, tp, sequence_dim=-2)
        # x: [b, s/(cp*tp), d], and so it stays from layer to layer

        scan = scan_naively if mode == "naive" else fsdp_scan
        layer = partial(apply_layer, labels != PADDING)
        state = (x, no_statistics(model))
        x, found = scan(layer, params["layers"], state, fsdp, dim=dims_of_layers)
        x = rms_norm(x, params["final_norm"])
        logits = embedding.T if model.tied else gather(params, "logits")  # [d, V/tp]
        losses = vocab_parallel_cross_entropy(
            x,
            logits,
            jnp.maximum(labels, IGNORE),
            tp,
            vocabulary=model.vocabulary,
            sequence_dim=-2,
            ignore_label=IGNORE,
        )
        loss, weight = losses.sum(), (labels >= 0).sum().astype(losses.dtype)
        if training is not None and found is not None:
            # Of all tokens: each device has of it what its labels are of all labels.
            loss = loss + weight * router_loss(training, found).astype(loss.dtype)
        return (loss, weight), found

    def gather(params: Any, name: str) -> Array:
        return fsdp_gather(params[name], fsdp, dim=dims[name])

    def apply_layer(is_token: Array, w: Any, state: Any) -> Any:
        x, found = state
        normed = rms_norm(x, w["attention_norm"])
        x = x + parallel_attention(
            normed,
            w["query"],
            w["key"],
            w["value"],
            w["output"],
            tp,
            attend,
            heads=model.heads,
            kv_heads=model.kv_heads,
        )
        normed = rms_norm(x, w["mlp_norm"])
        if not model.experts:
            return x + gated_mlp(normed, w["gate"], w["up"], w["down"], tp), found
        made, new = mixture(model, w, normed, is_token, dispatch, wire_dtype)
        return x + made, append(found, new)

    def attend(q: Array, k: Array, v: Array) -> Array:
        # q: [b, s/cp, h, e]; k and v: [b, s/cp, g, e]
        turn = rotary(positions(q.shape[1]), model, q.dtype)
        return ring_attention(rotate(q, *turn), rotate(k, *turn), v, "cp", order="zigzag")

    return function


def scan_naively(layer: Any, stacked: Any, state: Any, axis: Axis, *, dim: Any) -> Any:
    """What `fsdp_scan` is measured against: each layer gathers its weights, and then computes."""

    @jax.checkpoint
    def apply(state: Any, shards: Any) -> Any:
        return layer(fsdp_gather(shards, axis, dim=dim), state)

    # What a layer hands on varies over all that its weights vary over.
    x, found = state
    x = lax.pcast(x, tuple({*AXES} - jax.typeof(x).manual_axis_type.varying), to="varying")
    return lax.scan(lambda state, w: (apply(state, w), None), (x, found), stacked)[0]


def positions(local: int) -> Array:
    """Returns the positions in the sequence of what this device holds of it over cp."""
    size = lax.axis_size("cp")
    order = sequence_order(local * size, size).reshape(size, local)
    return jnp.asarray(order, jnp.int32)[lax.axis_index("cp")]


def rotary(at: Array, model: Model, dtype: Any) -> tuple[Array, Array]:
    """Returns the cosines and sines, [s, 1, size/2], of the angles at these positions."""
    # Angles in bfloat16 would be off by radians.
    dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
    rates = model.rotary_base ** -(np.arange(0, model.head_size, 2) / model.head_size)
    angles = at.astype(dtype)[:, None, None] * jnp.asarray(rates, dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns feature i with feature i + size/2, x being [..., s, heads, size]."""
    left, right = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
