"""How many tokens an expert takes, which of them, and how many rows buffers need for that."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, comb
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, UInt

from jaxpar.arguments.calls import public, value_error
from jaxpar.arguments.checks import check_whole
from jaxpar.arguments.checks_of_layers import check_number
from jaxpar.arguments.types import Integer, Number, Policy
from jaxpar.axis.varying import zeros_alike
from jaxpar.compiler import control_flow
from jaxpar.moe._routing import Routing, RoutingLike, as_routing, of_chosen, of_experts

# Buffers of so many rows have a multiple of the rows of a tile.
_MANY, _TILE = 512, 16

POLICIES = ("probability", "position")


@public
def expert_capacity(
    tokens: Integer, top_k: Integer, experts: Integer, factor: Number | Fraction
) -> int:
    """Computes how many tokens each expert takes: `factor` times its even share, rounded up.

    Args:
      tokens: the number of tokens of this device.
      top_k: the number of experts for each token.
      experts: the number of all experts.
      factor: a number of at least 0, taken as it is written: 1.1 means 11/10.

    Returns:
      `ceil(factor * tokens * top_k / experts)`, exactly.

    Raises:
      TypeError: a number of the wrong type.
      ValueError: a negative number, no experts, a factor that is not finite.

    Cost: none; it is computed while tracing.

    Example:
      >>> expert_capacity(100, 2, 8, 1.1)
      28
      >>> expert_capacity(100, 1, 10, 1.1)  # although 1.1 * 100 / 10 is more than 11 in floats
      11

    Source: Lepikhin et al., "GShard" (2020).
    """
    tokens = check_whole("tokens", tokens, 0)
    top_k = check_whole("top_k", top_k, 1)
    experts = check_whole("experts", experts, 1)
    finite = f"an expert gets at most {tokens} tokens, and a capacity of so many drops none"
    return ceil(as_factor("factor", factor, finite) * tokens * top_k / experts)


def as_factor(argument: str, given: Any, finite: str) -> Fraction:
    """Returns a number of at least 0 as it is written; `finite` says what to give for infinity."""
    if not isinstance(given, Fraction):
        check_number(argument, given, finite=finite)
        return Fraction(str(given))
    if given < 0:
        raise value_error(f"{argument}={given} must be at least 0")
    return given


@public
def limit_capacity(
    routing: RoutingLike, capacity: Integer, *, policy: Policy = "probability"
) -> Routing:
    """Drops what is beyond each expert's capacity, of the tokens of this device.

    Args:
      routing: of local `[t, k]` choices. Those that are not kept already take no room.
      capacity: the largest number of this device's tokens that an expert keeps, known while
        tracing; see `expert_capacity`.
      policy: which tokens an expert keeps: `"probability"`, those of the largest weights, NaN
        first, the earlier one where they are equal; or `"position"`, the earliest.

    Returns:
      `routing` with fewer `kept`. Weights stay as they are.

    Raises:
      TypeError: a capacity that is no integer.
      ValueError: a negative capacity, an unknown policy.

    Cost: nothing is sent; nothing is computed for a capacity of t or more. Otherwise t k E
    operations, and running counts over `[t, E]`, which are matmuls with triangular blocks.
    `"probability"` does not sort: it finds the smallest weight that each expert keeps in 16 passes
    over such an array, one for every two bits of a float32.

    Example:
      >>> routing = route(jnp.log(jnp.array([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8]])), 1)
      >>> limit_capacity(routing, 1).kept.ravel()
      Array([False,  True,  True], dtype=bool)
      >>> limit_capacity(routing, 1, policy="position").kept.ravel()
      Array([ True, False,  True], dtype=bool)

    Source: Lepikhin et al., "GShard" (2020), by position; Riquelme et al., "Scaling vision with
    sparse mixture of experts" (2021), by weight.
    """
    routing = as_routing(routing)
    most = check_whole("capacity", capacity, 0)
    check_policy("policy", policy)
    if most >= len(routing.experts):
        return routing
    if most == 0:
        return routing._replace(kept=jnp.zeros_like(routing.kept))
    count = routing.logits.shape[1]
    experts = jnp.where(routing.kept, routing.experts, -1)
    if policy == "position":
        wanted = of_experts(jnp.ones_like(experts), experts, count)  # int32[t, E]
        kept = _running_count(wanted > 0) <= most
    else:
        kept = _largest(of_experts(_sort_keys(routing.weights), experts, count), most)
    return routing._replace(kept=routing.kept & (of_chosen(kept.astype("int32"), experts) > 0))


def check_policy(argument: str, policy: Any) -> None:
    """Raises unless `policy` names one."""
    if policy not in POLICIES:
        raise value_error(f"{argument} must be one of {', '.join(POLICIES)}, got {policy!r}")


def _sort_keys(weights: Float[Array, "tokens k"]) -> UInt[Array, "tokens k"]:
    """Unsigned integers of at least 1, in the order of the weights."""
    # The bits of positive floats are in their order, and those of negative ones in the opposite:
    # these are inverted, and the sign bit is set of the others, which are then above them.
    weights = lax.stop_gradient(weights)
    weights = jnp.where(weights == 0, 0, weights)  # -0 as 0
    weights = jnp.where(jnp.isnan(weights), jnp.inf, weights)  # whatever its sign
    bits = lax.bitcast_convert_type(weights, f"uint{8 * weights.dtype.itemsize}")
    sign = jnp.asarray(1 << (8 * weights.dtype.itemsize - 1), bits.dtype)
    return jnp.maximum(jnp.where(bits >= sign, ~bits, bits | sign), 1)


def _largest(keys: UInt[Array, "tokens experts"], most: int) -> Bool[Array, "tokens experts"]:
    """Tells of `keys` which are among the `most` largest of their column.

    Of equal keys the earlier are; those that are 0 never.
    """
    bits = 8 * keys.dtype.itemsize

    def fix_two_bits(
        step: Int32[Array, ""], found: UInt[Array, " experts"]
    ) -> UInt[Array, " experts"]:
        """The largest number that `most` keys reach, known down to two more bits."""
        place = (bits - 2 - 2 * step).astype(keys.dtype)
        known = found
        for digits in (1, 2, 3):
            tried = known | (jnp.asarray(digits, keys.dtype) << place)
            reached = jnp.sum(keys >= tried[None, :], axis=0, dtype="int32") >= most
            found = jnp.where(reached, tried, found)
        return found

    zeros = zeros_alike(keys.shape[1:], keys.dtype, keys)
    smallest = control_flow.fori_loop(jnp.int32(0), jnp.int32(bits // 2), fix_two_bits, zeros)
    smallest = smallest[None, :]
    above, equal = keys > smallest, (keys == smallest) & (keys > 0)
    # What the largest numbers leave goes to equal ones, the earlier tokens' first.
    room = most - jnp.sum(above, axis=0, dtype="int32")
    return above | (equal & (_running_count(equal) <= room[None, :]))


def _running_count(flags: Bool[Array, "tokens experts"]) -> Int32[Array, "tokens experts"]:
    """How many `flags` there are in each column, down to and with each row.

    By matmuls, exact at any precision: of 0 and 1, and of counts up to 128. `jnp.cumsum` runs as
    long on TPU, but takes seconds to compile.
    """
    tokens, count = flags.shape
    rows = min(128, tokens)
    padded = jnp.pad(flags, ((0, -tokens % rows), (0, 0))).astype("float32")
    blocks = padded.reshape(-1, rows, count)
    # [blocks, rows, experts], and of all blocks before [blocks, experts]
    within = jnp.einsum("ij,bje->bie", _triangle(rows, 0), blocks)
    before = jnp.einsum("ij,je->ie", _triangle(len(blocks), -1), within[:, -1])
    counts = within + before[:, None]
    return counts.reshape(-1, count)[:tokens].astype("int32")


def _triangle(size: int, diagonal: int) -> Float32[Array, "{size} {size}"]:
    """1 at and below a diagonal: a product with it sums all rows down to each."""
    return jnp.tri(size, k=diagonal, dtype="float32")


@dataclass(frozen=True)
class Bounds:
    """Static sizes: of the devices and experts, and of what limits the buffers."""

    devices: int  # over which experts are sharded
    experts: int  # real ones, without padding
    local: int  # experts of a device, padding included
    top_k: int
    capacity: int | None  # tokens of one device that one expert takes at most; None: all
    buffer_factor: float | None  # buffers of this multiple of the average; None: of the worst case

    def rows(self, tokens: int) -> int:
        """Tokens that arrive at a device, of `tokens` on each."""
        worst = self.devices * min(tokens, self._from_device(tokens))
        return self._limit(worst, tokens * self.targets)

    def pairs(self, tokens: int, sources: int, rows: int) -> int:
        """Pairs of a token and an expert of this device, of `rows` tokens of `sources` devices."""
        worst = min(rows * min(self.top_k, self.local), sources * self._from_device(tokens))
        share = min(self.local, self.experts) / self.experts  # of a device that is full of experts
        return self._limit(worst, tokens * sources * self.top_k * share)

    def average(self, tokens: int, sources: int) -> float:
        """Pairs that an expert has, on average, of `tokens` tokens of each of `sources` devices."""
        return tokens * sources * self.top_k / self.experts

    @property
    def targets(self) -> float:
        """Distinct devices that a token needs, on average, where each expert is as likely."""
        chosen = min(
            self.top_k, self.experts
        )  # a token may have more places than there are experts
        missed = comb(self.experts - min(self.local, self.experts), chosen)
        return self.devices * (1 - missed / comb(self.experts, chosen))

    @property
    def needed(self) -> float:
        """Distinct devices that have experts and that a token needs, on average."""
        full = -(-self.experts // self.local)
        return self.targets * full / self.devices

    def _from_device(self, tokens: int) -> int:
        """Pairs that the tokens of one device make with the experts of another, at most."""
        capacity = tokens if self.capacity is None else min(tokens, self.capacity)
        return min(tokens * min(self.top_k, self.local), capacity * self.local)

    def _limit(self, worst: int, average: float) -> int:
        if self.buffer_factor is None:
            return worst
        exact = self.buffer_factor * average
        if exact >= worst:  # it may be infinite
            return worst
        wanted = ceil(exact)
        if wanted >= _MANY:  # a TPU pads other numbers of rows, in passes of their own
            wanted = ceil(wanted / _TILE) * _TILE
        return min(worst, wanted)
