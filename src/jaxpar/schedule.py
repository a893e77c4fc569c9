"""Compiles for chips that need not be there, and shows exposed communication."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.platforms.chips import Chip
    from jaxpar.tools.explain.compare_instructions import MeasuredInstruction
    from jaxpar.tools.explain.explain import Explanation, Finding, explain
    from jaxpar.tools.explain.exposed import ExposedCollective
    from jaxpar.tools.explain.memory import LiveArray
    from jaxpar.tools.explain.overheads import Overhead
    from jaxpar.tools.explain.trials import TriedEdit
    from jaxpar.tools.program.sources import Line
    from jaxpar.tools.timeline.event import Event
    from jaxpar.tools.timeline.floor import Floor, matmul_floor, program_floor
    from jaxpar.tools.timeline.player import Assumptions
    from jaxpar.tools.timeline.target import Target, target
    from jaxpar.tools.timeline.timeline import (
        CompiledProgram,
        Memory,
        Timeline,
        compile_for,
        timeline,
    )
    from jaxpar.tools.timeline.trace import read_trace
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"Assumed": ("Assumptions", {})})

__all__ = [
    "Assumptions",
    "Chip",
    "CompiledProgram",
    "Event",
    "Explanation",
    "ExposedCollective",
    "Finding",
    "Floor",
    "Line",
    "LiveArray",
    "MeasuredInstruction",
    "Memory",
    "Overhead",
    "Target",
    "Timeline",
    "TriedEdit",
    "compile_for",
    "explain",
    "matmul_floor",
    "program_floor",
    "read_trace",
    "target",
    "timeline",
]
