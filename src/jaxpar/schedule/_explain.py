"""Explaining a program: what it exposes, why, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from jaxpar._calls import naming, readable
from jaxpar.schedule._causes import Cause, Rules
from jaxpar.schedule._exposed import Exposed, Exposures
from jaxpar.schedule._floor import Floor, program_floor
from jaxpar.schedule._player import Assumed
from jaxpar.schedule._timeline import CompiledProgram, Timeline, timeline
from jaxpar.schedule._trials import Trials, Tried

LEAST = 0.005  # of the step: what is exposed for less is not worth a line
FASTER = 0.995  # of the step's time: an edit that gains less gains nothing


@readable
@dataclass(frozen=True)
class Finding:
    """One exposed collective, its cause and what to do about it.

    Attributes:
      exposed: what is exposed, and where it comes from.
      cause: one of the closed list.
      why: the evidence.
      edit: what to change.
      tried: what the edit brings; None: it was not tried, as none can be tried by itself.
    """

    exposed: Exposed
    cause: Cause
    why: str
    edit: str
    tried: Tried | None


@readable
@dataclass(frozen=True)
class Explanation:
    """Why a step takes as long as it does; made by `explain`."""

    program: CompiledProgram
    timeline: Timeline
    floor: Floor
    findings: tuple[Finding, ...]

    def gain(self, finding: Finding) -> float:
        """Seconds that an edit takes from the step; 0 if it was not tried, or gains nothing."""
        tried, now = finding.tried, self.timeline.total
        return 0.0 if tried is None or tried.seconds > FASTER * now else now - tried.seconds


@readable
@naming("explain")
def explain(
    program: CompiledProgram, *, tries: int = 8, worst: int = 10, assumed: Assumed | None = None
) -> Explanation:
    """Says why a step takes as long as it does."""
    played = timeline(program, assumed=assumed)
    exposures = Exposures(program, played)
    trials = Trials(program, played, tries)
    exposed = list(exposures.found())
    rules = Rules(exposures, trials, exposed)
    shown = [e for e in exposed if e.seconds >= LEAST * played.total]
    findings = tuple(_finding(e, rules, trials, played) for e in islice(shown, worst))
    return Explanation(program, played, program_floor(program, played), findings)


def _finding(e: Exposed, rules: Rules, trials: Trials, played: Timeline) -> Finding:
    for verdict in rules.of(e):
        tried = trials.best(verdict.trials, None if verdict.is_sure else e)
        is_faster = tried is not None and tried.seconds <= FASTER * played.total
        if verdict.is_sure or is_faster:
            edit = tried.edit if tried is not None and is_faster else verdict.edit
            return Finding(e, verdict.cause, verdict.why, edit, tried)
    raise AssertionError("the last rule holds without a trial")
