"""Compiles for chips that are not there, and shows which communication their programs expose.

A program is first read, then played, then explained. `_hlo`, `_costs` and `_operations` find out
what its instructions are, from the compiler's text and without a chip's figures. `_links`,
`_player` and `_timeline` find out what time it is, from operations and figures and without the
text. `_origins`, `_exposed`, `_causes`, `_edits` and `_trials` find out why, and what to change.
`_trace` has the same of a run that was measured.
"""

from jaxpar._chips import Chip
from jaxpar.schedule._beside import Beside
from jaxpar.schedule._event import Event
from jaxpar.schedule._explain import Explanation, Finding, explain
from jaxpar.schedule._exposed import Exposed
from jaxpar.schedule._floor import Floor, matmul_floor, program_floor
from jaxpar.schedule._memory import Held
from jaxpar.schedule._overheads import Overhead
from jaxpar.schedule._player import Assumed
from jaxpar.schedule._sources import Line
from jaxpar.schedule._target import Target, target
from jaxpar.schedule._timeline import CompiledProgram, Memory, Timeline, compile_for, timeline
from jaxpar.schedule._trace import read_trace
from jaxpar.schedule._trials import Tried

__all__ = [
    "Assumed",
    "Beside",
    "Chip",
    "CompiledProgram",
    "Event",
    "Explanation",
    "Exposed",
    "Finding",
    "Floor",
    "Held",
    "Line",
    "Memory",
    "Overhead",
    "Target",
    "Timeline",
    "Tried",
    "compile_for",
    "explain",
    "matmul_floor",
    "program_floor",
    "read_trace",
    "target",
    "timeline",
]
