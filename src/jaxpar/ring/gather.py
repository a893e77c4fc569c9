"""A gather in steps: a device uses each block that arrives while it sends the block on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import getitem
from typing import Any

import jax

from jaxpar.axis.ring_order import Index
from jaxpar.ring.cuts import cut_out, like_finished
from jaxpar.ring.order import Work
from jaxpar.ring.phase import Ordering, Phase, freely
from jaxpar.ring.pieces import half_of, join_halves
from jaxpar.ring.run import run
from jaxpar.ring.steps import Hop, Step, gather_steps
from jaxpar.ring.ways import Arrivals, Positions, Use, as_it_is

At = Callable[[Index, int | None], Positions]  # from an owner and a share; None: its full block


@dataclass(frozen=True)
class Gather:
    """A gather of all devices' blocks, in phases. The last phase uses them."""

    phases: Sequence[Phase]  # several if blocks go along torus dimensions in turn
    directions: tuple[int, ...]
    cuts: Sequence[tuple[int, int]]  # start and size of each share in a block
    dim: int | None  # along which blocks form the full array; None: blocks are used singly
    whole_opposite: bool = False
    reach: int | None = None

    def steps(self, phase: Phase | None = None) -> list[Step]:
        phase = phase or self.phases[-1]
        rings, whole = len(phase.rings), self.whole_opposite
        return gather_steps(
            *(phase.around, self.directions), rings=rings, whole_opposite=whole, reach=self.reach
        )

    def places(self, length: int) -> list[Callable[[Index], Positions]]:
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
        """Returns the last carry; appends arriving blocks to `kept`.

        `share_of` maps `(block, number)` to a share.
        """
        *earlier, last = self.phases
        length = 0 if self.dim is None else jax.tree.leaves(block)[0].shape[self.dim]
        at = self._positions(length)
        if not earlier:
            # Shares are cut from the arrays that the order passes on, which may wait for others.
            return self._past(
                last, index, [block], lambda xs, n: share_of(xs[0], n), at, beside, use, kept
            )
        parts = [share_of(block, n) for n in range(len(self.cuts))]
        for phase in earlier:
            parts = self._collected(phase, index, parts)
        if last.halves:
            parts = [half for part in parts for half in self._halves(part)]
        return self._past(last, index, parts, getitem, at, beside, use, kept)

    def _positions(self, length: int) -> At:
        last = self.phases[-1]

        def at(owner: Index, share: int | None) -> Positions:
            if self.dim is None:
                return owner
            if share is None:
                return last.positions(owner, 0, length, 0, length)
            return last.positions(owner, share, length, *self.cuts[share // (1 + last.halves)])

        return at

    def _collected(self, phase: Phase, index: Index, parts: list[Any]) -> list[Any]:
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
        dim = self.dim
        assert dim is not None
        length = jax.tree.leaves(part)[0].shape[dim]
        return [cut_out(part, start, length // 2, dim) for start in (0, length // 2)]

    def _past(
        self,
        phase: Phase,
        index: Index,
        local: list[Any],
        share_of: Callable[[list[Any], int], Any],
        at: At,
        beside: Ordering,
        use: Use,
        kept: list[Any] | None,
    ) -> Any:
        """Runs a phase. `local` is the local block, or its shares."""
        ways = len(self.directions)

        # `blocks` are the arrivals, a block for each of the step's hops, in order: both
        # directions of ring 1, then both of ring 2. In the first step they are the local block.
        def step(state: Any, t: Step) -> Any:
            index, carry, blocks = state
            come = self._arrivals(t, phase)
            if len(come) < len(t.hops):  # each ring has brought two halves of one block
                blocks = [
                    jax.tree.map(
                        lambda x, *xs: join_halves(xs, x),
                        share_of(local, number),
                        *blocks[number * ways : (number + 1) * ways],
                    )
                    for number in range(len(phase.rings))
                ]
            if kept is not None:  # in the order of `places`: the derivative relies on it
                kept.extend(blocks)
            done = use.finish if not t.blocks else as_it_is

            def send(blocks: list[Any]) -> list[Any]:
                # One block for each hop of the step before. At first the local block serves all.
                def leaves(hop: Hop) -> Any:
                    if not t.hops:
                        return share_of(blocks, hop.ring)
                    return blocks[t.hops.index(Hop(hop.direction, None, hop.ring))]

                return [_moved(phase, leaves(hop), hop, t.distance) for hop in t.blocks]

            known: list[Any] = []  # an index, and its positions: traced once for each index

            def places(index: Index) -> list[Positions]:
                if not known or known[0] is not index:
                    of_all = [self._place(index, phase, t, at, hop, share) for hop, share in come]
                    known[:] = index, of_all
                positions: list[Positions] = known[1]
                return positions

            def take_all(index: Index) -> list[Any]:
                return [use.take(positions) for positions in places(index)]

            # Starts are computed again here. The compiler does not know that a start from behind a
            # barrier, or from outside a conditional, is a multiple of `length`. Then the TPU
            # compiler writes the result by a separate pass, not from the matmul.
            def compute(index: Index, blocks: list[Any], taken: list[Any]) -> Any:
                arrivals = list(zip(blocks, places(index), taken, strict=True))
                return done(use.consume(carry, arrivals))

            alike = use.like if carry is None else partial(like_finished, done, carry)
            if not t.blocks and use.sums is None:
                # The last step has no transfers, and only writes. As one instruction, it would copy
                # all that was written before.
                alike = None
            return beside(index, blocks, send, Work(take_all, compute, use.sums, alike))

        _, carry, _ = run(self.steps(phase), (index, None, local), step)
        return carry

    def _arrivals(self, t: Step, phase: Phase) -> list[tuple[Hop | None, int | None]]:
        """Returns each arriving block's hop (None: local) and share."""
        if not t.hops:
            shares = [None] if len(self.phases) == 1 else range(len(phase.rings))
            return [(None, share) for share in shares]
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
