"""Started collectives and copies that are not done."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jaxpar.tools.program.operations import Collective, Copy, Done, Operation

Held = TypeVar("Held")


@dataclass(eq=False)
class Open(Generic[Held]):
    start: Collective | Copy
    event: Held
    covers: list[str] = field(default_factory=list[str])


class UnderWay(Generic[Held]):
    # A loop may start a transfer again before it waits for the previous iteration's.
    def __init__(self) -> None:
        self.open: list[Open[Held]] = []

    def clone(self) -> "UnderWay[Held]":
        other = UnderWay[Held]()
        other.open = [Open(begun.start, begun.event, list(begun.covers)) for begun in self.open]
        return other

    def begin(self, start: Collective | Copy, event: Held) -> None:
        self.open.append(Open(start, event))

    def end(self, done: Done) -> Open[Held] | None:
        """Removes and returns the start that a done waits for, or None.

        If the done uses no open start, a loop carries it: the oldest with the same `pair` counts.
        """
        carried = (begun for begun in self.open if begun.start.pair == done.pair)
        begun = self.used(done) or next(carried, None)
        if begun is not None:
            self.open.remove(begun)
        return begun

    def has(self, collective: Collective) -> bool:
        """Returns whether an open start contains this collective."""
        begun = self.used(collective) if collective.is_fused else None
        return (
            begun is not None
            and isinstance(begun.start, Collective)
            and begun.start.message == collective.message
        )

    def used(self, operation: Operation) -> Open[Held] | None:
        seen: set[Operation] = set()
        operands = deque(operation.operands)
        while operands:
            operand = operands.popleft()
            if operand in seen:
                continue
            for begun in reversed(self.open):
                if begun.start is operand:
                    return begun
            seen.add(operand)
            operands += operand.operands
        return None
