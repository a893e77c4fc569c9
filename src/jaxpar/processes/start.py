"""Starts programs of several processes."""

from __future__ import annotations

import os
from inspect import signature
from typing import Any

import jax

from jaxpar.arguments.calls import called, public, type_error, value_error
from jaxpar.arguments.types import Integer, Number
from jaxpar.axis.checks import check_whole
from jaxpar.axis.checks_of_layers import check_number
from jaxpar.processes import heartbeat
from jaxpar.processes.describe import Description, describe
from jaxpar.processes.meeting import call_roll

# Variables by which jax.distributed sees that a launcher or a cloud knows the processes.
_LAUNCHERS = (
    *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_NAME"),
    *("TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
)
# Arguments that a process without others can leave aside.
_TIMES = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")


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
      timeout_s: seconds to wait for the others, as `initialization_timeout` in JAX, which is
        taken, too.
      **more: as for `jax.distributed.initialize`. JAX ends all processes if any is stopped for
        `heartbeat_timeout_seconds`, or half of it: `guard` and `agree` say so before.

    Returns:
      The current `describe()`.

    Raises:
      TimeoutError: processes are missing; the message lists them.
      ValueError: only some of the first three arguments are given, or a number is out of range; an
        argument that a process without others cannot obey.
      TypeError: an argument that this JAX does not know.
      RuntimeError: arrays were made or devices were listed before; the processes have others
        numbers already.

    Example:
      >>> initialize().processes  # alone
      1
    """
    placement = (coordinator_address, num_processes, process_id)
    seconds = _seconds(timeout_s, more)
    if jax.distributed.is_initialized():
        _check_same(num_processes, process_id)
        return describe()
    if all(value is None for value in placement):
        method = more.get("cluster_detection_method")
        if method is not None or any(name in os.environ for name in _LAUNCHERS):
            _start(dict(more), seconds)
        elif idle := [name for name in more if name not in _TIMES and more[name] is not None]:
            raise value_error(
                f"{idle[0]}={more[idle[0]]!r} is for one of several processes, and neither an "
                "address nor a launcher tells of others; give coordinator_address, num_processes "
                f"and process_id, or leave out {idle[0]}"
            )
        return describe()
    if any(value is None for value in placement):
        raise value_error(
            "coordinator_address, num_processes and process_id go together, got "
            f"{coordinator_address!r}, {num_processes!r}, {process_id!r}; give all, or none "
            "where a launcher knows them"
        )
    count = check_whole("num_processes", num_processes, 1)
    rank = check_whole("process_id", process_id, 0, count - 1, "the last of num_processes")
    address = _host_and_port("coordinator_address", coordinator_address)
    bound = more.get("coordinator_bind_address") or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    at = _host_and_port("coordinator_bind_address", bound) if bound else ("", address[1])
    if count > 1:
        call_roll(address, at, count, rank, seconds)
    numbers = {"num_processes": count, "process_id": rank}
    _start({"coordinator_address": coordinator_address, **numbers, **more}, seconds)
    return describe()


def _seconds(timeout_s: Number, more: dict[str, Any]) -> float:
    known = signature(jax.distributed.initialize).parameters
    for name in more:
        if name not in known:
            raise type_error(
                f"{name!r} is no argument of jax.distributed.initialize in jax {jax.__version__}; "
                f"it takes {', '.join(known)}"
            )
    if (waits := more.pop("initialization_timeout", None)) is None:
        return check_number("timeout_s", timeout_s)
    if timeout_s != signature(initialize).parameters["timeout_s"].default:
        raise value_error(
            f"timeout_s={timeout_s} and initialization_timeout={waits} mean the same; give one"
        )
    return check_number("initialization_timeout", waits)


def _check_same(num_processes: Integer | None, process_id: Integer | None) -> None:
    now = {"num_processes": jax.process_count(), "process_id": jax.process_index()}
    for name, value in (("num_processes", num_processes), ("process_id", process_id)):
        if value is not None and value != now[name]:
            raise RuntimeError(
                f"{called()}: {name}={value}, but the processes have met already, as {name}="
                f"{now[name]}; leave it out of the second call"
            )


def _host_and_port(name: str, address: Any) -> tuple[str, int]:
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal():
        raise value_error(f"{name} must be 'host:port', got {address!r}")
    return host.strip("[]"), int(port)


def _start(arguments: dict[str, Any], seconds: float) -> None:
    try:
        keywords: Any = {"initialization_timeout": max(1, round(seconds)), **arguments}
        jax.distributed.initialize(**keywords)
        heartbeat.LIMIT[0] = keywords.get("heartbeat_timeout_seconds", heartbeat.LIMIT[0])
    except RuntimeError as reason:
        if "before" not in str(reason):
            raise
        raise RuntimeError(
            f"{called()}: arrays were made or devices were listed before; call it first in the "
            "program"
        ) from reason
