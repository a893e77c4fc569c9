"""Two processes of four CPU devices each, over Gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jaxpar


def _free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_two_processes_measure_one_ring(tmp_path):
    data = tmp_path / "bench.json"
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    command = [
        *(sys.executable, "-m", "jaxpar", "bench", "--shapes", "16x16x16", "--repeats", "2"),
        *("--ops", "gather-lhs-rows,scatter-rows", "--json", str(data)),
        *("--coordinator", f"localhost:{_free_port()}", "--num-processes", "2", "--process-id"),
    ]
    processes = [
        subprocess.Popen(
            [*command, str(i)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        (out, err), (silent, peer_err) = (p.communicate(timeout=600) for p in processes)
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], err + peer_err
    assert "8 x cpu in 2 processes | mesh tp=8" in out
    assert "scatter-rows 16x16x16, forward+backward\n" in out
    assert "ratio" not in silent
    record = json.loads(data.read_text())
    assert (record["devices"], record["processes"]) == (8, 2)
    assert len(record["rows"]) == 2 * 2 * 3
