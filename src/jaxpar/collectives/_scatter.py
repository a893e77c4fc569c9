"""A scatter in turns: sums on their way to their owners, to which each device adds its share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._axis import Ring
from jaxpar._cycles import AlongOne
from jaxpar._dtypes import addition_dtype
from jaxpar._quantized import read_as
from jaxpar.collectives._order import Beside, Work
from jaxpar.collectives._parts import Slab, Span, empty_result
from jaxpar.collectives._run import run
from jaxpar.collectives._turns import Leg, Turn
from jaxpar.collectives._ways import as_it_is

Place = Callable[[Array, Any, Callable[[Any], Any], Work], Beside]


@dataclass(frozen=True)
class Phase:
    """The rings by which the shares of all sums go, at the same time.

    One phase is all there is where rings go through all devices. Over a torus whose sides are alike
    there can be one for each dimension, and each share goes along another one: the first phase
    leaves each device the sums of a slab of owners, of which the next one deals out as many less.

    Attributes:
      rings: of each share its own.
      dimensions: of each share those of the torus over whose devices its sums are still of all.
    """

    rings: tuple[Ring, ...]
    dimensions: tuple[tuple[int, ...], ...] = ()

    @property
    def around(self) -> int:
        """How many devices a sum goes past, its owner among them."""
        return self.rings[0].around

    def positions(
        self, owner: Array, share: int, length: int, start: int, size: int
    ) -> Span | Slab:
        """Where, in what sums are made of, a piece of a share's blocks is, for a turn's owner.

        Of each block of `length` the piece is `size` positions from `start` on.
        """
        if not self.dimensions:
            return Span(owner * length + start, size)
        left, walk = self.dimensions[share], self.rings[share].walk
        assert isinstance(walk, AlongOne)
        sides = tuple(walk.sides[dimension] for dimension in left)
        return Slab(sides, left.index(walk.dimension), walk.place(owner), length, start, size)


def phases_over(ring: Ring, sides: tuple[int, ...], shares: int) -> list[Phase]:
    """The phases of shares that take the dimensions of a torus in turn, each from another one on.

    No two of them are at the same dimension at a time, and so share no link.
    """
    phases: list[Phase] = []
    for number in range(len(sides)):
        orders = [
            [(share + later) % len(sides) for later in range(number, len(sides))]
            for share in range(shares)
        ]
        rings = tuple(replace(ring, walk=AlongOne(sides, order[0])) for order in orders)
        phases.append(Phase(rings, tuple(tuple(sorted(order)) for order in orders)))
    return phases


def freely(index: Array, leaving: Any, send: Callable[[Any], Any], work: Work) -> Beside:
    """Leaves it to the compiler when what only adds is computed: no matmul has to wait for it."""
    return index, work.compute(index, leaving, work.take(index)), send(leaving)


@dataclass(frozen=True)
class Scatter:
    """What all phases of a scatter share.

    Attributes:
      turns: the program, of each of them.
      cuts: of each share its pieces, one or two, as starts and sizes in a block.
      dim: along which the blocks of all devices make a whole.
      length: of a block.
      dtype: of the result.
      encode: sums, as they travel.
    """

    turns: Sequence[Turn]
    cuts: Sequence[Sequence[tuple[int, int]]]
    dim: int
    length: int
    dtype: DTypeLike
    encode: Callable[[Array], Any]

    def run(
        self,
        phases: Sequence[Phase],
        index: Array,
        beside: Place,
        take: Callable[[Any], Any],
        produce: Callable[[Any], Array],
    ) -> Array:
        """Returns the sum of all devices' addends for the device of an index, int32[].

        Those of a phase that is not the first are the sums that the one before has left.
        """
        first, *others = phases

        def needed(owner: Array, share: int, piece: int) -> Any:
            start, size = self.cuts[share][piece]
            return take(first.positions(owner, share, self.length, start, size))

        made = self._phase(first, index, beside, needed, produce, place=not others)
        for phase in others:
            left = partial(self._left, phase, made)
            made = self._phase(phase, index, freely, left, self._wide, place=phase is phases[-1])
        return made

    def _left(
        self, phase: Phase, sums: list[list[Array]], owner: Array, share: int, piece: int
    ) -> Array:
        """What the phase before has left of a piece for an owner."""
        size = self.cuts[share][piece][1]
        return phase.positions(owner, share, size, 0, size).cut(sums[piece][share], self.dim)

    def _phase(
        self,
        phase: Phase,
        index: Array,
        beside: Place,
        take: Callable[[Array, int, int], Any],
        produce: Callable[[Any], Array],
        *,
        place: bool,
    ) -> Any:
        """Runs the program of a phase, of sums that `produce` makes of `take(owner, share, piece)`.

        Returns the block where sums are to be placed in it; or of each piece those of the shares.
        """
        pieces, shares, rings = len(self.cuts[0]), range(len(self.cuts)), phase.rings

        def send(sums: list[Any], t: Turn) -> list[Any]:
            hops = t.distance - (1 if t.piece else 0)
            return [
                rings[leg.ring].hop(self.encode(x), leg.direction, hops)
                for x, leg in zip(sums, t.sums, strict=True)
            ]

        def take_all(index: Array, t: Turn) -> list[Any]:
            def owner(leg: Leg) -> Array:
                return rings[leg.ring].behind(index, -leg.direction * t.distance)

            owners = [(owner(leg), leg.ring) for leg in t.legs] or [(index, n) for n in shares]
            return [take(at, share, t.piece) for at, share in owners]

        def add(made: list[Array], arrived: list[Any], t: Turn) -> list[Array]:
            """Adds to each sum what came by its leg; to that for this device all of a ring."""
            for leg, x in zip(t.adds, arrived, strict=True):
                of = [to == leg for to in t.legs] or [n == leg.ring for n in shares]
                made = [
                    m + read_as(x, m.dtype) if adds else m for m, adds in zip(made, of, strict=True)
                ]
            return made

        def in_one(state: Any, t: Turn) -> Any:
            """What was sent is under way while this turn computes, and added once it is here."""
            index, leaving = state
            work = Work(partial(take_all, t=t), lambda _, __, taken: [produce(x) for x in taken])
            index, made, arrived = beside(index, leaving, partial(send, t=t), work)
            return index, add(made, arrived, t)

        def in_two(state: Any, t: Turn) -> Any:
            """What is added came in the turn before, while the other piece was computed."""
            index, leaving, arrived, done = state
            result: Any = done
            if place and not t.legs and not t.piece:
                result = empty_result(read_as(arrived[0], self.dtype), self.dim, self.length)

            def compute(_: Array, leaving: Any, taken: list[Any]) -> Any:
                sums = add([produce(x) for x in taken], arrived, t)
                if t.legs:
                    return [self.encode(x) for x in sums]
                return self._placed(result, sums, t.piece) if place else self._rounded(sums)

            def like() -> Any:
                if place and not t.legs:
                    return result
                came: list[list[Any]] = [[] for _ in shares]
                for leg, x in zip(t.adds, arrived, strict=True):
                    came[leg.ring].append(x if t.legs else read_as(x, self.dtype))
                # Other arrays wherever there are: one that is returned twice is copied.
                count = max(1, len(t.legs) // len(shares))
                return [x for alike in came for x in (alike * 2)[:count]]

            work = Work(partial(take_all, t=t), compute, as_it_is, like if t.adds else None)
            if t.awaited:
                index, made, arriving = beside(index, leaving, partial(send, t=t), work)
            else:
                arriving = send(leaving, t)
                index, made, _ = beside(index, (), as_it_is, work)
            if t.legs:
                return index, made, arriving, done
            return index, [], arriving, made if place else [*done, made]

        if pieces == 1:
            _, sums = run(self.turns, (index, []), in_one)
            sums = self._rounded(sums)
            if not place:
                return [sums]
            return lax.concatenate(sums, self.dim) if len(sums) > 1 else sums[0]
        return run(self.turns, (index, [], [], []), in_two, period=2)[-1]

    def _wide(self, x: Array) -> Array:
        return x.astype(addition_dtype(x.dtype))

    def _rounded(self, sums: list[Array]) -> list[Array]:
        return [x.astype(self.dtype) for x in sums]

    def _placed(self, block: Array, sums: list[Array], piece: int) -> Array:
        """Writes a piece of each share where it belongs."""
        for x, cuts in zip(self._rounded(sums), self.cuts, strict=True):
            block = lax.dynamic_update_slice_in_dim(block, x, cuts[piece][0], self.dim)
        return block
