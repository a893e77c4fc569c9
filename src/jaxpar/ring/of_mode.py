"""The steps of a mode: in one direction, in both, or over disjoint rings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jaxpar.arguments.types import Mode
from jaxpar.ring.order import traced_order
from jaxpar.ring.seconds import MARGIN, Flow, hop_time
from jaxpar.ring.stepwise import Stepwise

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem


def stepwise(problem: Problem, mode: Mode, flows: tuple[Flow, ...]) -> Stepwise:
    if problem.near is not None and mode != "multi-ring":
        directions, reach = problem.near
        return Stepwise(problem.ring, directions, traced_order(), reach=reach)
    rings = problem.ring.disjoint() if mode == "multi-ring" else None
    one_way = mode == "unidirectional" or (rings and rings[0].crosses_a_cube)
    directions = (1,) if one_way else (1, -1)
    covered = _opposite_is_covered(problem, flows)
    way = Stepwise(problem.ring, directions, traced_order(), covered, rings)
    return way if mode != "multi-ring" else with_phases(problem, way, flows)


def with_phases(problem: Problem, way: Stepwise, flows: tuple[Flow, ...]) -> Stepwise:
    """Returns disjoint rings, or one torus dimension after the other if faster."""
    # Then pieces are larger, but less overlaps with work.
    sides = tuple(ring.size for ring in problem.ring.stages())
    if problem.chip is None or len(sides) < 2 or min(sides) < 3 or len(set(sides)) > 1:
        return way
    # Steps need only permutes: a named mode does not ask for compiler options.
    told = replace(problem, told=frozenset())
    scattered = [flow for flow in flows if flow.kind != "gather"]
    gathered = [flow for flow in flows if flow.kind == "gather"]
    from jaxpar.ring.hierarchical import along_dimensions

    along = along_dimensions(way, sides)
    sums = along.seconds(told, scattered) < way.seconds(told, scattered)
    # The model is less sure of blocks: the compiler lays out copies between dimensions.
    blocks = along.seconds(told, gathered) < MARGIN * way.seconds(told, gathered)
    return replace(along, blocks=blocks, sums=sums) if blocks or sums else way


def _opposite_is_covered(problem: Problem, flows: tuple[Flow, ...]) -> bool:
    chip = problem.chip
    if problem.kind == "weights":  # cutting costs two passes over memory, and hides nothing
        return True
    flows = flows or problem.forward
    # 8-bit halves save half the wire time of wide ones, but take as long to cut.
    if any(flow.quantized and flow.kind == "gather" for flow in flows):
        return True
    if chip is None or not all(flow.flops for flow in flows) or not flows:
        return False
    # One step's work on two blocks covers the transfer of a full block.
    return all(
        2 * flow.flops / problem.ring.size / chip.flops >= hop_time(chip, flow.block_bytes)
        for flow in flows
    )
