"""Described devices with a mesh."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, Literal

import jax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh

from jaxpar.tools.timeline.cuda_plugin import described_gpus, find_plugin
from jaxpar.tools.timeline.gpu_tables import GpuTables, measured_on, published, tables_of
from jaxpar.tools.timeline.gpu_times import (
    collectives,
    gpu_of,
    installed_nccl,
    nearest_version,
    products,
)
from jaxpar.tools.toolkit_api import (
    Chip,
    Gpu,
    MeshAxes,
    Tpu,
    chip_of,
    install_command,
    on_torus,
    platform_of,
    platforms,
    readable,
    slice_of,
    value_error,
    with_measured_links,
)

HERE = "here"  # a name for the devices at hand
TPUS = tuple(name for known in platforms() if isinstance(known, Tpu) for name in known.names)

# For GPUs on several hosts: the share of the network that is reached, and seconds to start.
NETWORK, NETWORK_START = 0.85, 45e-6
# Seconds of a long program, in which some chips compute slower.
LONG = 0.1
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no cloud host
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


@readable
@dataclass(frozen=True)
class Target:
    """Described devices to compile for.

    Attributes:
      name: the argument of `target`.
      mesh: the devices' mesh.
      chip: figures of a device, or None.

    Example:
      >>> target("v5e:2x2").platform
      'tpu'
    """

    name: str
    mesh: Mesh
    chip: Chip | None

    @property
    def platform(self) -> str:
        """Returns the platform, such as `"tpu"` or `"gpu"`."""
        return self.mesh.devices.flat[0].platform


def _with_measured_links(chip: Chip) -> Chip:
    known = platform_of(chip.kind)
    if isinstance(known, Tpu):
        network = known.measured.network or chip.network
        return replace(with_measured_links(chip), network=network)
    return replace(chip, network=NETWORK * chip.network, start=NETWORK_START)


def measured_of(chip: Chip) -> GpuTables | None:
    # The network between hosts is in no table and may differ.
    plugin = find_plugin()
    known = chip_of(chip.kind)
    if chip.torus or plugin is None or known is None:
        return None
    measured = replace(_with_measured_links(known), network=chip.network, nccl=chip.nccl)
    nccl = chip.nccl or installed_nccl()
    return _as_fast_as(known, plugin, nccl) if chip == measured else None


@cache
def _as_fast_as(chip: Chip, plugin: str, nccl: str) -> GpuTables | None:
    names, tables = measured_on(chip.kind), tables_of(plugin, chip.kind)
    xlas = None
    if names is not None and tables is not None:
        multiplying, sending = names
        xlas = tables.slower(multiplying.flops / chip.flops, sending.link / chip.link)
    if (gpu := gpu_of(chip.kind)) is None:
        return xlas
    there = next(known.chip for known in platforms() if gpu in known.names)
    of_nccl = collectives(gpu, nearest_version(gpu, nccl))
    times = published(products(gpu, there.flops, there.hbm), of_nccl)
    scaled = times.slower(there.flops / chip.flops, there.link / chip.link)
    return scaled.before(xlas) if xlas else scaled


def unknown_network(mesh: Mesh, chip: Chip | None = None) -> str:
    """Returns why figures lack, or an empty text."""
    slices = {slice_of(device) for device in mesh.devices.flat if on_torus(device)}
    chip = chip or chip_of(mesh.devices.flat[0].device_kind)
    if len(slices) < 2 or chip is None or chip.network or not chip.torus:
        return ""
    return (
        f"the mesh {dict(mesh.shape)} joins {len(slices)} TPU slices, and no figure is known of "
        f"the network between slices of {chip.kind}; give the figures of one slice and of the "
        "network, in bytes a second and device: dataclasses.replace(of_one_slice.chip, network=...)"
    )


def under_load(chip: Chip) -> Chip:
    """Returns a chip's figures in long programs."""
    known = platform_of(chip.kind)
    slower = known.measured.sustained if isinstance(known, Tpu) else 1.0
    return replace(chip, clock=chip.clock and chip.clock / slower, flops=chip.flops / slower)


