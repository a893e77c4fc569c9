"""A ring program as data: in each turn whose blocks are worked on, and what travels meanwhile.

`gather_turns(4, (1, -1))` is the program that brings the blocks of four devices past each of them,
both ways round:

    Turn(0, blocks=[+1, -1])                 # the own block is used while it leaves both ways
    Turn(1, legs=[+1, -1], blocks=[+1/0, -1/1])  # two have come; half of each goes one further
    Turn(2, legs=[+1/0, -1/1])               # the halves are the block of the opposite device

Nothing here knows what is computed, nor on which platform: `in_turns.py` runs a program, and
`order.py` says how a platform keeps a turn's transfers beside its work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any


@dataclass(frozen=True, repr=False, order=True)
class Leg:
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
class Turn:
    """The work between two waits, and the transfers beside it.

    Attributes:
      distance: how many places away the owners are whose blocks are used, or for whom sums are
        made; 0 is this device. An integer, traced where turns run in a loop.
      legs: the ways between here and those owners. Of a gather those by which their blocks came,
        of a scatter those by which the sums that are made now will leave; none for this device's
        own. Two halves that come by two legs are one owner's block.
      blocks: by which blocks leave while the turn computes.
      sums: by which sums leave that the turn before made.
      adds: by which the sums came that are added to those that are made now.
      piece: which piece of the owner's block the sums are for.
      awaited: whether the next turn waits for what leaves in this one. Not while sums go one way at
        a time: those of the next turns take other links, or follow over the same one.
    """

    distance: Any
    legs: tuple[Leg, ...] = ()
    blocks: tuple[Leg, ...] = ()
    sums: tuple[Leg, ...] = ()
    adds: tuple[Leg, ...] = ()
    piece: int = 0
    awaited: bool = True

    def __repr__(self) -> str:
        given = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        shown = [f"{f.name}={_shown(getattr(self, f.name))}" for f in given]
        return f"Turn({', '.join([str(self.distance), *shown])})"


def gather_turns(
    size: int,
    directions: tuple[int, ...],
    *,
    rings: int = 1,
    whole_opposite: bool = False,
    reach: int | None = None,
) -> list[Turn]:
    """Returns the program that brings every device's block past every other.

    Or, each way, past so many as the `reach` is.

    Both ways round an even ring, the block of the opposite device is left in the end. It comes in
    halves, one from each side, so that each link carries (size - 1) / 2 blocks; or whole, which
    costs no cutting and half a transfer more, by the first direction, of several rings by one after
    the other. Of those each brings its own share of all blocks in this way.
    """
    # Four devices, both ways, as device 0 has it:
    #
    #     turn   uses              meanwhile
    #        0   its own block     that leaves, to 1 and to 3
    #        1   those of 3 and 1  a half of each goes one further: of 3 to 1, of 1 to 3
    #        2   that of 2         nothing: one half has come by 3, the other by 1
    #
    # Five devices have no opposite one: in turn 1 whole blocks go further, in turn 2 two are used.
    legs = _legs(directions, rings)
    halves = tuple(
        Leg(direction, half, ring)
        for ring in range(rings)
        for half, direction in enumerate(directions)
    )
    hops, opposite = divmod(size - 1, len(directions)) if reach is None else (reach, 0)
    whole = tuple(Leg(directions[ring % len(directions)], None, ring) for ring in range(rings))
    last = () if not opposite else whole if whole_opposite else halves
    turns = [
        Turn(distance, legs if distance else (), blocks=legs if distance < hops else last)
        for distance in range(hops + 1)
    ]
    return [*turns, Turn(hops + 1, last)] if opposite else turns


def scatter_turns(
    size: int,
    directions: tuple[int, ...],
    pieces: int = 1,
    *,
    rings: int = 1,
    staggered: bool = True,
) -> list[Turn]:
    """Returns the program that sends to every device the sum of what all devices make for it.

    It is a gather's, backwards: the sum for the farthest owner is made first, and each device on
    its way adds its share. With one piece a sum is still under way while the share that is added to
    it is made. With two pieces, the halves, which take turns, it has come by then. The halves of
    the opposite device's sum take the directions in turn, the first one by the last of them.
    Staggered, of the sums for the devices before that one those are made first to which nothing
    comes: so its first half has a turn more to arrive.
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
    # So each sum that comes has had a turn's work to hide behind before it is added to. In one
    # piece, 1a would be made while the share of 3 is still under way.
    hops, opposite = divmod(size - 1, len(directions))
    halves = range(pieces) if pieces > 1 else [None]

    def made(distance: int, half: int | None) -> tuple[Leg, ...]:
        ways = tuple(-direction for direction in directions)
        if distance > hops:
            ways = ways[((half or 0) + 1) % pieces :][:1]
        return _legs(ways, rings, half) if distance else ()

    farthest = hops + bool(opposite)
    turns: list[Turn] = []
    for distance, half in product(range(farthest, -1, -1), halves):
        leaving = made(distance, half)
        came = made(distance + 1, half) if distance < farthest else ()
        awaited, parts = half is None or distance <= hops, [leaving]
        if staggered and half == 0 and leaving and came and came != leaving:
            awaited, parts = False, [tuple(leg for leg in leaving if leg not in came), came]
        for legs in parts:
            sums = turns[-1].legs if turns else ()
            adds = tuple(leg for leg in came if leg in legs or not legs)
            turns.append(Turn(distance, legs, (), sums, adds, half or 0, awaited))
    return turns


