"""A gather in steps: blocks come past all devices, each of which uses them while they go on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import getitem
from typing import Any

import jax

from jaxpar.mesh.walk import Index
from jaxpar.ring.order import Work
from jaxpar.ring.parts import cut_out, like_finished
from jaxpar.ring.phase import Ordering, Phase, freely
from jaxpar.ring.pieces import half_of, join_halves
from jaxpar.ring.run import run
from jaxpar.ring.steps import Hop, Step, gather_steps
from jaxpar.ring.ways import Arrivals, Positions, Use, as_it_is

At = Callable[[Index, int | None], Positions]  # of an owner and a share; None: its whole block


@dataclass(frozen=True)
class Gather:
    """How the blocks of all devices come past each, in phases.

    Those of the first phases are laid out for the next one, which brings as many more at a time;
    those of the last one are used as they come.

    Attributes:
      phases: the first one first.
      directions: of the transfers.
      cuts: of each share its start and size in a block.
      dim: along which the blocks of all devices make a whole; None: they are used one by one.
      whole_opposite: the last block of an even ring comes whole.
      reach: the number of hops that blocks go each way; None: past all devices.
    """

    phases: Sequence[Phase]
    directions: tuple[int, ...]
    cuts: Sequence[tuple[int, int]]
    dim: int | None
    whole_opposite: bool = False
    reach: int | None = None

    def steps(self, phase: Phase | None = None) -> list[Step]:
        """The program of a phase, of the last one if it is not said of which."""
        phase = phase or self.phases[-1]
        rings, whole = len(phase.rings), self.whole_opposite
        return gather_steps(
            *(phase.around, self.directions), rings=rings, whole_opposite=whole, reach=self.reach
        )

    def places(self, length: int) -> list[Callable[[Index], Positions]]:
        """Where what comes lies in the whole, in its order, for blocks of a length."""
        last, at = self.phases[-1], self._positions(length)
        return [
            partial(self._place, phase=last, t=t, at=at, hop=hop, share=share)
            for t in self.steps()
            for hop, share in self._arrivals(t, last)
        ]

    def run(
        self,
        index: Index,
        block: Any,
        share_of: Callable[[Any, int], Any],
        beside: Ordering,
        use: Use,
        kept: list[Any] | None,
    ) -> Any:
        """Returns the last carry of what is made of all blocks.

        Args:
          index: this device's logical index.
          block: its block.
          share_of: a block and the number of a share to that.
          beside: as an order says.
          use: what is made of blocks.
          kept: where those are added that come.
        """
        *earlier, last = self.phases
        length = 0 if self.dim is None else jax.tree.leaves(block)[0].shape[self.dim]
        at = self._positions(length)
        if not earlier:
            # Cut of the blocks that an order has leave, which may come after others.
            return self._past(
                last, index, [block], lambda own, n: share_of(own[0], n), at, beside, use, kept
            )
        parts = [share_of(block, n) for n in range(len(self.cuts))]
        for phase in earlier:
            parts = self._collected(phase, index, parts)
        if last.halves:
            parts = [half for part in parts for half in self._halves(part)]
        return self._past(last, index, parts, getitem, at, beside, use, kept)

    def _positions(self, length: int) -> At:
        """Where, in the whole of blocks of a length, a share is that comes in the last phase."""

        last = self.phases[-1]

        def at(owner: Index, share: int | None) -> Positions:
            if self.dim is None:
                return owner
            if share is None:
                return last.positions(owner, 0, length, 0, length)
            return last.positions(owner, share, length, *self.cuts[share // (1 + last.halves)])

        return at

    def _collected(self, phase: Phase, index: Index, parts: list[Any]) -> list[Any]:
        """Returns of each share the blocks of all devices that a phase brings, in their order."""
        dim = self.dim
        assert dim is not None

        def at(owner: Index, share: int | None) -> Positions:
            assert share is not None
            size = self.cuts[share][1]
            return share, phase.positions(owner, share, size, 0, size)

        def place(wholes: list[Any] | None, arrivals: Arrivals) -> list[Any]:
            wholes = list(wholes or [None] * len(parts))
            for part, (share, positions), _ in arrivals:
                length = prod(phase.sides(share)) * self.cuts[share][1]
                leaves, form = jax.tree.flatten(part)
                into = jax.tree.leaves(wholes[share]) or [None] * len(leaves)
                placed = [
                    positions.place(whole, x, dim, length)
                    for whole, x in zip(into, leaves, strict=True)
                ]
                wholes[share] = jax.tree.unflatten(form, placed)
            return wholes

        return self._past(phase, index, parts, getitem, at, freely, Use(place), None)

    def _halves(self, part: Any) -> list[Any]:
        """The first half of a slab's blocks and the last, as `Phase.positions` has them."""
        dim = self.dim
        assert dim is not None
        length = jax.tree.leaves(part)[0].shape[dim]
        return [cut_out(part, start, length // 2, dim) for start in (0, length // 2)]

    def _past(
        self,
        phase: Phase,
        index: Index,
        own: list[Any],
        share_of: Callable[[list[Any], int], Any],
        at: At,
        beside: Ordering,
        use: Use,
        kept: list[Any] | None,
    ) -> Any:
        """Runs the program of a phase.

        What the first step uses is this device's `own`: the shares, or the block that they are of.
        """
        ways = len(self.directions)

        # `blocks` are those that have come, one for each hop of the step, in the order of its hops:
        # both ways of ring 0, then both of ring 1. In the first step they are this device's own.
        def step(state: Any, t: Step) -> Any:
            index, carry, blocks = state
            come = self._arrivals(t, phase)
            if len(come) < len(t.hops):  # two halves of one block have come by each ring
                blocks = [
                    jax.tree.map(
                        lambda x, *xs: join_halves(xs, x),
                        share_of(own, number),
                        *blocks[number * ways : (number + 1) * ways],
                    )
                    for number in range(len(phase.rings))
                ]
            if kept is not None:  # in the order of `places`, on which the derivative relies
                kept.extend(blocks)
            done = use.finish if not t.blocks else as_it_is

            def send(blocks: list[Any]) -> list[Any]:
                # One block for each hop of the step before; at first the own one for all.
                def leaves(hop: Hop) -> Any:
                    if not t.hops:
                        return share_of(blocks, hop.ring)
                    return blocks[t.hops.index(Hop(hop.direction, None, hop.ring))]

                return [_moved(phase, leaves(hop), hop, t.distance) for hop in t.blocks]

            known: list[Any] = []  # an index, and where blocks lie: traced once for each index

            def places(index: Index) -> list[Positions]:
                if not known or known[0] is not index:
                    of_all = [self._place(index, phase, t, at, hop, share) for hop, share in come]
                    known[:] = index, of_all
                found: list[Positions] = known[1]
                return found

            def take_all(index: Index) -> list[Any]:
                return [use.take(positions) for positions in places(index)]

            # Starts are computed here once more, and not taken: one that comes through a barrier,
            # or into a conditional, is not known to be a multiple of `length`, and the TPU compiler
            # then writes what was made in a pass of its own, not as the matmul makes it.
            def compute(index: Index, blocks: list[Any], taken: list[Any]) -> Any:
                arrivals = list(zip(blocks, places(index), taken, strict=True))
                return done(use.consume(carry, arrivals))

            alike = use.like if carry is None else partial(like_finished, done, carry)
            if not t.blocks and use.sums is None:
                # Nothing is under way beside the last step, which only writes: a step in one piece
                # would copy all that was written before.
                alike = None
            return beside(index, blocks, send, Work(take_all, compute, use.sums, alike))

        _, carry, _ = run(self.steps(phase), (index, None, own), step)
        return carry

    def _arrivals(self, t: Step, phase: Phase) -> list[tuple[Hop | None, int | None]]:
        """By which hops blocks have come to a step, and of which share they are.

        To the first one the own block, by none; or its shares, where there are several phases. Of
        two halves there is one hop.
        """
        if not t.hops:
            own = [None] if len(self.phases) == 1 else range(len(phase.rings))
            return [(None, share) for share in own]
        hops = t.hops[:: len(self.directions)] if t.hops[0].half is not None else t.hops
        return [(hop, hop.ring) for hop in hops]

    def _place(
        self,
        index: Index,
        phase: Phase,
        t: Step,
        at: At,
        hop: Hop | None,
        share: int | None,
    ) -> Positions:
        if hop is None:
            return at(index, share)
        return at(phase.rings[hop.ring].behind(index, hop.direction * t.distance), share)


def _moved(phase: Phase, x: Any, hop: Hop, distance: Any) -> Any:
    if hop.half is not None:
        x = jax.tree.map(partial(half_of, half=hop.half), x)
    return phase.rings[hop.ring].hop(x, hop.direction, distance)
