"""Ways that are tried out in the place of what a model would take."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxpar.arguments.types import Mode
from jaxpar.choose.sites import AUTO, Asked, imposing, using

# What is decided at a call site: for each part of it, such as its forward pass, a way.
Choices = Mapping[str, Mapping[str, str]]


@dataclass(eq=False)
class Trial:
    """Ways that are tried out, `auto` for the rest; and what a program asks for meanwhile.

    Attributes:
      imposed: a mode that is tried in the place of all others, of those that are named, too.
      met: whether the program has anything that it was imposed on.
    """

    choices: Choices
    asked: dict[tuple[str, str], Asked] = field(default_factory=dict[tuple[str, str], Asked])
    imposed: Mode | None = None
    met: bool = False

    def decide(self, asked: Asked) -> str:
        """Returns what is tried here."""
        self.asked.setdefault((asked.site, asked.part), asked)
        return self.choices.get(asked.site, {}).get(asked.part, AUTO)


@contextmanager
def trying(trial: Trial) -> Generator[None]:
    """Has what is traced here take the ways of a trial, whatever `tuned` says inside."""
    with using(trial), imposing(None if trial.imposed is None else trial):
        yield


def is_trying() -> bool:
    """Whether ways are being tried out."""
    return isinstance(using.value, Trial)