def circulate_turns(
    size: int, directions: tuple[int, ...], *, rings: int = 1, reach: int | None = None
) -> list[Turn]:
    """Returns the program in which blocks go all the way round and sums follow them home.

    A sum is a turn behind its block, so that its transfer has the next turn's work beside it. In
    the last turn, when the blocks are home again but for one place, sums take the last leg. Blocks
    that go no farther than a `reach` have their sums come home from there at once.
    """
    # Four devices, one way, as device 0 has it; 3' is what it adds to the sums of device 3:
    #
    #     turn   works on          block leaves   sums leave, to 1
    #        0   its own, a share  0
    #        1   that of 3         3
    #        2   that of 2         2              3'
    #        3   that of 1         none: it is    2', with 3's share
    #        4   its own, the rest                1', home, with the shares of all
    legs, last = _legs(directions, rings), size - 1 if reach is None else reach
    return [
        Turn(0, blocks=legs if last else ()),
        *[
            Turn(d, legs, blocks=legs if d < last else (), sums=legs if d > 1 else ())
            for d in range(1, last + 1)
        ],
        Turn(last + 1, sums=legs if last else ()),
    ]


def _legs(directions: tuple[int, ...], rings: int, half: int | None = None) -> tuple[Leg, ...]:
    """All ways of all rings, those of one ring side by side."""
    return tuple(Leg(direction, half, ring) for ring in range(rings) for direction in directions)


def stretches(turns: Sequence[Turn], period: int = 1) -> Iterator[tuple[list[Turn], int, int]]:
    """Cuts a program where turns differ from those a `period` before in more than distance.

    Yields, of each stretch, its first `period` turns (fewer at the end of a program), how often
    they come, and by how much their distance grows from one time to the next.
    """
    number = 0
    while number < len(turns):
        first = list(turns[number : number + period])
        following = turns[number + period : number + 2 * period]
        step = following[0].distance - first[0].distance if following else 0
        times = 1
        while list(turns[number + times * period :][:period]) == moved(first, times * step):
            times += 1
        yield first, times, step
        number += times * period


def moved(turns: Sequence[Turn], by: Any) -> list[Turn]:
    """Returns the turns for owners so many places farther away."""
    return [replace(turn, distance=turn.distance + by) for turn in turns]


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
