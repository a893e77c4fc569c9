"""The decoder transformer on one device's blocks: the same text for every mesh."""

from dataclasses import dataclass
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
from language_model.config import Model, Training
from language_model.data import IGNORE, PADDING
from language_model.experts import append, mixture, no_statistics, router_loss
from language_model.parallel import AXES, sequence_order


@dataclass(frozen=True)
class Decoder:
    """The functions of a device's blocks that are differentiated: together, or as a pipeline.

    `batch` is `(tokens, labels)`: int32[b, s/cp] and int32[b, s/(cp*tp)]. What goes from layer to
    layer is `(x, of_routers)`: x, [b, s/(cp*tp), d], and the sum, over this device's labels that
    count, of the losses of routers so far; None without.

    Attributes:
      model: the sizes.
      layout: of the weights, from `lay_out`.
      mode: how the matmuls and gathers run.
      dispatch: how tokens reach their experts.
      training: for the losses of the experts' routers, which are left out without.
      wire_dtype: how what is gathered travels; None: as it is.
    """

    model: Model
    layout: Layout
    mode: str = "auto"
    dispatch: str = "auto"
    training: Training | None = None
    wire_dtype: LowBit | None = None

    def loss_sum(self, params: Any, tokens: Array, labels: Array) -> Any:
        """Returns `((loss, weight), statistics)`, for `layers.mean_value_and_grad`.

        Those are the sums, over this device's tokens, of the losses and of the labels that count;
        and `jaxpar.moe.Statistics` of each layer, stacked, or None.
        """
        table = self._gather(params, "embedding")  # [V/tp, d]
        state = self._look_up(table, tokens)
        state, found = self.apply(params["layers"], state, (tokens, labels))
        logits = table.T if self.model.tied else self._gather(params, "logits")  # [d, V/tp]
        return self._losses(params, logits, state, labels), found

    def first(self, shared: Any, batch: Any) -> Any:
        """Returns what enters the first stage."""
        tokens, _ = batch
        return self._look_up(self._gather(shared, "embedding"), tokens)

    def apply(self, layers: Any, state: Any, batch: Any) -> Any:
        """Applies stacked layers, all or those of a stage; returns the state, and statistics."""
        (x, of_routers), (_, labels) = state, batch
        count = len(layers["query"])
        # A choice between experts does not bear rounding.
        weights = {k: w if k == "router" else self._cast(w) for k, w in layers.items()}
        dims = self.layout.under("layers").fsdp_dims(stacked=1)
        scan = scan_naively if self.mode == "naive" else fsdp_scan
        layer = partial(self._layer, labels != PADDING)
        given = x, no_statistics(self.model, count)
        x, found = scan(layer, weights, given, self._axis("fsdp"), dim=dims)
        if self.training is not None and found is not None:
            # Of all tokens: each device has of it what its labels are of all labels.
            weight = (labels >= 0).sum().astype(of_routers.dtype)
            share = weight * (count / self.model.layers)
            of_routers = of_routers + share * router_loss(self.training, found)
        return (x, of_routers), found

    def last(self, shared: Any, state: Any, batch: Any) -> tuple[tuple[Array, Array], None]:
        """Returns the loss and the weight of this device's part, over pp, of the sequence."""
        _, labels = batch
        tied = self.model.tied
        logits = self._gather(shared, "embedding").T if tied else self._gather(shared, "logits")
        return self._losses(shared, logits, state, labels), None

    def _look_up(self, table: Array, tokens: Array) -> Any:
        x = vocab_parallel_embedding(tokens, table, "tp", sequence_dim=-2)
        counted = self.model.experts and self.training is not None
        return x, jnp.zeros((), self.model.weight_dtype) if counted else None

    def _losses(self, shared: Any, logits: Array, state: Any, labels: Array) -> Any:
        x, of_routers = state  # x: [b, s/(cp*tp*pp), d]
        first = lax.axis_index("pp") * x.shape[1]
        labels = lax.dynamic_slice_in_dim(labels, first, x.shape[1], axis=1)
        losses = vocab_parallel_cross_entropy(
            rms_norm(x, self._cast(shared["final_norm"])),
            logits,
            jnp.maximum(labels, IGNORE),
            self._axis("tp"),
            vocabulary=self.model.vocabulary,
            sequence_dim=-2,
            ignore_label=IGNORE,
        )
        loss, weight = losses.sum(), (labels >= 0).sum().astype(losses.dtype)
        return loss if of_routers is None else loss + of_routers, weight

    def _axis(self, name: str) -> Axis:
        return Axis(name, mode=self.mode, wire_dtype=self.wire_dtype)

    def _cast(self, w: Array) -> Array:
        # Weights travel in the dtype of the arithmetic; their gradients are summed in float32.
        return w.astype(self.model.dtype)

    def _gather(self, shared: Any, name: str) -> Array:
        dim = self.layout.fsdp_dims()[name]
        return fsdp_gather(self._cast(shared[name]), self._axis("fsdp"), dim=dim)

    def _layer(self, is_token: Array, w: Any, state: Any) -> Any:
        (x, found), tp = state, self._axis("tp")
        normed = rms_norm(x, w["attention_norm"])
        x = x + parallel_attention(
            normed,
            w["query"],
            w["key"],
            w["value"],
            w["output"],
            tp,
            self._attend,
            heads=self.model.heads,
            kv_heads=self.model.kv_heads,
        )
        normed = rms_norm(x, w["mlp_norm"])
        if not self.model.experts:
            return x + gated_mlp(normed, w["gate"], w["up"], w["down"], tp), found
        made, new = mixture(self.model, w, normed, is_token, self.dispatch, self.wire_dtype)
        return x + made, append(found, new)

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        # q: [b, s/cp, h, e]; k and v: [b, s/cp, g, e]
        turn = rotary(positions(q.shape[1]), self.model, q.dtype)
        return ring_attention(rotate(q, *turn), rotate(k, *turn), v, "cp", order="zigzag")


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
