"""Ring programs as data: written out, and played in plain Python on every device at once."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest

from jaxpar.ring.steps import (
    Hop,
    Step,
    circulate_steps,
    gather_steps,
    moved,
    scatter_steps,
    stretches,
)

ONE, BOTH = (1,), (1, -1)
UP, DOWN = Hop(1), Hop(-1)
UP_0, UP_1 = Hop(1, 0), Hop(1, 1)
DOWN_0, DOWN_1 = Hop(-1, 0), Hop(-1, 1)


def test_a_gather_one_way():
    assert gather_steps(3, ONE) == [
        Step(0, blocks=(UP,)),
        Step(1, (UP,), blocks=(UP,)),
        Step(2, (UP,)),
    ]


def test_a_gather_both_ways_round_an_odd_ring():
    assert gather_steps(5, BOTH) == [
        Step(0, blocks=(UP, DOWN)),
        Step(1, (UP, DOWN), blocks=(UP, DOWN)),
        Step(2, (UP, DOWN)),
    ]


def test_the_opposite_block_of_an_even_ring_comes_in_halves_or_whole():
    assert gather_steps(4, BOTH) == [
        Step(0, blocks=(UP, DOWN)),
        Step(1, (UP, DOWN), blocks=(UP_0, DOWN_1)),
        Step(2, (UP_0, DOWN_1)),
    ]
    assert gather_steps(4, BOTH, whole_opposite=True)[1:] == [
        Step(1, (UP, DOWN), blocks=(UP,)),
        Step(2, (UP,)),
    ]


def test_two_devices_and_one():
    assert gather_steps(2, BOTH) == [Step(0, blocks=(UP_0, DOWN_1)), Step(1, (UP_0, DOWN_1))]
    assert gather_steps(2, ONE) == [Step(0, blocks=(UP,)), Step(1, (UP,))]
    assert gather_steps(1, ONE) == gather_steps(1, BOTH) == [Step(0)]
    assert scatter_steps(1, BOTH) == [Step(0)]
    assert circulate_steps(1, BOTH) == [Step(0), Step(1)]


def test_a_scatter_one_way():
    """What was made for one place farther leaves, and is added to what is made now."""
    assert scatter_steps(3, ONE) == [
        Step(2, (DOWN,)),
        Step(1, (DOWN,), sums=(DOWN,), adds=(DOWN,)),
        Step(0, sums=(DOWN,), adds=(DOWN,)),
    ]


def test_a_scatter_in_two_pieces_that_take_turns():
    """What was made two steps ago has come."""
    assert scatter_steps(3, ONE, 2) == [
        Step(2, (DOWN_0,)),
        Step(2, (DOWN_1,), sums=(DOWN_0,), piece=1),
        Step(1, (DOWN_0,), sums=(DOWN_1,), adds=(DOWN_0,)),
        Step(1, (DOWN_1,), sums=(DOWN_0,), adds=(DOWN_1,), piece=1),
        Step(0, sums=(DOWN_1,), adds=(DOWN_0,)),
        Step(0, adds=(DOWN_1,), piece=1),
    ]


def test_pieces_for_the_opposite_device_go_one_each_way():
    """The first of them has a step to come, in which a sum is made to which nothing is added."""
    assert scatter_steps(4, BOTH, 2) == [
        Step(2, (UP_0,), awaited=False),
        Step(2, (DOWN_1,), sums=(UP_0,), piece=1, awaited=False),
        Step(1, (DOWN_0,), sums=(DOWN_1,), awaited=False),
        Step(1, (UP_0,), sums=(DOWN_0,), adds=(UP_0,), awaited=False),
        Step(1, (DOWN_1, UP_1), sums=(UP_0,), adds=(DOWN_1,), piece=1),
        Step(0, sums=(DOWN_1, UP_1), adds=(DOWN_0, UP_0)),
        Step(0, adds=(DOWN_1, UP_1), piece=1),
    ]
    assert scatter_steps(4, BOTH, 2, staggered=False)[2:4] == [
        Step(1, (DOWN_0, UP_0), sums=(DOWN_1,), adds=(UP_0,)),
        Step(1, (DOWN_1, UP_1), sums=(DOWN_0, UP_0), adds=(DOWN_1,), piece=1),
    ]


def test_blocks_go_round_and_sums_follow_a_turn_behind():
    both = (UP, DOWN)
    assert circulate_steps(4, BOTH) == [
        Step(0, blocks=both),
        Step(1, both, blocks=both),
        Step(2, both, blocks=both, sums=both),
        Step(3, both, sums=both),
        Step(4, sums=both),
    ]


def test_blocks_that_go_no_farther_than_a_reach():
    """Sums go home from there in one transfer."""
    assert gather_steps(9, BOTH, reach=2) == gather_steps(5, BOTH)
    assert gather_steps(9, BOTH, reach=0) == [Step(0)]
    assert circulate_steps(9, ONE, reach=2) == [
        Step(0, blocks=(UP,)),
        Step(1, (UP,), blocks=(UP,)),
        Step(2, (UP,), sums=(UP,)),
        Step(3, sums=(UP,)),
    ]
    assert circulate_steps(9, BOTH, reach=0) == circulate_steps(1, BOTH)


def test_programs_are_short_to_read():
    assert repr(gather_steps(4, BOTH)) == (
        "[Step(0, blocks=[+1, -1]), Step(1, hops=[+1, -1], blocks=[+1/0, -1/1]), "
        "Step(2, hops=[+1/0, -1/1])]"
    )
    assert repr(scatter_steps(2, ONE)) == "[Step(1, hops=[-1]), Step(0, sums=[-1], adds=[-1])]"


every_ring = pytest.mark.parametrize(
    ("size", "directions"), list(product([*range(1, 18), 32], [ONE, BOTH]))
)


@every_ring
@pytest.mark.parametrize("whole", [False, True])
def test_every_block_comes_once(size, directions, whole):
    """Played on all devices: what a hop brings is what the neighbour had, and is used once."""
    at_hand = [{None: [(i, None)]} for i in range(size)]  # by hop: (owner, half)
    used = [Counter() for _ in range(size)]
    coming = ()
    for step in gather_steps(size, directions, whole_opposite=whole):
        assert step.hops == coming
        for i in range(size):
            for hop in step.hops or [None]:
                [(owner, half)] = at_hand[i][hop]
                assert owner == (i - (hop.direction * step.distance if hop else 0)) % size
                assert half == (hop.half if hop else None)
                used[i][owner] += 0.5 if half is not None else 1
        coming, before = step.blocks, at_hand
        at_hand = [
            {
                hop: [
                    (owner, hop.half)
                    for owner, _ in before[(i - hop.direction) % size].get(
                        Hop(hop.direction), before[(i - hop.direction) % size].get(None)
                    )
                ]
                for hop in step.blocks
            }
            for i in range(size)
        ]
    assert coming == ()
    assert all(count == Counter(range(size)) for count in used)


@every_ring
@pytest.mark.parametrize(("pieces", "staggered"), [(1, True), (2, True), (2, False)])
def test_every_share_comes_home_once(size, directions, pieces, staggered):
    """A sum is played as whose shares it has: that of an owner at home has each device's once."""
    made = [{} for _ in range(size)]  # by hop: (owner, piece, shares)
    came = [{} for _ in range(size)]
    home = [{} for _ in range(size)]
    for step in scatter_steps(size, directions, pieces, staggered=staggered):
        assert set(step.sums) == set(made[0])
        coming = [
            {hop: made[(i - hop.direction) % size][hop] for hop in step.sums} for i in range(size)
        ]
        if pieces == 1:
            came = coming
        assert set(step.adds) <= set(came[0])
        for i in range(size):
            made[i] = {}
            for to in step.hops or [None]:
                owner = (i + (to.direction * step.distance if to else 0)) % size
                shares = Counter([i])
                for hop in step.adds:
                    of, piece, more = came[i][hop]
                    if to is None or hop == to:
                        assert (of, piece) == (owner, step.piece)
                        shares += more
                if to is None:
                    home[i][step.piece] = shares
                else:
                    made[i][to] = owner, step.piece, shares
        left = [{hop: x for hop, x in each.items() if hop not in step.adds} for each in came]
        assert not any(set(each) & set(coming[0]) for each in left)  # one by a hop at a time
        came = [old | new for old, new in zip(left, coming, strict=True)]
    for found in home:
        assert found == {key: Counter(range(size)) for key in range(pieces)}


