"""Starts JAX for a benchmark: CPU devices where there are no others, and several processes."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import jax

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
    jax.distributed.initialize(coordinator, num_processes, process_id)
    try:
        yield
    finally:
        jax.distributed.shutdown()
