"""Events of a timeline."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["compute", "transfer", "copy", "wait"]


@dataclass(frozen=True)
class Event:
    """An interval on a row of a timeline.

    Attributes:
      name: the HLO instruction.
      op: the operation of the traced program.
      kind: `"compute"`, `"transfer"` (a collective), `"copy"` (between memories) or `"wait"`
        (nothing computes until a transfer or a copy arrives).
      row: `"compute"`, or where a copy or transfer goes, as `"memory"` or `"tp +1"`; `(DCN)` marks
        the network between TPU slices.
      start: seconds from the start of the run.
      end: likewise.
      bytes: bytes that a device sends.
      synchronous: whether no other work overlaps with it.
      covers: matmuls between a transfer's start and done.
      is_matmul: whether it is a matmul.
      queued: seconds for which a transfer's links were busy.
      latency: a transfer's seconds besides those of its bytes.
      links: a transfer's mean number of links per device.
      slow: whether a transfer goes over the network between slices, or hosts of GPUs.

    Example:
      >>> Event("dot.1", "jit(f)/dot_general", "compute", "compute", 0.0, 2e-6).seconds
      2e-06
    """

    name: str
    op: str
    kind: Kind
    row: str
    start: float
    end: float
    bytes: float = 0.0
    synchronous: bool = False
    covers: tuple[str, ...] = ()
    is_matmul: bool = False
    queued: float = 0.0
    latency: float = 0.0
    links: float = 0.0
    slow: bool = False

    @property
    def seconds(self) -> float:
        """Returns the length of the interval."""
        return self.end - self.start


# How `jaxpar.pipeline` names its passes.
_PASSES = re.compile(r"/passes\[bubble=([0-9.]+)\]/")


@cache
def idle_share(op: str) -> float:
    """Returns the share of an operation's runs that idle devices of a pipeline do."""
    match = _PASSES.search(op)
    return float(match[1]) if match else 0.0
