"""How a platform is told to keep a transfer beside a computation: all that compilers need.

An algorithm says what leaves, what is computed meanwhile, and what of that is added to. An order
says in which form a compiler must see it. `Order` is enough for GPUs and for chips that nobody
knows; a platform that needs more is a class more, and `ORDERS` says which chip it is for.

All of this is about transfers beside work. A barrier that keeps memory low or a layout apart, and a
kernel that one platform has, stand where their arrays are: `_ragged.py`, `layers/`, `moe/`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpar.axis.varying import spec_of
from jaxpar.compiler import control_flow
from jaxpar.compiler.compat import cuts_within_matmuls
from jaxpar.mesh.chips import traced_for_cpu, traced_for_cpu_cluster
from jaxpar.mesh.walk import Index

Send = Callable[[Any], Any]
Beside = tuple[Index, Any, Any]  # the index, what was made, what arrived


class Work(NamedTuple):
    """What a step computes while its transfers are under way.

    Attributes:
      take: cuts what the step needs of what stays at home; depends on the index alone.
      compute: `(index, leaving, take(index))` to what is made of them.
      sums: picks, of what is made, that which is added to and not only written into; None where
        nothing is.
      like: makes arrays of the types of what is made, of any values; None where what is made
        continues nothing that is there already.
    """

    take: Callable[[Index], Any]
    compute: Callable[[Index, Any, Any], Any]
    sums: Callable[[Any], Any] | None = None
    like: Callable[[], Any] | None = None


# A scatter's sum of up to so many FLOPs had better have its matmul cut the operand by itself. A cut
# of its own takes a microsecond and a pass over memory; one within has a long matmul read memory
# again and again. All sums of a ring of 8 v5p, cut first and within: 139 and 127 us with 2 GFLOP
# each, 429 and 421 with 7.5, 1307 and 1388 with 30, 2444 and 3080 with 60.
FLOPS_WITHIN = 1e10


@dataclass(frozen=True)
class Order:
    """A barrier a step: the transfers of the next one start when this one's work is done.

    Without it, in the HLO for 8 devices:

        H100  7 x collective-permute, of which none has a -start; one gemm of all 8 blocks
        v5p   6 x collective-permute-start and -done, beside nothing, and then 6 matmuls
    """

    pieces = 1  # in how many parts sums are made and sent
    cuts_first = False  # whether operands are cut by an instruction of their own

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        """Computes while a transfer is under way.

        `index` is this device's logical index; `send(leaving)` starts the transfers of
        what leaves, and returns what arrives. All that the next step does must depend on the index
        that is returned, which comes after both.
        """
        arriving = send(leaving)
        made = work.compute(index, leaving, work.take(index))
        return lax.optimization_barrier((index, made, arriving))

    def for_sums(self, flops: float) -> "Order":
        """Returns the order for the unrolled steps of a scatter, each of whose sums takes `flops`.

        0: nothing is multiplied.
        """
        return self

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both, in an order that keeps a backward pass behind its forward pass."""
        return out, residuals


@dataclass(frozen=True)
class TpuOrder(Order):
    """A step that adds is one instruction: a conditional whose predicate the compiler cannot prove.

    Without it, the addition of a sum that has arrived is a pass over memory of its own, a third of
    a matmul, where in the matmul's epilogue it is free:

        fusion.2 = f32[256,4096] fusion(cut, rhs), kind=kOutput          # the matmul
        add_fusion.10 = bf16[256,4096] fusion(fusion.2, arrived), kind=kLoop

    For the same reason sums travel in two pieces that take turns: one is added in the epilogue
    while the other is under way. One piece is added only when it has come:

        fusion.2 = ...; collective-permute-done; add_fusion.10 = ...; collective-permute-start
    """

    pieces = 2
    # The scheduler reckons with half of a transfer's time, and delays its start to the last
    # instruction that covers that; a step that only places is one instruction, too. Without it:
    #     matmul.8; collective-permute-start; matmul.9; collective-permute-done
    delays_transfers: bool = False
    # A long matmul that cuts its operand is slower by more than the cut takes (376 us for 24 + 272;
    # short ones: `for_sums`).
    # Without it there is one instruction for both, which reads memory where the cut stays in VMEM:
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
            # Arrays by closure: an operand that a step does not use would be kept. With jax 0.12.0
            # `scheduling_group` does not replace this: it changes no program. `must_fuse_call` does
            # where a step makes one sum, as fast; where it makes two, compilation fails.
            made = control_flow.cond(index >= 0, compute, lambda _: like(), index)
        else:
            made = compute(index)
        return lax.optimization_barrier((index, made, arriving))

    def for_sums(self, flops: float) -> Order:
        within = cuts_within_matmuls() and flops <= FLOPS_WITHIN
        return replace(self, cuts_first=self.cuts_first and not within)

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        # Without it a backward pass whose cotangent does not depend on the result is interleaved
        # with the forward pass, their transfers wait for the same links, and memory holds both:
        #     forward's collective-permute-start.1; backward's collective-permute-start.9; ...
        return lax.optimization_barrier((out, residuals))


