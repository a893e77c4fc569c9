"""Every notebook is the same in both of its files, runs, and is stored with what a run shows."""

import copy
import json
import re

import jupytext
import notebook_cells
import pytest
from forks import Forks
from nbformat import NotebookNode
from notebooks import ROOT, SCRIPTS, VARIES, code_cells, execute, pictures, stale
from programs import environment

NAMES = [script.stem for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_both_files_hold_the_same_cells(script):
    paired = script.with_suffix(".ipynb")
    assert paired.exists(), f"run: nox -s notebooks -- {script.stem}"
    from_script, from_notebook = jupytext.read(script), jupytext.read(paired)

    def cells(notebook):
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    assert cells(from_notebook) == cells(from_script)
    for notebook in (from_script, from_notebook):
        assert notebook.metadata.jupytext.formats == "ipynb,py:percent"


@pytest.fixture(scope="module")
def forks():
    made = Forks(notebook_cells.MODULES, environment(**notebook_cells.ENVIRONMENT))
    yield made
    made.end()


def ran(forks, sources):
    """What each cell shows, run in a fork that prints and warns of nothing besides."""
    fork = forks.start([notebook_cells.__file__])
    fork.stdin.write(json.dumps(sources))
    shown, wrong = fork.communicate()
    assert (fork.returncode, wrong) == (0, "")
    return json.loads(shown)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_runs_and_shows_what_is_stored(script, forks):
    stored = jupytext.read(script.with_suffix(".ipynb"))
    fresh = copy.deepcopy(stored)
    outputs = ran(forks, [cell.source for cell in code_cells(fresh)])
    for number, (cell, shown) in enumerate(zip(code_cells(fresh), outputs, strict=True), 1):
        cell.update(outputs=[NotebookNode(output) for output in shown], execution_count=number)
    found = stale(stored, fresh)
    assert not found, f"run: nox -s notebooks -- {script.stem}\n" + "\n".join(found)


def test_runs_in_a_kernel():
    """As notebooks are stored; the others are only run in a fork, which shows the same."""
    stored = jupytext.read(SCRIPTS[0].with_suffix(".ipynb"))
    fresh = copy.deepcopy(stored)
    execute(fresh)
    assert not stale(stored, fresh)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_shows_text_and_pictures(script):
    cells = code_cells(jupytext.read(script.with_suffix(".ipynb")))
    shown = [output for cell in cells for output in cell.outputs]
    assert any(output.output_type == "stream" for output in shown)
    assert any("image/png" in output.get("data", {}) for output in shown)


def test_pictures_of_pages_are_those_of_notebooks():
    shown = {}
    for script in SCRIPTS:
        shown |= pictures(jupytext.read(script.with_suffix(".ipynb")))
    assert shown
    for path, picture in shown.items():
        assert path.read_bytes() == picture, f"{path.name} is stale; run: nox -s notebooks"
        pages = [page.read_text() for page in path.parent.glob("*.md")]
        assert any(f"]({path.name})" in page for page in pages), f"no page shows {path.name}"


def test_figures_of_the_page_of_links_are_those_of_its_notebook():
    page = (ROOT / "docs" / "links.md").read_text()
    table = page.partition("| rows of the gather |")[2].partition("\n\n")[0].replace("**", "")
    cells = code_cells(jupytext.read(ROOT / "notebooks" / "18_links.ipynb"))
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    told = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", table, re.M)
    assert told == re.findall(r"^(\d+) +(\d+) +(\d+) +(\d+) +\d+$", text, re.M) != []


def test_stale_outputs_are_found():
    stored = jupytext.read(SCRIPTS[0].with_suffix(".ipynb"))
    assert not stale(stored, stored)
    for changed in ("text", "order", "missing"):
        wrong = copy.deepcopy(stored)
        cell = next(
            cell
            for cell in code_cells(wrong)
            if cell.outputs
            and cell.outputs[0].output_type == "stream"
            and VARIES not in cell.metadata.get("tags", [])
        )
        if changed == "text":
            cell.outputs[0].text += "7 more"
        elif changed == "order":
            cell.execution_count += 1
        else:
            cell.outputs = []
        assert len(stale(wrong, stored)) == 1, changed


def test_every_notebook_is_listed_in_order():
    listed = (ROOT / "notebooks" / "README.md").read_text()
    places = [listed.find(f"({name}.ipynb)") for name in NAMES]
    assert -1 not in places
    assert places == sorted(places)
