"""The mixture-of-experts layer: route, dispatch, compute, combine."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike

from jaxpar._axis import Ring
from jaxpar._calls import public
from jaxpar._choice import Problem, applies_experts_in_stages, choose_dispatch
from jaxpar._dtypes import addition_dtype, check_wire, common_dtype, sum_dtype
from jaxpar._types import AxisLike, Dispatch, Implementation, Integer, Number, Policy, Scoring
from jaxpar._varying import vary_over, varying_axes
from jaxpar.layers import fsdp_gather
from jaxpar.moe._arguments import (
    Axes,
    bind_axes,
    check_experts,
    check_options,
    check_tokens,
    check_widths,
    fsdp_dims,
)
from jaxpar.moe._bounds import Bounds
from jaxpar.moe._capacity import expert_capacity, limit_capacity
from jaxpar.moe._exchange import Gathered, Ragged, exchange_in_chunks
from jaxpar.moe._experts import as_experts
from jaxpar.moe._local import LocalExperts
from jaxpar.moe._mlp import Experts, ExpertsLike
from jaxpar.moe._routing import route
from jaxpar.moe._shared import apply_shared
from jaxpar.moe._statistics import Statistics, routing_statistics


@public
def moe_layer(
    tokens: Array,
    router: Array,
    experts: ExpertsLike,
    *,
    axis: AxisLike,
    top_k: Integer,
    capacity_factor: Number | None = None,
    capacity_policy: Policy = "probability",
    buffer_factor: Number | None = None,
    dispatch: Dispatch = "auto",
    chunks: Integer = 1,
    scoring: Scoring = "softmax",
    router_bias: Array | None = None,
    groups: Integer = 1,
    top_groups: Integer | None = None,
    normalize: bool = False,
    scale: Number = 1.0,
    shared: ExpertsLike | None = None,
    activation: Callable[[Array], Array] = jax.nn.silu,
    mask: Array | None = None,
    data_axis: AxisLike = (),
    tp_axis: AxisLike | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer = 1,
    precision: PrecisionLike = None,
    implementation: Implementation = "auto",
) -> tuple[Array, Statistics]:
    """Sends each token to the experts that the router chooses, and sums what they make of it.

    Args:
      tokens: local `[..., d]`, sharded over `axis`: each device has its own.
      router: `[d, E]`, replicated: a column for each of the E experts.
      experts: local `Experts`, or a mapping with their names: `up` and, for gated ones, `gate`
        `[e, d, f]`, `down` `[e, f, d]`, and biases, in the dtype of `tokens`. A device has
        e = ceil(E / n) experts, device 0 the first e; where n does not divide E, `pad_experts`
        appends the ones that are missing.
      axis: the mesh axis, or a tuple of them in any order, over which experts are sharded.
      top_k: how many experts each token has.
      capacity_factor: an expert takes at most ceil(factor x t x top_k / E) of the t tokens of each
        device, and the others lose that expert's share. None: nothing is dropped.
      capacity_policy: which tokens an expert keeps, those with the largest weight,
        `"probability"`, or the first ones, `"position"`.
      buffer_factor: receive buffers of this multiple of a device's share when loads are balanced;
        choices that do not fit are lost, and counted in `overflow`. None: buffers of the worst
        case, all tokens of all devices (or what `capacity_factor` leaves of it): nothing is lost.
      dispatch: `"ragged"`: each token travels once to each device that it needs, by a ragged
        all-to-all, and a row comes back. `"all_gather"`: all tokens to all devices, and a
        reduce-scatter. `"auto"`: ragged, or all-gather where nearly every token needs nearly every
        device, or a way round a ring of links to each costs more than one past all.
      chunks: so many pieces of the tokens are sent one after the other, each while the experts
        compute the one before.
      scoring: as in `route`.
      router_bias: as `bias` of `route`.
      groups: as in `route`.
      top_groups: as in `route`.
      normalize: as in `route`.
      scale: as in `route`.
      shared: experts that every token has, as one: `up` and `gate` `[d, f]`, `down` `[f, d]`,
        biases `[f]` and `[d]`; replicated over `axis`.
      activation: an elementwise function.
      mask: bool `[...]`: tokens that count. The others, which may hold NaN, reach no expert and no
        statistics; shared experts get 0 in their place.
      data_axis: further axes over which tokens are sharded; the statistics are over these too.
      tp_axis: axes over which the hidden features f of each expert, shared ones too, are
        sharded.
      sequence_dim: with `tp_axis`, whether tokens are sharded over it, as the other layers
        return them: any integer; or replicated over it: None.
      fsdp_axis: axes over which all experts' weights are sharded further. They are gathered
        here, and again for the backward pass.
      fsdp_dim: the dimension of matrices `[e, d, f]` and `[e, f, d]` along which they are, 1 or 2;
        of shared experts, which lack the first, one less. Biases are sharded along their last.
      precision: as in `jax.lax.dot_general`.
      implementation: as in `grouped_matmul`.

    Returns:
      The results, like `tokens`, and `Statistics` over `axis` and `data_axis`. What is
      lost, by capacity, buffers or mask, adds nothing to a token's result.

    Raises:
      TypeError: experts that are not of the tokens' dtype; an option of the wrong type.
      ValueError: shapes that do not fit each other, experts that are not ceil(E / n), options out
        of range, an unknown option or axis name, a call outside shard_map.

    Cost: with r the rows that reach a device, at most tokens x distinct target devices in all:
      `"ragged"` sends those rows, with k integers and k weights each, and one row back for each.
      `"all_gather"` sends (n-1) t rows each way. Matmuls of every pair of a token and an expert,
      2 d f each. The derivative sends as much again, and computes twice as much.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> w = jnp.ones((16, 4, 32)) / 4
      >>> experts = Experts(up=w, gate=w, down=w.swapaxes(1, 2))
      >>> layer = jax.jit(jax.shard_map(
      ...     lambda x, r, w: moe_layer(x, r, w, axis="ep", top_k=2), mesh=mesh,
      ...     in_specs=(P("ep"), P(), P("ep")), out_specs=(P("ep"), P())))
      >>> y, statistics = layer(jnp.ones((64, 4)), jnp.eye(4, 16), experts)
      >>> y.shape, int(statistics.tokens_per_expert.sum()), int(statistics.dropped)
      ((64, 4), 128, 0)

    Source: Shazeer et al., "Outrageously large neural networks" (2017); Lepikhin et al., "GShard"
    (2020), for capacities; Gale et al., "MegaBlocks" (2022), for dropless experts.
    """
    axes = bind_axes(axis, data_axis, tp_axis, sequence_dim, fsdp_axis)
    routed, fused = as_experts(experts), None if shared is None else as_experts(shared)
    check_tokens(tokens, router, mask)
    check_experts(tokens, router, routed, fused, axes)
    rows = tokens.reshape(-1, tokens.shape[-1])  # [t, d]
    counted = None if mask is None else mask.reshape(-1)
    if counted is not None:  # what they hold may be NaN, which no weight's gradient must see
        rows = jnp.where(counted[:, None], rows, jnp.zeros((), rows.dtype))
    for ring in (axes.expert, axes.tensor, axes.fsdp):
        if ring is not None:
            check_wire(ring.wire_dtype, tokens.dtype)
    chunks, buffer_factor = check_options(len(rows), dispatch, chunks, buffer_factor)

    routing = route(
        _logits(rows, router, precision),
        top_k,
        scoring=scoring,
        bias=router_bias,
        groups=groups,
        top_groups=top_groups,
        normalize=normalize,
        scale=scale,
        mask=counted,
    )
    capacity = None
    if capacity_factor is not None:
        capacity = expert_capacity(len(rows), top_k, router.shape[1], capacity_factor)
        routing = limit_capacity(routing, capacity, policy=capacity_policy)

    count = len(routed.up)
    bounds = Bounds(axes.expert.size, router.shape[1], count, top_k, capacity, buffer_factor)
    if dispatch == "auto":
        problem = Problem("experts", axes.expert, (rows.shape,), needed=bounds.needed)
        dispatch = choose_dispatch(problem)
    staged = applies_experts_in_stages(chunks)
    exchange = (Ragged if dispatch == "ragged" and axes.expert.size > 1 else Gathered)(
        axes.expert,
        bounds,
        LocalExperts(activation, precision, implementation, staged),
        axes.gathered_tensor,
    )
    chosen = jnp.where(routing.kept, routing.experts, -1)
    replicated = axes.summed_tensor

    def compute(
        rows: Array, weights: Array, routed: Experts, fused: Experts | None
    ) -> tuple[Array, Array]:
        routed = _whole(axes, rows, routed, "experts", fsdp_dim)
        if fused is not None:
            fused = _whole(axes, rows, fused, "shared", fsdp_dim)
        if axes.tensor is not None:
            routed = _bias_once(axes.tensor, routed)
        summed = replicated.names if replicated else ()
        sent, given = vary_over(summed, (rows, weights))  # once here, not where they have arrived
        out, pairs = exchange_in_chunks(exchange, (sent, chosen, given), routed, chunks)
        if replicated is not None:
            wide = replicated.wire_dtype or addition_dtype(out.dtype)
            out = lax.psum(out.astype(wide), summed).astype(out.dtype)
            pairs = lax.psum(jnp.where(replicated.index() == 0, pairs, 0), summed)
        if fused is not None:
            out = out + apply_shared(axes, rows, fused, activation, precision)
        return out, pairs

    if axes.fsdp is not None:
        keep = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
        compute = jax.checkpoint(compute, policy=keep)
    out, pairs = compute(rows, routing.weights, routed, fused)
    overflow = jnp.sum(routing.kept, dtype=jnp.int32) - pairs
    statistics = routing_statistics(routing, axes.counted, mask=counted, overflow=overflow)
    return out.reshape(tokens.shape), statistics


_GATHERED = "gathered experts"


def _logits(rows: Array, router: Array, precision: PrecisionLike) -> Array:
    """Scores are sensitive to rounding: in float32 at least."""
    wide = common_dtype(sum_dtype(rows.dtype), sum_dtype(router.dtype))
    w = vary_over(varying_axes(rows), router.astype(wide))
    return lax.dot(rows.astype(wide), w, precision=precision)


def _whole(axes: Axes, rows: Array, experts: Experts, kind: str, dim: int) -> Experts:
    """Gathers what is sharded over fsdp, and checks that it fits the rows."""
    if axes.fsdp is not None:
        dims = fsdp_dims(experts, dim)
        experts = fsdp_gather(experts, axes.fsdp, dim=dims)
        # Named last, after the cast that its uses need: what comes after a name would be kept.
        experts = vary_over(varying_axes(rows, experts), experts)
        experts = jax.tree.map(lambda w: checkpoint_name(w, _GATHERED), experts)
    check_widths(rows.shape[1], experts, kind)
    return experts


def _bias_once(ring: Ring, experts: Experts) -> Experts:
    """Leaves the last bias to one device of those whose results are summed."""
    if experts.down_bias is None:
        return experts
    (bias,) = vary_over(ring.names, (experts.down_bias,))
    once = jnp.where(ring.index() == 0, bias, jnp.zeros_like(bias))
    return experts._replace(down_bias=once)
