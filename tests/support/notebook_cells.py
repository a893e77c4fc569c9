"""Runs the cells of a notebook in this process, which `forks` has started.

It reads the cells' sources from standard input and writes their outputs to standard output, both as
JSON. A kernel of its own would take seconds to import JAX, matplotlib and itself.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

# What the process that is forked imports: no backend of JAX starts by that. Not the backend of
# pictures, which looks for a shell as it is imported.
MODULES = (
    *("IPython.core.interactiveshell", "matplotlib.pyplot", "optax", "jaxpar.layers"),
    *("jaxpar.layout", "jaxpar.moe", "jaxpar.schedule", "jaxpar.testing"),
)
# As kernels have it; XLA's remarks have times and places in them; JAX's profiler warns with Python
# 3.13 of a type of its own.
ENVIRONMENT = {
    "PYTHONWARNINGS": "ignore:builtin type event_stats has no __module__:DeprecationWarning",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
Cells = list[list[dict[str, Any]]]


class Shown(DisplayPublisher):
    """Takes what cells show and print, as a notebook stores it."""

    cells: Cells

    def publish(self, data: dict[str, Any], metadata: object = None, **_: object) -> None:
        self.cells[-1].append({"output_type": "display_data", "data": data})

    def write(self, text: str) -> int:
        cell = self.cells[-1]
        if text and (not cell or cell[-1]["output_type"] != "stream"):
            cell.append({"output_type": "stream", "name": "stdout", "text": ""})
        if text:
            cell[-1]["text"] += text
        return len(text)

    def flush(self) -> None:
        pass


def run(sources: list[str]) -> Cells:
    """The outputs of each cell; ends the process where one raises."""
    cells: Cells = []
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.display_pub = sys.stdout = Shown()
    shell.display_pub.cells = cells
    shell.displayhook.write_output_prompt = lambda: None
    shell.displayhook.write_format_data = lambda data, *_: cells[-1].append(
        {"output_type": "execute_result", "data": data}
    )
    for source in sources:
        cells.append([])
        if not shell.run_cell(source, store_history=True).success:
            print(*(output.get("text") for output in cells[-1]), sep="\n", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
    return cells


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)  # what is not Python's goes where nothing is expected
        json.dump(run(json.load(sys.stdin)), results)
    sys.stderr.flush()
    os._exit(0)  # no pools, profilers or compilers to wait for
