"""Starts programs of several processes."""

from __future__ import annotations

import os
from typing import Any

import jax

from jaxpar.tools.private_names import (
    Integer,
    Number,
    called,
    check_number,
    check_whole,
    public,
    value_error,
)
from jaxpar.tools.processes.describe import Description, describe
from jaxpar.tools.processes.meeting import call_roll

# Variables by which jax.distributed sees that a launcher or a cloud knows the processes.
_LAUNCHERS = (
    *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_NAME"),
    *("TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
)


@public
def initialize(
    coordinator_address: str | None = None,
    num_processes: Integer | None = None,
    process_id: Integer | None = None,
    *,
    timeout_s: Number = 300,
    **more: Any,
) -> Description:
    """Connects the processes of a program; may be called twice, or by a single process.

    Wraps `jax.distributed.initialize`, which needs no arguments for Slurm, Open MPI, Kubernetes and
    TPU pods. A process that finds no others does nothing. With an address, processes first wait for
    each other, and raise a `TimeoutError` where JAX alone would end them.

    Args:
      coordinator_address: `"host:port"` of process 0.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.
      timeout_s: seconds to wait for the others.
      **more: as for `jax.distributed.initialize`.

    Returns:
      The current `describe()`.

    Raises:
      TimeoutError: processes are missing; the message lists them.
      ValueError: only some of the first three arguments are given, or a number is out of range.
      RuntimeError: arrays were made or devices were listed before.

    Example:
      >>> initialize().processes  # alone
      1
    """
    given = (coordinator_address, num_processes, process_id)
    seconds = check_number("timeout_s", timeout_s)
    if jax.distributed.is_initialized():
        return describe()
    if all(value is None for value in given):
        if any(name in os.environ for name in _LAUNCHERS):
            _start(dict(more), seconds)
        return describe()
    if any(value is None for value in given):
        raise value_error(
            "coordinator_address, num_processes and process_id go together, got "
            f"{coordinator_address!r}, {num_processes!r}, {process_id!r}; give all, or none "
            "where a launcher knows them"
        )
    count = check_whole("num_processes", num_processes, 1)
    rank = check_whole("process_id", process_id, 0, count - 1, "the last of num_processes")
    host, _, port = str(coordinator_address).rpartition(":")
    if not host or not port.isdecimal():
        raise value_error(f"coordinator_address must be 'host:port', got {coordinator_address!r}")
    if count > 1:
        call_roll((host.strip("[]"), int(port)), count, rank, seconds)
    numbers = {"num_processes": count, "process_id": rank}
    _start({"coordinator_address": coordinator_address, **numbers, **more}, seconds)
    return describe()


def _start(arguments: dict[str, Any], seconds: float) -> None:
    try:
        given: Any = {"initialization_timeout": max(1, round(seconds)), **arguments}
        jax.distributed.initialize(**given)
    except RuntimeError as reason:
        if "before" not in str(reason):
            raise
        raise RuntimeError(
            f"{called()}: arrays were made or devices were listed before; call it first in the "
            "program"
        ) from reason
