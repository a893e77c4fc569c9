"""One interval on one row of a timeline."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "transfer", "copy", "wait"]


@dataclass(frozen=True)
class Event:
    """One interval on one row of the timeline.

    `kind` is `compute`; `transfer`, of a collective; `copy`, between the memories of the chip; or
    `wait`, when nothing computes because a transfer or a copy has not arrived.

    Example:
      >>> Event("dot.1", "jit(f)/dot_general", "compute", "compute", 0.0, 2e-6).seconds
      2e-06
    """

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program it comes from
    kind: Kind
    row: str  # "compute", "memory", or where a transfer goes, such as "tp +1"
    start: float  # seconds
    end: float
    bytes: float = 0.0  # that one device sends
    synchronous: bool = False  # of a transfer: nothing can run beside it
    covers: tuple[str, ...] = ()  # of a transfer: the matmuls between its start and its done
    is_matmul: bool = False
    queued: float = 0.0  # of a transfer: seconds for which its links were not free
    latency: float = 0.0  # of a transfer: seconds of it that no smaller message takes less of
    links: float = 0.0  # of a transfer: how many a device sends it over, in the mean

    @property
    def seconds(self) -> float:
        """The length of the interval."""
        return self.end - self.start
