"""The fold in which blocks go all the way round and sums follow them home."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.collectives._order import as_one, issue, pin
from jaxpar.collectives._plan import Plan
from jaxpar.collectives._ring import Ring

# Longer rings run a loop. Fewer than in the other folds: a step here holds more matmuls than one.
UNROLLED_STEPS = 8

Visits = list[tuple[Any, Array]]  # (part of a block, the logical index of its owner)


def circulate(
    parts: list[Any],
    carry: Any,
    own: Any,
    begin: Callable[[Any, Any], tuple[Any, Any]],
    visit: Callable[[Any, Visits], tuple[Any, list[Any]]],
    end: Callable[[Any, Any], tuple[Any, Any]],
    ring: Ring,
    plan: Plan,
    dtype: DTypeLike,
    wire_dtype: DTypeLike,
    summed: Callable[[Any], Any] = lambda part: part,
) -> tuple[Any, Any, list[Any]]:
    """Takes every device's block past all others, and sums for its owner what each makes of it.

    `parts` are those of this device's block, one for each direction in which to go. For each step
    `visit(carry, visits)` returns the carry and, for each visiting part, arrays in `dtype` of the
    shapes of `summed(part)`: what this device adds to the owner's sums. A sum is one step behind
    its part, so that its transfer has the next step's work to hide behind, and in the end one step
    from home.
    `begin(carry, own)` and `end(carry, own)` do the work that needs no visitor, each a share: the
    former beside the first transfer of blocks, the latter beside the last transfer of sums.

    Returns the carry, `own`, and the sums that have come home, without anything of this device's.
    """
    directions = (1, -1)[: len(parts)]

    def send(lanes: list[Any]) -> list[Any]:
        return [ring.shift(x, d) for x, d in zip(lanes, directions, strict=True)]

    def send_both(outgoing: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        parts, sums = outgoing
        return (send(parts) if parts else [], send(sums) if sums else [])

    def turn(
        state: Any,
        compute: Callable[..., Any],
        otherwise: Callable[..., Any],
        kept: tuple[Any, ...] = (),
        onward: bool = True,
    ) -> Any:
        """Sends the parts and sums at hand on, and computes."""
        index, carry, parts, sums = state
        outgoing = (parts if onward else [], _cast(sums, wire_dtype))
        outgoing, _, sent = issue(plan, index, outgoing, lambda _: (), send_both)
        parts = outgoing[0] if onward else parts
        made = as_one(plan, index, compute, otherwise, index, carry, parts, *kept)
        index, made, (parts, sums) = pin(plan, index, made, sent, (), made)
        return index, made, parts, sums

    def step(distance: Any, state: Any, onward: bool = True) -> Any:
        def compute(index: Array, carry: Any, parts: list[Any]) -> Any:
            owners = [(index - d * distance) % ring.size for d in directions]
            return visit(carry, list(zip(parts, owners, strict=True)))

        def otherwise(_: Array, carry: Any, parts: list[Any]) -> Any:
            return carry, [_cast(summed(part), dtype) for part in parts]

        index, (carry, made), parts, sums = turn(state, compute, otherwise, onward=onward)
        if sums:  # added here, not before: a sum still under way would hold the matmuls up
            made = jax.tree.map(lambda x, y: x + y, made, _cast(sums, dtype))
        return index, carry, parts, made

    def stay(_: Array, carry: Any, parts: list[Any], own: Any) -> Any:
        return carry, own

    last = ring.size - 1
    state = ring.index(), carry, parts, []
    index, (carry, own), parts, _ = turn(
        state, lambda _, carry, parts, own: begin(carry, own), stay, (own,), onward=last > 0
    )
    state = index, carry, parts, []
    if last > 1:
        state = step(1, state)
    if last <= UNROLLED_STEPS:
        for distance in range(2, last):
            state = step(distance, state)
    else:  # two steps a trip, as in the other folds
        state = lax.fori_loop(
            2, last, lambda t, state: step(t.astype("int32"), state), state, unroll=2
        )
    if last:
        state = step(last, state, onward=False)
    _, (carry, own), _, sums = turn(
        state, lambda _, carry, parts, own: end(carry, own), stay, (own,), onward=False
    )
    return carry, own, _cast(sums, dtype)


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)
