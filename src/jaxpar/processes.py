"""Programs of several processes: their start, what must be equal in all of them, what they are."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxpar._calls import called, public, readable, value_error
from jaxpar._checks import check_number, check_whole
from jaxpar._meeting import call_roll, compare
from jaxpar._types import Integer, Number
from jaxpar.layout import Layout, LayoutMap
from jaxpar.layout._paths import arrays_of

# What says that a launcher or a cloud knows the other processes, as jax.distributed reads it.
_LAUNCHERS = (
    *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_NAME"),
    *("TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
)
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")


@readable
@dataclass(frozen=True)
class Description:
    """What a program runs on, as seen from one process.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      device_kind: of the devices.
      devices: in all processes.
      local_devices: of this one.
      process: the index of this one.
      processes: how many there are.
      host: its name.
      memory: bytes of each local device; None where the backend does not say.
      collectives: those that the backend has, of all that jaxpar uses.
      versions: of jax, jaxlib and jaxpar.

    Example:
      >>> describe().devices
      8
    """

    platform: str
    device_kind: str
    devices: int
    local_devices: int
    process: int
    processes: int
    host: str
    memory: int | None
    collectives: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        memory = "unknown" if self.memory is None else f"{self.memory / 2**30:.1f} GiB"
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"process {self.process} of {self.processes} on {self.host}: {self.local_devices} of "
            f"{self.devices} x {self.device_kind} ({self.platform}), memory {memory} each\n"
            f"collectives: {', '.join(self.collectives)}\n{versions}"
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
    """Connects the processes of a program; may be called twice, and in a process that is alone.

    Wraps `jax.distributed.initialize`, which knows Slurm, Open MPI, Kubernetes and TPU pods without
    arguments. Where nothing tells of other processes, nothing is done. With an address, the
    processes call the roll first: JAX ends a process whose companions do not come.

    Args:
      coordinator_address: `"host:port"` of process 0, the same in all processes.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      timeout_s: seconds to wait for the others.
      more: as for `jax.distributed.initialize`.

    Returns:
      What there is now: `describe()`.

    Raises:
      TimeoutError: processes that did not come, by their numbers.
      ValueError: an address without the numbers, or the reverse; a number out of range.
      RuntimeError: arrays were made before, when it is too late.

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


@public
def agree(*, timeout_s: Number = 60, **values: Any) -> None:
    """Compares what must be equal in all processes, before the first collective.

    A collective among programs that differ hangs, or returns garbage with exit code 0. Versions,
    settings of compilers and the kind and number of devices are compared always.

    Args:
      timeout_s: seconds to wait for the others.
      values: meshes, layouts, pytrees of arrays or shapes, whatever prints itself; and programs, as
        `step=jax.jit(step).lower(*args)`, which compares every operation.

    Raises:
      ValueError: processes that differ: names both sides and the first difference. All processes
        raise it.
      TimeoutError: processes that did not come, by their numbers. JAX waits for dead ones at exit,
        for the `heartbeat_timeout_seconds` of `initialize`.

    Cost: a message of some hundred bytes from each process to process 0, over the network of hosts.

    Example:
      >>> agree(mesh=make_mesh("tp=8"), step=jax.jit(jnp.sin).lower(1.0))  # alone: always
    """
    seconds = check_number("timeout_s", timeout_s)
    texts = {"what it runs on": _surroundings()}
    texts |= {name: list(_lines(value)) for name, value in values.items()}
    if jax.process_count() == 1:
        return
    compare(texts, seconds)


@public
def describe() -> Description:
    """Returns what the program runs on: devices, processes, memory, collectives, versions.

    Example:
      >>> found = describe()
      >>> found.process, found.processes, "psum" in found.collectives
      (0, 1, True)
    """
    local = jax.local_devices()
    stats: dict[str, int] = {}
    with suppress(Exception):  # backends without statistics raise errors of their own
        stats = local[0].memory_stats() or {}
    kind = local[0].platform
    collectives = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
    if kind in ("tpu", "gpu"):
        collectives += ("ragged_all_to_all",)
    return Description(
        kind,
        local[0].device_kind,
        jax.device_count(),
        len(local),
        jax.process_index(),
        jax.process_count(),
        platform.node(),
        stats.get("bytes_limit"),
        collectives,
        _versions(),
    )


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


def _lines(value: Any) -> Iterator[str]:
    """A value as text, of which equal values have the same."""
    match value:
        case Mesh():
            yield f"axes {dict(value.shape)}"
            for index, device in np.ndenumerate(value.devices):
                yield f"{index}: device {device.id} of process {device.process_index}"
        case AbstractMesh():
            yield f"axes {dict(value.shape)}"
        case Layout():
            yield f"mesh {dict(value.mesh.shape)}"
            for path, array in value.items():
                yield f"{path}: {array.dtype}{list(array.shape)} {array.spec}"
        case LayoutMap() | str():
            yield from str(value).splitlines()
        case _ if hasattr(value, "as_text"):  # a program
            yield from value.as_text().splitlines()
        case _:
            arrays = [found for found in arrays_of(value)[0] if found is not None]
            if len(arrays) != len(jax.tree.leaves(value)) or not arrays:
                yield from repr(value).splitlines()
                return
            for path, x in arrays:
                if hasattr(x, "shape"):
                    spec = getattr(getattr(x, "sharding", None), "spec", "")
                    yield f"{path}: {x.dtype}{list(x.shape)} {spec}"
                else:
                    yield f"{path}: {x!r}"


def _surroundings() -> list[str]:
    settings = {name: os.environ.get(name, "") for name in _SETTINGS}
    local = jax.local_devices()
    return [
        *(f"{name} {number}" for name, number in _versions().items()),
        *(f"{name}={text}" for name, text in settings.items()),
        f"{len(local)} local devices of kind {local[0].device_kind}",
    ]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("jax", "jaxlib", "jaxpar", "libtpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
