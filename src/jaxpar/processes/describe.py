"""Describes what a program runs on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax

from jaxpar.arguments.calls import public, readable


@readable
@dataclass(frozen=True)
class Description:
    """The devices, processes and versions that a program runs on.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      device_kind: the `device_kind` of the devices.
      devices: the number of devices in all processes.
      local_devices: the number in this process.
      process: the index of this process.
      processes: the number of processes.
      host: the host's name.
      memory: bytes of each local device; None if the backend does not tell.
      collectives: the collectives used by jaxpar that the backend supports.
      versions: those of jax, jaxlib, jaxpar and libtpu, if installed.

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
def describe() -> Description:
    """Returns the devices, processes and versions of the running program.

    Example:
      >>> description = describe()
      >>> description.process, description.processes, "psum" in description.collectives
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
        versions(),
    )


def versions() -> dict[str, str]:
    numbers: dict[str, str] = {}
    for name in ("jax", "jaxlib", "jaxpar", "libtpu"):
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers
