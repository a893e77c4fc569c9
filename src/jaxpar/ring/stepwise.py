"""Runs ring programs step by step: each transfer overlaps with work on earlier arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax.typing import DTypeLike

from jaxpar.axis.axis import Ring
from jaxpar.axis.ring_order import Index
from jaxpar.platforms.chips import Chip, fitted_to
from jaxpar.ring.cuts import Span, cut_out, of_types
from jaxpar.ring.gather import Gather
from jaxpar.ring.order import Beside, Order, Work
from jaxpar.ring.phase import Phase
from jaxpar.ring.pieces import equal_pieces, shares_of
from jaxpar.ring.run import loops, run
from jaxpar.ring.scatter import Scatter
from jaxpar.ring.seconds import (
    INSTRUCTION,
    Flow,
    copy_time,
    gathered_again,
    hop_time,
    joins,
    quantizing_time,
    work_on_kept,
    work_time,
)
from jaxpar.ring.steps import Hop, Step, circulate_steps, gather_steps, scatter_steps
from jaxpar.ring.tasks import Spare, at_once
from jaxpar.ring.ways import (
    Arrivals,
    Kept,
    Round,
    Split,
    Take,
    Tasks,
    Use,
    Way,
    as_it_is,
    in_one_part,
    in_scope,
)

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem

FLOAT32 = 2  # bytes of a sum in float32, relative to 16 bits
UNROLLED_CIRCULATING = 6  # fewer than other steps, because each of these holds more matmuls


@dataclass(frozen=True)
class Stepwise(Way):
    """Blocks and sums go from neighbour to neighbour, in one direction or in both."""

    directions: tuple[int, ...]  # of a gather, (1,) or (1, -1). Sums go the other way.
    order: Order
    whole_opposite: bool = False  # whether the opposite device's block arrives in one piece
    # disjoint ones, each with its share of every block. None: a ring in logical order.
    rings: tuple[Ring, ...] | None = None
    reach: int | None = None  # number of hops in each direction; None: to all devices

    @property
    def mode(self) -> str:
        if self.rings is not None:
            return "multi-ring"
        return "unidirectional" if len(self.directions) == 1 else "bidirectional"

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        chip = problem.figures
        if kept:
            first, last = flows
            work = work_on_kept(chip, last, kept, self._parts, stepwise=True)
            return self._steps_time(problem, first, work)
        ahead = quantizing_time(chip, flows)
        return ahead + sum(self._steps_time(problem, flow) for flow in flows)

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
        length = 0 if dim is None else jax.tree.leaves(block)[0].shape[dim]
        if kept is not None and self._keeps_whole:
            use = placing(use, dim, length * self.ring.size)
            carry, whole = self.gather(block, use, dim=dim)
            kept.append(whole)
            return carry
        cuts = [] if dim is None else self._shares(length)
        shares = len(cuts or split(block, len(self.rings or [self.ring])))

        def share_of(block: Any, number: int) -> Any:
            if shares == 1:
                return block
            if dim is None:
                return split(block, shares)[number]
            start, size = cuts[number]
            return cut_out(block, start, size, dim)

        gather = self._gather(cuts, shares, dim)
        return gather.run(self.ring.index(), block, share_of, self.order.beside, use, kept)

    @property
    def _crosses_a_cube(self) -> bool:
        return self.rings is not None and self.rings[0].crosses_a_cube

    @property
    def _parts(self) -> int:
        around, pieces = self._sum_phases(1)[0].around, self.order.pieces
        looped = loops(scatter_steps(around, self.directions, pieces), pieces)
        # A full array that a longer gather saved is not cut for fewer steps. The gradients of a
        # gather of 16384x8192x8192 over 8 x 8 v5p take 2003 us uncut, and 2089 us cut.
        return 1 if looped or self._keeps_whole else around

    @property
    def _keeps_whole(self) -> bool:
        """Returns whether a gather saves one full array: loops hand out no blocks."""
        gather = self._gather([], len(self.rings or [self.ring]), 0)
        return loops(gather.steps())

    def kept(self, length: int) -> Kept | None:
        if self._keeps_whole:
            return Kept([lambda _: Span(0, self.ring.size * length)])
        cuts = self._shares(length)
        gather = self._gather(cuts, len(cuts), 0)
        return Kept(gather.places(length), own_first=len(gather.phases) == 1)

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
        # A block of 12 rows, two rings, two pieces. Each ring carries half of the block, in two
        # pieces of 3 rows:
        #
        #     rows   0 1 2   3 4 5 | 6 7 8   9 10 11
        #            ring 1        | ring 2
        #            a       b     | a       b
        pieces, shares = self.order.pieces if self.ring.size > 1 else 1, len(self._shares(length))
        pieces = max(1, min(pieces, length // shares))
        parts = equal_pieces(length, shares * pieces)
        cuts = [parts[share * pieces :][:pieces] for share in range(shares)]
        phases = self._sum_phases(shares)
        work = () if tasks is None else tasks(self._parts)
        # Staggering fills waiting time, and so do all tasks but the first, which runs ahead of the
        # steps. Quantized sums are not staggered: another quantization costs more than it saves.
        staggered = len(work) < 2 and self.ring.low_bit_sums(dtype) is None
        steps = scatter_steps(
            phases[0].around, self.directions, pieces, rings=shares, staggered=staggered
        )
        before, order = None, self.order
        if not loops(steps, pieces):
            # The shares of several rings count as one sum. Counted apart, a scatter of
            # 65536x14336x4096 over two rings takes 1746 us, not 1687.
            order = order.for_sums(flops / (phases[0].around * pieces))
        elif work:  # steps in a loop cannot take tasks
            before, work = at_once(work, self.ring.index()), ()
        spare = Spare(work, self.ring.index(), len(steps), before)

        def beside(index: Index, leaving: Any, send: Any, work: Work) -> Beside:
            return spare.within(partial(order.beside, index, leaving, send), work)

        quantize = partial(self._quantized, dim=dim, dtype=dtype)
        scatter = Scatter(steps, cuts, dim, length, dtype, quantize)
        return scatter.run(phases, self.ring.index(), beside, take, produce), spare.carry

    @in_scope
    def circulate(self, block: Any, carry: Any, local: Any, steps: Round) -> tuple[Any, Any]:
        (begin, visit, end, split, join, summed), rings = steps, len(self.rings or [self.ring])
        if self.reach is not None:
            parts, join = [block] * len(self.directions), _added
        else:
            parts = split(block, len(self.directions) * rings)
        if len(parts) < len(self.directions) * rings:  # one part a ring, or one
            rings = min(rings, len(parts))
            parts = split(block, rings)
        dtypes = [jax.tree.map(lambda x: x.dtype, summed(part)) for part in parts]  # of results
        first, *between, last = circulate_steps(
            self.ring.size, self.directions[: len(parts) // rings], rings=rings, reach=self.reach
        )

        def send(leaving: Any, t: Step) -> Any:
            blocks, sums = leaving
            return (
                [self._moved(x, hop, t.distance) for x, hop in zip(blocks, t.blocks, strict=True)],
                [self._followed(x, hop, t) for x, hop in zip(sums, t.sums, strict=True)],
            )

        def beside(state: Any, t: Step, compute: Any, like: Callable[[], Any]) -> Any:
            index, _, parts, sums = state
            wired = jax.tree.map(self._wire, sums, dtypes[: len(sums)])
            leaving = parts if t.blocks else [], wired
            here = () if t.blocks else parts  # blocks that are not sent on are used in place

            def on(index: Index, leaving: Any, _: Any) -> Any:
                return compute(index, here or leaving[0])

            work = Work(lambda _: (), on, as_it_is, like)
            return self.order.beside(index, leaving, partial(send, t=t), work)

        def at_home(state: Any, t: Step, share: Any, local: Any) -> Any:
            carry = state[1]
            index, (carry, local), arrived = beside(
                state, t, lambda *_: share(carry, local), lambda: (carry, local)
            )
            return (index, carry, *arrived), local

        def step(state: Any, t: Step) -> Any:
            _, carry, parts, _ = state

            def compute(index: Index, parts: list[Any]) -> Any:
                owners = [self._owner(index, hop, t) for hop in t.hops]
                return visit(carry, list(zip(parts, owners, strict=True)))

            def like() -> Any:
                return carry, [of_types(local, summed(part)) for part in parts]

            index, (carry, made), (parts, sums) = beside(state, t, compute, like)
            if sums:  # added here, not in `visit`: its matmuls would wait for sums under way
                made = jax.tree.map(lambda x, y: x + y.astype(x.dtype), made, sums)
            return index, carry, parts, made

        state, local = at_home((self.ring.index(), carry, parts, []), first, begin, local)
        # Across a cube each distance has its own neighbour, so that steps are unrolled.
        unrolled = None if self._crosses_a_cube else UNROLLED_CIRCULATING
        state = run(between, state, step, unrolled=unrolled)
        (_, carry, _, sums), local = at_home(state, last, end, local)
        if sums:
            local = jax.tree.map(lambda x, y: x + y.astype(x.dtype), local, join(sums))
        return carry, local

    def _steps_time(self, problem: Problem, flow: Flow, beside: float = 0.0) -> float:
        chip, size = problem.figures, self.ring.size
        messages = problem.messages("ring" if self.rings is None else "rings")
        again = gathered_again(chip, flow, size, problem.messages("collective"))
        # Each ring has its own links, and carries a share of every block.
        rings, whole = len(self.rings or [self.ring]), self.whole_opposite
        steps = gather_steps(size, self.directions, rings=rings, whole_opposite=whole)
        sent_in = 1 if flow.kind == "gather" else self.order.pieces  # messages of a block
        pieces = rings * sent_in
        fitted, joined = fitted_to(chip.kind), 0.0
        length, cut = flow.length // (size * rings), self.order.cuts_first
        if flow.kind == "gather" and flow.sums and joins(chip, length, flow.sums, cut):
            pieces = 1  # blocks from several rings are joined, and multiplied at once
            if rings > 1:
                joined = INSTRUCTION * size * rings
        fits = flow.kind == "gather" and 2 * flow.sums <= chip.vmem
        work = work_time(chip, flow, size * pieces, fitted.step_passes, kept=fits) + joined
        work = (work + beside) / size
        block = flow.block_bytes / rings * messages

        def time_of(step: Step) -> float:
            # Two halves are one block of work. The shares of all rings are one block too.
            whole = len([hop for hop in step.hops if hop.half is None]) / rings
            distance = [
                sent_in * hop_time(chip, block / sent_in)
                if hop.half is None
                else hop_time(chip, block / 2)
                for hop in step.blocks
            ]
            # A torus has a link per direction. On a GPU both directions share one port.
            sent = max(distance, default=0.0) if chip.torus else sum(distance, 0.0)
            computed = work * max(1, whole)
            if not step.hops and sent <= work * len(self.directions):
                # No sum was waited for: in the last step only the last piece is under way.
                return max(computed, sent / sent_in + computed * (1 - 1 / sent_in))
            return max(computed, sent)

        halves = any(hop.half is not None for step in steps for hop in step.blocks)
        # The opposite device's block is cut in halves, which are joined again.
        copied = 2 * copy_time(chip, flow.block_bytes) if halves and flow.kind == "gather" else 0.0
        copied += self._cut_time(chip, flow, rings)
        if flow.kind == "gather" and loops(steps):
            copied += len(steps) * INSTRUCTION
        # A GPU writes each product, and reads it again to add it to the sums that arrived.
        added = 0 if chip.torus or flow.kind == "gather" else FLOAT32 * size * flow.block_bytes
        copied += 2 * added / chip.hbm
        copied += again
        return sum(map(time_of, steps), 0.0) + copied

    def _cut_time(self, chip: Chip, flow: Flow, rings: int) -> float:
        fitted, order, pieces = fitted_to(chip.kind), self.order, self.order.pieces
        if flow.kind != "gather":
            around = self._sum_phases(rings)[0].around
            steps = scatter_steps(around, self.directions, pieces, rings=rings)
            looped = loops(steps, pieces)
            if not looped:
                order = order.for_sums(flow.flops / (around * pieces))
            elif order.cuts_first:
                return copy_time(chip, flow.cut) + 2 * len(steps) * INSTRUCTION
        if order.cuts_first:
            cut = flow.cut
        elif flow.kind == "gather" or not chip.torus:  # only columns cost a cut
            cut = flow.sliced
        else:
            cut = fitted.within * flow.cut
        return copy_time(chip, cut)

    def _shares(self, length: int) -> list[tuple[int, int]]:
        if self.rings is None or self.ring.size == 1:
            return [(0, length)]
        return shares_of(length, len(self.rings))

    def _gather(self, cuts: Sequence[tuple[int, int]], shares: int, dim: int | None) -> Gather:
        phase = Phase((self.rings or (self.ring,))[:shares])
        return Gather([phase], self.directions, cuts, dim, self.whole_opposite, self.reach)

    def _sum_phases(self, shares: int) -> Sequence[Phase]:
        return [Phase(self.rings or (self.ring,))]

    def _owner(self, index: Index, hop: Hop, t: Step) -> Array:
        return self._ring(hop).behind(index, hop.direction * t.distance)

    def _moved(self, x: Any, hop: Hop, distance: Any) -> Any:
        return self._ring(hop).hop(x, hop.direction, distance)

    def _followed(self, x: Any, hop: Hop, t: Step) -> Any:
        """Moves sums behind their block, finally to the owner."""
        if self.reach is None or t.hops:
            return self._moved(x, hop, t.distance - 1)
        return self.ring.shift(x, -hop.direction * self.reach)

    def _ring(self, hop: Hop) -> Ring:
        return self.ring if self.rings is None else self.rings[hop.ring]


def _added(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *parts)


def placing(use: Use, dim: int | None, length: int) -> Use:
    """Returns `use` that also places arrivals in a full array."""

    def both(carry: Any, arrivals: Arrivals) -> Any:
        made, whole = (None, None) if carry is None else carry
        for block, at, _ in arrivals:
            whole = at.place(whole, block, dim, length)
        return use.consume(made, arrivals), whole

    sums = use.sums
    return use._replace(
        consume=both,
        sums=None if sums is None else lambda carry: sums(carry[0]),
        finish=lambda carry: (use.finish(carry[0]), carry[1]),
    )
