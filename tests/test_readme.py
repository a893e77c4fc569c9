"""READMEs: the example runs as pasted and is short, and every benchmark has its line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpar

ROOT = Path(__file__).parents[1]
HOW_TO = (ROOT / "docs" / "how_to.md").read_text()


PRINTED = {
    "README.md": "(4, 16, 32)\n",
    "docs/all.md": "(50258, 32) {'key': P('fsdp', 'tp'), 'norm': P(), 'output': P('tp', 'fsdp'), "
    "'query': P('fsdp', 'tp')} P('tp', 'fsdp')\n",
}


def test_the_readme_is_short_and_has_its_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "pip install -e '.[bench]' && python -m jaxpar bench\n" in text
    assert "pip install nox && nox -s tests\n" in text


@pytest.mark.parametrize("page", [*PRINTED, "notebooks/README.md", "docs/how_to.md"])
def test_links_to_files_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


@pytest.mark.parametrize("page", PRINTED)
def test_example_runs_as_pasted(page):
    text = (ROOT / page).read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) <= 30
    assert printed(example).replace("PartitionSpec(", "P(") == PRINTED[page]


def test_a_flax_model_is_sharded_as_pasted():
    [example] = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)
    text = printed(example)
    assert "'up/kernel': P('fsdp', 'tp')" in text.replace("PartitionSpec(", "P(")
    first, *_, last = map(float, re.findall(r"^\d+\.\d{3}$", text, re.M))
    assert last < first
    assert "8 devices (fsdp=2, tp=4)" in text


def test_the_program_of_the_commands_is_one():
    text = (ROOT / "docs" / "api" / "commands.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(program, names)
    step, args = names["make_step"](jaxpar.make_mesh("tp=8"))
    assert jax.eval_shape(step, *args).shape == (8192, 28672)


def printed(example):
    """What a program of its own prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_has_a_line():
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    listed = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\): ", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in folder.glob("*/README.md"))
    assert {path.parent.name for path in folder.glob("*/__main__.py")} < set(listed)
