"""Trying edits: the whole program is compiled with each of them, and played again."""

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
from jaxpar.tools.private_names import readable
from jaxpar.tools.timeline.player import Assumptions
from jaxpar.tools.timeline.timeline import CompiledProgram, timeline


@readable
@dataclass(frozen=True)
class TriedEdit:
    """What an edit brings: the whole step, compiled with it and played.

    Attributes:
      edit: what was changed, in words.
      seconds: that the step takes with it.
      peak: bytes of memory that it needs.
      program: compiled with the edit.
      exposed: what the program with the edit exposes.

    Example:
      >>> from jaxpar.schedule import compile_for, explain, target
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P(None, "tp"))
      >>> found = explain(compile_for(lambda x, w: jnp.sin(x @ w), target("v5e:2x2"), x, w))
      >>> sorted(tried.edit for tried in found.findings[0].tried)[0]
      "shard w by P('tp', None) in place of P(None, 'tp')"
    """

    edit: str
    seconds: float
    peak: int
    program: CompiledProgram
    exposed: tuple[ExposedCollective, ...]

    def removes(self, exposed: ExposedCollective) -> bool:
        """Returns whether the edit removes more than half of what `exposed` waits for."""

        def source(one: ExposedCollective) -> tuple[Any, ...]:
            # Of places that are alike another one may be waited for the longest.
            shape, _, what = one.moved.partition(";")[0].partition(" of each device, ")
            return one.line, one.phase, one.axes, shape, re.sub(r"\d+", "", what)

        left = (one.seconds for one in self.exposed if source(one) == source(exposed))
        return sum(left) < exposed.seconds / 2


class Trials:
    """Tries edits of a program, each once."""

    def __init__(self, assumed: Assumptions | None, progress: Callable[[str], None] | None) -> None:
        self.assumed, self.progress = assumed, progress
        self.gains: dict[str, float] = defaultdict(float)  # seconds of what each edit may mend
        self.done: dict[str, TriedEdit | None] = {}
        self.refused: dict[str, str] = {}  # why an edit could not be tried
        self.compiled = 0

    def run(self, proposed: Iterable[tuple[float, Sequence[Sequence[Edit]]]], most: Budget) -> None:
        """Tries the edits of findings, those that can gain most first, as many as there may be.

        Args:
          proposed: of each finding its seconds, which an edit of it may gain, and the edits of its
            rules, in their order. An edit of several findings counts for all of them, the
            first one of a rule for more than the others, and what mends a known mistake in full.
          most: how many, or how long.
        """
        edits: dict[str, Edit] = {}
        for seconds, rules in proposed:
            places: dict[str, int] = {}
            for number, own in enumerate(rules):
                for place, edit in enumerate(own, 1):
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
        """What those bring that were tried, the fastest first."""
        found = (self.done.get(edit.text) for edit in edits)
        return tuple(sorted(filter(None, found), key=lambda tried: tried.seconds))

    def _try(self, edit: Edit) -> None:
        self.done[edit.text] = None
        if self.progress is not None:
            self.progress(edit.text)
        try:
            compiled = edit.compiled()
            played = compiled and timeline(compiled, assumed=self.assumed)
        except Exception as reason:  # an edit that does not fit the program is none
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
    """How many edits may be tried, and how long: none is begun later."""

    edits: float
    seconds: float

    @classmethod
    def of(cls, tries: Any) -> Budget:
        """Reads a number of edits, or minutes as in `"10min"`.

        Raises:
          ValueError: anything else, or less than none.
        """
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
