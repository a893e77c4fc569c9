"""Ring programs as data: written out, and played in plain Python on every device at once."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest

from jaxpar.ring.turns import (
    Leg,
    Turn,
    circulate_turns,
    gather_turns,
    moved,
    scatter_turns,
    stretches,
)

ONE, BOTH = (1,), (1, -1)
UP, DOWN = Leg(1), Leg(-1)
UP_0, UP_1 = Leg(1, 0), Leg(1, 1)
DOWN_0, DOWN_1 = Leg(-1, 0), Leg(-1, 1)


def test_a_gather_one_way():
    assert gather_turns(3, ONE) == [
        Turn(0, blocks=(UP,)),
        Turn(1, (UP,), blocks=(UP,)),
        Turn(2, (UP,)),
    ]


def test_a_gather_both_ways_round_an_odd_ring():
    assert gather_turns(5, BOTH) == [
        Turn(0, blocks=(UP, DOWN)),
        Turn(1, (UP, DOWN), blocks=(UP, DOWN)),
        Turn(2, (UP, DOWN)),
    ]


def test_the_opposite_block_of_an_even_ring_comes_in_halves_or_whole():
    assert gather_turns(4, BOTH) == [
        Turn(0, blocks=(UP, DOWN)),
        Turn(1, (UP, DOWN), blocks=(UP_0, DOWN_1)),
        Turn(2, (UP_0, DOWN_1)),
    ]
    assert gather_turns(4, BOTH, whole_opposite=True)[1:] == [
        Turn(1, (UP, DOWN), blocks=(UP,)),
        Turn(2, (UP,)),
    ]


def test_two_devices_and_one():
    assert gather_turns(2, BOTH) == [Turn(0, blocks=(UP_0, DOWN_1)), Turn(1, (UP_0, DOWN_1))]
    assert gather_turns(2, ONE) == [Turn(0, blocks=(UP,)), Turn(1, (UP,))]
    assert gather_turns(1, ONE) == gather_turns(1, BOTH) == [Turn(0)]
    assert scatter_turns(1, BOTH) == [Turn(0)]
    assert circulate_turns(1, BOTH) == [Turn(0), Turn(1)]


def test_a_scatter_one_way():
    """What was made for one place farther leaves, and is added to what is made now."""
    assert scatter_turns(3, ONE) == [
        Turn(2, (DOWN,)),
        Turn(1, (DOWN,), sums=(DOWN,), adds=(DOWN,)),
        Turn(0, sums=(DOWN,), adds=(DOWN,)),
    ]


def test_a_scatter_in_two_pieces_that_take_turns():
    """What was made two turns ago has come."""
    assert scatter_turns(3, ONE, 2) == [
        Turn(2, (DOWN_0,)),
        Turn(2, (DOWN_1,), sums=(DOWN_0,), piece=1),
        Turn(1, (DOWN_0,), sums=(DOWN_1,), adds=(DOWN_0,)),
        Turn(1, (DOWN_1,), sums=(DOWN_0,), adds=(DOWN_1,), piece=1),
        Turn(0, sums=(DOWN_1,), adds=(DOWN_0,)),
        Turn(0, adds=(DOWN_1,), piece=1),
    ]


def test_pieces_for_the_opposite_device_go_one_each_way():
    """The first of them has a turn to come, in which a sum is made to which nothing is added."""
    assert scatter_turns(4, BOTH, 2) == [
        Turn(2, (UP_0,), awaited=False),
        Turn(2, (DOWN_1,), sums=(UP_0,), piece=1, awaited=False),
        Turn(1, (DOWN_0,), sums=(DOWN_1,), awaited=False),
        Turn(1, (UP_0,), sums=(DOWN_0,), adds=(UP_0,), awaited=False),
        Turn(1, (DOWN_1, UP_1), sums=(UP_0,), adds=(DOWN_1,), piece=1),
        Turn(0, sums=(DOWN_1, UP_1), adds=(DOWN_0, UP_0)),
        Turn(0, adds=(DOWN_1, UP_1), piece=1),
    ]
    assert scatter_turns(4, BOTH, 2, staggered=False)[2:4] == [
        Turn(1, (DOWN_0, UP_0), sums=(DOWN_1,), adds=(UP_0,)),
        Turn(1, (DOWN_1, UP_1), sums=(DOWN_0, UP_0), adds=(DOWN_1,), piece=1),
    ]


def test_blocks_go_round_and_sums_follow_a_turn_behind():
    both = (UP, DOWN)
    assert circulate_turns(4, BOTH) == [
        Turn(0, blocks=both),
        Turn(1, both, blocks=both),
        Turn(2, both, blocks=both, sums=both),
        Turn(3, both, sums=both),
        Turn(4, sums=both),
    ]


def test_blocks_that_go_no_farther_than_a_reach():
    """Sums go home from there in one transfer."""
    assert gather_turns(9, BOTH, reach=2) == gather_turns(5, BOTH)
    assert gather_turns(9, BOTH, reach=0) == [Turn(0)]
    assert circulate_turns(9, ONE, reach=2) == [
        Turn(0, blocks=(UP,)),
        Turn(1, (UP,), blocks=(UP,)),
        Turn(2, (UP,), sums=(UP,)),
        Turn(3, sums=(UP,)),
    ]
    assert circulate_turns(9, BOTH, reach=0) == circulate_turns(1, BOTH)


def test_programs_are_short_to_read():
    assert repr(gather_turns(4, BOTH)) == (
        "[Turn(0, blocks=[+1, -1]), Turn(1, legs=[+1, -1], blocks=[+1/0, -1/1]), "
        "Turn(2, legs=[+1/0, -1/1])]"
    )
    assert repr(scatter_turns(2, ONE)) == "[Turn(1, legs=[-1]), Turn(0, sums=[-1], adds=[-1])]"


every_ring = pytest.mark.parametrize(
    ("size", "directions"), list(product([*range(1, 18), 32], [ONE, BOTH]))
)


@every_ring
@pytest.mark.parametrize("whole", [False, True])
def test_every_block_comes_once(size, directions, whole):
    """Played on all devices: what a leg brings is what the neighbour had, and is used once."""
    at_hand = [{None: [(i, None)]} for i in range(size)]  # by leg: (owner, half)
    used = [Counter() for _ in range(size)]
    coming = ()
    for turn in gather_turns(size, directions, whole_opposite=whole):
        assert turn.legs == coming
        for i in range(size):
            for leg in turn.legs or [None]:
                [(owner, half)] = at_hand[i][leg]
                assert owner == (i - (leg.direction * turn.distance if leg else 0)) % size
                assert half == (leg.half if leg else None)
                used[i][owner] += 0.5 if half is not None else 1
        coming, before = turn.blocks, at_hand
        at_hand = [
            {
                leg: [
                    (owner, leg.half)
                    for owner, _ in before[(i - leg.direction) % size].get(
                        Leg(leg.direction), before[(i - leg.direction) % size].get(None)
                    )
                ]
                for leg in turn.blocks
            }
            for i in range(size)
        ]
    assert coming == ()
    assert all(count == Counter(range(size)) for count in used)


@every_ring
@pytest.mark.parametrize(("pieces", "staggered"), [(1, True), (2, True), (2, False)])
def test_every_share_comes_home_once(size, directions, pieces, staggered):
    """A sum is played as whose shares it has: that of an owner at home has each device's once."""
    made = [{} for _ in range(size)]  # by leg: (owner, piece, shares)
    came = [{} for _ in range(size)]
    home = [{} for _ in range(size)]
    for turn in scatter_turns(size, directions, pieces, staggered=staggered):
        assert set(turn.sums) == set(made[0])
        coming = [
            {leg: made[(i - leg.direction) % size][leg] for leg in turn.sums} for i in range(size)
        ]
        if pieces == 1:
            came = coming
        assert set(turn.adds) <= set(came[0])
        for i in range(size):
            made[i] = {}
            for to in turn.legs or [None]:
                owner = (i + (to.direction * turn.distance if to else 0)) % size
                shares = Counter([i])
                for leg in turn.adds:
                    of, piece, more = came[i][leg]
                    if to is None or leg == to:
                        assert (of, piece) == (owner, turn.piece)
                        shares += more
                if to is None:
                    home[i][turn.piece] = shares
                else:
                    made[i][to] = owner, turn.piece, shares
        left = [{leg: x for leg, x in each.items() if leg not in turn.adds} for each in came]
        assert not any(set(each) & set(coming[0]) for each in left)  # one by a leg at a time
        came = [old | new for old, new in zip(left, coming, strict=True)]
    for found in home:
        assert found == {key: Counter(range(size)) for key in range(pieces)}


