"""When blocks are better joined than added one by one, and when they are kept."""

from collections.abc import Sequence

from jaxpar.axis.axis import Ring
from jaxpar.mesh.chips import traced_chip
from jaxpar.ring.costs import KEPT_JOINED, KEPT_TOGETHER, joins


def joining_is_cheaper(length: int) -> bool:
    """Whether two blocks of `length` are better joined along it, contracted, than added."""
    chip = traced_chip()
    return chip is not None and joins(chip, length)


def may_keep(ring: Ring) -> bool:
    """Whether a matmul may keep what it gathered for a derivative of its own, whatever its ways.

    `auto` on a TPU alone: a GPU adds sums in passes of their own, and gathers again beside other
    work (8192x8192x28672 over 8 H100: 1510 us, 1770 by what was kept).
    """
    if ring.keep_gathered is not None:
        return ring.keep_gathered
    chip = traced_chip()
    return ring.mode == "auto" and chip is not None and chip.torus


def joins_kept(lengths: Sequence[int]) -> bool:
    """Whether blocks that were kept, of these lengths, are better joined with one more."""
    chip = traced_chip()
    few = len(lengths) < KEPT_TOGETHER and sum(lengths) <= KEPT_JOINED
    return chip is not None and chip.torus and few
