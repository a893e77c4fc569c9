"""Ring programs as data: each step's work, and the transfers that overlap with it.

A block is a device's part of a sharded array; that device is its owner. This program brings four
blocks to all devices, in both directions, `gather_steps(4, (1, -1))`:

    Step(0, blocks=[+1, -1])                     # uses the local block while it leaves
    Step(1, hops=[+1, -1], blocks=[+1/0, -1/1])  # uses two blocks, sends half of each on
    Step(2, hops=[+1/0, -1/1])                   # uses two halves: the opposite device's block
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any


@dataclass(frozen=True, repr=False, order=True)
class Hop:
    """A transfer of a block or a sum to a neighbour."""

    direction: int  # 1 towards higher logical indices, -1 towards lower ones
    half: int | None = None  # the half that travels; None: all
    ring: int = 0  # its number, printed from 1 on. Each ring carries its own share of every block.

    def __repr__(self) -> str:
        half = "" if self.half is None else f"/{self.half}"
        return f"{self.direction:+d}{half}" + (f" of ring {self.ring + 1}" if self.ring else "")


@dataclass(frozen=True, repr=False)
class Step:
    """The work between two waits, and the transfers that overlap with it."""

    distance: Any  # number of places to the owners; traced in a loop
    # by which blocks arrived (gather), or sums will leave (scatter). Empty for this device's.
    hops: tuple[Hop, ...] = ()
    blocks: tuple[Hop, ...] = ()  # hops of blocks that leave meanwhile
    sums: tuple[Hop, ...] = ()  # hops of the previous step's sums, which leave meanwhile
    adds: tuple[Hop, ...] = ()  # hops of arrived sums that are added
    piece: int = 0  # number of a sum's piece
    # whether the next step waits for these transfers. Not while each step sends one way: the next
    # sum takes another link, or follows.
    awaited: bool = True

    def __repr__(self) -> str:
        changed = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        shown = [f"{f.name}={_shown(getattr(self, f.name))}" for f in changed]
        return f"Step({', '.join([str(self.distance), *shown])})"


def gather_steps(
    size: int,
    directions: tuple[int, ...],
    *,
    rings: int = 1,
    whole_opposite: bool = False,
    reach: int | None = None,
) -> list[Step]:
    """Returns the program that brings blocks within `reach` hops (None: all) to every device."""
    # With two directions and an even size, the opposite device's block arrives in halves, one from
    # each side: each link carries (size - 1) / 2 blocks. With `whole_opposite` it is not cut, but
    # takes half a transfer more.
    # Four devices, both directions, seen from device 0:
    #
    #     step   uses            meanwhile
    #        0   block 0         block 0 is sent to 1 and to 3
    #        1   blocks 3 and 1  half of each is sent on: of block 3 to 1, of block 1 to 3
    #        2   block 2         nothing: a half arrived from 3, the other from 1
    #
    # Five devices have no opposite device: step 1 sends full blocks on, and step 2 uses two blocks.
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
    """Returns the program that sends each device the sum of all devices' shares for it."""
    # With one piece, a sum is under way while the share added to it is computed. With two
    # alternating pieces, it has arrived by then. `staggered` makes sums without an addition first:
    # the opposite device's first half has a step more to arrive.
    # Four devices, both directions, two pieces, seen from device 0. 2a is the first half of the sum
    # for device 2. A sum that arrives holds the shares of all devices on its path so far:
    #
    #     makes     adds what arrived                           meanwhile
    #     2a                                                    nothing
    #     2b                                                    2a leaves to 1
    #     3a                                                    2b leaves to 3
    #     1a        to 1a, from 3                               3a leaves to 3
    #     3b, 1b    to 3b, from 1                               1a leaves to 1
    #     0a        from 1 and, with the share of 2, from 3     3b leaves to 3, 1b to 1
    #     0b        from 3 and, with the share of 2, from 1     nothing
    #
    # So each transfer of a sum overlaps with a step's work before the sum is used. With one
    # piece, sum 1 would be made while the share of device 3 is still under way.
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
    """Returns the program in which blocks visit all devices, and sums follow a step behind.

    With a `reach`, blocks stop there, and their sums return in one transfer.
    """
    # Four devices, one direction, seen from device 0. 3' is its addition to the sums of device 3:
    #
    #     step   works on           block leaves   sums leave, to 1
    #        0   block 0, a share   0
    #        1   block 3            3
    #        2   block 2            2              3'
    #        3   block 1            none           2', with 3's share
    #        4   block 0, the rest                 1', to its owner, with all shares
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
    return tuple(Hop(direction, half, ring) for ring in range(rings) for direction in directions)


def stretches(steps: Sequence[Step], period: int = 1) -> Iterator[tuple[list[Step], int, int]]:
    """Yields stretches of a program in which only the distance grows.

    Each is its first `period` steps, their repeats, and the growth.
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
    return [replace(step, distance=step.distance + by) for step in steps]


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
