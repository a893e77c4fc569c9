"""Programs of several processes: their start, and what is said where they differ or are missing."""

from inspect import signature
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import free_port, run_together

import jaxpar
from jaxpar.processes import heartbeat
from jaxpar.processes.meeting import processes_text

JOB = {"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 0}
WORKER = Path(__file__).with_name("worker.py")


def run(case, count, folder, forks=None, ranks=None):
    """Starts the processes; returns what each printed, their errors, and how they ended."""
    port, started = free_port(), range(count) if ranks is None else ranks
    commands = [
        [str(WORKER), case, str(rank), str(count), str(port), str(folder)] for rank in started
    ]
    return zip(*run_together(commands, forks, STARTED=str(len(started))), strict=True)


@pytest.mark.parametrize("count", [2, 4])
def test_equal_processes(count, forks, tmp_path):
    """Two by themselves, not as forks: other hash seeds and addresses must make no difference."""
    said, errors, codes = run("equal", count, tmp_path, forks if count == 4 else None)
    assert codes == (0,) * count, "\n".join(errors)
    assert said == ("equal\n",) * count


def test_processes_that_differ(forks, tmp_path):
    said, errors, codes = run("differ", 3, tmp_path, forks)
    assert codes == (0,) * 3, "\n".join(errors)
    for out in said:  # all say the same
        assert "layout: agree: processes 0 and 2 differ in 'layout', line 2: process 0 has" in out
        assert "has \"w: float32[6, 6] P(None, 'tp')\", process" in out.replace(
            "PartitionSpec", "P"
        )
        assert "processes 0 and 2 differ in 'step', line " in out
        assert "'batch', line 1: process 0 has 'x: float64[4, 2]', process" in out
        assert "names: agree: process 0 compares 'less', and process 2 does not" in out
        assert "'key', line 2: process 0 has 'values [0, 0]', process" in out
        assert "'weights', line 2: process 0 has 'values of digest " in out
        assert "process 0 has 'jax_default_matmul_precision=None', process" in out
        differ = "Layout.place_batch: processes make different arrays: process 0 has "
        rows = "float32[4,3] of [12, 3], and process 2 has 'x' float32[3,3] of [9, 3]; give each"
        assert f"{differ}'x' {rows} process as many rows, or use Layout.batches, which" in out
        assert f"{differ}'x' float32[4,3] of [12, 3], and process 2 has 'x' int8[3,3] of" in out
        assert f"{differ}'' int64[4] of [12], and process 2 has '' int64[3] of [9]; give" in out
        assert "placed: (12,)\nfilled: (12,)" in out


def test_a_process_that_does_not_come(forks, tmp_path):
    _, errors, codes = run("missing", 4, tmp_path, forks, ranks=[0, 2])
    assert all(codes)
    for out in errors:
        assert "TimeoutError: initialize: after 4 s processes 1, 3 of 4 are missing" in out


def test_a_process_that_is_killed_on_the_way(forks, tmp_path):
    said, errors, codes = run("killed", 2, tmp_path, forks)
    assert codes == (3, 9), "\n".join(errors)
    assert "TimeoutError: agree: after 3 s process 1 of 2 is missing" in said[0]


def test_who_is_late_is_told_before_jax_ends_all(forks, tmp_path):
    said, errors, codes = run("late", 2, tmp_path, forks)
    assert (said, codes) == (("agreed\n",) * 2, (0, 0)), "\n".join(errors)
    ends = "; if it, or its host, is stopped, JAX ends all processes 5 to 10 s after that; jaxpar"
    assert f"jaxpar.agree: process 1: after 3 s process 0 has not answered{ends}" in errors[1]
    assert f"jaxpar.agree: process 0: after 3 s process 1 has not come{ends}" in errors[0]


def test_a_process_0_that_does_not_answer(forks, tmp_path):
    said, errors, codes = run("silent", 2, tmp_path, forks)
    assert codes == (0, 3), "\n".join(errors)
    assert "TimeoutError: agree: process 0 did not answer within 1 s; is it alive" in said[1]


def test_a_process_0_that_does_not_come(forks, tmp_path):
    _, [error], [code] = run("missing", 2, tmp_path, forks, ranks=[1])
    assert code
    assert "TimeoutError: initialize: after 4 s process 0 is missing: nothing answers at" in error


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
        (
            {"heartbeat_timeout": 3},
            TypeError,
            "'heartbeat_timeout' is no argument of jax.distributed.initialize in jax ",
        ),
        (
            {"timeout_s": 5, "initialization_timeout": 3},
            ValueError,
            "timeout_s=5 and initialization_timeout=3 mean the same; give one",
        ),
        (
            {"local_device_ids": [1]},
            ValueError,
            "local_device_ids=[1] is for one of several processes, and neither an address nor a "
            "launcher tells of others; give coordinator_address, num_processes and process_id, or ",
        ),
        (
            {"coordinator_bind_address": "[::]:1"},
            ValueError,
            "coordinator_bind_address='[::]:1' is",
        ),
        (
            {**JOB, "coordinator_bind_address": "localhost"},
            ValueError,
            "coordinator_bind_address must be 'host:port', got 'localhost'",
        ),
    ],
)
def test_refused(arguments, error, text):
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with pytest.raises(error, match=r"^initialize: ") as found:
        jaxpar.initialize(*args, **kwargs)
    assert text in str(found.value)


@pytest.mark.parametrize("name", ["timeout_s", "initialization_timeout"])
def test_the_time_to_wait_by_either_name(name):
    job = JOB | {"coordinator_address": f"localhost:{free_port()}"}
    with pytest.raises(TimeoutError, match=r"initialize: after 0\.2 s process 1 of 2 is missing"):
        jaxpar.initialize(**job, **{name: 0.2})


TAKEN = [name for name in signature(jax.distributed.initialize).parameters if name not in JOB]


@pytest.mark.parametrize("name", TAKEN)
def test_every_argument_of_jax_reaches_it(name, monkeypatch):
    """Beside the processes' numbers, and where a launcher knows these."""
    taken = []
    jax_takes = signature(jax.distributed.initialize)

    def initialize(**given):
        taken.append(given)

    initialize.__signature__ = jax_takes
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(heartbeat, "LIMIT", [100.0])
    value = "localhost:1" if name == "coordinator_bind_address" else 7
    for others in ({}, JOB | {"num_processes": 1}):
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        jaxpar.initialize(**others, **{name: value})
        assert taken.pop() == {"initialization_timeout": 300, **others, name: value}
    (beat,) = heartbeat.LIMIT
    assert beat == (7 if name == "heartbeat_timeout_seconds" else 100)
    if name == "cluster_detection_method":  # where no launcher is known to jaxpar
        monkeypatch.delenv("SLURM_JOB_ID")
        jaxpar.initialize(cluster_detection_method=value)
        assert taken.pop() == {"initialization_timeout": 300, name: value}


def test_times_alone_are_no_fault():
    assert jaxpar.initialize(heartbeat_timeout_seconds=20, initialization_timeout=3).processes == 1


def test_too_late():
    with pytest.raises(RuntimeError, match="initialize: arrays were made or devices were"):
        jaxpar.initialize("localhost:1", 1, 0)
