"""Experts exchanged between two processes of two CPU devices each."""

import os
from pathlib import Path

from programs import free_port, run_together

import jaxpar

FOLDER = Path(__file__).parent


def test_two_processes_exchange_tokens():
    port, worker = str(free_port()), str(FOLDER / "process_worker.py")
    paths = os.pathsep.join([str(Path(jaxpar.__file__).parents[1]), str(FOLDER)])
    ended = run_together([[worker, str(rank), port] for rank in range(2)], PYTHONPATH=paths)
    for _, errors, status in ended:
        assert status == 0, errors
