"""What pins the overlap: what a compiler must keep before, beside and after what."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar._chips import traced_for_cpu
from jaxpar.collectives._plan import Plan


def issue(
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
        taken = take(index)
        return outgoing, lax.optimization_barrier(taken) if plan.sliced else taken, sent
    # Or fusion lets the tie slice for itself; jax 0.10.2 drops this barrier and still does.
    taken = lax.optimization_barrier(take(index))
    start = unforeseen_zero((index, taken))
    outgoing = jax.tree.map(lambda x: rewrite_first(x, start), outgoing)
    return outgoing, taken, send(outgoing)


def as_one(
    plan: Plan,
    index: Array,
    compute: Callable[..., Any],
    otherwise: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Returns `compute(*operands)`, where the plan groups as one instruction for the scheduler.

    A conditional is one instruction, whatever is inside it. Its predicate always holds, which the
    compiler does not know; `otherwise(*operands)` only has to be of the same types.
    """
    if not plan.grouped:
        return compute(*operands)
    return lax.cond(index >= 0, compute, otherwise, *operands)


def pin(
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
        index = index + unforeseen_zero((computed, transferred) if plan.queued else computed)
        # Where the plan queues, operands in use until the transfers are over: memory that the
        # matmul frees earlier would be given to what arrives, which then waits for the matmul.
        until = taken if plan.queued else sums
        if jax.tree.leaves(until):
            start = unforeseen_zero(until)
            transferred = jax.tree.map(lambda x: rewrite_first(x, start), transferred)
    return index, computed, transferred


def forward_first(plan: Plan, out: Any, residuals: Any) -> tuple[Any, Any]:
    """Returns both, the residuals not before the result is there, where the plan groups.

    A backward pass whose cotangent does not depend on the result would else be interleaved with the
    forward pass, and the transfers of two rings wait for the same links.
    """
    return lax.optimization_barrier((out, residuals)) if plan.grouped else (out, residuals)


def spec_of(x: Array) -> tuple[Any, ...]:
    """The explicit mesh axes that shard each dimension of `x` beyond the manual ones."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def unforeseen_zero(tree: Any) -> Array:
    """Returns a 0 that the compiler cannot know before every array of `tree` is there."""
    firsts = [x[(0,) * x.ndim] for x in jax.tree.leaves(tree) if x.size and not any(spec_of(x))]
    nonzero = [(first != jnp.zeros((), first.dtype)).astype("int32") for first in firsts]
    return sum((jnp.minimum(n, jnp.int32(0)) for n in nonzero), start=jnp.int32(0))


def rewrite_first(x: Array, start: Array) -> Array:
    """Returns `x` with its first element written onto itself, in place, at position `start` = 0."""
    if not x.size or any(spec_of(x)):
        return x
    return lax.dynamic_update_slice(x, x[(slice(1),) * x.ndim], [start] * x.ndim)
