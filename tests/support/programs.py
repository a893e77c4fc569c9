"""Programs of pages, run by themselves."""

import os
import subprocess
import sys
from pathlib import Path

import jaxpar


def printed(example):
    """What a program of its own prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
