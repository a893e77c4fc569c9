"""Programs of pages and workers of tests, run by themselves."""

import os
import subprocess
import sys
from pathlib import Path

from partitioner import WARNING

import jaxpar


def printed(example):
    """What a program of its own prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert WARNING not in done.stderr
    return done.stdout


def run_worker(file, *arguments):
    """Runs a worker, whose devices are other than the tests', until it says that it did all."""
    sources = Path(jaxpar.__file__).parents[1], Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(file), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all\n")
