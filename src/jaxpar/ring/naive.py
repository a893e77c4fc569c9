"""The naive algorithm over a ring: a collective of `jax.lax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.axis.quantized import Quantized, read_as
from jaxpar.axis.ring_order import Index
from jaxpar.axis.vma import vary_over, varying_axes
from jaxpar.compiler import control_flow
from jaxpar.compiler.compat import all_gather, psum_scatter
from jaxpar.platforms.chips import ADDED, Chip
from jaxpar.ring.cuts import Span, split_dim
from jaxpar.ring.seconds import (
    Flow,
    FlowKind,
    collective_time,
    last_copy_time,
    quantizing_time,
    work_on_kept,
    work_time,
)
from jaxpar.ring.ways import (
    Arrivals,
    Kept,
    Positions,
    Round,
    Split,
    Take,
    Tasks,
    Use,
    Way,
    in_one_part,
    in_scope,
    take_nothing,
)

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem


@dataclass(frozen=True)
class Naive(Way):
    """Gathers everything, then uses it, or computes everything, then scatters the sum."""

    derived_by_jax = True
    relays = False

    @property
    def mode(self) -> str:
        return "naive"

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        chip, size, beside = problem.figures, self.ring.size, problem.beside
        ahead = quantizing_time(chip, () if kept else flows)
        work = [work_time(chip, flow, 1, 0.0) for flow in flows]
        if kept and len(flows) > 1:
            work[1] = work_on_kept(chip, flows[1], kept)
        sent = [sent_time(problem, flow, flow.kind) for flow in flows]
        if len(flows) < 2:
            # After an all-reduce by a SparseCore, the result is copied.
            apart = [flow for flow in flows if flow.kind == "all-reduce" and flow.kind in beside]
            copied = sum(last_copy_time(chip, flow, size) for flow in apart)
            return ahead + sum(work, 0.0) + sum(sent, 0.0) + copied
        # A scatter and a gather: the gather overlaps with the scatter's work, and then the sums
        # travel while the gather's work is done.
        gathering = 0.0 if kept else sent[1]
        first = max(work[0], gathering) if "all-gather" in beside else work[0] + gathering
        second = max(work[1], sent[0]) if "reduce-scatter" in beside else work[1] + sent[0]
        return ahead + first + second

    @in_scope
    def gather(
        self,
        block: Any,
        use: Use,
        *,
        dim: int | None = None,
        split: Split = in_one_part,
        kept: list[Any] | None = None,
    ) -> Any:
        carry = None
        if dim is not None:
            for start, size, positions in self._parts(jax.tree.leaves(block)[0].shape[dim]):
                at = Span(start, size)
                part = jax.tree.map(lambda x, at=at: self._gathered(at.cut(x, dim), dim), block)
                if kept is not None:
                    kept.append(part)
                carry = use.consume(carry, [(part, positions, use.take(positions))])
            return use.finish(carry)
        index = self.ring.index()
        first = use.consume(None, [(block, index, use.take(index))])
        return use.finish(self._visit(block, use.consume, use.take, first))

    @in_scope
    def scatter(
        self,
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
        tasks: Tasks | None = None,
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        carry = None
        if tasks:
            from jaxpar.ring.tasks import at_once  # uses blocks that another algorithm saved

            carry = at_once(tasks(1), self.ring.index())
        parts = [
            self._scattered(produce(take(positions)), dim, size, dtype)
            for _, size, positions in self._parts(length)
        ]
        return (lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]), carry

    def kept(self, length: int) -> Kept | None:
        return Kept([lambda _: Span(0, length * self.ring.size)])

    def _parts(self, length: int) -> list[tuple[int, int, Positions]]:
        """Returns each travelling part's start and size in a block, and its positions."""
        return [(0, length, Span(0, length * self.ring.size))]

    def _scattered(self, sums: Array, dim: int, length: int, dtype: DTypeLike) -> Array:
        if not sums.size:  # XLA does not scatter empty arrays
            return lax.slice_in_dim(sums, 0, length, axis=dim).astype(dtype)
        axes = self.ring.names
        sums = self._quantized(sums, dim, dtype)
        if isinstance(sums, Quantized):
            return self._summed(sums, dim).astype(dtype)
        return psum_scatter(sums, axes, dim).astype(dtype)

    def _summed(self, sums: Quantized, dim: int) -> Array:
        """Sends quantized blocks to their owners, and adds them."""

        def apart(x: Array) -> Array:
            return lax.all_to_all(split_dim(x, dim, self.ring.size), self.ring.names, dim, 0)

        wide = jax.tree.map(apart, sums)
        return jnp.sum(read_as(wide, wide.scales.dtype), axis=0)

    @in_scope
    def circulate(self, block: Any, carry: Any, local: Any, steps: Round) -> tuple[Any, Any]:
        carry, local = steps.end(*steps.begin(carry, local))
        if self.ring.size == 1:
            return carry, local

        def put(sums: Any, made: Any, owner: Index) -> Any:
            return jax.tree.map(
                lambda x, y: lax.dynamic_update_index_in_dim(x, y, owner, 0), sums, made
            )

        def consume(state: Any, arrivals: Arrivals) -> Any:
            carry, sums = state
            [(part, owner, _)] = arrivals
            carry, [made] = steps.visit(carry, [(part, owner)])
            return carry, put(sums, made, owner)

        # [n, ...]: this device's share of the sums of each owner.
        sums = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(self.ring.size, *x.shape)), local)
        sums = put(vary_over(varying_axes(local), sums), local, self.ring.index())
        carry, sums = self._visit(block, consume, take_nothing, (carry, sums))
        axes = self.ring.names
        return carry, jax.tree.map(
            lambda x, like: psum_scatter(self._wire(x, like.dtype), axes), sums, steps.summed(block)
        )

    def _gathered(self, x: Array, dim: int) -> Array:
        if not x.size:  # nor does it gather them
            return lax.concatenate([x] * self.ring.size, dim)
        return all_gather(x, self.ring.names, dim)

    def _visit(self, block: Any, consume: Any, take: Take, state: Any) -> Any:
        """Gathers blocks, and consumes other devices' blocks in turn."""
        if self.ring.size == 1:
            return state
        index, axes = self.ring.index(), self.ring.names
        blocks = jax.tree.map(lambda x: all_gather(x, axes), block)  # [n, ...]

        def step(distance: Array, state: Any) -> Any:
            owner = self.ring.behind(index, distance.astype("int32"))
            at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, owner, keepdims=False), blocks)
            return consume(state, [(at, owner, take(owner))])

        return control_flow.fori_loop(1, self.ring.size, step, state)


