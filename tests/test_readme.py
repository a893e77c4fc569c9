"""READMEs: the example runs as pasted and is short, and every benchmark has its line."""

import re
from pathlib import Path

import jax
import pytest
from programs import printed

import jaxpar

ROOT = Path(__file__).parents[1]


def test_the_readme_is_short_and_has_its_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    assert "pip install -e '.[bench]' && python -m jaxpar bench\n" in text
    assert "pip install nox && nox -s tests\n" in text


@pytest.mark.parametrize(
    "page", ["README.md", "notebooks/README.md", "docs/how_to.md", "docs/links.md"]
)
def test_links_to_files_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def test_example_runs_as_pasted():
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) <= 20
    assert printed(example) == "(4, 16, 32)\n"


def test_the_rings_of_the_page_are_there():
    text = (ROOT / "docs" / "links.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert printed(example) == "[1, 1]\n[[0, 1, 2, 3, 7, 4], [0, 4, 8, 12, 13, 1]]\n"


def test_the_program_of_the_commands_is_one():
    text = (ROOT / "docs" / "api" / "commands.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(program, names)
    step, args = names["make_step"](jaxpar.make_mesh("tp=8"))
    assert jax.eval_shape(step, *args).shape == (8192, 28672)


def test_every_benchmark_has_a_line():
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    listed = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\): ", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in folder.glob("*/README.md"))
    assert {path.parent.name for path in folder.glob("*/__main__.py")} < set(listed)
