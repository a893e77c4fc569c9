"""What a flow of work takes by each way: the one model by which `auto` chooses.

It reckons with the matmuls at the share of peak that they reach, with what every piece reads and
writes of HBM, with what is copied because work was cut, with bytes on the wire and a latency a hop,
and with what the compiler runs beside other work. `benchmarks/sweep` compares it with compiled
programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, prod
from typing import Literal

from jaxpar._chips import Chip
from jaxpar.collectives._fitted import fitted_to
from jaxpar.collectives._in_turns import InTurns
from jaxpar.collectives._run import loops
from jaxpar.collectives._turns import Turn, gather_turns, scatter_turns
from jaxpar.collectives._ways import InChunks, Stationary, Way

# What one more collective costs, in seconds.
CHUNK_OVERHEAD = 6e-6
# Of peak, what large matmuls reach.
MATMUL_SHARE = 0.9
# Blocks that were kept are joined, contracted, while they are no longer than this together: more
# would be copied first, less is a sum of float32 for each. And no more than so many blocks.
KEPT_JOINED, KEPT_TOGETHER = 768, 4
# Passes over a block's bytes in HBM that quantizing it takes: seen on v5p 9, on v6e 14.
QUANTIZING = 12.0
# Where pieces are placed by a pass of its own, of rows whose parts lie apart in memory.
SCATTERED_SHARE = 0.2
# How much faster than from HBM each piece feeds an operand from VMEM to the matrix units, however
# few rows it multiplies.
VMEM_SPEED = 3.5
# Of the time in which gradients of weights are added up, what is not beside transfers.
GRADIENTS_SHARE = 2 / 3
# Seconds of a turn of a loop beyond its work; and of an instruction that cuts operands for one.
LOOPED, CUT = 1e-6, 1e-6
# Seconds of an instruction that joins a block with others; and of the time of copies how much it
# takes, as small ones are on the chip.
JOINED, JOINED_SHARE = 1e-6, 0.4
# Seconds of an instruction that lays out what came along one dimension for the next one.
PLACED = 1.3e-6
# Of the time in which sums are added that go along a second dimension, what is not beside matmuls.
PHASES_SHARE = 3 / 4

# Sums across a cube, in sixths of a block, take so much longer than is reckoned: 1.05 to 1.28 times
# as long at nine of eleven points of v5p; and so many seconds more each where an instruction of
# its own cuts their operand.
SIXTHS, CUT_SIXTH = 1.2, 6e-6

FlowKind = Literal["gather", "scatter", "all-reduce"]


@dataclass(frozen=True)
class Flow:
    """Work of one device beside which blocks come or sums leave.

    Attributes:
      kind: blocks that are gathered, or sums that are scattered, or summed for all devices.
      flops: over all pieces.
      block_bytes: of one device's block on the wire.
      whole: bytes that every piece reads, however small it is: an operand that has no part in what
        travels, such as a weight beside rows.
      shared: bytes of which each piece reads or writes its own share.
      sums: bytes of what every piece adds to.
      minor: bytes, of those that are shared, of arrays whose last dimension is dealt out: a chunk
        of every block lies in many places there.
      cut: bytes, of those that are shared, of operands that stay and are cut for each piece.
      sliced: bytes, of those, of operands whose last dimension is cut.
      partners: bytes that are gathered, or summed and scattered, where the operand stays that
        would be gathered; as one device's block of them.
      exchanged: bytes of one device that go all to all there.
      added: bytes of the float32 numbers that are made for all devices, where sums are scattered.
      quantized: whether what travels is, with scales.
      along: the label of what is cut into pieces, of arrays that have labels.
      length: of that label, of the whole; 0: not known.
      across: the same work, cut along another label of what travels, as only chunks can be.
    """

    kind: FlowKind
    flops: float = 0.0
    block_bytes: int = 0
    whole: int = 0
    shared: int = 0
    sums: int = 0
    minor: int = 0
    cut: int = 0
    sliced: int = 0
    partners: int = 0
    exchanged: int = 0
    added: int = 0
    quantized: bool = False
    along: str = ""
    length: int = 0
    across: tuple["Flow", ...] = ()

    def in_chunks(self, chunks: int) -> "Flow":
        """The flow in chunks along the label with which they move the fewest bytes.

        Along the ring's label blocks can be cut into parts that differ; along another one not.
        """
        even = [flow for flow in self.across if flow.length % chunks == 0]
        return min((*even, self), key=lambda flow: flow._moved_by(chunks, flow is self))

    def _moved_by(self, chunks: int, comb: bool) -> float:
        """Bytes of HBM that chunks move, and one piece does not."""
        # Of the ring's label each block has its part of a chunk: it is cut and placed with blocks
        # as a dimension of their own.
        apart = self.shared + 2 * self.minor / SCATTERED_SHARE if comb else 0.0
        return (chunks - 1) * (self.whole + 2.5 * self.sums) + apart


def time_of(
    chip: Chip,
    flows: Sequence[Flow],
    way: Way,
    beside: frozenset[str],
    *,
    kept: int = 0,
    devices: int = 0,
    messages: int = 1,
) -> float:
    """Returns the seconds that flows take, one after the other, by a way.

    Args:
      chip: the figures.
      flows: a gather, a scatter, or a scatter and then a gather that does not wait for it.
      way: any.
      beside: the collectives that the compiler runs beside other work.
      kept: in how many pieces what the last one gathers is there already; 0: it is not.
      devices: of the whole mesh; 0: no more than those of the ring.
      messages: that share a link in turns, where devices of one chip send at once.
    """
    if isinstance(way, Stationary):
        return sum((_staying(chip, flow, way.ring.size, kept > 0) for flow in flows), 0.0)
    if kept and isinstance(way, InTurns):
        work = _work_on_kept(chip, flows[1], kept, in_turns=True)
        return _in_turns(chip, flows[0], way, messages, beside=work)
    if kept and isinstance(way, InChunks):
        return _in_chunks(chip, flows[0], way, beside) + _work_on_kept(chip, flows[1], kept)
    gathered = [flow for flow in flows if flow.quantized and flow.kind == "gather" and not kept]
    ahead = sum((QUANTIZING * flow.block_bytes / chip.hbm for flow in gathered), 0.0)
    if isinstance(way, InTurns):
        return ahead + sum(_in_turns(chip, flow, way, messages) for flow in flows)
    if isinstance(way, InChunks):
        return ahead + sum(_in_chunks(chip, flow, way, beside) for flow in flows)
    return ahead + _at_once(chip, flows, way, beside, kept, max(devices, way.ring.size))


def row_chunks_time(chip: Chip, flows: Sequence[Flow], size: int, chunks: int) -> float:
    """Seconds of flows, one behind the other, through which rows go in chunks."""
    work = sum((_work(chip, flow, chunks, 0.0) for flow in flows), 0.0)
    sent = sum((collective_time(chip, flow, size) for flow in flows), 0.0)
    beside = sent * (chunks - 1) / chunks
    # Backward each chunk has gradients of all weights, which are added up: a third of three passes.
    passes = fitted_to(chip.kind).chunk_passes
    added = (chunks - 1) * sum(flow.whole for flow in flows) / chip.hbm * passes * GRADIENTS_SHARE
    overhead = (chunks - 1) * len(flows) * CHUNK_OVERHEAD
    return sent - beside + max(work, beside) + added + overhead


def _at_once(
    chip: Chip, flows: Sequence[Flow], way: Way, beside: frozenset[str], kept: int, devices: int
) -> float:
    size = way.ring.size
    work = [_work(chip, flow, 1, 0.0) for flow in flows]
    if kept and len(flows) > 1:
        work[1] = _work_on_kept(chip, flows[1], kept)
    sent = [collective_time(chip, flow, size) for flow in flows]
    if len(flows) < 2:
        reduces = any(flow.kind == "all-reduce" for flow in flows)
        passes = 2 / _spanned(chip, size, devices, "all-reduce" in beside) if reduces else 1
        return sum(work, 0.0) + sum(sent, 0.0) * passes
    # A scatter and a gather: the gather is under way while the scatter's work is done, the sums
    # leave while the gather's work is done.
    gathering = 0.0 if kept else sent[1]
    first = max(work[0], gathering) if "all-gather" in beside else work[0] + gathering
    second = max(work[1], sent[0]) if "reduce-scatter" in beside else work[1] + sent[0]
    return first + second


def _staying(chip: Chip, flow: Flow, size: int, kept: bool) -> float:
    """Seconds of a flow whose gathered operand stays, and of its sums, which stay with it."""
    if flow.kind != "gather" and not kept:
        return _work(chip, flow, 1, 0.0) + collective_time(chip, flow, size)
    moved = flow.block_bytes + size * (flow.partners + flow.exchanged)
    computed = flow.flops / (MATMUL_SHARE * chip.flops)
    sent = collective_time(chip, replace(flow, block_bytes=flow.partners), size)
    sent += _all_to_all(chip, flow.exchanged, size)
    return hypot(computed, moved / chip.hbm) + (sent if flow.kind == "gather" else 0.0)


def _spanned(chip: Chip, size: int, devices: int, offloaded: bool) -> int:
    """How many dimensions of the torus a ring probably spans: XLA all-reduces over all their links.

    Over one, a reduce-scatter and an all-gather follow each other. Not over the second one of a
    slice of two dimensions that is two devices wide, unless a SparseCore sends. Tracing does not
    see where devices are: the slice is taken for one whose sides are as even as can be.
    """
    sides = [1] * max(1, chip.dimensions)
    while prod(sides) < devices:
        sides[sides.index(min(sides))] *= 2
    sides = sorted((side for side in sides if side > 1), reverse=True)
    # Those that it fills: part of one is no closed ring.
    spanned = max([n for n in range(1, len(sides) + 1) if prod(sides[:n]) <= size], default=1)
    return 1 if chip.dimensions == 2 and size < 16 and not offloaded else spanned


def _in_chunks(chip: Chip, flow: Flow, way: InChunks, beside: frozenset[str]) -> float:
    chunks, comb = way.chunks, flow
    flow = flow.in_chunks(chunks)
    fit = chunks * flow.sums <= chip.vmem
    work = _work(chip, flow, chunks, fitted_to(chip.kind).chunk_passes, kept=fit)
    sent = collective_time(chip, flow, way.ring.size)
    # Chunks are cut out of the block, or joined to it; of blocks, which lie apart, at less speed.
    copied = _copy(chip, flow.block_bytes) if flow is comb else 2 * flow.block_bytes / chip.hbm
    rest = copied + chunks * CHUNK_OVERHEAD
    rest += 2 * flow.minor / (SCATTERED_SHARE * chip.hbm)
    rest += _gathered(chip, flow, way.ring.size)
    if ("all-gather" if flow.kind == "gather" else "reduce-scatter") not in beside:
        return work + sent + rest
    return rest + (work + sent + (chunks - 1) * max(work, sent)) / chunks


def kept_pieces(flow: Flow, way: Way, backward: Way) -> int:
    """In how many pieces a matmul uses what a gather brought by a way and kept."""
    if not isinstance(way, InTurns) or way.keeps_whole:
        return backward.parts
    if way.blocks_along:  # slabs, in halves if they can be
        side = way.blocks_along[0]
        pieces = side * len(way.blocks_along) * (2 - side % 2)
    else:
        pieces = way.ring.size * len(way.rings or [way.ring])
    if not flow.sums:
        return pieces
    joined = KEPT_JOINED // max(1, flow.length // pieces) + 1
    return -(-pieces // min(joined, KEPT_TOGETHER))


def _work_on_kept(chip: Chip, flow: Flow, pieces: int, *, in_turns: bool = False) -> float:
    """Seconds of the work on what was gathered before; in turns sums stay in VMEM if they fit."""
    fitted = fitted_to(chip.kind)
    cut = 2 * flow.cut / (fitted.slices * chip.hbm) if pieces > 1 else 0.0
    if in_turns:
        fits = 2 * flow.sums <= chip.vmem
        return cut + _work(chip, flow, pieces, fitted.turn_passes, kept=fits)
    return cut + _work(chip, flow, pieces, max(2.0, fitted.turn_passes))


def _in_turns(chip: Chip, flow: Flow, way: InTurns, messages: int, *, beside: float = 0.0) -> float:
    """Seconds of turns, to which so many seconds of other work are dealt out."""
    if way.sums_along and flow.kind != "gather":
        return _sums_in_phases(chip, flow, way, way.sums_along, messages, beside=beside)
    if way.blocks_along and flow.kind == "gather":
        return _blocks_in_phases(chip, flow, way, way.blocks_along, messages)
    size = way.ring.size
    rings = len(way.rings or [way.ring])  # of which each has its own links, and a share of blocks
    turns = gather_turns(size, way.directions, rings=rings, whole_opposite=way.whole_opposite)
    pieces = rings * (1 if flow.kind == "gather" else way.order.pieces)  # of each block
    fitted, joined = fitted_to(chip.kind), 0.0
    if flow.kind == "gather" and flow.sums and joins(chip, flow.length // (size * rings)):
        pieces = 1  # what comes by several rings is multiplied at once
        if rings > 1:
            joined = JOINED * size * rings + JOINED_SHARE * _copy(chip, size * flow.block_bytes)
    work = _work(chip, flow, size * pieces, fitted.turn_passes) + joined
    added = 2 * fitted.travelling * flow.added / chip.hbm
    if added:  # beside the matmul, as far as it takes longer
        added *= min(1.0, added / work)
    work = (work + added + beside) / size
    hop = flow.block_bytes / rings * messages / chip.link + chip.latency

    def seconds(turn: Turn) -> float:
        # Two halves are one block's work, and so are the shares of all rings.
        whole = len([leg for leg in turn.legs if leg.half is None]) / rings
        hops = [hop if leg.half is None else hop / 2 for leg in turn.blocks]
        # A torus has a link each way; on a GPU both ways leave by one port.
        sent = max(hops, default=0.0) if chip.torus else sum(hops, 0.0)
        return max(work * max(1, whole), sent)

    halves = any(leg.half is not None for turn in turns for leg in turn.blocks)
    # The opposite block is cut in two, and joined again.
    copied = 2 * _copy(chip, flow.block_bytes) if halves and flow.kind == "gather" else 0.0
    copied += _cut(chip, flow, way, rings)
    if flow.kind == "gather" and loops(turns):
        copied += len(turns) * LOOPED
    # A GPU writes what it multiplies, and reads it again to add it to the sums that have come.
    copied += 0.0 if chip.torus else 2 * flow.added / chip.hbm
    if fitted.placed_apart and flow.kind == "gather":
        copied += _copy(chip, flow.minor - flow.sliced)
    copied += _gathered(chip, flow, size)
    total = sum(map(seconds, turns), 0.0) + copied
    return total * SIXTHS if way.crosses_a_cube and flow.kind != "gather" else total


def _sums_in_phases(
    chip: Chip, flow: Flow, way: InTurns, sides: tuple[int, ...], messages: int, *, beside: float
) -> float:
    """Seconds of sums that go along one dimension of a torus after the other."""
    side, shares, pieces = sides[0], len(sides), way.order.pieces
    fitted = fitted_to(chip.kind)
    made = side * shares * pieces
    work = _work(chip, flow, made, fitted.turn_passes)
    added = 2 * fitted.travelling * flow.added / chip.hbm
    each = (work + added * min(1.0, added / work) + beside) / made  # of a sum
    sent = flow.block_bytes * way.ring.size / made  # of a sum, in bytes
    turn = 2 * shares * each  # both ways round of each share

    def hop(size: float) -> float:
        return size * messages / chip.link + chip.latency

    # The first turn that adds waits for what the first one made; half a turn is before, and behind.
    seconds = 2 * turn + hop(sent) + (side - 2) * max(turn, hop(sent))
    for _ in sides[1:]:
        sent /= side
        # More shares are less often of whole tiles.
        one = 3 * sent / (fitted.copies * chip.hbm) + (shares - 1) * fitted.piece
        adds = made * one * PHASES_SHARE
        seconds += max(adds, (side - 1) * hop(sent)) + hop(sent)
    # Columns of the blocks of a slab lie apart.
    seconds += flow.minor / (SCATTERED_SHARE * chip.hbm)
    return seconds + _cut(chip, flow, way, shares) + _gathered(chip, flow, way.ring.size)


def _blocks_in_phases(
    chip: Chip, flow: Flow, way: InTurns, sides: tuple[int, ...], messages: int
) -> float:
    """Seconds of blocks that come along one dimension of a torus after the other."""
    side, shares = sides[0], len(sides)
    fitted = fitted_to(chip.kind)
    hops, opposite = divmod(side - 1, 2)
    sent = flow.block_bytes / shares  # of a share, in bytes

    def hop(size: float) -> float:
        return size * messages / chip.link + chip.latency

    seconds = 0.0
    for _ in sides[1:]:
        placed = shares * side * (PLACED + 2 * sent / (fitted.copies * chip.hbm))
        seconds += hop(sent) + max(placed, (hops + opposite - 1) * hop(sent))
        sent *= side
    pieces = side * shares
    if opposite:  # slabs are cut in halves, the second one beside transfers
        seconds += shares * sent / (fitted.copies * chip.hbm)
        pieces *= 2
    joined = 0.0
    if flow.sums and joins(chip, flow.length // pieces):
        # Each is laid out beside others, and so is what it is multiplied by.
        joined = 2 * PLACED * pieces + _copy(chip, way.ring.size * flow.block_bytes)
        pieces = side
    work = (_work(chip, flow, pieces, fitted.turn_passes) + joined) / side  # of a turn, one way
    seconds += max(work, hop(sent)) + (hops - 1) * max(2 * work, hop(sent))
    if opposite:
        seconds += max(2 * work, hop(sent / 2)) + work
    else:
        seconds += 2 * work
    # Columns of the blocks of a slab lie apart.
    seconds += (flow.minor - flow.sliced) / (SCATTERED_SHARE * chip.hbm)
    if fitted.placed_apart:
        seconds += _copy(chip, flow.minor - flow.sliced)
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
            return 2 * flow.cut / (fitted.slices * chip.hbm) + len(turns) * (LOOPED + CUT)
    if order.cuts_first:
        cut = flow.cut
    elif flow.kind == "gather" or not chip.torus:  # columns are
        cut = flow.sliced
    else:
        cut = fitted.within * flow.cut
    seconds = 2 * cut / (fitted.slices * chip.hbm)
    if way.crosses_a_cube and flow.kind != "gather" and order.cuts_first:
        seconds += way.ring.size * rings * pieces * CUT_SIXTH
    return seconds


def joins(chip: Chip, length: int) -> bool:
    """Whether blocks of `length` are better joined along it, contracted, and multiplied once.

    A sum of M x N float32 is read and written, 8 M N bytes, while 2 M N `length` FLOPs run. Beyond
    half of their time joining is cheaper, where a compiler joins for nothing, within the matmul
    (TPU).
    """
    return chip.torus and 8 * chip.flops / chip.hbm > length


def _gathered(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds in which sums that all devices need are gathered again."""
    if flow.kind != "all-reduce":
        return 0.0
    share = fitted_to(chip.kind).last_gather
    copied = 2 * size * flow.block_bytes / (share * chip.hbm) if share else 0.0
    return collective_time(chip, flow, size) + copied


