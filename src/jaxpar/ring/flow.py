"""A flow: the work of one device beside which blocks come or sums leave, in bytes and FLOPs."""

from dataclasses import dataclass
from typing import Literal

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
      unaligned: bytes, of those that are shared, of results whose last dimension is no whole number
        of lanes: what chunks place in them is not placed by the matmul.
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
