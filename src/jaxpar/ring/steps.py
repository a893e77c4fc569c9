"""A ring program as data: in each step whose blocks are worked on, and what travels meanwhile.

`gather_steps(4, (1, -1))` is the program that brings the blocks of four devices past each of them,
both ways round:

    Step(0, blocks=[+1, -1])                 # the own block is used while it leaves both ways
    Step(1, hops=[+1, -1], blocks=[+1/0, -1/1])  # two have come; half of each goes one further
    Step(2, hops=[+1/0, -1/1])               # the halves are the block of the opposite device

Nothing here knows what is computed, nor on which platform: `stepwise.py` runs a program, and
`order.py` says how a platform keeps a step's transfers beside its work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any


@dataclass(frozen=True, repr=False, order=True)
class Hop:
    """A transfer to a neighbour: of a block or a sum, or of one half of it.

    Attributes:
      direction: 1 towards higher logical indices, -1 towards lower ones.
      half: 0 or 1, the half that travels; None: all of it.
      ring: which of several rings it is of, each of which carries its own share of every block.
    """

    direction: int
    half: int | None = None
    ring: int = 0

    def __repr__(self) -> str:
        half = "" if self.half is None else f"/{self.half}"
        return f"{self.direction:+d}{half}" + (f" of ring {self.ring}" if self.ring else "")


@dataclass(frozen=True, repr=False)
class Step:
    """The work between two waits, and the transfers beside it.

    Attributes:
      distance: how many places away the owners are whose blocks are used, or for whom sums are
        made; 0 is this device. An integer, traced where steps run in a loop.
      hops: the ways between here and those owners. Of a gather those by which their blocks came,
        of a scatter those by which the sums that are made now will leave; none for this device's
        own. Two halves that come by two hops are one owner's block.
      blocks: by which blocks leave while the step computes.
      sums: by which sums leave that the step before made.
      adds: by which the sums came that are added to those that are made now.
      piece: which piece of the owner's block the sums are for.
      awaited: whether the next step waits for what leaves in this one. Not while sums go one way at
        a time: those of the next steps take other links, or follow over the same one.
    """

    distance: Any
    hops: tuple[Hop, ...] = ()
    blocks: tuple[Hop, ...] = ()
    sums: tuple[Hop, ...] = ()
    adds: tuple[Hop, ...] = ()
    piece: int = 0
    awaited: bool = True

    def __repr__(self) -> str:
        given = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        shown = [f"{f.name}={_shown(getattr(self, f.name))}" for f in given]
        return f"Step({', '.join([str(self.distance), *shown])})"


def gather_steps(
    size: int,
    directions: tuple[int, ...],
    *,
    rings: int = 1,
    whole_opposite: bool = False,
    reach: int | None = None,
) -> list[Step]:
    """Returns the program that brings every device's block past every other.

    Or, each way, past so many as the `reach` is.

    Both ways round an even ring, the block of the opposite device is left in the end. It comes in
    halves, one from each side, so that each link carries (size - 1) / 2 blocks; or whole, which
    costs no cutting and half a transfer more, by the first direction, of several rings by one after
    the other. Of those each brings its own share of all blocks in this way.
    """
    # Four devices, both ways, as device 0 has it:
    #
    #     step   uses              meanwhile
    #        0   its own block     that leaves, to 1 and to 3
    #        1   those of 3 and 1  a half of each goes one further: of 3 to 1, of 1 to 3
    #        2   that of 2         nothing: one half has come by 3, the other by 1
    #
    # Five devices have no opposite one: in step 1 whole blocks go further, in step 2 two are used.
    hops = _hops(directions, rings)
    halves = tuple(
        Hop(direction, half, ring)
        for ring in range(rings)
        for half, direction in enumerate(directions)
    )
    reached, opposite = divmod(size - 1, len(directions)) if reach is None else (reach, 0)
    whole = tuple(Hop(directions[ring % len(directions)], None, ring) for ring in range(rings))
    last = () if not opposite else whole if whole_opposite else halves
    steps = [
        Step(distance, hops if distance else (), blocks=hops if distance < reached else last)
        for distance in range(reached + 1)
    ]
    return [*steps, Step(reached + 1, last)] if opposite else steps


def scatter_steps(
    size: int,
    directions: tuple[int, ...],
    pieces: int = 1,
    *,
    rings: int = 1,
    staggered: bool = True,
) -> list[Step]:
    """Returns the program that sends to every device the sum of what all devices make for it.

    It is a gather's, backwards: the sum for the farthest owner is made first, and each device on
    its way adds its share. With one piece a sum is still under way while the share that is added to
    it is made. With two pieces, the halves, which take turns, it has come by then. The halves of
    the opposite device's sum take the directions in turn, the first one by the last of them.
    Staggered, of the sums for the devices before that one those are made first to which nothing
    comes: so its first half has a step more to arrive.
    """
    # Four devices, both ways, in two pieces, as device 0 has it. 2a is the first half of the sum
    # for device 2; what comes holds the shares of all devices that it has been at:
    #
    #     makes     adds what came                              meanwhile
    #     2a                                                    nothing
    #     2b                                                    2a leaves to 1
    #     3a                                                    2b leaves to 3
    #     1a        to 1a, from 3                               3a leaves to 3
    #     3b, 1b    to 3b, from 1                               1a leaves to 1
    #     0a        from 1 and, with the share of 2, from 3     3b leaves to 3, 1b to 1
    #     0b        from 3 and, with the share of 2, from 1     nothing
    #
    # So each sum that comes has had a step's work to hide behind before it is added to. In one
    # piece, 1a would be made while the share of 3 is still under way.
    reached, opposite = divmod(size - 1, len(directions))
    halves = range(pieces) if pieces > 1 else [None]

    def made(distance: int, half: int | None) -> tuple[Hop, ...]:
        ways = tuple(-direction for direction in directions)
        if distance > reached:
            ways = ways[((half or 0) + 1) % pieces :][:1]
        return _hops(ways, rings, half) if distance else ()

    farthest = reached + bool(opposite)
    steps: list[Step] = []
    for distance, half in product(range(farthest, -1, -1), halves):
        leaving = made(distance, half)
        came = made(distance + 1, half) if distance < farthest else ()
        awaited, parts = half is None or distance <= reached, [leaving]
        if staggered and half == 0 and leaving and came and came != leaving:
            awaited, parts = False, [tuple(hop for hop in leaving if hop not in came), came]
        for hops in parts:
            sums = steps[-1].hops if steps else ()
            adds = tuple(hop for hop in came if hop in hops or not hops)
            steps.append(Step(distance, hops, (), sums, adds, half or 0, awaited))
    return steps


def circulate_steps(
    size: int, directions: tuple[int, ...], *, rings: int = 1, reach: int | None = None
) -> list[Step]:
    """Returns the program in which blocks go all the way round and sums follow them home.

    A sum is a step behind its block, so that its transfer has the next step's work beside it. In
    the last step, when the blocks are home again but for one place, sums take the last hop. Blocks
    that go no farther than a `reach` have their sums come home from there at once.
    """
    # Four devices, one way, as device 0 has it; 3' is what it adds to the sums of device 3:
    #
    #     step   works on          block leaves   sums leave, to 1
    #        0   its own, a share  0
    #        1   that of 3         3
    #        2   that of 2         2              3'
    #        3   that of 1         none: it is    2', with 3's share
    #        4   its own, the rest                1', home, with the shares of all
    hops, last = _hops(directions, rings), size - 1 if reach is None else reach
    return [
        Step(0, blocks=hops if last else ()),
        *[
            Step(d, hops, blocks=hops if d < last else (), sums=hops if d > 1 else ())
            for d in range(1, last + 1)
        ],
        Step(last + 1, sums=hops if last else ()),
    ]


def _hops(directions: tuple[int, ...], rings: int, half: int | None = None) -> tuple[Hop, ...]:
    """All ways of all rings, those of one ring side by side."""
    return tuple(Hop(direction, half, ring) for ring in range(rings) for direction in directions)


def stretches(steps: Sequence[Step], period: int = 1) -> Iterator[tuple[list[Step], int, int]]:
    """Cuts a program where steps differ from those a `period` before in more than distance.

    Yields, of each stretch, its first `period` steps (fewer at the end of a program), how often
    they come, and by how much their distance grows from one time to the next.
    """
    number = 0
    while number < len(steps):
        first = list(steps[number : number + period])
        following = steps[number + period : number + 2 * period]
        growth = following[0].distance - first[0].distance if following else 0
        times = 1
        while list(steps[number + times * period :][:period]) == moved(first, times * growth):
            times += 1
        yield first, times, growth
        number += times * period


def moved(steps: Sequence[Step], by: Any) -> list[Step]:
    """Returns the steps for owners so many places farther away."""
    return [replace(step, distance=step.distance + by) for step in steps]


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
