"""The way round a ring in turns: every transfer beside the work on what came before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._axis import Ring
from jaxpar.collectives._order import Beside, Order, Work
from jaxpar.collectives._parts import (
    Span,
    half_of,
    join_halves,
    like_finished,
    of_types,
    pieces_of,
    shares_of,
)
from jaxpar.collectives._run import loops, run
from jaxpar.collectives._scatter import Phase, Scatter, phases_over
from jaxpar.collectives._steps import Spare, Step, at_once
from jaxpar.collectives._turns import (
    Leg,
    Turn,
    circulate_turns,
    gather_turns,
    scatter_turns,
)
from jaxpar.collectives._ways import (
    Arrivals,
    Pick,
    Place,
    Positions,
    Split,
    Take,
    Visits,
    Way,
    as_it_is,
    in_one_part,
    in_scope,
    take_nothing,
)

UNROLLED_CIRCULATING = 6  # fewer than of other turns: such a one holds more matmuls


@dataclass(frozen=True)
class InTurns(Way):
    """Blocks and sums go from neighbour to neighbour, one way or both ways round.

    Attributes:
      directions: of the transfers of a gather, (1,) or (1, -1); sums go the other way.
      order: how a turn's transfers are kept beside its work.
      whole_opposite: the last block of an even ring comes whole, as matmuls cover it.
      rings: which devices are neighbours. Of several rings over the same devices, that share no
        link, each carries its own share of every block. None: the one in logical order.
      sides: of the torus of those devices, where sums do not go round such rings, but along one
        dimension after the other, each share along another one. None: they do.
    """

    directions: tuple[int, ...]
    order: Order
    whole_opposite: bool = False
    rings: tuple[Ring, ...] | None = None
    sides: tuple[int, ...] | None = None

    @property
    def mode(self) -> str:
        """One way round, both ways, or both ways round several rings."""
        if self.rings is not None:
            return "disjoint-rings"
        return "unidirectional" if len(self.directions) == 1 else "bidirectional"

    @in_scope
    def gather(
        self,
        block: Any,
        consume: Callable[[Any, Arrivals], Any],
        *,
        take: Take = take_nothing,
        dim: int | None = None,
        split: Split = in_one_part,
        sums: Pick | None = None,
        finish: Pick = as_it_is,
        like: Callable[[], Any] | None = None,
        kept: list[Any] | None = None,
    ) -> Any:
        length = 0 if dim is None else jax.tree.leaves(block)[0].shape[dim]
        if kept is not None and self.parts == 1:
            consume, sums, finish = placing(consume, sums, finish, dim, length * self.ring.size)
            carry, whole = self.gather(
                block, consume, take=take, dim=dim, sums=sums, finish=finish, like=like
            )
            kept.append(whole)
            return carry
        shares = [] if dim is None else self._shares(length)
        rings = len(shares or split(block, len(self.rings or [self.ring])))
        ways = len(self.directions)
        turns = self._gather_turns(rings)

        def share_of(block: Any, ring: int) -> Any:
            if rings == 1:
                return block
            if dim is None:
                return split(block, rings)[ring]
            start, size = shares[ring]
            cut = partial(lax.slice_in_dim, start_index=start, limit_index=start + size, axis=dim)
            return jax.tree.map(cut, block)

        def turn(state: Any, t: Turn) -> Any:
            index, carry, blocks = state
            legs = t.legs
            if legs != self._whole(legs):  # two halves of one block have come by each ring
                legs = self._whole(legs)
                blocks = [
                    jax.tree.map(
                        lambda x, *xs: join_halves(xs, x),
                        share_of(block, leg.ring),
                        *blocks[number * ways : (number + 1) * ways],
                    )
                    for number, leg in enumerate(legs)
                ]
            if kept is not None:
                kept.extend(blocks)
            done = finish if not t.blocks else as_it_is

            def send(blocks: list[Any]) -> list[Any]:
                # One block for each leg of the turn before; at first the own one for all.
                def leaves(leg: Leg) -> Any:
                    if not t.legs:
                        return share_of(blocks[0], leg.ring)
                    return blocks[t.legs.index(Leg(leg.direction, None, leg.ring))]

                return [self._moved(leaves(leg), leg, t.distance) for leg in t.blocks]

            def places(index: Array) -> list[Positions]:
                if dim is not None:
                    return [self._place(index, leg, t, length) for leg in legs or [None]]
                return [self._owner(index, leg, t) for leg in legs] if legs else [index]

            def take_all(index: Array) -> list[Any]:
                return [take(positions) for positions in places(index)]

            # Starts are computed here once more, and not taken: one that comes through a barrier,
            # or into a conditional, is not known to be a multiple of `length`, and the TPU compiler
            # then writes what was made in a pass of its own, not as the matmul makes it.
            def compute(index: Array, blocks: list[Any], taken: list[Any]) -> Any:
                return done(consume(carry, list(zip(blocks, places(index), taken, strict=True))))

            alike = like if carry is None else partial(like_finished, done, carry)
            if not t.blocks and sums is None:
                # Nothing is under way beside the last turn, which only writes: a turn in one piece
                # would copy all that was written before.
                alike = None
            work = Work(take_all, compute, sums, alike)
            return self.order.beside(index, blocks, send, work)

        _, carry, _ = run(turns, (self.ring.index(), None, [block]), turn)
        return carry

    @property
    def crosses_a_cube(self) -> bool:
        return self.rings is not None and self.rings[0].crosses_a_cube

    @property
    def parts(self) -> int:
        turns = self._gather_turns(len(self.rings or [self.ring]))
        return 1 if loops(turns) else self.ring.size

    def places(self, length: int) -> list[Place]:
        if self.parts == 1:
            return [lambda _: Span(0, self.ring.size * length)]
        return [
            partial(self._place, leg=leg, t=t, length=length)
            for t in self._gather_turns(len(self._shares(length)))
            for leg in self._whole(t.legs) or [None]
        ]

    @in_scope
    def scatter_beside(
        self,
        steps: Sequence[Step],
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        # Of each share its pieces, which all have as many of.
        pieces = self.order.pieces if self.ring.size > 1 else 1
        shares = self._shares(length)
        pieces = min(len(pieces_of(size, pieces)) for _, size in shares)
        cuts = [
            [(begin + start, size) for start, size in shares_of(share, pieces)]
            for begin, share in shares
        ]
        phases = [Phase(self.rings or (self.ring,))]
        if self.sides is not None:
            phases = phases_over(self.ring, self.sides, len(shares))
        turns = scatter_turns(phases[0].around, self.directions, pieces, rings=len(shares))
        before, order = None, self.order
        if not loops(turns, pieces):
            # Shares of several rings are counted as one sum: in smaller ones two rings took 1746 us
            # for 1687 of a scatter of 65536x14336x4096.
            order = order.for_sums(flops / (phases[0].around * pieces))
        elif steps:  # no turn is there by itself to take one
            before, steps = at_once(steps, self.ring.index()), ()
        spare = Spare(steps, self.ring.index(), len(turns), before)

        def beside(index: Array, leaving: Any, send: Any, work: Work) -> Beside:
            return spare.within(partial(order.beside, index, leaving, send), work)

        quantize = partial(self._quantized, dim=dim, dtype=dtype)
        scatter = Scatter(turns, cuts, dim, length, dtype, quantize)
        return scatter.run(phases, self.ring.index(), beside, take, produce), spare.carry

    @in_scope
    def circulate(
        self,
        block: Any,
        carry: Any,
        own: Any,
        begin: Callable[[Any, Any], tuple[Any, Any]],
        visit: Callable[[Any, Visits], tuple[Any, list[Any]]],
        end: Callable[[Any, Any], tuple[Any, Any]],
        *,
        split: Split,
        join: Callable[[list[Any]], Any],
        summed: Pick = as_it_is,
    ) -> tuple[Any, Any]:
        rings = len(self.rings or [self.ring])
        parts = split(block, len(self.directions) * rings)
        if len(parts) < len(self.directions) * rings:  # one part a ring, or one
            rings = min(rings, len(parts))
            parts = split(block, rings)
        dtypes = [jax.tree.map(lambda x: x.dtype, summed(part)) for part in parts]  # of results
        first, *between, last = circulate_turns(
            self.ring.size, self.directions[: len(parts) // rings], rings=rings
        )

        def send(leaving: Any, t: Turn) -> Any:
            blocks, sums = leaving
            return (
                [self._moved(x, leg, t.distance) for x, leg in zip(blocks, t.blocks, strict=True)],
                [self._moved(x, leg, t.distance - 1) for x, leg in zip(sums, t.sums, strict=True)],
            )

        def beside(state: Any, t: Turn, compute: Any, like: Callable[[], Any]) -> Any:
            index, _, parts, sums = state
            wired = jax.tree.map(self._wire, sums, dtypes[: len(sums)])
            leaving = parts if t.blocks else [], wired
            here = () if t.blocks else parts  # what is not sent on is used where it is

            def on(index: Array, leaving: Any, _: Any) -> Any:
                return compute(index, here or leaving[0])

            work = Work(lambda _: (), on, as_it_is, like)
            return self.order.beside(index, leaving, partial(send, t=t), work)

        def at_home(state: Any, t: Turn, share: Any, own: Any) -> Any:
            carry = state[1]
            index, (carry, own), arrived = beside(
                state, t, lambda *_: share(carry, own), lambda: (carry, own)
            )
            return (index, carry, *arrived), own

        def turn(state: Any, t: Turn) -> Any:
            _, carry, parts, _ = state

            def compute(index: Array, parts: list[Any]) -> Any:
                owners = [self._owner(index, leg, t) for leg in t.legs]
                return visit(carry, list(zip(parts, owners, strict=True)))

            def like() -> Any:
                return carry, [of_types(own, summed(part)) for part in parts]

            index, (carry, made), (parts, sums) = beside(state, t, compute, like)
            if sums:  # added here, not before: a sum still under way would hold the matmuls up
                made = jax.tree.map(lambda x, y: x + y.astype(x.dtype), made, sums)
            return index, carry, parts, made

        state, own = at_home((self.ring.index(), carry, parts, []), first, begin, own)
        # Over a cube each hop is another one.
        unrolled = None if self.crosses_a_cube else UNROLLED_CIRCULATING
        state = run(between, state, turn, unrolled=unrolled)
        (_, carry, _, sums), own = at_home(state, last, end, own)
        if sums:
            own = jax.tree.map(lambda x, y: x + y.astype(x.dtype), own, join(sums))
        return carry, own

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        return self.order.forward_first(out, residuals)

    def _shares(self, length: int) -> list[tuple[int, int]]:
        """Starts and sizes of what each ring carries of a block of `length`."""
        if self.rings is None or self.ring.size == 1:
            return [(0, length)]
        return shares_of(length, len(self.rings))

    def _gather_turns(self, rings: int) -> list[Turn]:
        return gather_turns(
            self.ring.size, self.directions, rings=rings, whole_opposite=self.whole_opposite
        )

    def _whole(self, legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
        """The legs by which blocks come, one of the two where a block comes in halves."""
        return legs[:: len(self.directions)] if legs and legs[0].half is not None else legs

    def _place(self, index: Array, leg: Leg | None, t: Turn, length: int) -> Span:
        """Where what comes by a leg lies, or the own block, which came by none."""
        if leg is None:
            return Span(index * length, length)
        start, size = self._shares(length)[leg.ring]
        return Span(self._owner(index, leg, t) * length + start, size)

    def _owner(self, index: Array, leg: Leg, t: Turn, behind: int = 1) -> Array:
        """The logical index of the owner behind a turn's leg, or ahead of it (-1): int32[]."""
        return self._ring(leg).behind(index, behind * leg.direction * t.distance)

    def _moved(self, x: Any, leg: Leg, hops: Any) -> Any:
        if leg.half is not None:
            x = jax.tree.map(partial(half_of, half=leg.half), x)
        return self._ring(leg).hop(x, leg.direction, hops)

    def _ring(self, leg: Leg) -> Ring:
        return self.ring if self.rings is None else self.rings[leg.ring]


def placing(
    consume: Callable[[Any, Arrivals], Any],
    sums: Pick | None,
    finish: Pick,
    dim: int | None,
    length: int,
) -> tuple[Callable[[Any, Arrivals], Any], Pick | None, Pick]:
    """Has a fold place what arrives in a whole, too, the second part of its carry."""

    def both(carry: Any, arrivals: Arrivals) -> Any:
        made, whole = (None, None) if carry is None else carry
        for block, at, _ in arrivals:
            whole = at.place(whole, block, dim, length)
        return consume(made, arrivals), whole

    return (
        both,
        None if sums is None else lambda carry: sums(carry[0]),
        lambda carry: (finish(carry[0]), carry[1]),
    )
