"""Events of a timeline."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "transfer", "copy", "wait"]


@dataclass(frozen=True)
class Event:
    """An interval on one row of a timeline.

    `kind` is `compute`, `transfer` (a collective), `copy` (between memories) or `wait` (nothing
    computes until a transfer or a copy arrives).

    Example:
      >>> Event("dot.1", "jit(f)/dot_general", "compute", "compute", 0.0, 2e-6).seconds
      2e-06
    """

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program
    kind: Kind
    row: str  # "compute", or where a copy or a transfer goes, such as "memory" or "tp +1"
    start: float  # seconds
    end: float
    bytes: float = 0.0  # sent by one device
    synchronous: bool = False  # a transfer that no other work overlaps with
    covers: tuple[str, ...] = ()  # matmuls between a transfer's start and its done
    is_matmul: bool = False
    queued: float = 0.0  # seconds for which a transfer's links were busy
    latency: float = 0.0  # seconds of a transfer besides those of its bytes
    links: float = 0.0  # how many a device sends a transfer over, on average

    @property
    def seconds(self) -> float:
        """Returns the length of the interval."""
        return self.end - self.start