def _work(chip: Chip, flow: Flow, pieces: int, passes: float, *, kept: bool = False) -> float:
    """Seconds of all pieces: of each its FLOPs, or what it reads and writes, and what it adds to.

    Near the ridge of the roofline neither is hidden by the other: hence the root of squares. Sums
    are read and written again for each piece: in `passes` of their own, in the matmul's epilogue
    where there are none, or not at all where they are `kept` on the chip until the last piece.
    """
    computed = flow.flops / (MATMUL_SHARE * chip.flops)
    fits = flow.whole <= fitted_to(chip.kind).resident * chip.vmem
    if fits:
        computed = max(computed, pieces * flow.whole / (VMEM_SPEED * chip.hbm))
    reads = 1 if fits else pieces
    again = 0.0 if kept else 2.0 * (pieces - 1) * flow.sums
    moved = reads * flow.whole + flow.shared + flow.sums
    work = hypot(computed, moved / chip.hbm)
    added = again * passes / chip.hbm
    return max(work, (moved + again) / chip.hbm) + added + (pieces - 1) * fitted_to(chip.kind).piece


def collective_time(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds of a collective by itself: both ways round a torus, through the port of a GPU."""
    if flow.quantized and flow.kind == "scatter":  # sums that nothing adds on their way
        return _all_to_all(chip, size * flow.block_bytes, size)
    ways = 2 if chip.torus else 1
    return (size - 1) / ways * (flow.block_bytes / chip.link + chip.latency)


def _all_to_all(chip: Chip, sent: int, size: int) -> float:
    """Seconds in which one device's bytes go all to all."""
    # A byte crosses a quarter of the ring on average, one way or the other.
    around = size / 8 if chip.torus else 1.0
    return sent * around / chip.link + size / 2 * chip.latency


def _copy(chip: Chip, size: int) -> float:
    """Seconds to read and write so many bytes in a pass of its own."""
    return 2 * size / (fitted_to(chip.kind).copies * chip.hbm)