def figures_of(target: Target, chip: Chip | None = None) -> Chip:
    chip = target.chip if chip is None else chip
    if why := unknown_network(target.mesh, chip):
        raise value_error(why)
    if chip is None:
        kind = target.mesh.devices.flat[0].device_kind
        raise value_error(
            f"no figures are known of {kind!r} ({target.name}); choose a chip that is known, or "
            "give some: dataclasses.replace(target, chip=jaxpar.schedule.Chip(...))"
        )
    return chip


@readable
def target(
    name: str,
    mesh: MeshAxes = "tp=-1",
    *,
    axis_types: Any = AxisType.Auto,
    figures: Literal["measured", "book"] = "measured",
    nccl: str = "",
) -> Target:
    """Describes devices that need not be present, and makes a mesh of them.

    Args:
      name: for TPU a generation and a slice as in `"v5p:8x8x8"` (v4, v5e, v5p, v6e, tpu7x; slices
        that libtpu knows), or several equal slices as in `"2xv6e:16x16"`. For GPU a name and a
        number as in `"h100:8"`, or hosts x devices per host as in `"h100:4x8"`. GPU names are those
        of the CUDA plugin, such as `"h100-pcie"`; with jax 0.10 only a100, h100, h200 and b200.
        `"here"` means `jax.devices()`; CPUs have no figures.
      mesh: as for `jaxpar.make_mesh`.
      axis_types: as for `jaxpar.make_mesh`.
      figures: `"measured"` uses links fitted to public measurements (TPUs except v4, networks of
        GPU hosts and of v6e slices), and published and XLA's tables for GPUs. `"book"` uses the
        vendor's links with a microsecond per hop, and rooflines for GPUs.
      nccl: for GPUs, the version of NCCL whose times count, such as `"2.29"`; without a table of
        its own, the next older. Empty: the installed version, else the newest that was measured.

    Returns:
      A `Target`. Described devices cannot run anything.

    Raises:
      ImportError: the compiler is not installed; the message names the pip extra.
      ValueError: an unknown chip or slice; axes that do not fit the devices; unknown `figures`;
        `nccl` that is no version, or beside other devices than GPUs.

    Example:
      >>> dict(target("v5p:8x8x8", "dp=64,tp=8").mesh.shape)
      {'dp': 64, 'tp': 8}

    Source: `jax.experimental.topologies`; times of GPUs: ai-dynamo/aiconfigurator (Apache-2.0).
    """
    if figures not in ("measured", "book"):
        raise ValueError(f"target: figures={figures!r} must be 'measured' or 'book'")
    if nccl and not re.fullmatch(r"\d+(\.\d+){1,2}", nccl):
        raise ValueError(f"target: nccl={nccl!r} must be a version, such as '2.29' or '2.29.2'")
    slices, chip, layout = parts_of(name)
    sizes = layout.split("x")
    if name == HERE:
        devices = jax.devices()
    elif not chip or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"target: {name!r} is not of the form chip:layout, as in 'v5p:8x8x8', 'h100:8' or, for "
            "two TPU slices, '2xv5p:8x8x8'"
        )
    elif chip in TPUS:
        devices = _tpu_devices(name, f"{chip}:{layout}", slices)
    elif slices > 1:
        raise ValueError(
            f"target: {name!r}: only TPUs ({', '.join(TPUS)}) have slices; for several hosts of "
            f"GPUs write hosts x devices, as in 'h100:{slices}x8'"
        )
    else:
        devices = _gpu_devices(name, chip, [int(size) for size in sizes])
    from jaxpar.mesh import make_mesh  # a timeline of a mesh at hand makes none

    made = target_of(make_mesh(mesh, devices=devices, axis_types=axis_types), name, figures)
    if nccl and made.platform not in ("gpu", "cuda"):
        raise ValueError(f"target: {name!r} has no NCCL; leave nccl={nccl!r} out")
    return replace(made, chip=made.chip and replace(made.chip, nccl=nccl))


