"""Tests of numbers pass with another instruction set, one thread, and other draws.

`nox -s rounding` runs all of them so, in hours; this is a small part.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEEP = (  # some layers, second derivatives, sums that cancel: each test both times
    ("layers/test_fsdp.py::test_scan_of_integers_among_the_weights", ("[5-True]", "[2-False]")),
    ("layers/test_groups.py::test_an_axis_that_loss_fn_does_not_name_needs_no_sum", ("", "")),
    ("layers/test_regions.py::test_twice_in_reverse", ("[False]", "[True]")),
    ("layout/test_layout.py::test_a_scan_with_its_dimensions", ("", "")),
    ("moe/test_statistics.py::test_gradients_inside", ("[names0-True]", "[names1-False]")),
)


@pytest.mark.parametrize(("isa", "threads", "seed"), [("AVX2", 1, 1), ("SSE4_2", 4, 2)])
def test_with_other_rounding(isa, threads, seed):
    flags = f"--xla_cpu_max_isa={isa}" if platform.machine() in ("x86_64", "AMD64") else ""
    env = os.environ | {
        "JAXPAR_TEST_SEED": str(seed),
        "NPROC": str(threads),  # XLA's threads
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    names = [f"{TESTS / name}{cases[seed - 1]}" for name, cases in DEEP]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    run = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "5 passed" in run.stdout
