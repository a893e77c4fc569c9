"""Trying edits: the whole program is compiled with each of them, and played again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
        """Whether most of what was exposed in one place is no more."""

        def source(one: ExposedCollective) -> tuple[Any, ...]:
            return one.line, one.phase, one.axes, one.moved.partition(";")[0]

        left = (one.seconds for one in self.exposed if source(one) == source(exposed))
        return sum(left) < exposed.seconds / 2


class Trials:
    """Tries edits, each once, and no more of them than `most`; None: the program allows none."""

    def __init__(
        self, assumed: Assumptions | None, most: int | None, progress: Callable[[str], None] | None
    ) -> None:
        self.assumed, self.most, self.progress = assumed, most, progress
        self.left = most or 0
        self.done: dict[str, TriedEdit | None] = {}
        self.refused: dict[str, str] = {}  # why an edit could not be tried

    def all(self, edits: Iterable[Edit]) -> tuple[tuple[TriedEdit, ...], int]:
        """What some edits bring, the fastest first; and how many there were no tries left for.

        They take a half of the tries that are left at most: other findings have edits, too.
        """
        if self.most is None:
            return (), 0
        found: list[TriedEdit] = []
        skipped, least = 0, self.left // 2
        # Edits of two arguments that change together are the same.
        for edit in {edit.text: edit for edit in edits}.values():
            if edit.text not in self.done and self.left <= least:
                skipped += 1
            elif (tried := self._try(edit)) is not None:
                found.append(tried)
        return tuple(sorted(found, key=lambda tried: tried.seconds)), skipped

    def _try(self, edit: Edit) -> TriedEdit | None:
        if edit.text not in self.done:
            self.left -= 1
            self.done[edit.text] = None
            if self.progress is not None:
                self.progress(edit.text)
            try:
                compiled = edit.compiled()
            except Exception as reason:  # an edit that does not fit the program is none
                said = str(reason).strip().partition("\n")[0]
                self.refused[edit.text] = f"{type(reason).__name__}: {said}"
                compiled = None
            if compiled is not None:
                played = timeline(compiled, assumed=self.assumed)
                exposed = tuple(Exposures(compiled, played).found())
                peak = compiled.memory.peak
                self.done[edit.text] = TriedEdit(edit.text, played.total, peak, compiled, exposed)
        return self.done[edit.text]
