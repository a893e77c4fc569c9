"""Tokens that go round the ring past all experts, and results that follow them home."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpar._dtypes import addition_dtype
from jaxpar._varying import vary_alike, zeros_alike
from jaxpar.collectives._circulate import Visits, circulate
from jaxpar.collectives._plan import make_plan
from jaxpar.moe._exchange import Exchange
from jaxpar.moe._local import Tokens
from jaxpar.moe._mlp import Experts

# What stays: the experts. What travels: rows, the experts that they chose, weights, cotangents.


def exchange_by_ring(
    way: Exchange, mode: str, tokens: Tokens, experts: Experts
) -> tuple[Array, Array]:
    """Returns the results of this device's tokens, and the number of pairs it computed."""
    if way.ring.size == 1:
        return _compute(way, tokens, experts)
    rows, chosen, weights = tokens
    axes = way.ring.axis_name
    rows, chosen, weights, experts = vary_alike(axes, rows, chosen, weights, experts)
    return _visit_experts(way, mode, chosen, rows, weights, experts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _visit_experts(
    way: Exchange, mode: str, chosen: Array, rows: Array, weights: Array, experts: Experts
) -> tuple[Array, Array]:
    wide = addition_dtype(rows.dtype)

    def compute(part: Tokens) -> tuple[Array, Array]:
        out, pairs = _compute(way, part, experts)
        return out.astype(wide), pairs

    def begin(count: Array, own: Array) -> tuple[Array, Array]:
        out, pairs = compute((rows, chosen, weights))
        return count + pairs, out

    def visit(count: Array, visits: Visits) -> tuple[Array, list[Array]]:
        made: list[Array] = []
        for part, _ in visits:
            out, pairs = compute(part)
            made.append(out)
            count = count + pairs
        return count, made

    nothing = zeros_alike((), "int32", rows), zeros_alike(rows.shape, wide, rows)
    part = rows, chosen, weights
    count, own, sums = _circulate(
        way, mode, part, nothing, begin, visit, wide, lambda part: part[0]
    )
    return (own + jnp.concatenate(sums)).astype(rows.dtype), count


def _fwd(way: Exchange, mode: str, *operands: Any) -> Any:
    return _visit_experts(way, mode, *operands), operands


def _bwd(way: Exchange, mode: str, residuals: Any, cts: tuple[Array, Any]) -> Any:
    chosen, rows, weights, experts = residuals
    wide = addition_dtype(rows.dtype)

    def pull(part: tuple[Tokens, Array]) -> tuple[tuple[Array, Array], Experts]:
        (rows, chosen, weights), ct = part

        def compute(rows: Array, weights: Array, experts: Experts) -> Array:
            return _compute(way, (rows, chosen, weights), experts)[0]

        drows, dweights, dexperts = jax.vjp(compute, rows, weights, experts)[1](ct)
        return (drows.astype(wide), dweights.astype(wide)), dexperts

    def add(sums: Experts, more: Experts) -> Experts:
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)

    own_part = (rows, chosen, weights), cts[0]

    def begin(sums: Experts, own: Any) -> tuple[Experts, Any]:
        made, more = pull(own_part)
        return add(sums, more), made

    def visit(sums: Experts, visits: Visits) -> tuple[Experts, list[Any]]:
        made: list[Any] = []
        for part, _ in visits:
            sums_of_owner, more = pull(part)
            sums = add(sums, more)
            made.append(sums_of_owner)
        return sums, made

    def zeros(x: Array) -> Array:
        return zeros_alike(x.shape, addition_dtype(x.dtype), x)

    nothing = jax.tree.map(zeros, experts), (zeros(rows), zeros(weights).astype(wide))
    sums, own, parts = _circulate(
        way, mode, own_part, nothing, begin, visit, wide, lambda part: part[0][::2]
    )
    drows, dweights = jax.tree.map(lambda x, *y: x + jnp.concatenate(y), own, *parts)
    return (
        np.zeros(chosen.shape, jax.dtypes.float0),
        drows.astype(rows.dtype),
        dweights.astype(weights.dtype),
        jax.tree.map(lambda x, w: x.astype(w.dtype), sums, experts),
    )


_visit_experts.defvjp(_fwd, _bwd)


def _circulate(
    way: Exchange,
    mode: str,
    part: Any,
    nothing: Any,
    begin: Callable[[Any, Any], Any],
    visit: Callable[[Any, Visits], Any],
    wide: Any,
    summed: Callable[[Any], Any],
) -> Any:
    plan = make_plan(way.ring.size, mode)
    length = len(jax.tree.leaves(part)[0])
    middle = length // 2
    lanes = [part]
    if len(plan.directions) == 2 and middle:
        lanes = [jax.tree.map(lambda x: x[:middle], part), jax.tree.map(lambda x: x[middle:], part)]
    wire = wide if way.wire_dtype is None else way.wire_dtype
    carry, own = nothing
    return circulate(
        lanes, carry, own, begin, visit, lambda *state: state, way.ring, plan, wide, wire, summed
    )


def _compute(way: Exchange, tokens: Tokens, experts: Experts) -> tuple[Array, Array]:
    """What this device makes of the tokens of one other."""
    return way.finish(way.begin(tokens, experts, len(tokens[0]), 1), experts)
