"""What no chip can do: a prediction beyond it is a fault of jaxpar, and no figure to print."""

from __future__ import annotations

import tempfile
from pathlib import Path

from jaxpar.tools.timeline.floor import Floor
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline

# Compilers round cycles, and simplify a matmul here and there.
_ROUNDING = 0.97


def require_possible(program: CompiledProgram, played: Timeline, floor: Floor) -> None:
    """Refuses a prediction that is shorter than the program's floor, and keeps its text.

    Args:
      program: what was predicted.
      played: its timeline; one that was measured is never refused.
      floor: of the whole program: its FLOPs at peak, its bytes over all links.

    Raises:
      RuntimeError: the prediction is impossible; the message names the file with the program's
        text.
    """
    if played.estimate == "measured" or played.total >= _ROUNDING * floor.total:
        return
    if played.loops_of_unknown_length:  # some trips are missing on both sides
        return
    file = Path(tempfile.mkdtemp(prefix="jaxpar-report-")) / "program.txt"
    file.write_text(program.text)
    raise RuntimeError(
        f"timeline: {played.total * 1e6:,.1f} us are predicted of a program that takes at least "
        f"{floor.total * 1e6:,.1f} us on {program.target.name} (its matmuls at peak: "
        f"{floor.compute * 1e6:,.1f}, its bytes over all links: {floor.transfer * 1e6:,.1f}); this "
        f"is a fault of jaxpar; please report it with the program's text, which is in {file}"
    )
