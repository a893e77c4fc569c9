"""What was started and is not done, and which of it an instruction uses or ends."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxpar.tools.program.operations import Collective, Copy, Done, Operation

Held = TypeVar("Held")


@dataclass(eq=False)
class Open(Generic[Held]):
    """A collective or copy that was started and is not done."""

    start: Collective | Copy
    event: Held
    covers: list[str] = field(default_factory=list[str])


class UnderWay(Generic[Held]):
    """All that was started and is not done, in the order of their starts.

    A loop can start one again before it waits for the one of the trip before.
    """

    def __init__(self) -> None:
        self.open: list[Open[Held]] = []

    def begin(self, start: Collective | Copy, event: Held) -> None:
        """Takes one in."""
        self.open.append(Open(start, event))

    def end(self, done: Done) -> Open[Held] | None:
        """Takes out what an instruction waits for, None if it is not known.

        Without one that it uses, what a loop carries is meant: the oldest that such a done ends.
        """
        carried = (one for one in self.open if one.start.pair == done.pair)
        found = self.used(done) or next(carried, None)
        if found is not None:
            self.open.remove(found)
        return found

    def has(self, collective: Collective) -> bool:
        """Whether it is no collective of its own, but what computes beside one that has started."""
        found = self.used(collective) if collective.is_fused else None
        return (
            found is not None
            and isinstance(found.start, Collective)
            and found.start.message == collective.message
        )

    def used(self, operation: Operation) -> Open[Held] | None:
        """Of what is under way, what an operation uses: an operand, or what that is part of."""
        seen: set[Operation] = set()
        operands = deque(operation.operands)
        while operands:
            operand = operands.popleft()
            if operand in seen:
                continue
            for one in reversed(self.open):
                if one.start is operand:
                    return one
            seen.add(operand)
            operands += operand.operands
        return None
