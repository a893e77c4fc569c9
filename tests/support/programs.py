"""Programs of pages and workers of tests, run by themselves."""

import os
import secrets
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from partitioner import WARNING

import jaxpar


def environment(**more):
    """Of a process of its own, which chooses its CPU devices itself."""
    kept = {name: text for name, text in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpar.__file__).parents[1])}
    return kept | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | more  # they take longer than they save


def printed(example):
    """What a program of its own prints."""
    env = environment()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert WARNING not in done.stderr
    return done.stdout


def free_port():
    """A port below those that systems give to connections: none takes it meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port


def run_together(commands, forks=None, **more):
    """Runs commands at the same time; returns what each prints, its errors, and its status."""
    env = environment(**more)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        forks.start(one, **more)
        if forks
        else subprocess.Popen([sys.executable, *one], env=env, **pipes)
        for one in commands
    ]
    try:
        with ThreadPoolExecutor() as threads:  # a pipe that nobody reads would hold up all
            said = list(threads.map(lambda process: process.communicate(timeout=600), processes))
    finally:
        for process in processes:
            process.kill()
    return [(*texts, process.returncode) for texts, process in zip(said, processes, strict=True)]


def run_worker(file, *arguments):
    """Runs a worker, whose devices are other than the tests', until it says that it did all."""
    sources = Path(jaxpar.__file__).parents[1], Path(__file__).parent
    run = subprocess.run(
        [sys.executable, str(file), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all\n")
