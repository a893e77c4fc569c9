"""The README's example runs as pasted, and is as short as it promises to be."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jaxpar

ROOT = Path(__file__).parents[1]


def test_example_runs_as_pasted():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 20
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(4, 16, 32)\n"
