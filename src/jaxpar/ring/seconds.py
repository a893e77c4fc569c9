"""Flows, and the cost model that predicts their seconds.

A flow is a device's work that overlaps with arriving blocks or leaving sums. Times: seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from jaxpar.platforms.chips import PERMUTE_STARTS, REACHED, Chip, fitted_to, traced_chip

# Share of HBM bandwidth of a pass that places pieces whose rows lie apart in memory.
SCATTERED_SHARE = 0.2

LANES = 128  # size of a TPU's registers along the last dimension

FlowKind = Literal["gather", "scatter", "all-reduce"]


@dataclass(frozen=True)
class Flow:
    """One device's work and what it sends or receives meanwhile. Sizes are in bytes."""

    kind: FlowKind
    flops: float = 0.0
    block_bytes: int = 0  # of a block on the wire
    whole: int = 0  # read by every piece, such as a weight
    shared: int = 0  # each piece has its share
    sums: int = 0  # every piece adds to them
    minor: int = 0  # part of `shared` that is split along the last dimension
    cut: int = 0  # part of `shared` in operands that are cut for each piece
    sliced: int = 0  # part of `cut` that is cut along the last dimension
    partners: int = 0  # travels, per device, if the gathered operand stays
    exchanged: int = 0  # then goes all to all, per device
    # part of `shared` in results into which no matmul writes chunks: their last dimension is no
    # multiple of the lanes, or the travelling array ends with the label
    unaligned: int = 0
    quantized: bool = False
    along: str = ""  # the label that is cut
    length: int = 0  # of this label in the full array; 0: unknown
    across: tuple["Flow", ...] = ()  # the same work, cut along other labels

    def in_chunks(self, chunks: int) -> "Flow":
        """Returns the flow whose chunks move the fewest bytes."""
        even = [flow for flow in self.across if flow.length % chunks == 0]
        return min((*even, self), key=lambda flow: flow._moved_by(chunks, flow is self))

    def _moved_by(self, chunks: int, comb: bool) -> float:
        # Along the ring's label, each block has a part of every chunk. The parts lie apart, and are
        # cut and placed with blocks as a dimension of their own.
        apart = self.shared + 2 * self.minor / SCATTERED_SHARE if comb else 0.0
        return (chunks - 1) * (self.whole + 2.5 * self.sums) + apart


# Share of peak that large matmuls reach.
MATMUL_SHARE = 0.9
# Share of a GPU's link that large collectives reach, and permutes of more than SMALL bytes. Smaller
# permutes reach SMALL_PERMUTE bytes per second. Source: XLA's tables of H100 and B200.
PORT_SHARE, SMALL, SMALL_PERMUTE = 0.7, 2**26, 7.5e10
# Seconds of a separate instruction that cuts, joins or lays out, and of a step in a loop.
INSTRUCTION = 1e-6
# Saved blocks are joined, contracted, up to this length together, and up to so many blocks. Longer
# ones would be copied first. Shorter ones need a float32 sum for each block.
KEPT_JOINED, KEPT_TOGETHER = 768, 4
# Another algorithm is chosen only if its predicted time is below this share of a collective's.
MARGIN = 0.96
# Passes over a block's bytes in HBM to quantize it. A block of 16 bits is read twice.
QUANTIZING = 6.0


def work_time(chip: Chip, flow: Flow, pieces: int, passes: float, *, kept: bool = False) -> float:
    """Predicts the time of all pieces, by a roofline."""
    # Near the ridge neither FLOPs nor bytes hide the other, hence the root of squares. Sums take
    # `passes`: 0 in the matmul's epilogue, none if `kept` on the chip.
    computed = flow.flops / (MATMUL_SHARE * chip.flops)
    beyond = max(0.0, flow.whole - fitted_to(chip.kind).resident * chip.vmem)
    again = 0.0 if kept else 2.0 * (pieces - 1) * flow.sums
    moved = flow.whole + (pieces - 1) * beyond + flow.shared + flow.sums
    work = hypot(computed, moved / chip.hbm)
    added = again * passes / chip.hbm
    return max(work, (moved + again) / chip.hbm) + added + (pieces - 1) * fitted_to(chip.kind).piece


def joins(chip: Chip, length: int, sums: float, cuts_first: bool) -> bool:
    """Returns whether to join blocks of `length`, and multiply them once."""
    # Adding an M x N float32 sum moves 8 M N bytes during 2 M N `length` FLOPs. On a TPU, joining
    # is cheaper if this takes over half of their time. It copies the other operand, unless
    # `cuts_first`. Small `sums`, in bytes, stay on the chip.
    adds = cuts_first or 2 * sums > chip.vmem
    return chip.torus and 8 * chip.flops / chip.hbm > length and adds


def collective_time(chip: Chip, flow: Flow, size: int, messages: int = 1) -> float:
    """Predicts a collective's seconds; `messages` share each torus link."""
    if flow.quantized and flow.kind == "scatter":  # no collective adds quantized sums
        return all_to_all_time(chip, size * flow.block_bytes, size)
    if not chip.torus:
        return (size - 1) * (flow.block_bytes / (PORT_SHARE * chip.link) + chip.latency)
    sent = messages * flow.block_bytes
    return chip.start + (size - 1) / 2 * (sent / chip.link + chip.latency)


def hop_time(chip: Chip, sent: float) -> float:
    if not chip.torus:
        reached = PORT_SHARE * chip.link
        return sent / (min(SMALL_PERMUTE, reached) if sent <= SMALL else reached) + chip.latency
    return sent / chip.link + PERMUTE_STARTS * chip.start + chip.latency


def all_to_all_time(chip: Chip, sent: float, size: int) -> float:
    # A byte crosses a quarter of the ring on average, in one of two directions.
    around = size / 8 if chip.torus else 1.0
    return chip.start + sent * around / chip.link + size / 2 * chip.latency


def gathered_again(chip: Chip, flow: Flow, size: int, messages: int) -> float:
    if flow.kind != "all-reduce":
        return 0.0
    return collective_time(chip, flow, size, messages) + last_copy_time(chip, flow, size)


def last_copy_time(chip: Chip, flow: Flow, size: int) -> float:
    return copy_time(chip, size * flow.block_bytes) if chip.torus else 0.0


def copy_time(chip: Chip, size: float) -> float:
    return 2 * size / (REACHED * chip.hbm)


def quantizing_time(chip: Chip, flows: Sequence[Flow]) -> float:
    gathered = [flow for flow in flows if flow.quantized and flow.kind == "gather"]
    return sum((QUANTIZING * flow.block_bytes / chip.hbm for flow in gathered), 0.0)


def work_on_kept(
    chip: Chip, flow: Flow, kept: int, parts: int = 1, *, stepwise: bool = False
) -> float:
    pieces, fitted = parts if kept == 1 else kept, fitted_to(chip.kind)
    if kept > 1 and flow.sums:
        joined = KEPT_JOINED // max(1, flow.length // kept) + 1
        pieces = -(-kept // min(joined, KEPT_TOGETHER))
    cut = copy_time(chip, flow.cut) if pieces > 1 else 0.0
    if stepwise:
        fits = 2 * flow.sums <= chip.vmem
        return cut + work_time(chip, flow, pieces, fitted.step_passes, kept=fits)
    return cut + work_time(chip, flow, pieces, max(2.0, fitted.step_passes))


def joining_is_cheaper(length: int, sums: int) -> bool:
    """Returns whether to join two blocks; see `joins`."""
    from jaxpar.ring.order import traced_order  # already loaded if two blocks arrive at once

    chip = traced_chip()
    return chip is not None and joins(chip, length, sums, traced_order().cuts_first)
