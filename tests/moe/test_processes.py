"""Experts exchanged between two processes of two CPU devices each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jaxpar

FOLDER = Path(__file__).parent


def test_two_processes_exchange_tokens():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    paths = [str(Path(jaxpar.__file__).parents[1]), str(FOLDER)]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, str(FOLDER / "process_worker.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), port],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert all(out.endswith("equal\n") for out in said)
