"""Targets: described devices of TPU slices and of GPU hosts, and a mesh over them."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh

from jaxpar.mesh import make_mesh
from jaxpar.tools.private_names import (
    Chip,
    MeshAxes,
    chip_of,
    install_command,
    readable,
    value_error,
)

HERE = "here"  # in place of a chip and its layout: the devices at hand
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# Of some GPUs: compute capability, multiprocessors, L2 cache, clock in GHz, memory and its speed.
# Shared memory of one multiprocessor is 164 KiB on the first and 228 on the others.
_KNOWN = {
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 40 << 20, 1.41, 80 << 30, 2_039_000_000_000),
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 50 << 20, 1.98, 80 << 30, 3_352_000_000_000),
    "NVIDIA H200 141GB HBM3e": ((9, 0), 132, 60 << 20, 1.98, 141 << 30, 4_800_000_000_000),
    "NVIDIA B200": ((10, 0), 148, 126 << 20, 1.965, 180 << 30, 8_000_000_000_000),
}


def find_plugin() -> str | None:
    """The CUDA plugin's module, None where none is installed."""
    return next((name for name in PLUGINS if _find_spec(name) is not None), None)


def described_gpus(plugin: str) -> dict[str, str]:
    """Descriptions of GPUs, by name in lower case with hyphens: GpuTargetConfigProto texts.

    They are those that the plugin carries, or, where it carries none (as with jax 0.10), those of
    the GPUs above. No tiles are tuned without a device, so that little depends on the rest.
    """
    folder = Path(next(iter(_find_spec(plugin).submodule_search_locations)))
    with (folder / "xla_cuda_plugin.so").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    texts: dict[str, str] = {}
    with data:
        for found in re.finditer(rb'device_description_str: "([^"]+)"', data):
            start = data.rfind(b"\0", 0, found.start()) + 1
            text = data[start : data.find(b"\0", found.end())].decode("ascii", "ignore")
            if "cuda_compute_capability" in text:
                texts[found.group(1).decode()] = text
    texts = texts or {name: _text(name, *figures) for name, figures in _KNOWN.items()}
    return {slug(name): text for name, text in texts.items()}


def slug(description: str) -> str:
    """A GPU's name in lower case, its words joined by hyphens, without the vendor."""
    words = re.findall(r"[a-z0-9.]+", description.lower())
    return "-".join(word for word in words if word not in ("nvidia", "tesla"))


def _find_spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _text(
    name: str, capability: tuple[int, int], cores: int, cache: int, clock: float, *memory: int
) -> str:
    major, minor = capability
    size, speed = memory
    shared = (164 if major == 8 else 228) << 10
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  memory_bandwidth: {speed}
  device_memory_size: {size}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

# What a short name of a GPU stands for, where the compiler knows several of that name.
_USUAL = {"a100": "a100-sxm4-80gb", "h100": "h100-80gb-hbm3", "h200": "h200-141gb-hbm3e"}
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud host is asked what it has
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


@readable
@dataclass(frozen=True)
class Target:
    """Described devices to compile for.

    Attributes:
      name: as given to `target`.
      mesh: a `jax.sharding.Mesh` of the described devices, to be used in shardings and `shard_map`.
      chip: published figures of one device, None for a chip that jaxpar has none of.

    Example:
      >>> from jaxpar.schedule import target
      >>> target("v5e:2x2").platform
      'tpu'
    """

    name: str
    mesh: Mesh
    chip: Chip | None

    @property
    def platform(self) -> str:
        """`"tpu"` or `"gpu"`."""
        return self.mesh.devices.flat[0].platform


def figures_of(target: Target, chip: Chip | None = None) -> Chip:
    """Returns the figures that are given, or else the target's, or says how to give some."""
    chip = target.chip if chip is None else chip
    if chip is None:
        kind = target.mesh.devices.flat[0].device_kind
        raise value_error(
            f"no figures are known of {kind!r} ({target.name}); choose a chip that is known, or "
            "give some: dataclasses.replace(target, chip=jaxpar.schedule.Chip(...))"
        )
    return chip


