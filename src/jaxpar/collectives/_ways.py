"""The two folds over a plan, gather and scatter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._compat import empty_like_blocks
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._order import as_one, issue, pin, spec_of
from jaxpar.collectives._plan import Plan
from jaxpar.collectives._ring import Ring

# Largest number of whole-block steps that is unrolled while tracing; longer rings run a loop.
# benchmarks/README.md has compile time and program size on both sides of it.
UNROLLED_STEPS = 16

HOME = (0,)  # the lane of what stays

Arrivals = list[tuple[Any, Any]]  # (block, what `take` gave for the device it belongs to)


def _position(position: Array) -> Any:
    return position


def _as_it_is(carry: Any) -> Any:
    return carry


def gather_fold(
    block: Any,
    consume: Callable[[Any, Arrivals], Any],
    ring: Ring,
    plan: Plan,
    sums: Callable[[Any], Any] = lambda carry: carry,
    take: Callable[[Array], Any] = _position,
    finish: Callable[[Any], Any] = _as_it_is,
) -> Any:
    """Brings every device's `block` past this one and folds `consume(carry, arrivals)` over them.

    The first call of `consume` gets None and this device's own block. Each further call gets the
    blocks that one step brought, whose transfer was started before the call that precedes it. With
    each block it gets what `take` gives for the logical index of the device that the block belongs
    to: the index itself, or what stays at home and is used together with the block.
    `sums` picks the part of the carry that is added to, not only written into: without a barrier
    (on CPU) that alone keeps blocks from arriving long before they are used.
    """

    def send(blocks: list[Any]) -> list[Any]:
        return [ring.shift(b, d) for b, d in zip(blocks, plan.directions, strict=True)]

    def send_last(blocks: list[Any]) -> list[Any]:
        if plan.opposite == "halves":
            parts = [jax.tree.map(lambda x, n=n: _half(x, n), b) for n, b in enumerate(blocks)]
            return send(parts)
        return [ring.shift(blocks[0], plan.directions[0])] if plan.opposite == "whole" else []

    late = plan.grouped and not plan.sliced  # where slices are free within a matmul

    def use(
        state: Any,
        owners: Callable[[Array], list[Array]],
        send: Callable[[list[Any]], list[Any]],
        finish: Callable[[Any], Any] = _as_it_is,
    ) -> Any:
        """Sends the blocks at hand on, and consumes them."""
        index, carry, blocks = state

        def take_all(index: Array) -> list[Any]:
            return [take(owner) for owner in owners(index)]

        def compute(carry: Any, blocks: list[Any], index: Array) -> Any:
            taken = take_all(index) if late else given
            return finish(consume(carry, list(zip(blocks, taken, strict=True))))

        blocks, given, sent = issue(plan, index, blocks, (lambda _: ()) if late else take_all, send)
        if carry is not None and (plan.delayed or jax.tree.leaves(sums(carry))):
            carry = as_one(
                plan, index, compute, lambda x, *_: _like(finish, x), carry, blocks, index
            )
        else:
            carry = compute(carry, blocks, index)
        return pin(plan, index, carry, sent, given, sums(carry))

    def step(distance: Any, state: Any, send: Callable[[list[Any]], list[Any]] = send) -> Any:
        return use(state, lambda i: [(i - d * distance) % ring.size for d in plan.directions], send)

    def send_own(blocks: list[Any]) -> list[Any]:
        own = blocks * len(plan.directions)
        return send(own) if plan.hops else send_last(own)

    state = use((ring.index(), None, [block]), lambda index: [index], send_own)
    if plan.hops <= UNROLLED_STEPS:
        for distance in range(1, plan.hops):
            state = step(distance, state)
    else:
        state = _loop(step, plan.hops, state)
    if plan.hops:
        state = step(plan.hops, state, send_last)
    index, carry, last = state
    if not last:
        return finish(carry)
    if plan.opposite == "halves":
        last = [jax.tree.map(lambda x, *xs: _join(xs, x), block, *last)]
    opposite = plan.hops + 1
    _, carry, _ = use(
        (index, carry, last), lambda i: [(i + opposite) % ring.size], lambda _: [], finish
    )
    return carry


def scatter_fold(
    produce: Callable[[Any], Array],
    ring: Ring,
    plan: Plan,
    dim: int,
    length: int,
    take: Callable[[Array, int], Any],
    wire_dtype: DTypeLike | None,
    dtype: DTypeLike,
) -> Array:
    """Sums over the devices what `produce(take(start, size))` gives for each owner, at that owner.

    `take` cuts what it needs for positions `start` to `start + size` of the scattered dimension,
    `dim` of what `produce` returns, of which each device owns `length`. Partial sums travel
    towards their owner in `wire_dtype` (their own if None); the result is of `dtype`.
    """
    cuts = _cuts(length, plan.pieces if ring.size > 1 else 1)
    late = plan.grouped and not plan.sliced  # where slices are free within a matmul

    def wire(x: Array) -> Array:
        return x if wire_dtype is None else x.astype(wire_dtype)

    def send(sums: dict[int, Array]) -> dict[int, Array]:
        return {d: ring.shift(wire(x), -d) for d, x in sums.items()}

    def turn(
        distance: Any, piece: int, lanes: tuple[int, ...], state: Any, result: Any = None
    ) -> Any:
        """Sends what the turn before made, and makes this piece's sums for `distance` places on.

        At home the sum is written into `result`.
        """
        index, outgoing, arrived = state
        start, size = cuts[piece]

        def take_all(index: Array) -> list[Any]:
            owners = [(index - d * distance) % ring.size for d in lanes]
            return [take(owner * length + start, size) for owner in owners]

        def make(index: Array) -> list[Array]:
            return [produce(t) for t in (take_all(index) if late else given)]

        def make_and_add(index: Array, arrived: dict[int, Array], result: Any) -> Any:
            sums = {d: _add(x, arrived, d) for d, x in zip(lanes, make(index), strict=True)}
            if lanes != HOME:
                return {d: wire(x) for d, x in sums.items()}
            return lax.dynamic_update_slice_in_dim(result, sums[0].astype(dtype), start, dim)

        def otherwise(_: Array, arrived: dict[int, Array], result: Any) -> Any:
            return result if lanes == HOME else dict.fromkeys(lanes, next(iter(arrived.values())))

        take_now = (lambda _: ()) if late else take_all
        outgoing, given, sent = issue(plan, index, outgoing, take_now, send)
        if len(cuts) == 1:  # what was sent is still under way: it is added once it is here
            index, made, sent = pin(plan, index, make(index), sent, given)
            return index, {d: _add(x, sent, d) for d, x in zip(lanes, made, strict=True)}, arrived
        mine = arrived[piece]
        if mine:
            made = as_one(plan, index, make_and_add, otherwise, index, mine, result)
        else:
            made = make_and_add(index, mine, result)
        if lanes in (plan.directions, HOME):
            index, made, sent = pin(plan, index, made, sent, given)
        else:  # the next turn's transfer takes the other direction: it need not wait for this one
            index, made, _ = pin(plan, index, made, (), given)
        return index, made, {**arrived, piece - 1 if piece else len(cuts) - 1: sent, piece: {}}

    def step(distance: Any, state: Any, far: bool = False) -> Any:
        for piece in range(len(cuts)):
            lanes = plan.lanes(plan.hops + 1, piece) if far else plan.directions
            state = turn(distance, piece, lanes, state)
        return state

    state = ring.index(), {}, {piece: {} for piece in range(len(cuts))}
    if plan.opposite != "none":
        state = step(plan.hops + 1, state, far=True)
    if plan.hops:
        state = step(plan.hops, state)
    if plan.hops <= UNROLLED_STEPS:
        for distance in range(plan.hops - 1, 0, -1):
            state = step(distance, state)
    else:
        state = _loop(lambda t, state: step(plan.hops - t, state), plan.hops, state)

    if len(cuts) == 1:
        _, own, _ = turn(0, 0, HOME, state)
        return own[0].astype(dtype)
    some = next(iter(state[2][0].values())).astype(dtype)
    result = vary_over(varying_axes(some), empty_like_blocks(some, dim, 2))
    result = lax.slice_in_dim(result, 0, length, axis=dim)
    for piece in range(len(cuts)):
        index, result, arrived = turn(0, piece, HOME, state, result)
        state = index, {}, arrived
    return result


def place_block(whole: Array | None, block: Array, dim: int, position: Array, count: int) -> Array:
    """Writes `block` as number `position` of `count` along `dim`; None is a whole yet unwritten."""
    if whole is None:
        # Not zeros: filling what every step overwrites would be one more pass over the result.
        whole = empty_like_blocks(block, dim, count)
    into: Array = vary_over(varying_axes(block), whole)
    return lax.dynamic_update_slice_in_dim(into, block, position * block.shape[dim], dim)


def _loop(step: Callable[[Any, Any], Any], stop: int, state: Any) -> Any:
    # Two steps a trip: with one, the compilers copy the carried block before each send.
    return lax.fori_loop(1, stop, lambda t, s: step(t.astype("int32"), s), state, unroll=2)


def _cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Starts and sizes of the pieces of `length` that are not empty; one piece at least."""
    middle = -(-length // 2)
    halves = [(0, middle), (middle, length - middle)]
    return halves if pieces == 2 and length > 1 else [(0, length)]


def _add(made: Array, arrived: dict[int, Array], lane: int) -> Array:
    """Adds what arrived in the lane; at home, in all lanes."""
    for direction, x in arrived.items():
        if lane in (direction, HOME[0]):
            made = made + x.astype(made.dtype)
    return made


def _like(finish: Callable[[Any], Any], carry: Any) -> Any:
    """Returns arrays of the types of `finish(carry)`, of any values."""

    def empty(x: Array, finished: Any) -> Array:
        if x.dtype == finished.dtype or not x.ndim:
            return x.astype(finished.dtype)
        return vary_over(varying_axes(x), empty_like_blocks(x, 0, 1, finished.dtype))

    return jax.tree.map(empty, carry, jax.eval_shape(finish, carry))


def _halved_dim(x: Array) -> int:
    spec = spec_of(x)
    whole = [dim for dim, axes in enumerate(spec) if axes is None] or list(range(x.ndim))
    even = [dim for dim in whole if x.shape[dim] % 2 == 0 and x.shape[dim]]
    return even[0] if even else max(whole, key=lambda dim: x.shape[dim])


def _half(block: Array, lane: int) -> Array:
    dim = _halved_dim(block)
    size = block.shape[dim]
    middle = -(-size // 2)
    start, stop = ((0, middle), (middle, size))[lane]
    return lax.slice_in_dim(block, start, stop, axis=dim)


def _join(halves: Sequence[Array], like: Array) -> Array:
    return lax.concatenate(halves, _halved_dim(like))