def sent_time(problem: Problem, flow: Flow, kind: FlowKind) -> float:
    chip, size, shared = problem.figures, problem.ring.size, problem.messages("collective")
    once = collective_time(chip, flow, size, shared)
    return once if flow.quantized else _passes(problem, kind) * once


def _passes(problem: Problem, kind: FlowKind) -> float:
    """Returns a collective's time, relative to a ring in both directions."""
    # XLA all-reduces over the links of all dimensions, or over one by a reduce-scatter and an
    # all-gather. A scatter over a full slice of equal sides is an all-reduce too.
    chip, size = problem.figures, problem.ring.size
    devices = max(problem.devices, size)
    if not chip.torus or kind == "gather":
        return 2.0 if kind == "all-reduce" else 1.0
    side = round(size ** (1 / max(1, chip.dimensions)))
    if size == devices and side**chip.dimensions == size and side > 1:
        closed = side == 16 if chip.dimensions == 2 else side % 4 == 0
        return 2 / (ADDED * chip.dimensions * (1 + closed) / 2)
    return 2 / _spanned(chip, size, devices) if kind == "all-reduce" else 1.0


def _spanned(chip: Chip, size: int, devices: int) -> int:
    """Guesses how many torus dimensions a ring spans: tracing sees no coordinates."""
    if chip.dimensions == 2:  # these dimensions close only if they are 16 long
        return 2 if size >= 256 else 1
    sides = [1] * max(1, chip.dimensions)
    while prod(sides) < devices:
        sides[sides.index(min(sides))] *= 2
    sides = sorted((side for side in sides if side > 1), reverse=True)
    # Only dimensions that the ring fills, of more than one link: a part is no closed ring.
    filled = (n for n in range(1, len(sides) + 1) if prod(sides[:n]) <= size and sides[n - 1] > 2)
    return max(filled, default=1)
