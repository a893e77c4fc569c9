"""Layers of experts as others write them, of plain lax.

Each is a function of local blocks inside `jax.shard_map`: tokens [t, d], the router [d, E], and the
weights of this device's e experts, up and gate [e, d, f], down [e, f, d]. Experts past the
router's are padding. All have softmax routing with normalised weights, and static shapes: `factor`
times the average load of an expert or of a device, beyond which assignments are dropped.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Weights = tuple[Array, Array, Array]  # up, gate, down
GROUP = 1024  # tokens that share the slots of the capacity einsum


def all_gather_dispatch(
    tokens: Array,
    router: Array,
    weights: Weights,
    *,
    axis: str,
    top_k: int,
    factor: float,
    batched: bool = False,
) -> Array:
    """Gathers all tokens, multiplies those of the local experts, sums by a reduce-scatter.

    The matmuls are `lax.ragged_dot`s of rows sorted by expert; or batched ones over as many slots
    for each expert, where ragged_dot multiplies every row with every expert (GPU).
    """
    ids, shares = _route(tokens, router, top_k)
    x, ids, shares = (lax.all_gather(y, axis, tiled=True) for y in (tokens, ids, shares))
    count = weights[0].shape[0]
    local = ids.reshape(-1) - lax.axis_index(axis) * count
    local = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(local, stable=True)  # [T * k]: the local ones first, by expert
    sizes = jnp.bincount(local, length=count + 1)[:count].astype(jnp.int32)
    average = ids.size / router.shape[1]  # rows of an expert
    if batched:
        slots = ceil(factor * average)
        begins = jnp.cumsum(sizes) - sizes
        places = begins[:, None] + jnp.arange(slots, dtype=jnp.int32)  # [e, slots]
        used = jnp.arange(slots) < sizes[:, None]
        chosen = order[jnp.minimum(places, order.size - 1)]
        y = _batched(x[chosen // top_k], weights)  # [e, slots, d]
    else:
        real = min(count, router.shape[1])  # experts of a device that can be chosen
        rows = min(8 * ceil(factor * average * real / 8), order.size)
        ends = jnp.minimum(jnp.cumsum(sizes), rows)
        kept = jnp.diff(ends, prepend=0)
        used = jnp.arange(rows) < ends[-1]
        chosen = order[:rows]
        y = _grouped(x[chosen // top_k], weights, kept)  # [rows, d]
    share = jnp.where(used, shares.reshape(-1)[chosen], 0).astype(y.dtype)
    y = jnp.where(used[..., None], y, 0) * share[..., None]
    out = jnp.zeros_like(x).at[chosen // top_k].add(y)
    return lax.psum_scatter(out, axis, tiled=True)


def dense_dispatch(
    tokens: Array, router: Array, weights: Weights, *, axis: str, top_k: int, factor: float
) -> Array:
    """Gathers all tokens and multiplies each with every local expert, one after the other."""
    del factor  # nothing is dropped
    ids, shares = _route(tokens, router, top_k)
    x, ids, shares = (lax.all_gather(y, axis, tiled=True) for y in (tokens, ids, shares))
    count = weights[0].shape[0]
    experts = lax.axis_index(axis) * count + jnp.arange(count)
    mask = jnp.sum(jnp.where(ids[..., None] == experts, shares[..., None], 0), axis=1)  # [T, e]

    def step(total: Array, expert: Any) -> tuple[Array, None]:
        (up, gate, down), share = expert
        y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return total + y * share[:, None].astype(y.dtype), None

    total = lax.scan(step, jnp.zeros_like(x), (weights, mask.T))[0]
    return lax.psum_scatter(total, axis, tiled=True)


def capacity_einsum(
    tokens: Array, router: Array, weights: Weights, *, axis: str, top_k: int, factor: float
) -> Array:
    """Slots for each expert, filled and emptied by einsums with one-hot tensors, as in GShard."""
    ids, shares = _route(tokens, router, top_k)
    t, d = tokens.shape
    size = min(GROUP, t)
    shards = lax.axis_size(axis)
    experts = weights[0].shape[0] * shards
    slots = ceil(factor * size * top_k / router.shape[1])
    ids, shares = (y.reshape(t // size, size * top_k) for y in (ids, shares))
    chosen = jax.nn.one_hot(ids, experts, dtype=jnp.int32)  # [g, s * k, E]
    place = jnp.sum((jnp.cumsum(chosen, axis=1) - 1) * chosen, axis=-1)  # [g, s * k]
    expert, slot = (
        jax.nn.one_hot(y, n, dtype=tokens.dtype).reshape(t // size, size, top_k, n)
        for y, n in ((ids, experts), (place, slots))
    )
    dispatch = jnp.einsum("gske,gskc->gsec", expert, slot)
    shares = shares.reshape(t // size, size, top_k).astype(tokens.dtype)
    combine = jnp.einsum("gske,gskc->gsec", expert * shares[..., None], slot)
    x = jnp.einsum("gsd,gsec->egcd", tokens.reshape(-1, size, d), dispatch)
    x = x.reshape(experts, -1, d)  # [E, g * c, d]
    x = lax.all_to_all(x, axis, 0, 1, tiled=True)  # [e, n * g * c, d]
    y = lax.all_to_all(_batched(x, weights), axis, 1, 0, tiled=True)
    y = y.reshape(experts, t // size, slots, d)
    return jnp.einsum("egcd,gsec->gsd", y, combine).reshape(t, d)


PEERS: dict[str, Callable[..., Array]] = {
    "all-gather": all_gather_dispatch,
    "dense": dense_dispatch,
    "capacity einsum": capacity_einsum,
}


def peer(name: str, platform: str) -> Callable[..., Array]:
    """A peer with the grouped matmul that suits a platform."""
    if name == "all-gather":
        return partial(all_gather_dispatch, batched=platform == "gpu")
    return PEERS[name]


def _route(tokens: Array, router: Array, top_k: int) -> tuple[Array, Array]:
    logits = jnp.matmul(tokens, router, preferred_element_type=jnp.float32)
    shares, ids = lax.top_k(jax.nn.softmax(logits), top_k)
    return ids.astype(jnp.int32), shares / jnp.sum(shares, axis=-1, keepdims=True)


def _grouped(x: Array, weights: Weights, sizes: Array) -> Array:
    up, gate, down = weights
    hidden = jax.nn.silu(lax.ragged_dot(x, gate, sizes)) * lax.ragged_dot(x, up, sizes)
    return lax.ragged_dot(hidden, down, sizes)


def _batched(x: Array, weights: Weights) -> Array:
    up, gate, down = weights
    hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", x, gate))
    hidden = hidden * jnp.einsum("ecd,edf->ecf", x, up)
    return jnp.einsum("ecf,efd->ecd", hidden, down)
