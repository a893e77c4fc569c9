"""What no chip can do: a prediction beyond it is a fault of jaxpar, and no figure to print."""

import tempfile
from pathlib import Path


def impossible(why: str, text: str) -> RuntimeError:
    """Keeps a program's text in a file, for a report, and says what is wrong with its prediction.

    Args:
      why: what is predicted and cannot be.
      text: the program's, as it was compiled.

    Returns:
      An error to raise, which names the file.
    """
    file = Path(tempfile.mkdtemp(prefix="jaxpar-report-")) / "program.txt"
    file.write_text(text)
    return RuntimeError(
        f"timeline: {why}; this is a fault of jaxpar; please report it with the program's text, "
        f"which is in {file}"
    )
