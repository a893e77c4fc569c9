"""What decides in the place of a model, and who wants to know what was decided.

A way is decided by the program, which names a mode; by a file of `jaxpar tune`, or a trial that
writes one; or by the model. Somebody may note each decision, with the table it was taken from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.arguments.types import Mode

AUTO = "auto"

# JAX keeps traced programs; it traces again where the value of such a context is another one.
using: Any = jax.make_user_context(default_value=None)  # what has `decide`: a file, or a trial
imposing: Any = jax.make_user_context(default_value=None)  # a trial that has `imposed` a mode
notes: Any = jax.make_user_context(default_value=None)  # `Notes`, where somebody wants to know


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


def decide(asked: Asked) -> Any:
    """Returns the way of a part of a site, `auto` where nothing was tried out."""
    return AUTO if using.value is None else using.value.decide(asked)


def imposed() -> Mode | None:
    """Returns the mode that is tried in the place of all others; None: no mode is."""
    trial = imposing.value
    if trial is None:
        return None
    trial.met = True
    mode: Mode | None = trial.imposed
    return mode


def is_tuning() -> bool:
    """Whether anything is to be decided by what was tried out, or is being tried out."""
    return using.value is not None