def of_ring(turn, ring):
    """What a turn has of one ring, as if it were the only one."""

    def own(legs):
        return tuple(replace(leg, ring=0) for leg in legs if leg.ring == ring)

    names = ("legs", "blocks", "sums", "adds")
    return replace(turn, **{name: own(getattr(turn, name)) for name in names})


@every_ring
def test_each_of_several_rings_runs_the_program_of_one(size, directions):
    for rings, ring in [(2, 0), (2, 1), (3, 2)]:
        for whole in (False, True):
            several = gather_turns(size, directions, rings=rings, whole_opposite=whole)
            one = gather_turns(size, directions, whole_opposite=whole)
            if whole and directions == BOTH and size % 2 == 0 and ring == 1:
                # The opposite device's block comes by one direction after the other.
                one[-2:] = [replace(one[-2], blocks=(DOWN,)), replace(one[-1], legs=(DOWN,))]
            assert [of_ring(turn, ring) for turn in several] == one
        for pieces in (1, 2):
            several = scatter_turns(size, directions, pieces, rings=rings)
            assert [of_ring(turn, ring) for turn in several] == scatter_turns(
                size, directions, pieces
            )
        several = circulate_turns(size, directions, rings=rings)
        assert [of_ring(turn, ring) for turn in several] == circulate_turns(size, directions)


