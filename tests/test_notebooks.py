"""Every notebook is the same in both of its files, and runs from its first cell to its last."""

from pathlib import Path

import jupytext
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("notebooks/*.py"))
CELL_TIMEOUT_S = 300


class OwnKernel(AsyncKernelManager):
    """A kernel in the interpreter of these tests, whatever kernels are installed besides."""

    def __init__(self, **options):
        # Looking nowhere on the disk leaves only the kernel that comes with ipykernel itself.
        specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
        super().__init__(kernel_spec_manager=specs, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_both_files_hold_the_same_cells(script):
    paired = script.with_suffix(".ipynb")
    assert paired.exists(), f"run: jupytext --sync {script.relative_to(ROOT)}"
    from_script, from_notebook = jupytext.read(script), jupytext.read(paired)

    def cells(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert cells(from_notebook) == cells(from_script)
    for notebook in (from_script, from_notebook):
        assert notebook.metadata.jupytext.formats == "ipynb,py:percent"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_committed_without_outputs(script):
    for cell in jupytext.read(script.with_suffix(".ipynb")).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_from_first_cell_to_last(script, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # they take longer than they save
    notebook = jupytext.read(script.with_suffix(".ipynb"))
    NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        kernel_name="python3",
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(ROOT)}},
    ).execute()
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))


def test_there_are_notebooks():
    assert SCRIPTS
