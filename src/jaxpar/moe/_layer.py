"""The mixture-of-experts layer, with a routing or a router."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from inspect import signature
from typing import ParamSpec, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Bool, Float, Int32

from jaxpar.arguments.calls import check_among, public
from jaxpar.arguments.dtypes import check_wire
from jaxpar.arguments.types import (
    Dispatch,
    Implementation,
    Integer,
    Number,
    Policy,
    Scoring,
    Values,
)
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.checks import as_array
from jaxpar.axis.vma import vary_over
from jaxpar.choose.of_experts import applies_experts_in_stages, choose_dispatch
from jaxpar.choose.problem import Problem
from jaxpar.layers._activation import Activation
from jaxpar.moe._capacity import POLICIES, Bounds, as_factor, expert_capacity, limit_capacity
from jaxpar.moe._copies import where_rows
from jaxpar.moe._dispatch import Gathered, Ragged, apply_shared, logits_of
from jaxpar.moe._local import LocalExperts
from jaxpar.moe._mlp import Experts, ExpertsLike, expert_arrays
from jaxpar.moe._routing import RoutingLike, as_bias, as_mask, as_routing, route
from jaxpar.moe._sharding import (
    GATHERED,
    as_router,
    bias_once,
    bind_axes,
    check_experts,
    check_options,
    check_own_rows,
    gather_whole,
)
from jaxpar.moe._statistics import Statistics, statistics_of

Given = ParamSpec("Given")
Result = TypeVar("Result")


@public
def moe_layer(
    tokens: Array,
    routing: RoutingLike,
    experts: ExpertsLike,
    axis: AxisLike,
    *,
    dispatch: Dispatch = "auto",
    chunks: Integer = 1,
    capacity: Integer | None = None,
    buffer_factor: Number | None = None,
    shared: ExpertsLike | None = None,
    shared_gate: Values | None = None,
    activation: Activation = jax.nn.silu,
    data_axis: AxisLike = (),
    tp_axis: AxisLike | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer = 1,
    precision: PrecisionLike = None,
    implementation: Implementation = "auto",
) -> tuple[Array, Statistics]:
    """Sums the weighted results of each token's experts, which are sharded over devices.

    Args:
      tokens: local `[..., d]`, sharded over `axis`.
      routing: the `Routing` of these tokens to all E experts, as from `route`.
      experts: local `Experts`, or a mapping with the same keys, in the dtype of `tokens`. Device i
        has experts i e to (i+1) e - 1, with e = ceil(E / n); `pad_experts` adds those that are
        missing.
      axis: mesh axes that shard experts, or an `Axis`. `dispatch="all_gather"` uses its mode and
        `wire_dtype`; `"ragged"` uses only an 8-bit `wire_dtype`, for dispatched rows.
      dispatch: `"ragged"` sends a token once to each device of its experts, by a ragged all-to-all.
        `"all_gather"` sends all tokens to all devices, and sums results by a reduce-scatter.
        `"auto"` takes the one predicted to be faster: `"all_gather"` if a token goes to nearly all
        devices, or, on TPUs with a 2-dimensional torus, to about 4 or more.
      chunks: pieces of the tokens. Each is sent while experts compute the previous piece.
      capacity: the `capacity` that you gave to `limit_capacity`, if any; it makes buffers smaller.
      buffer_factor: the size of receive buffers, in multiples of a balanced load. Pairs of token
        and expert that do not fit are lost, and counted in `Statistics.overflow`. With None nothing
        is lost: buffers have room for all devices' tokens, or for as many as `capacity` allows.
      shared: experts that every token uses, given as one wide expert without dimension e, such as
        `up` `[d, f]`; replicated over `axis`.
      shared_gate: floats `[d, 1]`, replicated over all axes. The results of shared experts are
        multiplied by `sigmoid(tokens @ shared_gate)`.
      activation: elementwise, or a `jaxpar.layers.GatedActivation`.
      data_axis: further axes that shard tokens, without options.
      tp_axis: axes that shard all experts' hidden features f, or an `Axis`. Tokens travel over it
        as with `"all_gather"`; with `sequence_dim=None` results are summed by a psum.
      sequence_dim: with `tp_axis`, None if tokens are replicated over it, else an integer, whose
        value is ignored.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: the sharded dimension of `[e, d, f]` and `[e, f, d]`, 1 or 2; one less for shared
        experts. Biases are sharded along their last dimension.
      precision: as in `jax.lax.dot_general`.
      implementation: as in `grouped_matmul`. On GPUs and CPUs, `"auto"` computes an expert's first
        `m + 3 sqrt(m)` rows (slots), m its average load, by a batched matmul, and the rest by
        `"blocks"`.

    Returns:
      Results like `tokens`, and `Statistics` over all axes that shard tokens. Tokens that
      `routing.mask` leaves out, and their cotangents, may hold NaN. They reach no expert, not even
      shared ones; their results are 0.

    Raises:
      TypeError: experts have another dtype than tokens, or `routing` is no `Routing`.
      ValueError: shapes or numbers of experts do not fit, tokens or experts are typed as replicated
        over an axis that shards them, or an option is unknown or out of range.

    Cost: `"ragged"` sends a token's row, k integers and k weights (for k experts a token) to each
    of its devices, and a row returns. `"all_gather"` sends (n-1) t rows for dispatch, t local
    tokens, and as many for results. A pair of token and expert takes matmuls of 2 d f FLOPs each.
    Empty slots cost as much. An expert's slots are rounded up to a multiple of 32 (on CPUs 16). The
    derivative sends as much and computes twice as much.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> w = jax.random.normal(jax.random.key(0), (16, 4, 32)) / 4
      >>> experts = Experts(up=w, gate=w, down=w.swapaxes(1, 2))
      >>> layer = jaxpar.jit(jax.shard_map(
      ...     lambda x, logits, w: moe_layer(x, route(logits, 2), w, "ep"), mesh=mesh,
      ...     in_specs=P("ep"), out_specs=(P("ep"), P())))
      >>> y, statistics = layer(jnp.eye(64, 4), jnp.eye(64, 16), experts)
      >>> y.shape, int(statistics.tokens_per_expert.sum()), int(statistics.dropped)
      ((64, 4), 128, 0)

    Source: Shazeer et al., "Outrageously large neural networks" (2017); Gale et al., "MegaBlocks"
    (2022), for dropless experts; Qwen2 (2024), for the gate of shared experts.
    """
    axes = bind_axes(axis, data_axis, tp_axis, sequence_dim, fsdp_axis, dispatch)
    tokens, routed = as_array("tokens", tokens), expert_arrays(experts)
    fused = None if shared is None else expert_arrays(shared, "shared")
    check_own_rows(tokens, axes)
    gate = None if shared_gate is None else as_router("shared_gate", shared_gate, tokens, 1)
    routing = as_routing(routing, tokens)
    known = routing.logits.shape[1]
    check_experts(tokens, known, routed, fused, gate, axes)
    rows = tokens.reshape(-1, tokens.shape[-1])  # [tokens, d]
    rows = _real(rows, routing.mask)
    for ring in (axes.expert, axes.tensor, axes.fsdp):
        if ring is not None:
            check_wire(ring.wire_dtype, tokens.dtype)
    options = check_options(len(rows), dispatch, chunks, capacity, buffer_factor)
    chunks, capacity, buffer_factor = options

    top_k = routing.experts.shape[1]
    bounds = Bounds(axes.expert.size, known, len(routed.up), top_k, capacity, buffer_factor)
    if dispatch == "auto":
        what = f"{top_k} of {known} for each token, {rows.dtype}"
        shapes = rows.shape, routing.experts.shape
        problem = Problem("experts", axes.expert, shapes, needed=bounds.needed, what=what)
        dispatch = choose_dispatch(problem)
    way = (Ragged if dispatch == "ragged" and axes.expert.size > 1 else Gathered)(
        axes.expert,
        bounds,
        LocalExperts(activation, precision, implementation, applies_experts_in_stages(chunks)),
        axes.gathered_tensor,
    )
    chosen = jnp.where(routing.kept, routing.experts, -1)
    replicated = axes.summed_tensor

    def compute(
        rows: Float[Array, "tokens d"],
        weights: Float[Array, "tokens k"],
        routed: Experts,
        fused: Experts | None,
    ) -> tuple[Float[Array, "tokens d"], Int32[Array, ""]]:
        routed = gather_whole(axes, rows, routed, "experts", fsdp_dim)
        if fused is not None:
            fused = gather_whole(axes, rows, fused, "shared", fsdp_dim)
        if axes.tensor is not None:
            routed = bias_once(axes.tensor, routed)
        summed = replicated.names if replicated else ()
        sent, factors = vary_over(summed, (rows, weights))  # once here, not again on arrival
        with jax.named_scope(way.name):
            out, pairs = way.apply((sent, chosen, factors), routed, chunks)
        if replicated is not None:
            wide = replicated.wire(out.dtype)
            out = lax.psum(out.astype(wide), summed).astype(out.dtype)
            pairs = lax.psum(jnp.where(replicated.index() == 0, pairs, 0), summed)
        if fused is not None:
            more = apply_shared(axes, rows, fused, gate, activation, precision)
            out = out + _real(more, routing.mask)
        return out, pairs

    if axes.fsdp is not None:
        keep = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
        compute = jax.checkpoint(compute, policy=keep)
    out, pairs = compute(rows, routing.weights, routed, fused)
    overflow = jnp.sum(chosen >= 0, dtype=jnp.int32) - pairs
    statistics = statistics_of(routing, axes.counted, None, overflow)
    return out.reshape(tokens.shape), statistics


class LayerOptions(TypedDict, total=False):
    dispatch: Dispatch
    chunks: Integer
    buffer_factor: Number | None
    shared: ExpertsLike | None
    shared_gate: Values | None
    activation: Activation
    data_axis: AxisLike
    tp_axis: AxisLike | None
    sequence_dim: Integer | None
    fsdp_axis: AxisLike | None
    fsdp_dim: Integer
    precision: PrecisionLike
    implementation: Implementation


def _showing_options(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes `help` show `moe_layer`'s options."""
    shown, handed_on = signature(function), signature(moe_layer).parameters
    named = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [handed_on[name] for name in LayerOptions.__annotations__]
    function.__dict__["__signature__"] = shown.replace(parameters=[*named, *more])
    return function


