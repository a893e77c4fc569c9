"""How many rows static buffers need: of the worst case, or a multiple of the average."""

from dataclasses import dataclass
from math import ceil, comb


@dataclass(frozen=True)
class Bounds:
    """Static sizes: of the devices and experts, and of what limits the buffers."""

    devices: int  # over which experts are sharded
    experts: int  # real ones, without padding
    local: int  # experts of a device, padding included
    top_k: int
    capacity: int | None  # tokens of one device that one expert takes at most; None: all
    buffer_factor: float | None  # buffers of this multiple of the average; None: of the worst case

    def rows(self, tokens: int) -> int:
        """Tokens that arrive at a device, of `tokens` on each."""
        worst = self.devices * min(tokens, self._from_device(tokens))
        return self._limit(worst, tokens * self.targets)

    def pairs(self, tokens: int, sources: int, rows: int) -> int:
        """Pairs of a token and an expert of this device, of `rows` tokens of `sources` devices."""
        worst = min(rows * min(self.top_k, self.local), sources * self._from_device(tokens))
        share = min(self.local, self.experts) / self.experts  # of a device that is full of experts
        return self._limit(worst, tokens * sources * self.top_k * share)

    @property
    def targets(self) -> float:
        """Distinct devices that a token needs, on average, where each expert is as likely."""
        missed = comb(self.experts - min(self.local, self.experts), self.top_k)
        return self.devices * (1 - missed / comb(self.experts, self.top_k))

    @property
    def needed(self) -> float:
        """Distinct devices that have experts and that a token needs, on average."""
        full = -(-self.experts // self.local)
        return self.targets * full / self.devices

    def _from_device(self, tokens: int) -> int:
        """Pairs that the tokens of one device make with the experts of another, at most."""
        capacity = tokens if self.capacity is None else min(tokens, self.capacity)
        return min(tokens * min(self.top_k, self.local), capacity * self.local)

    def _limit(self, worst: int, average: float) -> int:
        if self.buffer_factor is None:
            return worst
        return min(worst, ceil(self.buffer_factor * average))
