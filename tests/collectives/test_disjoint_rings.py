"""Rings that share no link: values and gradients on tori of 9 to 64 devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

WORKER = Path(__file__).with_name("disjoint_rings.py")


@pytest.mark.parametrize(
    ("sizes", "check_vma"),
    [
        ((3, 3), True),
        ((3, 3), False),
        ((4, 3), True),
        ((4, 4), False),
        ((3, 3, 3), True),
        ((8, 8), False),  # in loops
    ],
)
def test_values_and_gradients(sizes, check_vma):
    run = subprocess.run(
        [sys.executable, str(WORKER), str(check_vma), *map(str, sizes)],
        env={**os.environ, "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all\n")
