"""The error of a layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.arguments.calls import called, readable

SHOWN = 40  # kinds of problems in an error's text

# Numbers of layers in paths and tensor names. Problems that differ only in them are one kind.
_NUMBERS = re.compile(r"\d+(?=/|'|:)|(?<=\.)\d+(?=\.)")


@readable
@dataclass(frozen=True)
class LayoutProblem:
    """An array, rule or mesh axis that does not fit.

    Attributes:
      path: the array's path, or None.
      rule: the rule's key, or None.
      text: the problem, with its numbers.
      remedy: the edit.

    Example:
      >>> print(LayoutProblem("w", "w", "'w' float32[6]: 'tp' (4) does not divide it", "pad it"))
      'w' float32[6]: 'tp' (4) does not divide it; pad it
    """

    path: str | None
    rule: str | None
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


@readable
class LayoutError(ValueError):
    """A refusal with all problems.

    Attributes:
      problems: a tuple of `LayoutProblem`: arrays in the pytree's order, then rules, then axes.

    Example:
      >>> try:
      ...     LayoutMap({}).layout({"w": jnp.ones((2, 4))}, make_mesh("tp=8"))
      ... except LayoutError as error:
      ...     print(error.problems[0].remedy)
      add one, 'w': REPLICATED holds all 32 B on each device
    """

    def __init__(self, where: str, problems: Sequence[LayoutProblem]) -> None:
        self.problems = tuple(problems)
        alike: dict[str, list[LayoutProblem]] = {}  # layers with the same problem are shown once
        for problem in problems:
            alike.setdefault(_NUMBERS.sub("#", str(problem)), []).append(problem)
        lines = [
            f"  {group[0]}" + (f" (and {len(group) - 1} more like it)" if len(group) > 1 else "")
            for group in list(alike.values())[:SHOWN]
        ]
        if len(alike) > SHOWN:
            lines.append(f"  ... and {len(alike) - SHOWN} kinds more, in `problems` of this error")
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        super().__init__(f"{where}: {count}:\n" + "\n".join(lines))


def refuse(problems: Sequence[LayoutProblem]) -> None:
    if problems:
        raise LayoutError(called(), problems)


def shape_text(dtype: object, shape: Sequence[int]) -> str:
    """Returns an array's text, as in `bfloat16[8,4]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"
