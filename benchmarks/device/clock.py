"""A run's own clock: how long it may take, and when each part of it has to be done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate


class Clock:
    """Deadlines of parts that follow each other: what one leaves over, the next ones have."""

    def __init__(self, start: float, seconds: float, shares: Mapping[str, float]) -> None:
        """Takes when the run began (`time.monotonic`), its seconds, and the share of each part."""
        self.start, whole = start, sum(shares.values())
        ends = accumulate(shares.values())
        self.deadlines = {
            part: start + seconds * end / whole for part, end in zip(shares, ends, strict=True)
        }

    def left(self, part: str) -> float:
        """Seconds until a part has to be done."""
        return self.deadlines[part] - time.monotonic()

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.start
