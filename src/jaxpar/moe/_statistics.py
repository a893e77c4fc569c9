"""Statistics of how evenly a router uses its experts, and the losses that keep it even."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Num

from jaxpar.arguments.calls import public, readable, value_error
from jaxpar.arguments.types import Integer, Values
from jaxpar.axis.axis import AxisLike, bind_any
from jaxpar.axis.checks import as_array, check_own
from jaxpar.axis.vma import vary_alike
from jaxpar.moe._routing import Routing, RoutingLike, as_mask, as_routing, of_experts


@readable
class Statistics(NamedTuple):
    """A routing's statistics over all devices, from `routing_statistics`.

    Attributes:
      tokens_per_expert: int32 `[E]`, tokens routed to each expert, dropped ones included.
      dropped: int32, choices that `limit_capacity` dropped.
      overflow: int32, rows or choices that did not fit into receive buffers.
      entropy: mean over tokens of the entropy of their normalized scores; 0 to log(E).
      largest_load: the busiest expert's tokens, divided by the mean; 1 at balance.
      load_balance_loss: see `load_balance_loss`.
      router_z_loss: see `router_z_loss`.

    Example:
      >>> stats = routing_statistics(route(jnp.eye(4), 1))
      >>> stats.tokens_per_expert, float(stats.largest_load)
      (Array([1, 1, 1, 1], dtype=int32), 1.0)
    """

    tokens_per_expert: Array
    dropped: Array
    overflow: Array
    entropy: Array
    largest_load: Array
    load_balance_loss: Array
    router_z_loss: Array


@public
def routing_statistics(
    routing: RoutingLike,
    axis: AxisLike = (),
    *,
    mask: Values | None = None,
    overflow: Array | Integer = 0,
) -> Statistics:
    """Computes a routing's statistics and losses over all devices.

    Args:
      routing: the `Routing` of this device's tokens.
      axis: all axes that shard tokens, without options. Empty: only this device's tokens count.
      mask: bool `[t]`, False for tokens that do not count, besides those that `route` masked.
      overflow: a scalar integer, rows that this device could not receive.

    Returns:
      `Statistics`, replicated over `axis`; all 0 if no token counts. Entropy and losses are
      differentiable in scores and logits. For `layers.mean_value_and_grad`, which divides by the
      weight, add a loss times the device's `weight` to `loss_sum`.

    Raises:
      ValueError: `routing` is typed as replicated over `axis`, a shape is wrong, or `axis` is an
        `Axis` with options.

    Cost: psums of E + 2 integers, of E + 2 floats and of `overflow`. The derivative sends nothing,
    or with `check_vma=False` the floats again.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x: routing_statistics(route(x, 2), "ep"),
      ...     mesh=mesh, in_specs=P("ep"), out_specs=P()))
      >>> f(jnp.tile(jnp.array([3.0, 2.0, 1.0, 0.0]), (16, 1))).tokens_per_expert
      Array([16, 16,  0,  0], dtype=int32)
    """
    routing = as_routing(routing)
    ring = bind_any(axis, takes=())
    if ring.names:
        check_own("routing", routing, ring, "tokens", "leave out of axis where all have them")
    return statistics_of(routing, ring.names, mask, overflow)


def statistics_of(
    routing: Routing, axes: tuple[str, ...], mask: Values | None, overflow: Array | Integer
) -> Statistics:
    counted = _counted(routing, mask)
    lost = as_array("overflow", overflow)
    if lost.ndim or not jnp.issubdtype(lost.dtype, jnp.integer):
        raise value_error(
            f"overflow must be a scalar integer, got {lost.dtype}{list(lost.shape)}; it is "
            "the number of rows that this device could not receive"
        )
    dropped = jnp.sum(_routed(routing, counted) & ~routing.kept, dtype="int32")
    tokens, counts, dropped = _sums(
        axes, _count(counted), _tokens_per_expert(routing, counted), dropped
    )
    scores = _normalized(routing.scores, counted)
    total, entropy, z_loss = _sums(
        axes,
        jnp.sum(scores, axis=0),
        jnp.sum(_entropies(scores)),
        jnp.sum(_z_losses(routing, counted)),
    )
    loads = counts.astype(total.dtype)
    return Statistics(
        tokens_per_expert=counts,
        dropped=dropped,
        overflow=_sums(axes, lost.astype("int32"))[0],
        entropy=_per(entropy, tokens),
        largest_load=len(counts) * _per(jnp.max(loads), jnp.sum(counts, dtype="int32")),
        load_balance_loss=_balance(counts, total, tokens),
        router_z_loss=_per(z_loss, tokens),
    )


@public
def load_balance_loss(
    routing: RoutingLike, axis: AxisLike = (), *, mask: Values | None = None
) -> Array:
    """Computes the load-balancing loss: 1 at balance, at most E.

    It is `E * sum_e share_e * score_e`, over all devices. `share_e` is expert e's share of all
    choices, dropped ones included. `score_e` is the mean over tokens of its normalized score (a
    token's scores sum to 1). It is not the average of single devices' losses.

    Args:
      routing: as in `routing_statistics`.
      axis: as in `routing_statistics`.
      mask: as in `routing_statistics`.

    Returns:
      A scalar in the dtype of scores, replicated over `axis`. Shares are not differentiated.
      Without tokens that count, the loss and its gradients are 0.

    Raises:
      ValueError: as in `routing_statistics`.

    Cost: psums of E + 1 integers and E floats. The derivative costs as in `routing_statistics`.

    Example:
      >>> load_balance_loss(route(100 * jnp.eye(4), 1))
      Array(1., dtype=float32)
      >>> load_balance_loss(route(100 * jnp.ones((6, 1)) * jnp.eye(4)[2], 1))
      Array(4., dtype=float32)

    Source: Fedus et al., "Switch transformers" (2021).
    """
    routing, axes = as_routing(routing), bind_any(axis, takes=()).names
    counted = _counted(routing, mask)
    tokens, counts = _sums(axes, _count(counted), _tokens_per_expert(routing, counted))
    scores = _normalized(routing.scores, counted)
    (total,) = _sums(axes, jnp.sum(scores, axis=0))
    return _balance(counts, total, tokens)


@public
def router_z_loss(
    routing: RoutingLike, axis: AxisLike = (), *, mask: Values | None = None
) -> Array:
    """Computes the mean over tokens of `logsumexp(logits)**2`, which keeps logits small.

    Args:
      routing: as in `routing_statistics`.
      axis: as in `routing_statistics`.
      mask: as in `routing_statistics`.

    Returns:
      A scalar in the dtype of logits, replicated over `axis`. Without tokens that count, the loss
      and its gradients are 0.

    Raises:
      ValueError: as in `routing_statistics`.

    Cost: psums of two scalars. The derivative sends nothing, or with `check_vma=False` one scalar.

    Example:
      >>> f"{router_z_loss(route(jnp.zeros((3, 4)), 1)):.3f}"  # log(4)**2
      '1.922'

    Source: Zoph et al., "ST-MoE" (2022).
    """
    routing, axes = as_routing(routing), bind_any(axis, takes=()).names
    counted = _counted(routing, mask)
    (tokens,) = _sums(axes, _count(counted))
    (total,) = _sums(axes, jnp.sum(_z_losses(routing, counted)))
    return _per(total, tokens)


def _sums(axes: tuple[str, ...], *parts: Num[Array, " ..."]) -> tuple[Num[Array, " ..."], ...]:
    """Sums parts of a dtype in a psum."""
    if not axes:
        return parts
    whole = jnp.concatenate([part.reshape(-1) for part in vary_alike(axes, *parts)])
    whole = lax.psum(whole, axes)
    ends = np.cumsum([part.size for part in parts])[:-1].tolist()
    pieces = jnp.split(whole, ends)
    return tuple(piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True))


def _counted(routing: Routing, mask: Values | None) -> Bool[Array, " tokens"]:
    """Returns tokens that have an expert, not masked."""
    counted = jnp.any(routing.experts >= 0, axis=1)
    for flags in (routing.mask, mask):
        if flags is not None:
            counted = counted & as_mask(flags, counted.shape, "tokens")
    return counted


def _count(counted: Bool[Array, " tokens"]) -> Int32[Array, ""]:
    return jnp.sum(counted, dtype="int32")


def _routed(routing: Routing, counted: Bool[Array, " tokens"]) -> Bool[Array, "tokens k"]:
    return counted[:, None] & (routing.experts >= 0)


def _tokens_per_expert(
    routing: Routing, counted: Bool[Array, " tokens"]
) -> Int32[Array, " experts"]:
    ones = _routed(routing, counted).astype("int32")
    chosen = of_experts(ones, routing.experts, routing.scores.shape[1])
    return jnp.sum(chosen, axis=0, dtype="int32")


def _normalized(
    scores: Float[Array, "tokens experts"], counted: Bool[Array, " tokens"]
) -> Float[Array, "tokens experts"]:
    """Returns scores over their sums, 0 if not counted."""
    scores = jnp.where(counted[:, None], scores, 0)
    total = jnp.sum(scores, axis=1, keepdims=True)
    # Sigmoids may underflow, and the derivative divides by the square.
    return scores / jnp.where(total > 1e-15, total, 1)


def _entropies(scores: Float[Array, "tokens experts"]) -> Float[Array, " tokens"]:
    logs = jnp.log(jnp.where(scores > 0, scores, 1))  # 0 log 0 is 0, without a gradient of NaN
    return -jnp.sum(scores * logs, axis=1)


def _z_losses(routing: Routing, counted: Bool[Array, " tokens"]) -> Float[Array, " tokens"]:
    # Logits of tokens that do not count may be NaN or infinite. The derivative of `where` would
    # multiply theirs by 0. So they are replaced before the arithmetic, and the result again after
    # it.
    logits = jnp.where(counted[:, None], routing.logits, 0)
    return jnp.where(counted, jax.nn.logsumexp(logits, axis=1) ** 2, 0)


def _balance(
    counts: Int32[Array, " experts"], scores: Float[Array, " experts"], tokens: Int32[Array, ""]
) -> Float[Array, ""]:
    shares = _per(counts.astype(scores.dtype), jnp.sum(counts, dtype="int32"))
    return len(counts) * jnp.sum(shares * _per(scores, tokens))


def _per(x: Float[Array, "*any"], count: Int32[Array, ""]) -> Float[Array, "*any"]:
    """Returns `x / count`, or `x` if the count is 0."""
    return x / jnp.maximum(count, 1).astype(x.dtype)
