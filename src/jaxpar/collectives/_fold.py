"""The two folds over a plan, gather and scatter, and the barrier that pins their overlap."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._chips import traced_for_cpu
from jaxpar._compat import empty_like_blocks
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._plan import Plan
from jaxpar.collectives._ring import Ring

# Largest number of whole-block steps that is unrolled while tracing; longer rings run a loop.
# benchmarks/README.md has compile time and program size on both sides of it.
UNROLLED_STEPS = 16

Arrivals = list[tuple[Any, Any]]  # (block, what `take` gave for the device it belongs to)


def _position(position: Array) -> Any:
    return position


def gather_fold(
    block: Any,
    consume: Callable[[Any, Arrivals], Any],
    ring: Ring,
    plan: Plan,
    sums: Callable[[Any], Any] = lambda carry: carry,
    take: Callable[[Array], Any] = _position,
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

    def send_halves(blocks: list[Any]) -> list[Any]:
        if not plan.halves:
            return []
        return send([jax.tree.map(lambda x, n=n: _half(x, n), b) for n, b in enumerate(blocks)])

    def step(distance: Any, state: Any, send: Callable[[list[Any]], list[Any]] = send) -> Any:
        index, carry, blocks = state

        def take_all(index: Array) -> list[Any]:
            return [take((index - d * distance) % ring.size) for d in plan.directions]

        blocks, taken, sent = _issue(plan, index, blocks, take_all, send)
        carry = consume(carry, list(zip(blocks, taken, strict=True)))
        return _pin(plan, index, carry, sent, taken, sums(carry))

    def send_own(blocks: list[Any]) -> list[Any]:
        own = blocks * len(plan.directions)
        return send(own) if plan.hops else send_halves(own)

    index = ring.index()
    (block,), taken, sent = _issue(plan, index, [block], take, send_own)
    carry = consume(None, [(block, taken)])
    state = _pin(plan, index, carry, sent, taken, sums(carry))
    if plan.hops <= UNROLLED_STEPS:
        for distance in range(1, plan.hops):
            state = step(distance, state)
    else:
        state = _loop(step, plan.hops, state)
    if plan.hops:
        state = step(plan.hops, state, send_halves)
    index, carry, halves = state
    if plan.halves:
        opposite = jax.tree.map(lambda x, *xs: _join(xs, x), block, *halves)
        carry = consume(carry, [(opposite, take((index + plan.hops + 1) % ring.size))])
    return carry


def scatter_fold(
    produce: Callable[[Any], Array],
    ring: Ring,
    plan: Plan,
    wire_dtype: DTypeLike | None = None,
    take: Callable[[Array], Any] = _position,
) -> Array:
    """Sums over the devices what `produce(take(owner))` gives for each owner, at that owner.

    Partial sums travel towards their owner in `wire_dtype` (their own dtype if None), and each
    device adds what it produced while they were under way.
    """

    def take_all(distance: Any, index: Array) -> list[Any]:
        return [take((index - d * distance) % ring.size) for d in plan.directions]

    def send(sums: list[Array]) -> list[Array]:
        wire = [s if wire_dtype is None else s.astype(wire_dtype) for s in sums]
        return [ring.shift(s, -d) for s, d in zip(wire, plan.directions, strict=True)]

    def step(distance: Any, state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        index, sums = state
        _, taken, sent = _issue(plan, index, sums, lambda index: take_all(distance, index), send)
        index, produced, arrived = _pin(plan, index, [produce(t) for t in taken], sent, taken)
        return index, [_add_arrival(p, arrived, lane) for lane, p in enumerate(produced)]

    index, sums = ring.index(), []
    if plan.halves:
        opposite = produce(take((index + plan.hops + 1) % ring.size))
        sums = [_half(opposite, lane) for lane in range(2)]
        if plan.hops:
            index, sums = step(plan.hops, (index, sums))
    elif plan.hops:
        # Pinned, or the GPU compiler merges this matmul with the next one, which covers a transfer.
        taken = take_all(plan.hops, index)
        index, sums, _ = _pin(plan, index, [produce(t) for t in taken], (), taken)

    state = index, sums
    if plan.hops <= UNROLLED_STEPS:
        for distance in range(plan.hops - 1, 0, -1):
            state = step(distance, state)
    else:
        state = _loop(lambda t, state: step(plan.hops - t, state), plan.hops, state)

    index, sums = state
    _, taken, sent = _issue(plan, index, sums, take, lambda sums: send(sums) if sums else [])
    _, own, arrived = _pin(plan, index, produce(taken), sent, taken)
    for lane in range(len(arrived)):
        own = _add_arrival(own, arrived, lane)
    return own


def take_block(x: Array, dim: int, size: int, position: Array) -> Array:
    """Returns block number `position` of the blocks of `size` along dimension `dim`."""
    return lax.dynamic_slice_in_dim(x, position * size, size, dim)


def place_block(whole: Array | None, block: Array, dim: int, position: Array, count: int) -> Array:
    """Writes `block` as number `position` of `count` along `dim`; None is a whole yet unwritten."""
    if whole is None:
        # Not zeros: filling what every step overwrites would be one more pass over the result.
        whole = empty_like_blocks(block, dim, count)
    into: Array = vary_over(varying_axes(block), whole)
    return lax.dynamic_update_slice_in_dim(into, block, position * block.shape[dim], dim)


def _issue(
    plan: Plan,
    index: Array,
    outgoing: Any,
    take: Callable[[Array], Any],
    send: Callable[[Any], Any],
) -> tuple[Any, Any, Any]:
    """Starts a step's transfers; returns what leaves, what `take(index)` gave, what arrives.

    Where the plan queues, nothing leaves before all that the step's matmul needs is there. The
    executor of CPU devices runs what is ready in the order in which it became so, and a transfer
    blocks the thread that runs it: a matmul that is ready only later would wait for its end.
    """
    if not plan.queued:
        sent = send(outgoing)
        return outgoing, take(index), sent
    taken = lax.optimization_barrier(take(index))
    start = _unforeseen_zero((index, taken))
    outgoing = jax.tree.map(lambda x: _rewrite_first(x, start), outgoing)
    return outgoing, taken, send(outgoing)


def _pin(
    plan: Plan, index: Array, computed: Any, transferred: Any, taken: Any, sums: Any = ()
) -> tuple[Array, Any, Any]:
    """Keeps a step's matmul and its transfers together, and the next step's after both.

    Without it the compilers are free to start every transfer at once, before any matmul, to run
    every matmul at once, before any transfer, or to fuse the addition of an arriving sum into the
    matmul that was to cover its transfer. The index passes through, and with it all that the next
    step slices and computes.
    """
    index, computed, transferred = lax.optimization_barrier((index, computed, transferred))
    if traced_for_cpu():
        # That compiler drops barriers before it orders the program; only data orders it there.
        index = index + _unforeseen_zero((computed, transferred) if plan.queued else computed)
        # Where the plan queues, operands in use until the transfers are over: memory that the
        # matmul frees earlier would be given to what arrives, which then waits for the matmul.
        until = taken if plan.queued else sums
        if jax.tree.leaves(until):
            start = _unforeseen_zero(until)
            transferred = jax.tree.map(lambda x: _rewrite_first(x, start), transferred)
    return index, computed, transferred


def _unforeseen_zero(tree: Any) -> Array:
    """Returns a 0 that the compiler cannot know before every array of `tree` is there."""
    firsts = [x[(0,) * x.ndim] for x in jax.tree.leaves(tree) if x.size and not any(_spec(x))]
    nonzero = [(first != jnp.zeros((), first.dtype)).astype("int32") for first in firsts]
    return sum((jnp.minimum(n, jnp.int32(0)) for n in nonzero), start=jnp.int32(0))


def _rewrite_first(x: Array, start: Array) -> Array:
    """Returns `x` with its first element written onto itself, in place, at position `start` = 0."""
    if not x.size or any(_spec(x)):
        return x
    return lax.dynamic_update_slice(x, x[(slice(1),) * x.ndim], [start] * x.ndim)


def _loop(step: Callable[[Any, Any], Any], stop: int, state: Any) -> Any:
    # Two steps a trip: with one, the compilers copy the carried block before each send.
    return lax.fori_loop(1, stop, lambda t, s: step(t.astype("int32"), s), state, unroll=2)


def _spec(x: Array) -> tuple[Any, ...]:
    """The explicit mesh axes that shard each dimension of `x` beyond the manual ones."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def _halved_dim(x: Array) -> int:
    whole = [dim for dim, axes in enumerate(_spec(x)) if axes is None] or list(range(x.ndim))
    even = [dim for dim in whole if x.shape[dim] % 2 == 0 and x.shape[dim]]
    return even[0] if even else max(whole, key=lambda dim: x.shape[dim])


def _half(block: Array, lane: int) -> Array:
    dim = _halved_dim(block)
    size = block.shape[dim]
    middle = -(-size // 2)
    start, stop = ((0, middle), (middle, size))[lane]
    return lax.slice_in_dim(block, start, stop, axis=dim)


def _add_arrival(produced: Array, arrived: list[Array], lane: int) -> Array:
    sum_ = arrived[lane].astype(produced.dtype)
    if sum_.shape != produced.shape:  # half of a sum: the rest of it went the other way
        dim = _halved_dim(produced)
        missing = produced.shape[dim] - sum_.shape[dim]
        padding = [(0, 0, 0)] * produced.ndim
        padding[dim] = ((0, missing, 0), (missing, 0, 0))[lane]
        sum_ = lax.pad(sum_, jnp.zeros((), sum_.dtype), padding)
    return produced + sum_


def _join(halves: Sequence[Array], like: Array) -> Array:
    return lax.concatenate(halves, _halved_dim(like))
