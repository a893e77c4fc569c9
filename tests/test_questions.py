"""Pages that answer a question: each program runs as pasted, and prints what the page shows."""

import re
from pathlib import Path

import pytest
from forks import Forks
from partitioner import WARNING
from programs import environment

PAGES = Path(__file__).parents[1] / "docs" / "questions"
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def texts():
    return {path.stem: path.read_text() for path in sorted(PAGES.glob("*.md"))}


@pytest.fixture(scope="module")
def forks():
    """Of JAX alone: what else a program needs it imports itself."""
    made = Forks(["jax", "jax.numpy"], environment(PYTHONWARNINGS="error"))
    yield made
    made.end()


@pytest.mark.parametrize("page", [name for name, text in texts().items() if "```python" in text])
def test_its_program_runs_as_pasted(page, forks, tmp_path):
    [(program, shown)] = PROGRAM.findall(texts()[page])
    pasted = tmp_path / "pasted.py"
    pasted.write_text(program)
    fork = forks.start([str(pasted)])
    text, wrong = fork.communicate()
    assert fork.returncode == 0, wrong
    assert WARNING not in wrong
    assert text.replace("PartitionSpec(", "P(") == shown


@pytest.mark.parametrize("page", texts())
def test_its_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", texts()[page])
    assert not [link for link in links if not PAGES.joinpath(link).exists()]


@pytest.mark.parametrize("page", texts())
def test_it_is_short(page):
    prose = re.sub(r"```.*?```", "", texts()[page], flags=re.DOTALL)
    assert len(prose.split()) <= 350
