"""Trials: programs traced with other algorithms than the model's."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxpar.arguments.types import Mode
from jaxpar.choose.sites import AUTO, Asked, imposing, using

# For each call site, and each part of it (such as its forward pass), the algorithm.
Choices = Mapping[str, Mapping[str, str]]


@dataclass(eq=False)
class Trial:
    """Algorithms to try, and the decisions that a program asks for meanwhile."""

    choices: Choices
    asked: dict[tuple[str, str], Asked] = field(default_factory=dict[tuple[str, str], Asked])
    imposed: Mode | None = None  # a mode that replaces all others
    met: bool = False  # whether the program has a site for it

    def decide(self, asked: Asked) -> str:
        self.asked.setdefault((asked.site, asked.part), asked)
        return self.choices.get(asked.site, {}).get(asked.part, AUTO)


@contextmanager
def trying(trial: Trial) -> Generator[None]:
    """Traces with a trial's algorithms; `tuned` inside has no effect."""
    with using(trial), imposing(None if trial.imposed is None else trial):
        yield


def is_trying() -> bool:
    return isinstance(using.value, Trial)
