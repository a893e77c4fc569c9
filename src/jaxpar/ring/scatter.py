"""A scatter in turns: sums on their way to their owners, to which each device adds its share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.quantized import read_as
from jaxpar.mesh.walk import Index
from jaxpar.ring.order import Work
from jaxpar.ring.parts import Span, empty_result
from jaxpar.ring.phase import Ordering, Phase, freely
from jaxpar.ring.run import run
from jaxpar.ring.turns import Leg, Turn
from jaxpar.ring.ways import as_it_is

Sums = dict[Leg, Any]  # by the legs by which they leave or came, as they travel


@dataclass(frozen=True)
class Scatter:
    """What all phases of a scatter share.

    Attributes:
      turns: the program, of each of them.
      cuts: of each share its pieces, one or two, as starts and sizes in a block: all of one size.
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
        index: Index,
        beside: Ordering,
        take: Callable[[Any], Any],
        produce: Callable[[Any], Array],
    ) -> Array:
        """Returns the sum of all devices' partial sums for the device of an index.

        Those of a phase that is not the first are the sums that the one before has left.
        """
        first, *others = phases

        def needed(owner: Index, share: int, piece: int) -> Any:
            start, size = self.cuts[share][piece]
            return take(first.positions(owner, share, self.length, start, size))

        made = self._phase(first, index, beside, needed, produce, place=not others)
        for phase in others:
            left = partial(self._left, phase, made)
            made = self._phase(phase, index, freely, left, self._wide, place=phase is phases[-1])
        return made

    def _left(
        self, phase: Phase, sums: list[list[Array]], owner: Index, share: int, piece: int
    ) -> Array:
        """What the phase before has left of a piece for an owner."""
        size = self.cuts[share][piece][1]
        return phase.positions(owner, share, size, 0, size).cut(sums[piece][share], self.dim)

    def _phase(
        self,
        phase: Phase,
        index: Index,
        beside: Ordering,
        take: Callable[[Index, int, int], Any],
        produce: Callable[[Any], Array],
        *,
        place: bool,
    ) -> Any:
        """Runs the program of a phase, of sums that `produce` makes of `take(owner, share, piece)`.

        Returns the block where sums are to be placed in it; or of each piece those of the shares.

        The state between turns of one piece is the index, and the sums that leave in the next turn.
        Of two pieces it is the index; what the turn before has made; by legs, the sums that came
        and to which nothing was added yet, for a turn or two, as pieces take turns; and what is
        finished.
        """
        pieces, shares, rings = len(self.cuts[0]), range(len(self.cuts)), phase.rings

        def send(leaving: Sums, t: Turn) -> Sums:
            def hops(leg: Leg) -> Any:
                # A sum of a later half than the turn's is for an owner one place farther.
                return t.distance - (1 if leg.half is not None and leg.half <= t.piece else 0)

            return {
                leg: rings[leg.ring].hop(self.encode(x), leg.direction, hops(leg))
                for leg, x in leaving.items()
            }

        def take_all(index: Index, t: Turn) -> list[Any]:
            def owner(leg: Leg) -> Array:
                return rings[leg.ring].behind(index, -leg.direction * t.distance)

            owners = [(owner(leg), leg.ring) for leg in t.legs] or [(index, n) for n in shares]
            return [take(at, share, t.piece) for at, share in owners]

        def added(t: Turn) -> list[list[Leg]]:
            """By which legs what is added to each sum comes; to one for this device, by all."""
            if t.legs:
                return [[leg] if leg in t.adds else [] for leg in t.legs]
            return [[leg for leg in t.adds if leg.ring == ring] for ring in shares]

        def add(made: list[Array], came: Sums, t: Turn) -> list[Array]:
            for number, legs in enumerate(added(t)):
                for leg in legs:
                    made[number] += read_as(came[leg], made[number].dtype)
            return made

        def in_one(state: Any, t: Turn) -> Any:
            """What was sent is under way while this turn computes, and added once it is here."""
            index, leaving = state
            work = Work(partial(take_all, t=t), lambda _, __, taken: [produce(x) for x in taken])
            index, made, came = beside(index, leaving, partial(send, t=t), work)
            made = add(made, came, t)
            return index, dict(zip(t.legs, made, strict=True)) if t.legs else made

        def in_two(state: Any, t: Turn) -> Any:
            """What is added came in the turns before, while the other piece was computed."""
            index, leaving, came, done = state
            result: Any = done
            if place and not t.legs and not t.piece:  # the first own piece: the block is begun
                some = next(iter(came.values()))
                result = empty_result(read_as(some, self.dtype), self.dim, self.length)

            def compute(_: Array, leaving: Sums, taken: list[Any]) -> Any:
                sums = add([produce(x) for x in taken], came, t)
                if t.legs:
                    return [self.encode(x) for x in sums]
                return self._placed(result, sums, t.piece) if place else self._rounded(sums)

            def like() -> Any:
                if place and not t.legs:
                    return result
                # Other arrays wherever there are: one that is returned twice is copied.
                alike = {n: cycle([leg for leg in t.adds if leg.ring == n]) for n in shares}
                if t.legs:
                    return [came[next(alike[leg.ring])] for leg in t.legs]
                return [read_as(came[next(alike[n])], self.dtype) for n in shares]

            work = Work(partial(take_all, t=t), compute, as_it_is, like if t.adds else None)
            if t.awaited:
                index, made, arriving = beside(index, leaving, partial(send, t=t), work)
            else:
                arriving = send(leaving, t)
                index, made, _ = beside(index, {}, as_it_is, work)
            came = {leg: x for leg, x in came.items() if leg not in t.adds} | arriving
            if t.legs:
                return index, dict(zip(t.legs, made, strict=True)), came, done
            return index, {}, came, made if place else [*done, made]

        if pieces == 1:
            _, sums = run(self.turns, (index, {}), in_one)
            sums = self._rounded(sums)
            if not place:
                return [sums]
            return self._placed(None, sums, 0)
        return run(self.turns, (index, {}, {}, []), in_two, period=2)[-1]

    def _wide(self, x: Array) -> Array:
        return x.astype(addition_dtype(x.dtype))

    def _rounded(self, sums: list[Array]) -> list[Array]:
        return [x.astype(self.dtype) for x in sums]

    def _placed(self, block: Array | None, sums: list[Array], piece: int) -> Array:
        """Writes a piece of each share where it belongs; None: in a block that is yet unwritten."""
        for x, cuts in zip(self._rounded(sums), self.cuts, strict=True):
            block = Span(*cuts[piece]).place(block, x, self.dim, self.length)
        assert block is not None  # there is a share
        return block