def test_several_rings_are_short_to_read():
    assert repr(gather_turns(3, BOTH, rings=2)) == (
        "[Turn(0, blocks=[+1, -1, +1 of ring 1, -1 of ring 1]), "
        "Turn(1, legs=[+1, -1, +1 of ring 1, -1 of ring 1])]"
    )


@pytest.mark.parametrize("directions", [ONE, BOTH])
def test_both_ways_take_half_the_turns(directions):
    hops = [len(gather_turns(n, directions)) - 1 for n in (1, 2, 3, 8, 9)]
    assert hops == ([0, 1, 2, 7, 8] if directions == ONE else [0, 1, 1, 4, 4])


@every_ring
def test_a_turn_waits_for_what_its_links_carry_next(size, directions):
    """But where sums go one way at a time, behind the device that is as far as the other way."""
    for pieces in (1, 2):
        turns = scatter_turns(size, directions, pieces)
        for turn, following in pairwise(turns):
            farthest = len(directions) == 2 and 2 * turn.distance == size
            one_way = len(turn.legs) == 1 and 2 * turn.distance == size - 2 and directions == BOTH
            assert turn.awaited == (pieces == 1 or not (farthest or one_way))
            if farthest and pieces == 2:
                assert not set(turn.sums) & set(following.sums)


@every_ring
def test_stretches_are_the_program(size, directions):
    programs = [(gather_turns(size, directions), 1), (circulate_turns(size, directions), 1)]
    programs += [(scatter_turns(size, directions, pieces), pieces) for pieces in (1, 2)]
    for turns, period in programs:
        again = []
        for first, times, step in stretches(turns, period):
            assert len(first) <= period
            assert abs(step) <= 1 or times == 1
            for number in range(times):
                again += moved(first, number * step)
        assert again == turns


def test_most_of_a_long_ring_is_one_stretch():
    lengths = [times for _, times, _ in stretches(gather_turns(64, ONE))]
    assert lengths == [1, 62, 1]
    lengths = [times for _, times, _ in stretches(scatter_turns(64, BOTH, 2), 2)]
    assert lengths == [1, 1, 1, 29, 1, 1]
    lengths = [times for _, times, _ in stretches(circulate_turns(64, BOTH))]
    assert lengths == [1, 1, 61, 1, 1]
