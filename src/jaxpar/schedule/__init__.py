"""Compiles for chips that are not there, and shows which communication their programs expose.

A program is first read, then played. `_hlo`, `_costs` and `_operations` find out what its
instructions are, from the compiler's text and without a chip's figures. `_links`, `_player` and
`_timeline` find out what time it is, from operations and figures and without the text.
"""

from jaxpar._chips import Chip
from jaxpar.schedule._floor import Floor, matmul_floor, program_floor
from jaxpar.schedule._player import Assumed, Event
from jaxpar.schedule._target import Target, target
from jaxpar.schedule._timeline import CompiledProgram, Memory, Timeline, compile_for, timeline

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