@public
@_showing_options
def routed_moe_layer(
    tokens: Array,
    router: Array,
    experts: ExpertsLike,
    axis: AxisLike,
    *,
    top_k: Integer,
    scoring: Scoring = "softmax",
    router_bias: Values | None = None,
    groups: Integer = 1,
    top_groups: Integer | None = None,
    scores_per_group: Integer | None = None,
    normalize: bool = False,
    scale: Number = 1.0,
    mask: Values | None = None,
    capacity_factor: Number | Fraction | None = None,
    capacity_policy: Policy = "probability",
    **options: Unpack[LayerOptions],
) -> tuple[Array, Statistics]:
    """Routes tokens by a router matrix, limits experts' tokens, and applies `moe_layer`.

    Args:
      tokens: as in `moe_layer`.
      router: floats `[d, E]`, replicated.
      experts: as in `moe_layer`.
      axis: as in `moe_layer`.
      top_k: as in `route`, like `scoring`, `groups`, `top_groups`, `scores_per_group`, `normalize`,
        `scale`.
      router_bias: the `bias` of `route`.
      mask: bool `[...]`, False for tokens that reach no expert and no statistics, and may hold NaN.
      capacity_factor: an expert takes at most `expert_capacity(t, top_k, E, capacity_factor)` of a
        device's t tokens; the others go without this expert. None drops nothing.
      capacity_policy: the `policy` of `limit_capacity`.
      **options: other options of `moe_layer`.

    Returns:
      As `moe_layer`. Logits are computed in float32 at least.

    Raises:
      ValueError: `router` does not fit the tokens, or as in `route`, `limit_capacity` and
        `moe_layer`.

    Cost: of `route`, `limit_capacity` and `moe_layer`, and a matmul of 2 t d E FLOPs.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> w = jax.random.normal(jax.random.key(0), (16, 4, 32)) / 4
      >>> experts = Experts(up=w, gate=w, down=w.swapaxes(1, 2))
      >>> layer = jaxpar.jit(jax.shard_map(
      ...     lambda x, r, w: routed_moe_layer(x, r, w, "ep", top_k=2, chunks=2), mesh=mesh,
      ...     in_specs=(P("ep"), P(), P("ep")), out_specs=(P("ep"), P())))
      >>> y, statistics = layer(jnp.eye(64, 4), jnp.eye(4, 16), experts)
      >>> y.shape, int(statistics.tokens_per_expert.sum())
      ((64, 4), 128)
    """
    tokens = as_array("tokens", tokens)
    router = as_router("router", router, tokens)
    check_among("capacity_policy", capacity_policy, POLICIES)
    if router_bias is not None:
        router_bias = as_bias("router_bias", router_bias, router.shape[1])
    real = None
    if mask is not None:
        what = f"tokens of local shape {tokens.shape}"
        real = as_mask(mask, tokens.shape[:-1], what).reshape(-1)
    # Masked tokens may hold NaN, which must not reach a weight's gradient.
    rows = _real(tokens.reshape(-1, tokens.shape[-1]), real)
    routing = route(
        logits_of(rows, router, options.get("precision")),
        top_k,
        scoring=scoring,
        bias=router_bias,
        groups=groups,
        top_groups=top_groups,
        scores_per_group=scores_per_group,
        normalize=normalize,
        scale=scale,
        mask=real,
    )
    capacity = None
    if capacity_factor is not None:
        factor = as_factor("capacity_factor", capacity_factor, "None drops nothing")
        capacity = expert_capacity(len(rows), top_k, router.shape[1], factor)
        routing = limit_capacity(routing, capacity, policy=capacity_policy)
    return moe_layer(tokens, routing, experts, axis, capacity=capacity, **options)


def _real(
    rows: Float[Array, "tokens d"], mask: Bool[Array, " tokens"] | None
) -> Float[Array, "tokens d"]:
    return rows if mask is None else where_rows(mask, rows)
