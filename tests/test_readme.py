"""READMEs: the example runs as pasted and is short, and every benchmark has its line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(__file__).parents[1]


PRINTED = [
    "(4, 16, 32)\n",
    "(50258, 32) {'key': P('fsdp', 'tp'), 'norm': P(), 'output': P('tp', 'fsdp'), 'query': "
    "P('fsdp', 'tp')} P('tp', 'fsdp')\n",
]


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_example_runs_as_pasted(number):
    text = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == len(PRINTED)
    example = examples[number]
    assert len(example.splitlines()) <= 30
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("PartitionSpec(", "P(") == PRINTED[number]


def test_every_benchmark_has_a_line():
    folder = ROOT / "benchmarks"
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    listed = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\): ", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.parent.name for path in folder.glob("*/README.md"))
    assert {path.parent.name for path in folder.glob("*/__main__.py")} < set(listed)
