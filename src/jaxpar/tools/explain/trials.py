"""Tries edits: compiles and simulates the full program with each."""

from __future__ import annotations

import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import jax

from jaxpar.tools.explain.edits import Edit
from jaxpar.tools.explain.exposed import ExposedCollective, Exposures
from jaxpar.tools.timeline.player import Assumptions
from jaxpar.tools.timeline.timeline import CompiledProgram, timeline
from jaxpar.tools.toolkit_api import readable


@readable
@dataclass(frozen=True)
class TriedEdit:
    """The full step, compiled with an edit and simulated.

    Attributes:
      edit: the change in words.
      seconds: the time of the step.
      peak: the most bytes of memory at a time.
      program: the program with the edit.
      exposed: the collectives that the device then waits for.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> explanation = explain(compile_for(lambda x: x @ x, target("v5e:2x2"), x))
      >>> sorted(tried.edit for tried in explanation.findings[0].tried)[0]
      "shard x by P(None, 'tp') in place of P('tp')"
    """

    edit: str
    seconds: float
    peak: int
    program: CompiledProgram
    exposed: tuple[ExposedCollective, ...]

    def removes(self, exposed: ExposedCollective) -> bool:
        """Returns whether it removes over half of `exposed`'s wait."""

        def source(wait: ExposedCollective) -> tuple[Any, ...]:
            # Another of the places that are alike may now have the longest wait.
            shape, _, what = wait.moved.partition(";")[0].partition(" of each device, ")
            return wait.line, wait.phase, wait.axes, shape, re.sub(r"\d+", "", what)

        left = (wait.seconds for wait in self.exposed if source(wait) == source(exposed))
        return sum(left) < exposed.seconds / 2


class Trials:
    def __init__(self, assumed: Assumptions | None, progress: Callable[[str], None] | None) -> None:
        self.assumed, self.progress = assumed, progress
        self.gains: dict[str, float] = defaultdict(float)  # seconds that each edit may save
        self.done: dict[str, TriedEdit | None] = {}
        self.refused: dict[str, str] = {}  # why an edit could not be tried
        self.compiled = 0

    def run(self, proposed: Iterable[tuple[float, Sequence[Sequence[Edit]]]], most: Budget) -> None:
        """Tries edits within a budget, those that may save most first.

        `proposed` has each finding's seconds, and the edits of its rules. A rule's first edit
        counts most. One that repairs a known mistake counts in full.
        """
        edits: dict[str, Edit] = {}
        for seconds, rules in proposed:
            places: dict[str, int] = {}
            for number, rule in enumerate(rules):
                for place, edit in enumerate(rule, 1):
                    edits.setdefault(edit.text, edit)
                    places.setdefault(edit.text, 1 if edit.disagrees else number + place)
            for text, place in places.items():
                self.gains[text] += seconds / place
        begin = time.monotonic()
        for text in sorted(self.gains, key=self.gains.__getitem__, reverse=True):
            if self.compiled >= most.edits or time.monotonic() - begin >= most.seconds:
                return
            self._try(edits[text])

    def of(self, edits: Iterable[Edit]) -> tuple[TriedEdit, ...]:
        trials = (self.done.get(edit.text) for edit in edits)
        return tuple(sorted(filter(None, trials), key=lambda tried: tried.seconds))

    def _try(self, edit: Edit) -> None:
        self.done[edit.text] = None
        if self.progress is not None:
            self.progress(edit.text)
        try:
            compiled = edit.compiled()
            played = compiled and timeline(compiled, assumed=self.assumed)
        except Exception as reason:  # the edit does not fit the program
            said = str(reason).strip().partition("\n")[0]
            self.refused[edit.text] = f"{type(reason).__name__}: {said}"
            self.compiled += isinstance(reason, jax.errors.JaxRuntimeError)  # by the compiler
            return
        if compiled is not None and played is not None:
            self.compiled += 1
            exposed = tuple(Exposures(compiled, played).found())
            peak = compiled.memory.peak
            self.done[edit.text] = TriedEdit(edit.text, played.total, peak, compiled, exposed)


class Budget(NamedTuple):
    edits: float
    seconds: float

    @classmethod
    def of(cls, tries: Any) -> Budget:
        minutes = re.fullmatch(r"(\d+(?:\.\d+)?) ?min", tries) if isinstance(tries, str) else None
        if minutes:
            return cls(inf, 60 * float(minutes[1]))
        try:
            count = operator.index(int(tries) if isinstance(tries, str) else tries)
        except (TypeError, ValueError):
            count = -1
        if count < 0:
            raise ValueError(
                f"must be a number of edits, at least 0, or minutes as in '10min', got {tries!r}"
            )
        return cls(count, inf)
