"""What decides in the place of a model, and who wants to know what was decided.

A way is decided by the program, which names a mode; by a file of `jaxpar tune`, or a trial that
writes one; or by the model. `noting` notes each decision with the table that it was taken from.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxpar.arguments.calls import value_error
from jaxpar.arguments.types import Mode

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem

AUTO = "auto"

# What is decided at a call site: for each part of it, such as its forward pass, a way.
Choices = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Asked:
    """A decision that a program asks for: the part of a site, and what there is to choose from.

    Attributes:
      size: how large the operands are, to try the largest first.
    """

    site: str
    part: str
    ways: tuple[str, ...]
    size: int = 0


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

    def way(self, decision: Asked) -> str:
        """Returns what is tried here."""
        self.asked.setdefault((decision.site, decision.part), decision)
        return self.choices.get(decision.site, {}).get(decision.part, AUTO)


# JAX keeps traced programs; it traces again where the value of such a context is another one.
using: Any = jax.make_user_context(default_value=None)


@contextmanager
def trying(trial: Trial) -> Generator[None]:
    """Has what is traced here take the ways of a trial, whatever `tuned` says inside."""
    with using(trial):
        yield


def decide(site: str, part: str, ways: Sequence[str], size: int = 0) -> str:
    """Returns the way of a part of a site, `auto` where nothing was tried out."""
    found = using.value
    if found is None:
        return AUTO
    if isinstance(found, Trial):
        return found.way(Asked(site, part, tuple(ways), size))
    way = found.way(site, part)
    if way != AUTO and way not in ways:
        known = ", ".join((*ways, AUTO))
        raise value_error(
            f"{found.name} has {way!r} for the {part} of {site!r}; write one of {known}"
        )
    return way


def imposed() -> Mode | None:
    """Returns the mode that is tried in the place of all others; None: no mode is."""
    found = using.value
    if not isinstance(found, Trial) or found.imposed is None:
        return None
    found.met = True
    return found.imposed


def is_tuning() -> bool:
    """Whether anything is to be decided by what was tried out, or is being tried out."""
    return using.value is not None


def is_trying() -> bool:
    """Whether ways are being tried out."""
    return isinstance(using.value, Trial)


@dataclass(frozen=True)
class WayRow:
    """A way in the table of a decision.

    Attributes:
      way: its name.
      seconds: that it is predicted to take; None: nothing is predicted of it.
      out: why it may not be taken; "" if it may.
    """

    way: str
    seconds: float | None = None
    out: str = ""


@dataclass(frozen=True)
class Decision:
    """What was decided of a part of a call site, and what there was to choose from.

    Attributes:
      problem: of the site.
      part: such as "forward".
      rows: of all ways.
      taken: the way that was taken.
      tuned: whether a file of `jaxpar tune` says so.
      frames: of the stack that asked, the innermost last: file, line and function.
    """

    problem: Problem
    part: str
    rows: tuple[WayRow, ...]
    taken: str
    tuned: bool = False
    frames: tuple[tuple[str, int, str], ...] = ()

    @property
    def asked(self) -> str:
        """The way that the program names, "auto" where it names none."""
        ring = self.problem.ring
        return (ring.backward or ring.mode) if self.part == "backward" else ring.mode


@dataclass(eq=False)
class Notes:
    """The decisions of what is traced."""

    decisions: list[Decision] = field(default_factory=list[Decision])


# JAX traces again where the value of such a context is another one.
_notes: Any = jax.make_user_context(default_value=None)


@contextmanager
def noting() -> Generator[Notes]:
    """Notes the decisions of what is traced here, each with its table."""
    notes = Notes()
    with _notes(notes):
        yield notes


def note(decisions: Callable[[], Iterable[Decision]]) -> None:
    """Notes decisions, which are made out only where somebody wants to know."""
    notes: Notes | None = _notes.value
    if notes is not None:
        stack = traceback.extract_stack()
        frames = tuple((f.filename, f.lineno or 0, f.name) for f in stack)
        notes.decisions += [replace(found, frames=frames) for found in decisions()]
