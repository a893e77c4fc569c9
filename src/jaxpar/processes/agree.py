"""Compares values of all processes before the first collective."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import jax

from jaxpar.arguments.calls import public
from jaxpar.arguments.types import Number
from jaxpar.axis.checks_of_layers import check_number
from jaxpar.processes.describe import versions
from jaxpar.processes.meeting import compare
from jaxpar.processes.text import lines_of

_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# jax options that may differ by host: folders, devices and addresses.
_OF_A_HOST = re.compile(
    "cache|coordinator|cross_host|debug_log|default_device|device_assignment|dump|log|mtls|"
    "num_cpu_devices|pgle|platform|pprint|process|proxy|traceback|url|visible_devices"
)


@public
def agree(*, timeout_s: Number = 60, **values: Any) -> None:
    """Checks that all processes have equal values. Call it before the first collective.

    Collectives of different programs hang or return garbage. Versions, `jax.config`, compiler
    settings, and the kind and number of devices are always compared.

    Args:
      timeout_s: seconds to wait for the others.
      **values: meshes, layouts, configurations, optimizers, keys, pytrees of arrays or shapes,
        nested in any way. Programs, as in `step=jax.jit(step).lower(*args)`, are compared by
        operations; functions by code, defaults and closure, not globals; other objects by pickled
        state. Arrays are compared by value if a process holds the full array, otherwise by dtype,
        shape and sharding. For a batch that differs by process pass
        `jax.eval_shape(lambda: batch)`.

    Raises:
      ValueError: processes differ; all raise it, with both sides and the first difference.
      TimeoutError: processes are missing; the message lists them. If `timeout_s` is more than 0.3
        of JAX's `heartbeat_timeout_seconds`, they are printed before. At exit, JAX waits as long as
        that for dead processes.

    Cost: a message of some hundred bytes from each process to process 0. Arrays are copied to the
    host one at a time.

    Example:
      >>> agree(mesh=make_mesh("tp=8"), step=jax.jit(jnp.sin).lower(1.0))  # one process: agrees
    """
    seconds = check_number("timeout_s", timeout_s)
    texts = {"what it runs on": _surroundings()}
    texts |= {name: lines_of(value) for name, value in values.items()}
    if jax.process_count() == 1:
        return
    compare(texts, seconds)


def _surroundings() -> list[str]:
    settings = {name: os.environ.get(name, "") for name in _SETTINGS}
    # Current values: some are set for a thread, or within a `with`.
    options = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    local = jax.local_devices()
    return [
        f"python {platform.python_version()}",
        *(f"{name} {number}" for name, number in versions().items()),
        *(f"{name}={text}" for name, text in settings.items()),
        *(f"{name}={options[name]}" for name in sorted(options) if not _OF_A_HOST.search(name)),
        f"{len(local)} local devices of kind {local[0].device_kind}",
    ]
