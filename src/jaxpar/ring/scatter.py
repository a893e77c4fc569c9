"""A scatter in steps: each device adds its share to the sums that travel to their owners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.quantized import read_as
from jaxpar.axis.ring_order import Index
from jaxpar.ring.cuts import Span, empty_result
from jaxpar.ring.order import Work
from jaxpar.ring.phase import Ordering, Phase, freely
from jaxpar.ring.run import run
from jaxpar.ring.steps import Hop, Step
from jaxpar.ring.ways import as_it_is

Sums = dict[Hop, Any]  # encoded sums, by the hops by which they leave or arrived


@dataclass(frozen=True)
class Scatter:
    """A scatter of all devices' sums, in phases."""

    steps: Sequence[Step]
    # pieces of each share, all of one size, as start and size in a block
    cuts: Sequence[Sequence[tuple[int, int]]]
    dim: int
    length: int
    dtype: DTypeLike
    encode: Callable[[Array], Any]  # converts sums to their wire form

    def run(
        self,
        phases: Sequence[Phase],
        index: Index,
        beside: Ordering,
        take: Callable[[Any], Any],
        produce: Callable[[Any], Array],
    ) -> Array:
        first, *others = phases

        def needed(owner: Index, share: int, piece: int) -> Any:
            start, size = self.cuts[share][piece]
            return take(first.positions(owner, share, self.length, start, size))

        made = self._phase(first, index, beside, needed, produce, place=not others)
        for phase in others:  # each scatters the sums that the phase before has left
            left = partial(self._left, phase, made)
            made = self._phase(phase, index, freely, left, self._wide, place=phase is phases[-1])
        return made

    def _left(
        self, phase: Phase, sums: list[list[Array]], owner: Index, share: int, piece: int
    ) -> Array:
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
        """Runs a phase on sums `produce(take(owner, share, piece))`.

        Returns the block if it can `place` sums, otherwise the sums.
        """
        # With one piece, the state is the index and the sums that leave next. With two, it is the
        # index, the last sums, the sums to be added, and the finished ones.
        pieces, shares, rings = len(self.cuts[0]), range(len(self.cuts)), phase.rings

        def send(leaving: Sums, t: Step) -> Sums:
            def places_on(hop: Hop) -> Any:
                # If its half is later than the step's piece, a sum is for an owner one farther.
                return t.distance - (1 if hop.half is not None and hop.half <= t.piece else 0)

            return {
                hop: rings[hop.ring].hop(self.encode(x), hop.direction, places_on(hop))
                for hop, x in leaving.items()
            }

        def take_all(index: Index, t: Step) -> list[Any]:
            def owner(hop: Hop) -> Array:
                return rings[hop.ring].behind(index, -hop.direction * t.distance)

            owners = [(owner(hop), hop.ring) for hop in t.hops] or [(index, n) for n in shares]
            return [take(at, share, t.piece) for at, share in owners]

        def added(t: Step) -> list[list[Hop]]:
            if t.hops:
                return [[hop] if hop in t.adds else [] for hop in t.hops]
            return [[hop for hop in t.adds if hop.ring == ring] for ring in shares]

        def add(made: list[Array], came: Sums, t: Step) -> list[Array]:
            for number, hops in enumerate(added(t)):
                for hop in hops:
                    made[number] += read_as(came[hop], made[number].dtype)
            return made

        def in_one(state: Any, t: Step) -> Any:
            index, leaving = state
            work = Work(partial(take_all, t=t), lambda _, __, taken: [produce(x) for x in taken])
            index, made, came = beside(index, leaving, partial(send, t=t), work)
            made = add(made, came, t)
            return index, dict(zip(t.hops, made, strict=True)) if t.hops else made

        def in_two(state: Any, t: Step) -> Any:
            """Adds sums that arrived during the other piece's work."""
            index, leaving, came, done = state
            result: Any = done
            if place and not t.hops and not t.piece:  # this device's first piece starts the block
                arrived = next(iter(came.values()))
                result = empty_result(read_as(arrived, self.dtype), self.dim, self.length)

            def compute(_: Array, leaving: Sums, taken: list[Any]) -> Any:
                sums = add([produce(x) for x in taken], came, t)
                if t.hops:
                    return [self.encode(x) for x in sums]
                return self._placed(result, sums, t.piece) if place else self._rounded(sums)

            def like() -> Any:
                if place and not t.hops:
                    return result
                # Different arrays where possible: an array that is returned twice is copied.
                alike = {n: cycle([hop for hop in t.adds if hop.ring == n]) for n in shares}
                if t.hops:
                    return [came[next(alike[hop.ring])] for hop in t.hops]
                return [read_as(came[next(alike[n])], self.dtype) for n in shares]

            work = Work(partial(take_all, t=t), compute, as_it_is, like if t.adds else None)
            if t.awaited:
                index, made, arriving = beside(index, leaving, partial(send, t=t), work)
            else:
                arriving = send(leaving, t)
                index, made, _ = beside(index, {}, as_it_is, work)
            came = {hop: x for hop, x in came.items() if hop not in t.adds} | arriving
            if t.hops:
                return index, dict(zip(t.hops, made, strict=True)), came, done
            return index, {}, came, made if place else [*done, made]

        if pieces == 1:
            _, sums = run(self.steps, (index, {}), in_one)
            sums = self._rounded(sums)
            if not place:
                return [sums]
            return self._placed(None, sums, 0)
        return run(self.steps, (index, {}, {}, []), in_two, period=2)[-1]

    def _wide(self, x: Array) -> Array:
        return x.astype(addition_dtype(x.dtype))

    def _rounded(self, sums: list[Array]) -> list[Array]:
        return [x.astype(self.dtype) for x in sums]

    def _placed(self, block: Array | None, sums: list[Array], piece: int) -> Array:
        for x, cuts in zip(self._rounded(sums), self.cuts, strict=True):
            block = Span(*cuts[piece]).place(block, x, self.dim, self.length)
        assert block is not None  # there is a share
        return block
