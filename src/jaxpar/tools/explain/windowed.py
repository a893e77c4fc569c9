"""Windowed einsums: matmuls that the partitioner cut into pieces with permutes between them.

The program has a loop for them or, with few devices, more matmuls than were traced.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jax.extend import core

from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.program.sources import Line, line_of, own_line, primitive_of
from jaxpar.tools.toolkit_api import subjaxprs

_MATMULS = ("dot_general", "conv_general_dilated")
_PIECES = ("dot", "convolution")
_LOOP = "windowed_dot_general"  # part of the name of such a loop's body
Origin = tuple[str, tuple[Line, ...]]  # an operation of the traced program, and its lines


@dataclass(frozen=True)
class WindowedEinsums:
    origins: frozenset[Origin]
    permutes: frozenset[str]


def windowed_einsums(exposures: Exposures) -> WindowedEinsums:
    # A permute alone may only reshard an operand.
    by_name: dict[str, Origin] = {}
    for name in exposures.transfers:
        i = exposures.values.collective(name)
        if i is None or not i.opcode.startswith("collective-permute"):
            continue
        if primitive_of(i.op_name) in _MATMULS:
            by_name[name] = exposures.origin(i)
    if not by_name:
        return WindowedEinsums(frozenset(), frozenset())
    cut = _lines_with_more_matmuls(exposures)
    origins = {
        origin
        for name, origin in by_name.items()
        if _is_in_its_loop(exposures, name) or own_line(origin[1]) in cut
    }
    permutes = (name for name, origin in by_name.items() if origin in origins)
    return WindowedEinsums(frozenset(origins), frozenset(permutes))


def _is_in_its_loop(exposures: Exposures, name: str) -> bool:
    loop = exposures.loop_around(name)
    return loop is not None and _LOOP in exposures.instruction(loop.name).called_as("body").name


def _lines_with_more_matmuls(exposures: Exposures) -> set[Line | None]:
    program = exposures.program
    if program.jaxpr is None:
        return set()
    compiled = Counter(
        own_line(exposures.origin(i)[1])
        for i in exposures.values.instructions.values()
        if i.opcode in _PIECES
    )
    traced = Counter[Line | None]()
    _count(program.jaxpr.jaxpr, 1, traced)
    return {line for line, count in compiled.items() if count > traced[line]}


def _count(jaxpr: core.Jaxpr, times: int, counts: Counter[Line | None]) -> None:
    # Matmuls of unrolled loops count repeatedly.
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MATMULS:
            counts[line_of(eqn)] += times
        unrolled = eqn.params.get("unroll", 1) if eqn.primitive.name == "scan" else 1
        for sub in subjaxprs(eqn.params):
            _count(sub, times * int(unrolled), counts)
