"""Starts JAX for a benchmark: CPU devices where there are no others, and several processes."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

import jax

from jaxpar.bench._errors import UsageError

CPU_DEVICES = 8  # over all processes


@contextmanager
def start_jax(
    coordinator: str | None, process_id: int, num_processes: int
) -> Generator[None, None, None]:
    """Chooses the number of CPU devices and joins the processes, before JAX is first used.

    The number is left alone where the user chose it, and has no effect where JAX's default devices
    are not CPUs.
    """
    flag = "xla_force_host_platform_device_count"
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or flag in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        jax.config.update("jax_num_cpu_devices", max(1, CPU_DEVICES // num_processes))
    if coordinator is None:
        yield
        return
    if process_id == 0:
        _require_port(coordinator)
    jax.distributed.initialize(coordinator, num_processes, process_id)
    try:
        yield
    finally:
        jax.distributed.shutdown()


def _require_port(coordinator: str) -> None:
    # JAX crashes, without an exception, where its coordinator cannot listen.
    _, _, port = coordinator.rpartition(":")
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual).close()
    except (OSError, OverflowError, ValueError) as reason:
        raise UsageError(
            f"--coordinator {coordinator} must be HOST:PORT with a port that is free on the host "
            f"of process 0: {reason}"
        ) from None
