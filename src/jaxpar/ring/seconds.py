"""Flows: the work of a device beside which blocks come or sums leave, and its seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from jaxpar.mesh.chips import PERMUTE_STARTS, REACHED, Chip, traced_chip

# Where pieces are placed by a pass of its own, of rows whose parts lie apart in memory.
SCATTERED_SHARE = 0.2

LANES = 128  # of a TPU's registers, along the last dimension

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
      unaligned: bytes, of those, of results in which no matmul places chunks by itself: of a last
        dimension that is no whole number of lanes, or where what travels has the label last.
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
    unaligned: int = 0
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


# Of peak, what large matmuls reach.
MATMUL_SHARE = 0.9
# Of a GPU's link, what large collectives reach, and permutes of more than so many bytes; smaller
# permutes reach so many bytes per second. XLA's own tables of H100 and B200 have it so.
PORT_SHARE, SMALL, SMALL_PERMUTE = 0.7, 2**26, 7.5e10
# Seconds of an instruction of its own that cuts, joins or lays out, and of a step of a loop.
INSTRUCTION = 1e-6
# Blocks that were kept are joined, contracted, while they are no longer than this together: more
# would be copied first, less is a sum of float32 for each. And no more than so many blocks.
KEPT_JOINED, KEPT_TOGETHER = 768, 4
# What another way than a collective is predicted to take must be less than this share of that.
MARGIN = 0.96
# Passes over a block's bytes in HBM that quantizing it takes: of 16 bits, it is read twice.
QUANTIZING = 6.0


@dataclass(frozen=True)
class Fitted:
    """The figures of one kind of chip.

    Attributes:
      within: of a copy of what stays, how much longer a matmul takes that cuts it by itself.
      step_passes: how often sums of float32 are read and written for each piece, apart from the
        matmul, in steps; not at all where the compiler adds in its epilogue at full speed.
      chunk_passes: the same in chunks.
      piece: seconds that one more piece of work costs beyond what it computes, reads and writes.
      resident: the share of VMEM that keeps an operand; what is beyond it is read for each piece.
    """

    within: float = 0.0
    step_passes: float = 0.0
    chunk_passes: float = 0.0
    piece: float = 3e-6
    resident: float = 0.3


_OTHERS = Fitted(chunk_passes=2.0)
BY_KIND = {
    "TPU v5 lite": Fitted(step_passes=2.0, chunk_passes=0.25),
    "TPU v5": Fitted(within=0.5, piece=1.8e-6),
    "TPU v6 lite": Fitted(step_passes=1.0, chunk_passes=1.0, piece=4.2e-6, resident=0.5),
    "TPU7x": Fitted(step_passes=1.0, chunk_passes=1.0),
}


def fitted_to(kind: str) -> Fitted:
    """Returns the figures of a kind of chip, those of most where none were fitted to it."""
    return BY_KIND.get(kind, _OTHERS)


def work_time(chip: Chip, flow: Flow, pieces: int, passes: float, *, kept: bool = False) -> float:
    """Seconds of all pieces: of each its FLOPs, or what it reads and writes, and what it adds to.

    Near the ridge of the roofline neither is hidden by the other: hence the root of squares. Sums
    are read and written again for each piece: in `passes` of their own, in the matmul's epilogue
    where there are none, or not at all where they are `kept` on the chip until the last piece.
    """
    computed = flow.flops / (MATMUL_SHARE * chip.flops)
    beyond = max(0.0, flow.whole - fitted_to(chip.kind).resident * chip.vmem)
    again = 0.0 if kept else 2.0 * (pieces - 1) * flow.sums
    moved = flow.whole + (pieces - 1) * beyond + flow.shared + flow.sums
    work = hypot(computed, moved / chip.hbm)
    added = again * passes / chip.hbm
    return max(work, (moved + again) / chip.hbm) + added + (pieces - 1) * fitted_to(chip.kind).piece


def joins(chip: Chip, length: int, sums: float, cuts_first: bool) -> bool:
    """Whether blocks of `length` are better joined along it, contracted, and multiplied once.

    A sum of M x N float32 is read and written, 8 M N bytes, while 2 M N `length` FLOPs run. Beyond
    half of their time joining is cheaper on a TPU. But it copies what blocks are multiplied by, if
    that is not cut first anyway. That is not worth it where `sums`, in bytes, stay on the chip.
    """
    adds = cuts_first or 2 * sums > chip.vmem
    return chip.torus and 8 * chip.flops / chip.hbm > length and adds


def collective_time(chip: Chip, flow: Flow, size: int, messages: int = 1) -> float:
    """Seconds of a collective by itself, where so many messages share each link of a torus."""
    if flow.quantized and flow.kind == "scatter":  # sums that nothing adds on their way
        return all_to_all_time(chip, size * flow.block_bytes, size)
    if not chip.torus:
        return (size - 1) * (flow.block_bytes / (PORT_SHARE * chip.link) + chip.latency)
    sent = messages * flow.block_bytes
    return chip.start + (size - 1) / 2 * (sent / chip.link + chip.latency)


def hop_time(chip: Chip, sent: float) -> float:
    """Seconds in which a permute brings so many bytes to a neighbour."""
    if not chip.torus:
        reached = PORT_SHARE * chip.link
        return sent / (min(SMALL_PERMUTE, reached) if sent <= SMALL else reached) + chip.latency
    return sent / chip.link + PERMUTE_STARTS * chip.start + chip.latency


def all_to_all_time(chip: Chip, sent: float, size: int) -> float:
    """Seconds in which one device's bytes go all to all."""
    # A byte crosses a quarter of the ring on average, one way or the other.
    around = size / 8 if chip.torus else 1.0
    return chip.start + sent * around / chip.link + size / 2 * chip.latency


def gathered_again(chip: Chip, flow: Flow, size: int, messages: int) -> float:
    """Seconds in which sums that all devices need are gathered again."""
    if flow.kind != "all-reduce":
        return 0.0
    return collective_time(chip, flow, size, messages) + last_copy_time(chip, flow, size)


def last_copy_time(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds in which what all devices have at the end becomes the result of a program."""
    return copy_time(chip, size * flow.block_bytes) if chip.torus else 0.0


def copy_time(chip: Chip, size: float) -> float:
    """Seconds to read and write so many bytes in a pass of its own."""
    return 2 * size / (REACHED * chip.hbm)


def quantizing_time(chip: Chip, flows: Sequence[Flow]) -> float:
    """Seconds in which the blocks of gathers are quantized, before any of them leaves."""
    gathered = [flow for flow in flows if flow.quantized and flow.kind == "gather"]
    return sum((QUANTIZING * flow.block_bytes / chip.hbm for flow in gathered), 0.0)


def work_on_kept(
    chip: Chip, flow: Flow, kept: int, parts: int = 1, *, stepwise: bool = False
) -> float:
    """Seconds of the work on what was gathered before, in so many blocks, or a whole in `parts`.

    In steps sums stay in VMEM if they fit.
    """
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
    """Whether two blocks of `length` are better joined along it, contracted, than added."""
    from jaxpar.ring.order import traced_order  # there already, where two blocks come at once

    chip = traced_chip()
    return chip is not None and joins(chip, length, sums, traced_order().cuts_first)
