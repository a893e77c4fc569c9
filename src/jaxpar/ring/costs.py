"""What every way is made of: seconds of work in pieces, of collectives and of copies."""

from math import hypot

from jaxpar.ring.fitted import fitted_to
from jaxpar.ring.flow import Flow
from jaxpar.mesh.chips import PERMUTE_STARTS, REACHED, Chip

# Of peak, what large matmuls reach.
MATMUL_SHARE = 0.9
# Of a GPU's link, what large collectives reach, and permutes of more than so many bytes; smaller
# permutes reach so many bytes per second. XLA's own tables of H100 and B200 have it so.
PORT_SHARE, SMALL, SMALL_PERMUTE = 0.7, 2**26, 7.5e10
# How much faster than from HBM each piece feeds an operand from VMEM to the matrix units, however
# few rows it multiplies.
VMEM_SPEED = 3.5


def work_time(chip: Chip, flow: Flow, pieces: int, passes: float, *, kept: bool = False) -> float:
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


def joins(chip: Chip, length: int) -> bool:
    """Whether blocks of `length` are better joined along it, contracted, and multiplied once.

    A sum of M x N float32 is read and written, 8 M N bytes, while 2 M N `length` FLOPs run. Beyond
    half of their time joining is cheaper, where a compiler joins for nothing, within the matmul
    (TPU).
    """
    return chip.torus and 8 * chip.flops / chip.hbm > length


def collective_time(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds of a collective by itself: both ways round a torus, through the port of a GPU."""
    if flow.quantized and flow.kind == "scatter":  # sums that nothing adds on their way
        return all_to_all_time(chip, size * flow.block_bytes, size)
    if not chip.torus:
        return (size - 1) * (flow.block_bytes / (PORT_SHARE * chip.link) + chip.latency)
    return chip.start + (size - 1) / 2 * (flow.block_bytes / chip.link + chip.latency)


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


def gathered_again(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds in which sums that all devices need are gathered again."""
    if flow.kind != "all-reduce":
        return 0.0
    return collective_time(chip, flow, size) + last_copy_time(chip, flow, size)


def last_copy_time(chip: Chip, flow: Flow, size: int) -> float:
    """Seconds in which what all devices have at the end becomes the result of a program."""
    return copy_time(chip, size * flow.block_bytes) if chip.torus else 0.0


def copy_time(chip: Chip, size: float) -> float:
    """Seconds to read and write so many bytes in a pass of its own."""
    return 2 * size / (REACHED * chip.hbm)
