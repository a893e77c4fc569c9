"""Compiles for chips that are not there, and shows which communication their programs expose."""

from jaxpar._chips import Chip
from jaxpar.schedule._assumed import Assumed
from jaxpar.schedule._compile import CompiledProgram, Memory, compile_for
from jaxpar.schedule._floor import Floor, matmul_floor, program_floor
from jaxpar.schedule._target import Target, target
from jaxpar.schedule._timeline import Event, Timeline, timeline

__all__ = [
    "Assumed",
    "Chip",
    "CompiledProgram",
    "Event",
    "Floor",
    "Memory",
    "Target",
    "Timeline",
    "compile_for",
    "matmul_floor",
    "program_floor",
    "target",
    "timeline",
]
