"""A link that all messages under way share equally, as DMA engines share that to the host."""

from collections.abc import Hashable


class SharedLink:
    """When each message has arrived; seconds, bytes."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now = 0.0
        self.left: dict[Hashable, float] = {}  # bytes of each message that is under way
        self.arrived: dict[Hashable, float] = {}

    def begin(self, message: Hashable, size: float, at: float) -> None:
        """Takes in a message; none comes in later that has begun before it."""
        while self.left and (arrives := self._next_arrival()) <= at:
            self._go_on(arrives)
        self._go_on(max(self.now, at))
        self.left[message] = size

    def end(self, message: Hashable) -> float:
        """When a message arrives, if none comes in until then."""
        while message in self.left:
            self._go_on(self._next_arrival())
        return self.arrived.pop(message)

    def _next_arrival(self) -> float:
        return self.now + min(self.left.values()) * len(self.left) / self.speed

    def _go_on(self, until: float) -> None:
        sent = (until - self.now) * self.speed / max(len(self.left), 1)
        self.now = until
        for message, size in list(self.left.items()):
            self.left[message] = size - sent
            if size - sent <= 1e-6 * size:  # of rounding
                del self.left[message]
                self.arrived[message] = until
