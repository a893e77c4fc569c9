"""Keeps transfers overlapped with work: all that compilers must be told.

An `Order` gives a step the form that a platform's compiler needs. `Order` itself is for GPUs and
unknown chips.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar.axis.ring_order import Index
from jaxpar.axis.vma import spec_of
from jaxpar.compiler import control_flow
from jaxpar.compiler.compat import cuts_within_matmuls
from jaxpar.platforms.chips import Tpu, is_tpu, platform_of, traced_for_cpu, traced_for_cpu_cluster

Send = Callable[[Any], Any]
Beside = tuple[Index, Any, Any]  # the index, the results, the arrivals


class Work(NamedTuple):
    """What a step computes while its transfers are under way."""

    take: Callable[[Index], Any]  # maps the index to the step's operands; depends on nothing else
    compute: Callable[[Index, Any, Any], Any]  # maps `(index, leaving, take(index))` to the results
    sums: Callable[[Any], Any] | None = None  # picks the results that are added to; None: none
    # makes arrays of the results' types; None: nothing continues earlier arrays
    like: Callable[[], Any] | None = None


# For a scatter's sum of up to so many FLOPs, the matmul should cut its operand itself. A separate
# cut takes a microsecond and a pass over memory. A cut within a long matmul reads memory again and
# again. All sums of a ring of 8 v5p, by GFLOP of each sum, in us:
#
#     GFLOP        2  7.5    30    60
#     cut first  139  429  1307  2444
#     within     127  421  1388  3080
FLOPS_WITHIN = 1e10


@dataclass(frozen=True)
class Order:
    """One barrier a step: transfers start when the previous step's work is done."""

    # Without the barrier, in the HLO for 8 devices:
    #     H100  7 x collective-permute, of which none has a -start; one gemm of all 8 blocks
    #     v5p   6 x collective-permute-start and -done, which overlap with nothing; then 6 matmuls
    pieces = 1  # number of parts in which sums are made and sent
    cuts_first = False  # whether operands are cut by a separate instruction

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        """Computes during a transfer; returns an index, the results and the arrivals.

        `send(leaving)` starts the transfers, and returns what arrives. The next step must depend
        only on the returned index, which comes after both.
        """
        arriving = send(leaving)
        made = work.compute(index, leaving, work.take(index))
        return lax.optimization_barrier((index, made, arriving))

    def for_sums(self, flops: float) -> "Order":
        """Returns the order for unrolled sums; `flops` of 0: no matmul."""
        return self

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both, with the backward pass after the forward pass."""
        return out, residuals


@dataclass(frozen=True)
class TpuOrder(Order):
    """A step that adds is one instruction, a conditional with an unprovable predicate."""

    # So the matmul's epilogue adds an arrived sum. Sums travel in two alternating pieces: one is
    # added while the other is under way.
    # Without the conditional, the addition is a separate pass over memory:
    #     fusion.2 = f32[256,4096] fusion(cut, rhs), kind=kOutput          # the matmul
    #     add_fusion.10 = bf16[256,4096] fusion(fusion.2, arrived), kind=kLoop
    # A single piece is added only after it arrives:
    #     fusion.2 = ...; collective-permute-done; add_fusion.10 = ...; collective-permute-start
    pieces = 2
    # The scheduler assumes half of a transfer's time, and delays its start to the last instruction
    # that covers this. So a step that only places is one instruction too. Without it:
    #     matmul.8; collective-permute-start; matmul.9; collective-permute-done
    delays_transfers: bool = False
    # A long matmul that cuts its operand takes longer than both apart (376 us, not 24 + 272; for
    # short ones see `for_sums`). A separate cut stays in VMEM. Without it, one instruction for both
    # reads memory:
    #     fusion.45 = fusion(lhs, start, rhs), kind=kOutput  # dynamic-slice and convolution
    cuts_first: bool = False

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        arriving = send(leaving)
        take, like = work.take, work.like
        if self.cuts_first:
            cut = lax.optimization_barrier(take(index))
            take = lambda _: cut  # noqa: E731

        def compute(index: Index) -> Any:
            return work.compute(index, leaving, take(index))

        if like is not None and (work.sums is not None or self.delays_transfers):
            # Arrays come by closure: otherwise a step would hold operands that it does not use.
            # In jax 0.12.0 `scheduling_group` is no replacement, because it changes no program.
            # `must_fuse_call` is as fast for steps of one sum. For two sums, compilation fails.
            made = control_flow.cond(index >= 0, compute, lambda _: like(), index)
        else:
            made = compute(index)
        return lax.optimization_barrier((index, made, arriving))

    def for_sums(self, flops: float) -> Order:
        within = cuts_within_matmuls() and flops <= FLOPS_WITHIN
        return replace(self, cuts_first=self.cuts_first and not within)

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        # Without it, a backward pass whose cotangent does not depend on the result interleaves with
        # the forward pass. Their transfers wait for the same links, and memory holds both:
        #     forward's collective-permute-start.1; backward's collective-permute-start.9; ...
        return lax.optimization_barrier((out, residuals))


@dataclass(frozen=True)
class CpuOrder(Order):
    """Data dependencies replace barriers, which the CPU compiler drops before jax 0.12."""

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        # Without the tie of the index, all operands are cut before the first matmul:
        #     slice.1; slice.2; ...; slice.8; dot.1; collective-permute.1; dot.2; ...
        # Before jax 0.12, without the tie of sums, all blocks arrive before the first is used, and
        # all products are held:
        #     collective-permute.1; ...; collective-permute.7; dot.1; ...; dot.8; add.1; ...
        index, made, arrived = super().beside(index, leaving, send, work)
        if work.sums is not None:
            arrived = written_after(work.sums(made), arrived)
        return known_after(made, index), made, arrived


@dataclass(frozen=True)
class ClusterOrder(Order):
    """A transfer starts only when the matmul that overlaps with it can start."""

    # The CPU executor runs instructions as they become ready, and a transfer between processes
    # blocks its thread: a later matmul would wait.
    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        # Without the barrier, fusion cuts the operand twice, and the tie waits for nothing. This
        # happens before jax 0.12, where the compiler drops the barrier:
        #     leaving = fusion(block, lhs, index); product = dot(fusion(lhs, index), block)
        cut = lax.optimization_barrier(work.take(index))
        leaving = written_after((index, cut), leaving)
        work = work._replace(take=lambda _: cut)
        index, made, arrived = super().beside(index, leaving, send, work)
        # The cut stays in use until the transfers are over. Otherwise an arrival gets the memory
        # that the matmul frees, and waits for the matmul:
        #     product = dot(cut, block); arrived = collective-permute(leaving)  # where cut was
        return known_after((made, arrived), index), made, written_after(cut, arrived)


def traced_order() -> Order:
    if traced_for_cpu_cluster():
        return ClusterOrder()
    if traced_for_cpu():
        return CpuOrder()
    device = jax.sharding.get_abstract_mesh().abstract_device
    return Order() if device is None else order_of(device.device_kind)


def order_of(kind: str) -> Order:
    """Returns the order for a `device_kind`, known or not."""
    known = platform_of(kind)
    if isinstance(known, Tpu):
        return TpuOrder(known.delays_transfers, known.cuts_first)
    return TpuOrder() if is_tpu(kind) else Order()


def known_after(tree: Any, index: Index) -> Array:
    """Returns `index`, unknown to any compiler before all of `tree` is there."""
    # The minimum of the index, and of the index plus a count of nonzero elements.
    for x in jax.tree.leaves(tree):
        if x.size and not any(spec_of(x)):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
            first = lax.squeeze(_first(x), range(x.ndim))
            nonzero = lax.convert_element_type(lax.ne(first, np.zeros((), x.dtype)), "int32")
            index = lax.min(index, lax.add(index, nonzero))
    return index


def written_after(before: Any, tree: Any) -> Any:
    """Returns `tree`, whose arrays are all there only after all of `before`."""
    if not jax.tree.leaves(before):
        return tree
    start = known_after(before, jnp.int32(0))  # no compiler knows that it is 0

    def rewritten(x: Array) -> Array:
        if not x.size or any(spec_of(x)):
            return x
        start_of_all = [start] * x.ndim
        return lax.dynamic_update_slice(x, _first(x), start_of_all, allow_negative_indices=False)

    return jax.tree.map(rewritten, tree)


def _first(x: Array) -> Array:
    return lax.slice(x, [0] * x.ndim, [1] * x.ndim)
