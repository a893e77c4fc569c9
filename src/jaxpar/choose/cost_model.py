"""What a flow of work takes by each way: the one model by which `auto` chooses.

It reckons with the matmuls at the share of peak that they reach, with what every piece reads and
writes of HBM, with what is copied because work was cut, with bytes on the wire and a latency a hop,
and with what the compiler runs beside other work. `benchmarks/sweep` compares it with compiled
programs.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, prod

from jaxpar.choose.cost_of_turns import turns_time
from jaxpar.ring.costs import (
    MATMUL_SHARE,
    all_to_all_time,
    collective_time,
    copy_time,
    gathered_again,
    last_copy_time,
    work_time,
)
from jaxpar.ring.fitted import fitted_to
from jaxpar.ring.flow import SCATTERED_SHARE, Flow
from jaxpar.mesh.chips import Chip
from jaxpar.ring.in_turns import InTurns
from jaxpar.ring.ways import InChunks, Stationary, Way

# Blocks that were kept are joined, contracted, while they are no longer than this together: more
# would be copied first, less is a sum of float32 for each. And no more than so many blocks.
KEPT_JOINED, KEPT_TOGETHER = 768, 4
# Passes over a block's bytes in HBM that quantizing it takes: of 16 bits, it is read twice.
QUANTIZING = 6.0
# Of the time in which gradients of weights are added up, what is not beside transfers.
GRADIENTS_SHARE = 2 / 3


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
        return turns_time(chip, flows[0], way, messages, beside=work)
    if kept and isinstance(way, InChunks):
        return _in_chunks(chip, flows[0], way, beside) + _work_on_kept(chip, flows[1], kept)
    gathered = [flow for flow in flows if flow.quantized and flow.kind == "gather" and not kept]
    ahead = sum((QUANTIZING * flow.block_bytes / chip.hbm for flow in gathered), 0.0)
    if isinstance(way, InTurns):
        return ahead + sum(turns_time(chip, flow, way, messages) for flow in flows)
    if isinstance(way, InChunks):
        return ahead + sum(_in_chunks(chip, flow, way, beside) for flow in flows)
    return ahead + _at_once(chip, flows, way, beside, kept, max(devices, way.ring.size))


def row_chunks_time(chip: Chip, flows: Sequence[Flow], size: int, chunks: int) -> float:
    """Seconds of flows, one behind the other, through which rows go in chunks."""
    work = sum((work_time(chip, flow, chunks, 0.0) for flow in flows), 0.0)
    sent = sum((collective_time(chip, flow, size) for flow in flows), 0.0)
    beside = sent * (chunks - 1) / chunks
    # Backward each chunk has gradients of all weights, which are added up: a third of three passes.
    passes = fitted_to(chip.kind).chunk_passes
    added = (chunks - 1) * sum(flow.whole for flow in flows) / chip.hbm * passes * GRADIENTS_SHARE
    starts = (chunks - 1) * len(flows) * chip.start
    return sent - beside + max(work, beside) + added + starts


def _at_once(
    chip: Chip, flows: Sequence[Flow], way: Way, beside: frozenset[str], kept: int, devices: int
) -> float:
    size = way.ring.size
    work = [work_time(chip, flow, 1, 0.0) for flow in flows]
    if kept and len(flows) > 1:
        work[1] = _work_on_kept(chip, flows[1], kept)
    sent = [collective_time(chip, flow, size) for flow in flows]
    if len(flows) < 2:
        reduces = any(flow.kind == "all-reduce" for flow in flows)
        passes = 2 / _spanned(chip, size, devices) if reduces else 1
        apart = reduces and "all-reduce" in beside  # by a SparseCore
        copied = sum(last_copy_time(chip, flow, size) for flow in flows) if apart else 0.0
        return sum(work, 0.0) + sum(sent, 0.0) * passes + copied
    # A scatter and a gather: the gather is under way while the scatter's work is done, the sums
    # leave while the gather's work is done.
    gathering = 0.0 if kept else sent[1]
    first = max(work[0], gathering) if "all-gather" in beside else work[0] + gathering
    second = max(work[1], sent[0]) if "reduce-scatter" in beside else work[1] + sent[0]
    return first + second


def _staying(chip: Chip, flow: Flow, size: int, kept: bool) -> float:
    """Seconds of a flow whose gathered operand stays, and of its sums, which stay with it."""
    if flow.kind != "gather" and not kept:
        return work_time(chip, flow, 1, 0.0) + collective_time(chip, flow, size)
    moved = flow.block_bytes + size * (flow.partners + flow.exchanged)
    computed = flow.flops / (MATMUL_SHARE * chip.flops)
    sent = collective_time(chip, replace(flow, block_bytes=flow.partners), size)
    sent += all_to_all_time(chip, flow.exchanged, size)
    return hypot(computed, moved / chip.hbm) + (sent if flow.kind == "gather" else 0.0)


def _spanned(chip: Chip, size: int, devices: int) -> int:
    """How many dimensions of the torus a ring probably spans: XLA all-reduces over all their links.

    Over one, a reduce-scatter and an all-gather follow each other. Tracing does not see where
    devices are: the slice is taken for one whose sides are as even as can be.
    """
    if chip.dimensions == 2:  # whose dimensions close where they are 16 long
        return 2 if size >= 256 else 1
    sides = [1] * max(1, chip.dimensions)
    while prod(sides) < devices:
        sides[sides.index(min(sides))] *= 2
    sides = sorted((side for side in sides if side > 1), reverse=True)
    # Those that it fills: part of one is no closed ring.
    return max([n for n in range(1, len(sides) + 1) if prod(sides[:n]) <= size], default=1)


def _in_chunks(chip: Chip, flow: Flow, way: InChunks, beside: frozenset[str]) -> float:
    chunks, comb = way.chunks, flow
    flow = flow.in_chunks(chunks)
    fit = chunks * flow.sums <= chip.vmem
    work = work_time(chip, flow, chunks, fitted_to(chip.kind).chunk_passes, kept=fit)
    sent = collective_time(chip, flow, way.ring.size)
    # Chunks are cut out of the block, or joined to it; of blocks, which lie apart, at less speed.
    copied = copy_time(chip, flow.block_bytes) if flow is comb else 2 * flow.block_bytes / chip.hbm
    rest = copied + chunks * chip.start
    rest += 2 * flow.minor / (SCATTERED_SHARE * chip.hbm)
    rest += gathered_again(chip, flow, way.ring.size)
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
    cut = copy_time(chip, flow.cut) if pieces > 1 else 0.0
    if in_turns:
        fits = 2 * flow.sums <= chip.vmem
        return cut + work_time(chip, flow, pieces, fitted.turn_passes, kept=fits)
    return cut + work_time(chip, flow, pieces, max(2.0, fitted.turn_passes))
