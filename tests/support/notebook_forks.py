"""Notebooks, each in a fork of one process that has imported what all of them import.

A kernel of its own takes seconds to import JAX, matplotlib and itself. What has been imported is
shared; backends start in the fork, with as many devices as the notebook says.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class NotebookForks:
    """Runs the cells of notebooks, each notebook in a process of its own."""

    def __enter__(self) -> Self:
        env = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as kernels have it
        env["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA's remarks have times and places in them
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | env,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def run(self, sources: list[str]) -> tuple[list[list[dict[str, Any]]], str]:
        """The outputs of each cell, and what went to standard error; fails where a cell does."""
        to, back = self._server.stdin, self._server.stdout
        assert to is not None
        assert back is not None
        with tempfile.TemporaryDirectory() as folder:
            to.write(json.dumps([folder, sources]) + "\n")
            to.flush()
            status = back.readline().strip()
            wrong = Path(folder, "stderr").read_text()
            assert status == "0", f"ended with status {status}:\n{wrong}"
            return json.loads(Path(folder, "outputs").read_text()), wrong


def _run(folder: str, sources: list[str]) -> None:
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    file = os.open(Path(folder, "stderr"), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)  # what is not Python's: nothing is expected there either
    os.dup2(file, 2)
    cells: list[list[dict[str, Any]]] = []

    class Shown(DisplayPublisher):
        """Takes what cells show, as a notebook stores it."""

        def publish(self, data: dict[str, Any], metadata: object = None, **_: object) -> None:
            cells[-1].append({"output_type": "display_data", "data": data})

        def write(self, text: str) -> int:
            if text and (not cells[-1] or cells[-1][-1]["output_type"] != "stream"):
                cells[-1].append({"output_type": "stream", "name": "stdout", "text": ""})
            if text:
                cells[-1][-1]["text"] += text
            return len(text)

        def flush(self) -> None:
            pass

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.display_pub = sys.stdout = Shown()
    shell.displayhook.write_output_prompt = lambda: None
    shell.displayhook.write_format_data = lambda data, *_: cells[-1].append(
        {"output_type": "execute_result", "data": data}
    )
    for source in sources:
        cells.append([])
        if not shell.run_cell(source, store_history=True).success:
            print(*(output.get("text") for output in cells[-1]), sep="\n", file=sys.stderr)
            os._exit(1)
    Path(folder, "outputs").write_text(json.dumps(cells))
    sys.stderr.flush()


def _serve() -> None:
    import IPython.core.interactiveshell
    import matplotlib.pyplot
    import optax

    import jaxpar.layers
    import jaxpar.layout
    import jaxpar.moe
    import jaxpar.schedule
    import jaxpar.testing  # noqa: F401

    del IPython, matplotlib, optax
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(*json.loads(line))
            os._exit(0)  # no pools, profilers or compilers to wait for
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
