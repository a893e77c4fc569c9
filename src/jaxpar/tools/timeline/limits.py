"""Errors for predictions that no chip can reach."""

import tempfile
from pathlib import Path


def impossible(why: str, text: str) -> RuntimeError:
    file = Path(tempfile.mkdtemp(prefix="jaxpar-report-")) / "program.txt"
    file.write_text(text)
    return RuntimeError(
        f"timeline: {why}; this is a fault of jaxpar; please report it with the program's text, "
        f"which is in {file}"
    )