@readable
def target(name: str, mesh: MeshAxes = "tp=-1", *, axis_types: Any = AxisType.Auto) -> Target:
    """Describes devices that need not be there, and makes a mesh of them.

    Args:
      name: for TPU the generation and the slice as in `"v5p:8x8x8"` (v4, v5e, v5p, v6e, tpu7x; the
        slices that libtpu knows). For GPU the chip and how many as in `"h100:8"`, or hosts x
        devices of each as in `"h100:4x8"`; any GPU that the CUDA plugin describes, by its name in
        lower case with hyphens, such as `"h100-pcie"` or `"a100-sxm4-40gb"`. That of jax 0.10
        describes none: there, one of a100, h100, h200 and b200. `"here"`: the devices at hand,
        `jax.devices()`; of CPUs nothing is published, so that they have no figures.
      mesh: as for `jaxpar.make_mesh`.
      axis_types: as for `jaxpar.make_mesh`.

    Returns:
      A `Target`. Described devices cannot run anything.

    Raises:
      ImportError: the compiler is not installed; the message names the extra that brings it.
      ValueError: an unknown chip or slice, or axes that do not fit the number of devices.

    Example:
      >>> from jaxpar.schedule import target
      >>> dict(target("v5p:8x8x8", "dp=64,tp=8").mesh.shape)
      {'dp': 64, 'tp': 8}

    Source: `jax.experimental.topologies`.
    """
    chip, _, layout = name.partition(":")
    sizes = layout.split("x")
    if name == HERE:
        devices = jax.devices()
    elif not chip or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"target: {name!r} is not of the form chip:layout, as in 'v5p:8x8x8' or 'h100:8'"
        )
    elif chip in TPUS:
        devices = _tpu_devices(name)
    else:
        devices = _gpu_devices(name, chip, [int(size) for size in sizes])
    first = devices[0]
    return Target(
        name=name,
        mesh=make_mesh(mesh, devices=devices, axis_types=axis_types),
        chip=chip_of(first.device_kind, getattr(first, "num_cores", None)),
    )


def _tpu_devices(name: str) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"target: {name!r} needs the TPU compiler; {install_command('tpu')}"
        ) from None
    with _environment(_OFFLINE):
        try:
            return list(get_topology_desc(platform="tpu", topology_name=name).devices)
        except Exception as reason:  # each jax version has its own class for what libtpu reports
            raise ValueError(
                f"target: libtpu does not know the slice {name!r}: {reason}; name one that is "
                "offered, such as v5e:4x4"
            ) from None


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None, None, None]:
    """Sets what is not set, for a while: real devices must not be started with it."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _gpu_devices(name: str, chip: str, sizes: list[int]) -> list[Any]:
    known = _gpu_configs(name)
    slug = _USUAL.get(chip, chip)
    fitting = [slug] if slug in known else [gpu for gpu in known if gpu.startswith(slug)]
    if len(fitting) != 1:
        problem = f"is one of {', '.join(fitting)}" if fitting else "is not a chip"
        raise ValueError(
            f"target: {name!r}: {chip!r} {problem}; write chip:devices or chip:hosts x devices. "
            f"TPU: {', '.join(TPUS)}. GPU: {', '.join(sorted({*known, *_USUAL}))}"
        )
    if len(sizes) > 2:
        raise ValueError(
            f"target: {name!r}: a layout of GPUs must be devices, or hosts x devices of each, as "
            f"in '{chip}:8' or '{chip}:4x8'"
        )
    text = known[fitting[0]]
    hosts = sizes[0]
    if len(sizes) == 1:  # as many as one switch joins make a host
        figures = chip_of(_description(text))
        most = sizes[0] if figures is None else figures.switched or 1
        hosts, rest = divmod(max(sizes[0], most), most)
        if rest and sizes[0] > most:
            raise ValueError(
                f"target: {name!r}: {sizes[0]} devices are no whole hosts of {most} "
                f"({sizes[0]} = {hosts} x {most} + {rest}); write hosts x devices, as in "
                f"'{chip}:2x8'"
            )
    layout = f"1x{hosts}x{prod(sizes) // hosts}"  # slices, hosts, devices of a host
    describe = partial(get_topology_desc, name, "cuda", target_config=text, topology=layout)
    # Else the plugin registers only where the libraries are that run programs.
    with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
        try:
            return list(describe().devices)
        except NotImplementedError:  # JAX looked for plugins before the variable was set
            importlib.import_module(find_plugin() or "").initialize()
            return list(describe().devices)


def _description(text: str) -> str:
    found = re.search(r'device_description_str: "([^"]+)"', text)
    return found.group(1) if found else ""


@cache
def _gpu_configs(name: str) -> dict[str, str]:
    plugin = find_plugin()
    if plugin is None:
        raise ImportError(
            f"target: {name!r} is no TPU ({', '.join(TPUS)}), and a GPU needs the CUDA compiler; "
            f"{install_command('gpu')}"
        )
    return described_gpus(plugin)