def target_of(
    mesh: Mesh, name: str = HERE, figures: Literal["measured", "book"] = "measured"
) -> Target:
    first = mesh.devices.flat[0]
    known = not unknown_network(mesh)
    chip = chip_of(first.device_kind, getattr(first, "num_cores", None)) if known else None
    chip = _with_measured_links(chip) if chip and figures == "measured" else chip
    return Target(name, mesh, chip)


def parts_of(name: str) -> tuple[int, str, str]:
    """Splits a name into slices, chip and layout."""
    chip, _, layout = name.partition(":")
    several = re.fullmatch(r"([1-9][0-9]*)x(.+)", chip)
    return (int(several[1]), several[2], layout) if several else (1, chip, layout)


def _tpu_devices(name: str, one_slice: str, slices: int) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f"target: {name!r} needs the TPU compiler; {install_command('tpu')}"
        ) from None
    with _environment(_OFFLINE):
        try:
            several = {"num_slices": slices} if slices > 1 else {}
            topology = get_topology_desc(platform="tpu", topology_name=one_slice, **several)
            return list(topology.devices)
        except Exception as reason:  # each jax version has its own class for libtpu's errors
            raise ValueError(
                f"target: libtpu does not know the slice {name!r}: {reason}; name one that is "
                "offered, such as v5e:4x4"
            ) from None


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None, None, None]:
    # The variables are temporary: real devices must not start with them.
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _gpu_devices(name: str, chip: str, sizes: list[int]) -> list[Any]:
    known, gpus = _gpu_configs(name), [gpu for gpu in platforms() if isinstance(gpu, Gpu)]
    usual = {short: gpu.plugin_name for gpu in gpus if gpu.plugin_name for short in gpu.names}
    slug = usual.get(chip, chip)
    fitting = [slug] if slug in known else [gpu for gpu in known if gpu.startswith(slug)]
    if len(fitting) != 1:
        problem = f"is one of {', '.join(fitting)}" if fitting else "is not a chip"
        raise ValueError(
            f"target: {name!r}: {chip!r} {problem}; write chip:devices or chip:hosts x devices. "
            f"TPU: {', '.join(TPUS)}. GPU: {', '.join(sorted({*known, *usual}))}"
        )
    if len(sizes) > 2:
        raise ValueError(
            f"target: {name!r}: a layout of GPUs must be devices, or hosts x devices of each, as "
            f"in '{chip}:8' or '{chip}:4x8'"
        )
    text = known[fitting[0]]
    hosts = sizes[0]
    if len(sizes) == 1:  # a host has as many as one switch joins
        figures = chip_of(_description(text))
        most = sizes[0] if figures is None else figures.switched or 1
        hosts, rest = divmod(max(sizes[0], most), most)
        if rest and sizes[0] > most:
            raise ValueError(
                f"target: {name!r}: {sizes[0]} devices are no whole hosts of {most} "
                f"({sizes[0]} = {hosts} x {most} + {rest}); write hosts x devices, as in "
                f"'{chip}:2x8'"
            )
    layout = f"1x{hosts}x{prod(sizes) // hosts}"  # slices, hosts, devices per host
    describe = partial(get_topology_desc, name, "cuda", target_config=text, topology=layout)
    # Otherwise the plugin registers only if the libraries that run programs are installed.
    with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
        try:
            return list(describe().devices)
        except NotImplementedError:  # JAX looked for plugins before the variable was set
            importlib.import_module(find_plugin() or "").initialize()
            return list(describe().devices)


def _description(text: str) -> str:
    match = re.search(r'device_description_str: "([^"]+)"', text)
    return match.group(1) if match else ""


@cache
def _gpu_configs(name: str) -> dict[str, str]:
    plugin = find_plugin()
    if plugin is None:
        raise ImportError(
            f"target: {name!r} is no TPU ({', '.join(TPUS)}), and a GPU needs the CUDA compiler; "
            f"{install_command('gpu')}"
        )
    return described_gpus(plugin)
