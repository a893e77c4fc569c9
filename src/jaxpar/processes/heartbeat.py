"""How long processes wait for a silent process, before JAX ends them all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer

import jax

from jaxpar.arguments.calls import called

# JAX's default for `heartbeat_timeout_seconds`, in all versions; `initialize` sets what it is told.
LIMIT = [100.0]


def patience() -> float:
    """Returns seconds of silence that are over before JAX ends all processes.

    It does so when a process's last heartbeat is as old as the limit. There are two within that
    time, so that up to half of it has passed when a process is stopped.
    """
    return 0.3 * LIMIT[0]


def jax_ends() -> str:
    return (
        f"if it, or its host, is stopped, JAX ends all processes {LIMIT[0] / 2:g} to {LIMIT[0]:g} "
        "s after that; jaxpar.initialize(heartbeat_timeout_seconds=...) sets the latter"
    )


@contextmanager
def telling(seconds: float, late: Callable[[], str]) -> Generator[None]:
    """Prints who is late, if the time to wait is longer than JAX may leave."""
    if seconds <= patience() or not jax.distributed.is_initialized():
        yield  # JAX sends no heartbeats yet
        return
    who, rank, after = called(), jax.process_index(), patience()

    def tell() -> None:
        text = f"jaxpar.{who}: process {rank}: after {after:g} s {late()}; {jax_ends()}\n"
        sys.stderr.write(text)

    timer = Timer(after, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