def of_ring(step, ring):
    """What a step has of one ring, as if it were the only one."""

    def own(hops):
        return tuple(replace(hop, ring=0) for hop in hops if hop.ring == ring)

    names = ("hops", "blocks", "sums", "adds")
    return replace(step, **{name: own(getattr(step, name)) for name in names})


@every_ring
def test_each_of_several_rings_runs_the_program_of_one(size, directions):
    for rings, ring in [(2, 0), (2, 1), (3, 2)]:
        for whole in (False, True):
            several = gather_steps(size, directions, rings=rings, whole_opposite=whole)
            one = gather_steps(size, directions, whole_opposite=whole)
            if whole and directions == BOTH and size % 2 == 0 and ring == 1:
                # The opposite device's block comes by one direction after the other.
                one[-2:] = [replace(one[-2], blocks=(DOWN,)), replace(one[-1], hops=(DOWN,))]
            assert [of_ring(step, ring) for step in several] == one
        for pieces in (1, 2):
            several = scatter_steps(size, directions, pieces, rings=rings)
            assert [of_ring(step, ring) for step in several] == scatter_steps(
                size, directions, pieces
            )
        several = circulate_steps(size, directions, rings=rings)
        assert [of_ring(step, ring) for step in several] == circulate_steps(size, directions)


