"""What a flow takes in turns: round rings, across a cube, or along dimensions of a torus."""

from jaxpar.ring.costs import (
    copy_time,
    gathered_again,
    hop_time,
    joins,
    work_time,
)
from jaxpar.ring.fitted import fitted_to
from jaxpar.ring.flow import SCATTERED_SHARE, Flow
from jaxpar.mesh.chips import Chip
from jaxpar.ring.in_turns import InTurns
from jaxpar.ring.run import loops
from jaxpar.ring.turns import Turn, gather_turns, scatter_turns

# Seconds of a turn of a loop beyond its work; and of an instruction that cuts operands for one.
LOOPED, CUT = 1e-6, 1e-6
# Seconds of an instruction that joins a block with others; and of the time of copies how much it
# takes, as small ones are on the chip.
JOINED, JOINED_SHARE = 1e-6, 0.4
# Seconds of an instruction that lays out what came along one dimension for the next one.
PLACED = 1.3e-6
# Of the time in which sums are added that go along a second dimension, what is not beside matmuls.
PHASES_SHARE = 3 / 4
# Seconds of an instruction that cuts an operand for sums across a cube, in sixths of a block.
CUT_SIXTH = 6e-6


def turns_time(
    chip: Chip, flow: Flow, way: InTurns, messages: int, *, beside: float = 0.0
) -> float:
    """Seconds of turns, to which so many seconds of other work are dealt out."""
    if way.sums_along and flow.kind != "gather":
        return _sums_in_phases(chip, flow, way, way.sums_along, messages, beside=beside)
    if way.blocks_along and flow.kind == "gather":
        return _blocks_in_phases(chip, flow, way, way.blocks_along, messages)
    size = way.ring.size
    rings = len(way.rings or [way.ring])  # of which each has its own links, and a share of blocks
    turns = gather_turns(size, way.directions, rings=rings, whole_opposite=way.whole_opposite)
    sent_in = 1 if flow.kind == "gather" else way.order.pieces  # messages that a block is sent in
    pieces = rings * sent_in
    fitted, joined = fitted_to(chip.kind), 0.0
    if flow.kind == "gather" and flow.sums and joins(chip, flow.length // (size * rings)):
        pieces = 1  # what comes by several rings is multiplied at once
        if rings > 1:
            joined = JOINED * size * rings + JOINED_SHARE * copy_time(chip, size * flow.block_bytes)
    fits = flow.kind == "gather" and 2 * flow.sums <= chip.vmem
    work = work_time(chip, flow, size * pieces, fitted.turn_passes, kept=fits) + joined
    work = (work + beside) / size
    block = flow.block_bytes / rings * messages

    def seconds(turn: Turn) -> float:
        # Two halves are one block's work, and so are the shares of all rings.
        whole = len([leg for leg in turn.legs if leg.half is None]) / rings
        hops = [
            sent_in * hop_time(chip, block / sent_in)
            if leg.half is None
            else hop_time(chip, block / 2)
            for leg in turn.blocks
        ]
        # A torus has a link each way; on a GPU both ways leave by one port.
        sent = max(hops, default=0.0) if chip.torus else sum(hops, 0.0)
        return max(work * max(1, whole), sent)

    halves = any(leg.half is not None for turn in turns for leg in turn.blocks)
    # The opposite block is cut in two, and joined again.
    copied = 2 * copy_time(chip, flow.block_bytes) if halves and flow.kind == "gather" else 0.0
    copied += _cut(chip, flow, way, rings)
    if flow.kind == "gather" and loops(turns):
        copied += len(turns) * LOOPED
    # A GPU writes what it multiplies, and reads it again to add it to the sums that have come.
    copied += 0.0 if chip.torus else 2 * flow.added / chip.hbm
    if fitted.placed_apart and flow.kind == "gather":
        copied += copy_time(chip, flow.minor - flow.sliced)
    copied += gathered_again(chip, flow, size)
    return sum(map(seconds, turns), 0.0) + copied


def _sums_in_phases(
    chip: Chip, flow: Flow, way: InTurns, sides: tuple[int, ...], messages: int, *, beside: float
) -> float:
    """Seconds of sums that go along one dimension of a torus after the other."""
    side, shares, pieces = sides[0], len(sides), way.order.pieces
    fitted = fitted_to(chip.kind)
    made = side * shares * pieces
    work = work_time(chip, flow, made, fitted.turn_passes)
    each = (work + beside) / made  # of a sum
    sent = flow.block_bytes * way.ring.size / made  # of a sum, in bytes
    turn = 2 * shares * each  # both ways round of each share

    def hop(size: float) -> float:
        return hop_time(chip, size * messages)

    # The first turn that adds waits for what the first one made; half a turn is before, and behind.
    seconds = 2 * turn + hop(sent) + (side - 2) * max(turn, hop(sent))
    for _ in sides[1:]:
        sent /= side
        # More shares are less often of whole tiles.
        one = 1.5 * copy_time(chip, sent) + (shares - 1) * fitted.piece
        adds = made * one * PHASES_SHARE
        seconds += max(adds, (side - 1) * hop(sent)) + hop(sent)
    # Columns of the blocks of a slab lie apart.
    seconds += flow.minor / (SCATTERED_SHARE * chip.hbm)
    return seconds + _cut(chip, flow, way, shares) + gathered_again(chip, flow, way.ring.size)


def _blocks_in_phases(
    chip: Chip, flow: Flow, way: InTurns, sides: tuple[int, ...], messages: int
) -> float:
    """Seconds of blocks that come along one dimension of a torus after the other."""
    side, shares = sides[0], len(sides)
    fitted = fitted_to(chip.kind)
    hops, opposite = divmod(side - 1, 2)
    sent = flow.block_bytes / shares  # of a share, in bytes

    def hop(size: float) -> float:
        return hop_time(chip, size * messages)

    seconds = 0.0
    for _ in sides[1:]:
        placed = shares * side * (PLACED + copy_time(chip, sent))
        seconds += hop(sent) + max(placed, (hops + opposite - 1) * hop(sent))
        sent *= side
    pieces = side * shares
    if opposite:  # slabs are cut in halves, the second one beside transfers
        seconds += shares * copy_time(chip, sent) / 2
        pieces *= 2
    joined = 0.0
    if flow.sums and joins(chip, flow.length // pieces):
        # Each is laid out beside others, and so is what it is multiplied by.
        joined = 2 * PLACED * pieces + copy_time(chip, way.ring.size * flow.block_bytes)
        pieces = side
    work = (work_time(chip, flow, pieces, fitted.turn_passes) + joined) / side  # of a turn, one way
    seconds += max(work, hop(sent)) + (hops - 1) * max(2 * work, hop(sent))
    if opposite:
        seconds += max(2 * work, hop(sent / 2)) + work
    else:
        seconds += 2 * work
    # Columns of the blocks of a slab lie apart.
    seconds += (flow.minor - flow.sliced) / (SCATTERED_SHARE * chip.hbm)
    if fitted.placed_apart:
        seconds += copy_time(chip, flow.minor - flow.sliced)
    return seconds + _cut(chip, flow, way, shares)


def _cut(chip: Chip, flow: Flow, way: InTurns, rings: int) -> float:
    """Seconds in which what stays is cut, or a matmul takes longer that cuts it by itself."""
    fitted, order, pieces = fitted_to(chip.kind), way.order, way.order.pieces
    if flow.kind != "gather":
        around = way.sums_along[0] if way.sums_along else way.ring.size
        turns = scatter_turns(around, way.directions, pieces, rings=rings)
        looped = loops(turns, pieces)
        if not looped:
            order = order.for_sums(flow.flops / (around * pieces))
        elif order.cuts_first:
            return copy_time(chip, flow.cut) + len(turns) * (LOOPED + CUT)
    if order.cuts_first:
        cut = flow.cut
    elif flow.kind == "gather" or not chip.torus:  # columns are
        cut = flow.sliced
    else:
        cut = fitted.within * flow.cut
    seconds = copy_time(chip, cut)
    if way.crosses_a_cube and flow.kind != "gather" and order.cuts_first:
        seconds += way.ring.size * rings * pieces * CUT_SIXTH
    return seconds
