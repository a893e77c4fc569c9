"""The capacity of experts, the tokens that they keep, and the sizes of buffers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, comb
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, UInt

from jaxpar.arguments.calls import check_among, public, value_error
from jaxpar.arguments.types import Integer, Number, Policy
from jaxpar.axis.checks import check_whole
from jaxpar.axis.checks_of_layers import check_number
from jaxpar.axis.vma import zeros_alike
from jaxpar.compiler import control_flow
from jaxpar.moe._routing import Routing, RoutingLike, as_routing, of_chosen, of_experts

# Buffers of at least _MANY rows have a multiple of _TILE rows.
_MANY, _TILE = 512, 16

POLICIES = ("probability", "choice", "position")


@public
def expert_capacity(
    tokens: Integer, top_k: Integer, experts: Integer, factor: Number | Fraction
) -> int:
    """Computes an expert's capacity: its even share of choices times `factor`, rounded up.

    Args:
      tokens: the number of this device's tokens.
      top_k: experts per token.
      experts: the number of all experts.
      factor: at least 0. A float means its shortest decimal: 1.1 is 11/10.

    Returns:
      `ceil(factor * tokens * top_k / experts)`, exactly.

    Raises:
      ValueError: a number is negative, `factor` is not finite, or there are no experts.

    Example:
      >>> expert_capacity(100, 2, 8, 1.1)
      28

    Source: Lepikhin et al., "GShard" (2020).
    """
    tokens = check_whole("tokens", tokens, 0)
    top_k = check_whole("top_k", top_k, 1)
    experts = check_whole("experts", experts, 1)
    finite = f"an expert gets at most {tokens} tokens, and a capacity of so many drops none"
    return ceil(as_factor("factor", factor, finite) * tokens * top_k / experts)


def as_factor(argument: str, number: Any, finite: str) -> Fraction:
    """Returns a fraction; `finite` is the remedy for infinity."""
    if not isinstance(number, Fraction):
        check_number(argument, number, finite=finite)
        return Fraction(str(number))
    if number < 0:
        raise value_error(f"{argument}={number} must be at least 0")
    return number


@public
def limit_capacity(
    routing: RoutingLike, capacity: Integer, *, policy: Policy = "probability"
) -> Routing:
    """Drops choices (pairs of token and expert) of this device beyond each expert's capacity.

    Args:
      routing: a `Routing` of local tokens. Choices dropped before take no room.
      capacity: the most tokens that an expert keeps, static; see `expert_capacity`.
      policy: `"probability"` keeps the largest weights, NaN first, and the earlier of equal ones.
        `"choice"` keeps all tokens' first choices (column 0 of `routing.experts`) before any
        second, and the earlier tokens of a column. `"position"` keeps the earliest tokens.

    Returns:
      `routing` with fewer `kept`. The order is that of a device's own tokens, whatever the mesh.

    Raises:
      ValueError: `capacity` is negative, or `policy` is unknown.

    Cost: nothing is sent. `"probability"` makes 16 passes over `[t, E]` for float32, `"choice"` one
    for each two bits of `top_k`.

    Example:
      >>> routing = route(jnp.log(jnp.array([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]])), 1)
      >>> limit_capacity(routing, 1).kept.ravel()
      Array([False,  True,  True], dtype=bool)
      >>> limit_capacity(routing, 1, policy="position").kept.ravel()
      Array([ True, False,  True], dtype=bool)

    Source: Riquelme et al., "Scaling vision with sparse mixture of experts" (2021), by weight;
    Lepikhin et al., "GShard" (2020), by choice; Fedus et al., "Switch transformers" (2021), by
    position, of one choice a token.
    """
    routing = as_routing(routing)
    most = check_whole("capacity", capacity, 0)
    check_among("policy", policy, POLICIES)
    if most >= len(routing.experts):
        return routing
    if most == 0:
        return routing._replace(kept=jnp.zeros_like(routing.kept))
    count = routing.logits.shape[1]
    experts = jnp.where(routing.kept, routing.experts, -1)
    k = experts.shape[1]
    if policy == "probability":
        keys = _sort_keys(routing.weights)
        bits = 8 * keys.dtype.itemsize
    else:  # equal keys are kept in the order of tokens
        top = 1 if policy == "position" else k
        ranks = jnp.minimum(jnp.arange(k, 0, -1, dtype="uint32"), jnp.uint32(top))
        keys, bits = jnp.broadcast_to(ranks, experts.shape), top.bit_length()
    kept = _largest(of_experts(keys, experts, count), most, bits)
    return routing._replace(kept=routing.kept & (of_chosen(kept.astype("int32"), experts) > 0))


def _sort_keys(weights: Float[Array, "tokens k"]) -> UInt[Array, "tokens k"]:
    """Returns integers of at least 1, ordered like weights."""
    # Bits of positive floats sort like the floats, and bits of negative floats in reverse. So
    # negative ones are inverted. Positive ones get the sign bit, which puts them above.
    weights = lax.stop_gradient(weights)
    weights = jnp.where(weights == 0, 0, weights)  # -0 as 0
    weights = jnp.where(jnp.isnan(weights), jnp.inf, weights)  # NaN of either sign
    bits = lax.bitcast_convert_type(weights, f"uint{8 * weights.dtype.itemsize}")
    sign = jnp.asarray(1 << (8 * weights.dtype.itemsize - 1), bits.dtype)
    return jnp.maximum(jnp.where(bits >= sign, ~bits, bits | sign), 1)


def _largest(
    keys: UInt[Array, "tokens experts"], most: int, bits: int
) -> Bool[Array, "tokens experts"]:
    """Returns which `keys` are their column's `most` largest, earlier ones of equal first.

    Keys have at most so many `bits`. Those of 0 are never among the largest.
    """
    steps = -(-bits // 2)

    def fix_two_bits(
        step: Int32[Array, ""], fixed: UInt[Array, " experts"]
    ) -> UInt[Array, " experts"]:
        place = (2 * (steps - 1 - step)).astype(keys.dtype)
        known = fixed
        for digits in (1, 2, 3):
            tried = known | (jnp.asarray(digits, keys.dtype) << place)
            reached = jnp.sum(keys >= tried[None, :], axis=0, dtype="int32") >= most
            fixed = jnp.where(reached, tried, fixed)
        return fixed

    zeros = zeros_alike(keys.shape[1:], keys.dtype, keys)
    smallest = control_flow.fori_loop(jnp.int32(0), jnp.int32(steps), fix_two_bits, zeros)
    smallest = smallest[None, :]
    above, equal = keys > smallest, (keys == smallest) & (keys > 0)
    # Room that larger keys leave goes to equal keys, the earlier tokens first.
    room = most - jnp.sum(above, axis=0, dtype="int32")
    return above | (equal & (_running_count(equal) <= room[None, :]))


def _running_count(flags: Bool[Array, "tokens experts"]) -> Int32[Array, "tokens experts"]:
    """Counts each column's `flags` up to each row.

    Its matmuls are exact at any precision. `jnp.cumsum` takes seconds to compile for TPU.
    """
    tokens, count = flags.shape
    rows = min(128, tokens)
    padded = jnp.pad(flags, ((0, -tokens % rows), (0, 0))).astype("float32")
    blocks = padded.reshape(-1, rows, count)
    # `within` is [blocks, rows, experts]. `before`, the sum of earlier blocks, is [blocks,
    # experts].
    within = jnp.einsum("ij,bje->bie", _triangle(rows, 0), blocks)
    before = jnp.einsum("ij,je->ie", _triangle(len(blocks), -1), within[:, -1])
    counts = within + before[:, None]
    return counts.reshape(-1, count)[:tokens].astype("int32")


def _triangle(size: int, diagonal: int) -> Float32[Array, "{size} {size}"]:
    return jnp.tri(size, k=diagonal, dtype="float32")


@dataclass(frozen=True)
class Bounds:
    devices: int  # over which experts are sharded
    experts: int  # real ones, without padding
    local: int  # experts of a device, padding included
    top_k: int
    capacity: int | None  # tokens of a device that an expert takes at most; None: all
    buffer_factor: float | None  # buffers hold this multiple of the average; None: the worst case

    def rows(self, tokens: int) -> int:
        worst = self.devices * min(tokens, self._from_device(tokens))
        return self._limit(worst, tokens * self.targets)

    def pairs(self, tokens: int, sources: int, rows: int) -> int:
        """Returns a buffer's pairs: `rows` arrivals from `sources` devices of `tokens` each."""
        worst = min(rows * min(self.top_k, self.local), sources * self._from_device(tokens))
        share = min(self.local, self.experts) / self.experts  # of a device without padding
        return self._limit(worst, tokens * sources * self.top_k * share)

    def average(self, tokens: int, sources: int) -> float:
        return tokens * sources * self.top_k / self.experts

    @property
    def targets(self) -> float:
        """Returns a token's average devices, experts equally likely."""
        chosen = min(
            self.top_k, self.experts
        )  # a token may have more choices than there are experts
        missed = comb(self.experts - min(self.local, self.experts), chosen)
        return self.devices * (1 - missed / comb(self.experts, chosen))

    @property
    def needed(self) -> float:
        """Returns how many `targets` have experts on average."""
        full = -(-self.experts // self.local)
        return self.targets * full / self.devices

    def _from_device(self, tokens: int) -> int:
        """Returns the most pairs between two devices."""
        capacity = tokens if self.capacity is None else min(tokens, self.capacity)
        return min(tokens * min(self.top_k, self.local), capacity * self.local)

    def _limit(self, worst: int, average: float) -> int:
        if self.buffer_factor is None:
            return worst
        exact = self.buffer_factor * average
        if exact >= worst:  # `exact` may be infinite
            return worst
        wanted = ceil(exact)
        if wanted >= _MANY:  # a TPU pads other numbers of rows, in passes of their own
            wanted = ceil(wanted / _TILE) * _TILE
        return min(worst, wanted)
