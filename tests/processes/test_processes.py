"""Programs of several processes: their start, and what is said where they differ or are missing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.processes._meeting import processes_text

WORKER = Path(__file__).with_name("worker.py")


def run(case, count, folder, ranks=None):
    """Starts the processes, and returns what each printed and how it ended."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {name: text for name, text in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    started = range(count) if ranks is None else ranks
    env |= {"PYTHONPATH": str(Path(jaxpar.__file__).parents[1]), "STARTED": str(len(started))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case, str(rank), str(count), port, str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in started
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return said, [process.returncode for process in processes]


@pytest.mark.parametrize("count", [2, 4])
def test_equal_processes(count, tmp_path):
    said, codes = run("equal", count, tmp_path)
    assert codes == [0] * count, "\n".join(said)
    assert all(out.endswith("equal\n") for out in said)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_differ(count, tmp_path):
    said, codes = run("differ", count, tmp_path)
    assert codes == [0] * count, "\n".join(said)
    last = count - 1
    for out in said:  # all say the same
        assert (
            f"layout: agree: processes 0 and {last} differ in 'layout', line 2: process 0 has"
            in out
        )
        assert "has \"w: float32[8, 8] P(None, 'tp')\", process" in out.replace(
            "PartitionSpec", "P"
        )
        assert f"processes 0 and {last} differ in 'step', line " in out
        assert "'batch', line 1: process 0 has 'x: float64[4, 2]', process" in out
        assert f"names: agree: process 0 compares 'less', and process {last} does not" in out
        assert "'key', line 2: process 0 has 'values [0, 0]', process" in out
        assert "'weights', line 2: process 0 has 'values of digest " in out
        assert "process 0 has 'jax_default_matmul_precision=None', process" in out


def test_a_process_that_does_not_come(tmp_path):
    said, codes = run("missing", 4, tmp_path, ranks=[0, 2])
    assert all(codes)
    for out in said:
        assert "TimeoutError: initialize: after 4 s processes 1, 3 of 4 are missing" in out


def test_a_process_that_is_killed_on_the_way(tmp_path):
    said, codes = run("killed", 2, tmp_path)
    assert codes == [3, 9]
    assert "TimeoutError: agree: after 3 s process 1 of 2 is missing" in said[0]


def test_a_process_0_that_does_not_answer(tmp_path):
    said, codes = run("silent", 2, tmp_path)
    assert codes == [0, 3]
    assert "TimeoutError: agree: process 0 did not answer within 1 s; is it alive" in said[1]


def test_a_process_0_that_does_not_come(tmp_path):
    [said], [code] = run("missing", 2, tmp_path, ranks=[1])
    assert code
    assert "TimeoutError: initialize: after 4 s process 0 is missing: nothing answers at" in said


def test_many_processes_are_short_to_read():
    assert processes_text([3]) == "process 3"
    assert processes_text([0, 1, 2, 7]) == "processes 0, 1, 2, 7"
    assert processes_text([1, *range(4, 512), 600, 601]) == "processes 1, 4-511, 600, 601"


def test_alone():
    found = jaxpar.initialize()
    assert found == jaxpar.describe()
    assert (found.process, found.processes, found.devices, found.local_devices) == (0, 1, 8, 8)
    assert found.platform == "cpu"
    assert "ragged_all_to_all" not in found.collectives
    assert str(found).startswith("process 0 of 1 on ")
    jaxpar.agree(anything=jnp.ones(3), number=np.pi, program=jax.jit(jnp.sin).lower(1.0))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            ("localhost:1",),
            ValueError,
            "go together, got 'localhost:1', None, None; give all, or no",
        ),
        (
            ("localhost:1", 2, 2),
            ValueError,
            "process_id=2 must be at least 0 and at most 1",
        ),
        (
            ("localhost", 2, 0),
            ValueError,
            "coordinator_address must be 'host:port', got",
        ),
        (("localhost:1", 0, 0), ValueError, "num_processes=0 must be at least 1"),
    ],
)
def test_refused(arguments, error, text):
    with pytest.raises(error, match=r"^initialize: ") as found:
        jaxpar.initialize(*arguments)
    assert text in str(found.value)


def test_too_late():
    with pytest.raises(RuntimeError, match="initialize: arrays were made or devices were"):
        jaxpar.initialize("localhost:1", 1, 0)
