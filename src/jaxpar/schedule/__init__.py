"""Compiles for chips that are not there, and shows which communication their programs expose.

A program is first read, then played, then explained. `_hlo`, `_costs` and `_operations` find out
what its instructions are, from the compiler's text and without a chip's figures. `_links`,
`_player` and `_timeline` find out what time it is, from operations and figures and without the
text. `_origins`, `_exposed`, `_causes`, `_edits` and `_trials` find out why, and what to change.
`_trace` has the same of a run that was measured.
"""

from jaxpar.mesh.chips import Chip
from jaxpar.tools.explain.explain import Explanation, Finding, explain
from jaxpar.tools.explain.exposed import Exposed
from jaxpar.tools.explain.overheads import Overhead
from jaxpar.tools.explain.trials import Tried
from jaxpar.tools.program.memory import Held
from jaxpar.tools.program.sources import Line
from jaxpar.tools.timeline.beside import Beside
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.floor import Floor, matmul_floor, program_floor
from jaxpar.tools.timeline.player import Assumed
from jaxpar.tools.timeline.target import Target, target
from jaxpar.tools.timeline.timeline import CompiledProgram, Memory, Timeline, compile_for, timeline
from jaxpar.tools.timeline.trace import read_trace

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