def test_several_rings_are_short_to_read():
    assert repr(gather_steps(3, BOTH, rings=2)) == (
        "[Step(0, blocks=[+1, -1, +1 of ring 2, -1 of ring 2]), "
        "Step(1, hops=[+1, -1, +1 of ring 2, -1 of ring 2])]"
    )


@pytest.mark.parametrize("directions", [ONE, BOTH])
def test_both_ways_take_half_the_turns(directions):
    hops = [len(gather_steps(n, directions)) - 1 for n in (1, 2, 3, 8, 9)]
    assert hops == ([0, 1, 2, 7, 8] if directions == ONE else [0, 1, 1, 4, 4])


@every_ring
def test_a_turn_waits_for_what_its_links_carry_next(size, directions):
    """But where sums go one way at a time, behind the device that is as far as the other way."""
    for pieces in (1, 2):
        steps = scatter_steps(size, directions, pieces)
        for step, following in pairwise(steps):
            farthest = len(directions) == 2 and 2 * step.distance == size
            one_way = len(step.hops) == 1 and 2 * step.distance == size - 2 and directions == BOTH
            assert step.awaited == (pieces == 1 or not (farthest or one_way))
            if farthest and pieces == 2:
                assert not set(step.sums) & set(following.sums)


@every_ring
def test_stretches_are_the_program(size, directions):
    programs = [(gather_steps(size, directions), 1), (circulate_steps(size, directions), 1)]
    programs += [(scatter_steps(size, directions, pieces), pieces) for pieces in (1, 2)]
    for steps, period in programs:
        again = []
        for first, times, step in stretches(steps, period):
            assert len(first) <= period
            assert abs(step) <= 1 or times == 1
            for number in range(times):
                again += moved(first, number * step)
        assert again == steps


def test_most_of_a_long_ring_is_one_stretch():
    lengths = [times for _, times, _ in stretches(gather_steps(64, ONE))]
    assert lengths == [1, 62, 1]
    lengths = [times for _, times, _ in stretches(scatter_steps(64, BOTH, 2), 2)]
    assert lengths == [1, 1, 1, 29, 1, 1]
    lengths = [times for _, times, _ in stretches(circulate_steps(64, BOTH))]
    assert lengths == [1, 1, 61, 1, 1]
