"""Chooses the algorithms of weights over several axes."""

from dataclasses import replace

from jaxpar.choose.choice import ways_of_passes
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import notes, settled
from jaxpar.ring.naive import Naive
from jaxpar.ring.ways import Way


def choose_stages(problem: Problem) -> tuple[Way, ...]:
    """Returns the algorithms of weights over several axes, in a scatter's order."""
    # In steps, each axis is a stage. Other algorithms take all axes at once.
    named = settled(problem)
    stages = _stages(named)
    if stages and notes.value is not None:
        notes.value.passes(problem, (stages[0], stages[0]), named.ring != problem.ring)
    return stages


def _stages(problem: Problem) -> tuple[Way, ...]:
    rings = problem.ring.stages()
    if not rings:
        return ()
    longest = max(rings, key=lambda ring: ring.size)
    of_each = problem.ring.mode != "multi-ring" and not isinstance(
        ways_of_passes(replace(problem, ring=longest))[0], Naive
    )
    rings = rings if of_each else [problem.ring]
    return tuple(ways_of_passes(replace(problem, ring=ring))[0] for ring in rings)