@dataclass(frozen=True)
class CpuOrder(Order):
    """Data that depend on one another: before jax 0.12 the CPU compiler drops all barriers.

    Without the tie of the index, all operands are cut before the first matmul (temporaries of a
    scatter over 8 devices: 16 MiB for 4.3, and 6.0 for 2.3 since jax 0.12):

        slice.1; slice.2; ...; slice.8; dot.1; collective-permute.1; dot.2; ...

    Without that of sums all blocks arrive before the first is used, and all products are held
    before they are added (14.3 MiB for 6.3; nothing since jax 0.12):

        collective-permute.1; ...; collective-permute.7; dot.1; ...; dot.8; add.1; ...
    """

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        index, made, arrived = super().beside(index, leaving, send, work)
        if work.sums is not None:
            arrived = written_after(work.sums(made), arrived)
        return known_after(made, index), made, arrived


@dataclass(frozen=True)
class ClusterOrder(Order):
    """Nothing leaves before the matmul beside it can start, and the next step waits for both.

    The executor of CPU devices runs what is ready in the order in which it became so, and a
    transfer between processes blocks the thread that runs it: a matmul that is ready only later
    would wait for its end.
    """

    def beside(self, index: Index, leaving: Any, send: Send, work: Work) -> Beside:
        # Without the barrier fusion has the tie cut for itself, and wait for nothing; so it does
        # before jax 0.12, which drops the barrier:
        #     leaving = fusion(block, lhs, index); product = dot(fusion(lhs, index), block)
        cut = lax.optimization_barrier(work.take(index))
        leaving = written_after((index, cut), leaving)
        work = work._replace(take=lambda _: cut)
        index, made, arrived = super().beside(index, leaving, send, work)
        # The cut is in use until the transfers are over. What the matmul frees earlier would be
        # given to what arrives, which then waits for the matmul: one allocation, two tenants,
        #     product = dot(cut, block); arrived = collective-permute(leaving)  # where cut was
        return known_after((made, arrived), index), made, written_after(cut, arrived)


# By the beginning of `device_kind`; the last is for TPUs that nobody has compiled for.
ORDERS = {
    "TPU v4": TpuOrder(delays_transfers=True),
    "TPU v5 lite": TpuOrder(),
    "TPU v5": TpuOrder(delays_transfers=True, cuts_first=True),
    "TPU v6 lite": TpuOrder(delays_transfers=True, cuts_first=True),
    "TPU7x": TpuOrder(cuts_first=True),
    "TPU": TpuOrder(),
}


def traced_order() -> Order:
    """Returns the order for the devices that the program is traced for."""
    if traced_for_cpu_cluster():
        return ClusterOrder()
    if traced_for_cpu():
        return CpuOrder()
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    return next((order for name, order in ORDERS.items() if kind.startswith(name)), Order())


def known_after(tree: Any, index: Index) -> Array:
    """Returns `index`, which no compiler can know before every array of `tree` is there.

    It is the least of the index and of itself with a count of elements that are not zero.
    """
    for x in jax.tree.leaves(tree):
        if x.size and not any(spec_of(x)):
            first = lax.squeeze(_first(x), range(x.ndim))
            nonzero = lax.convert_element_type(lax.ne(first, np.zeros((), x.dtype)), "int32")
            index = lax.min(index, lax.add(index, nonzero))
    return index


def written_after(before: Any, tree: Any) -> Any:
    """Returns `tree`, none of whose arrays is there before every array of `before`."""
    if not jax.tree.leaves(before):
        return tree
    start = known_after(before, jnp.int32(0))

    def rewritten(x: Array) -> Array:
        """`x` with its first element written onto itself, in place, at the position 0."""
        if not x.size or any(spec_of(x)):
            return x
        start_of_all = [start] * x.ndim
        return lax.dynamic_update_slice(x, _first(x), start_of_all, allow_negative_indices=False)

    return jax.tree.map(rewritten, tree)


def _first(x: Array) -> Array:
    """The first element of `x`, in an array of as many dimensions."""
    return lax.slice(x, [0] * x.ndim, [1] * x.ndim)
