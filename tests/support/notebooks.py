"""Notebooks: run with the interpreter at hand, stored with outputs, and held against fresh ones.

python tests/support/notebooks.py [NAME ...]    # runs notebooks and stores what they show
"""

import base64
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jupytext
import matplotlib.image
import numpy as np
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("notebooks/*.py"))
CELL_TIMEOUT_S = 1200  # of a cell that hangs, not of one on a busy machine

# What a cell with this tag shows depends on compilers or clocks: only its kind is compared.
VARIES = "varies"
FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
FLOAT_TOLERANCE = 0.03
PICTURE_TOLERANCE = 0.02  # mean difference of pixels, of 1


class OwnKernel(AsyncKernelManager):
    """A kernel in the interpreter at hand, whatever kernels are installed besides."""

    def __init__(self, **options):
        # Looking nowhere on the disk leaves only the kernel that comes with ipykernel itself.
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
        super().__init__(kernel_spec_manager=specs, **options)


def execute(notebook: NotebookNode) -> None:
    """Runs all cells in a new kernel; their outputs take the place of those before."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA's remarks have times and places in them
    NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        kernel_name="python3",
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT)}},
    ).execute()


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: NotebookNode) -> dict[Path, bytes]:
    """The pictures of pages: what cells show that have the path of a picture for a tag."""
    return {
        ROOT / tag: base64.b64decode(output.data["image/png"])
        for cell in code_cells(notebook)
        for tag in cell.metadata.get("tags", [])
        if tag.endswith(".png")
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    }


def stale(stored: NotebookNode, fresh: NotebookNode) -> list[str]:
    """What the stored notebook shows and a fresh run does not, a line a cell."""
    found = []
    for number, cells in enumerate(zip(code_cells(stored), code_cells(fresh), strict=True), 1):
        old, new = ([_shown(output) for output in cell.outputs] for cell in cells)
        if cells[0].execution_count != number:
            found.append(f"cell {number} was not stored as run in order")
        elif [kind for kind, _ in old] != [kind for kind, _ in new]:
            found.append(f"cell {number} shows {old}, now {new}"[:2000])
        elif VARIES not in cells[0].metadata.get("tags", []):
            for (kind, before), (_, now) in zip(old, new, strict=True):
                same = _same_picture if kind == "image/png" else _same_text
                if not same(before, now):
                    found.append(f"cell {number} shows\n{before}\nnow\n{now}"[:2000])
    return found


def _shown(output: NotebookNode) -> tuple[str, str]:
    """The kind of an output and its text, of a picture the text that encodes it."""
    if output.output_type == "stream":
        return output.name, output.text
    for kind in ("image/png", "text/plain"):
        if kind in output.data:
            return kind, output.data[kind]
    return ", ".join(output.data), ""


def _same_text(before: str, now: str) -> bool:
    """Whether all but floats are equal, and floats nearly; JAX spells specs in two ways."""
    before, now = (text.replace("PartitionSpec(", "P(") for text in (before, now))
    old, new = ([float(number) for number in FLOAT.findall(text)] for text in (before, now))
    return FLOAT.sub("#", before).split() == FLOAT.sub("#", now).split() and bool(
        np.allclose(old, new, rtol=FLOAT_TOLERANCE, atol=2e-3)
    )


def _same_picture(before: str, now: str) -> bool:
    old, new = (
        matplotlib.image.imread(io.BytesIO(base64.b64decode(text)), format="png")
        for text in (before, now)
    )
    height, width = np.minimum(old.shape, new.shape)[:2]
    if np.max(np.maximum(old.shape, new.shape)[:2] - [height, width]) > 3:  # fonts differ a little
        return False
    return bool(np.mean(np.abs(old[:height, :width] - new[:height, :width])) < PICTURE_TOLERANCE)


def layouts(**sizes: int) -> dict[str, Any]:
    """What the notebook of layouts defines, its model, rules and meshes; with other sizes."""
    names: dict[str, Any] = {"jax": jax}
    for cell in jupytext.read(ROOT / "notebooks" / "13_layouts.py").cells:
        if cell.source.startswith(("import jax.numpy", "WIDTH, HIDDEN", "RULES = ")):
            exec(cell.source, names)
            names.update(sizes)
    return names


def store(script: Path) -> None:
    """Runs a notebook from its script, and writes the paired file with all outputs.

    Pictures that a page shows, too, are written beside the page.
    """
    notebook = jupytext.read(script)
    execute(notebook)
    jupytext.write(notebook, script.with_suffix(".ipynb"))
    for path, picture in pictures(notebook).items():
        path.write_bytes(picture)


if __name__ == "__main__":
    named = sys.argv[1:]
    for script in SCRIPTS:
        if not named or any(name in script.stem for name in named):
            print(script.stem, flush=True)
            store(script)
