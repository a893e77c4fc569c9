"""A table of chips, and the chip for which a program is traced."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import jax


@dataclass(frozen=True)
class Chip:
    """Published figures of one device; those of a `Target`'s links are fitted by default.

    `kind` is `device_kind` or its beginning. On a `torus`, neighbours have links of their own.

    - Per second: `flops` of bf16; bytes of `hbm`; bytes one way over a `link`, over the `network`
      beyond the switch or TPU slice, and to the `host`'s memory; cycles of the compiler's `clock`.
    - Bytes: `capacity` of HBM, `vmem` of a TPU core.
    - Seconds: `latency` of a hop, `start` of a transfer.
    - Numbers: `dimensions` of the torus, `cores`, devices `switched` by one switch; NCCL's version.
    - `synchronous_around`: the size of dimensions whose ring's permutes are synchronous (v5e:8x16).

    Example:
      >>> target("v5e:2x2").chip.flops
      197000000000000.0
    """

    kind: str
    flops: float
    hbm: float
    capacity: float
    link: float
    torus: bool
    clock: float | None = None
    dimensions: int = 0
    cores: int = 1
    switched: int | None = None
    network: float = 0.0
    latency: float = 1e-6
    start: float = 0.0
    vmem: float = 0.0
    host: float = 1.6e10
    synchronous_around: int | None = None
    nccl: str = ""


def _tpu(kind: str, dimensions: int = 3, **figures: Any) -> Chip:
    return Chip(kind, torus=True, dimensions=dimensions, **figures)


def _gpu(kind: str, flops: float, hbm: float, capacity: float, link: float, **more: Any) -> Chip:
    # By default: hosts of eight devices with 400 Gbit/s each, and fifth-generation PCIe.
    more = {"switched": 8, "network": 5e10, "host": 6.4e10, **more}
    return Chip(kind, flops, hbm, capacity, link, torus=False, **more)


_GIB, _MIB = 2.0**30, 2.0**20

# Sources: the vendors' product pages, the public book "How to scale your model", and for VMEM JAX's
# "TPU hardware reference". GPU FLOP/s are without sparsity. Networks between TPU slices are from
# Google Cloud's pages, which have none for v4. A TPU's clock is such that matrix units at full use
# reach the published peak in the compiler's cycles. If one kind is the beginning of another, the
# longer one comes first.
CHIPS = (
    _tpu("TPU v4", flops=2.75e14, hbm=1.23e12, capacity=32 * _GIB, link=4.5e10, clock=1.05e9,
         cores=2, vmem=16 * _MIB),
    _tpu("TPU v5 lite", flops=1.97e14, hbm=8.1e11, capacity=16 * _GIB, link=4.5e10, clock=1.5e9,
         dimensions=2, synchronous_around=16, vmem=128 * _MIB, network=3.125e9),
    _tpu("TPU v5", flops=4.59e14, hbm=2.76e12, capacity=95 * _GIB, link=9e10, clock=1.75e9,
         cores=2, vmem=64 * _MIB, network=6.25e9),
    _tpu("TPU v6 lite", flops=9.18e14, hbm=1.64e12, capacity=32 * _GIB, link=9e10, clock=1.75e9,
         dimensions=2, vmem=128 * _MIB, host=3.2e10, network=1.25e10),
    _tpu("TPU7x", flops=2.307e15, hbm=7.38e12, capacity=192 * _GIB, link=1e11, clock=2.2e9,
         cores=2, vmem=64 * _MIB, host=3.2e10, network=1.25e10),
    _gpu("NVIDIA A100-SXM4-40GB", 3.12e14, 1.555e12, 4e10, link=3e11, network=2.5e10, host=3.2e10),
    _gpu("NVIDIA A100 80GB PCIe", 3.12e14, 1.935e12, 8e10, link=3.2e10, network=2.5e10,
         host=3.2e10),
    _gpu("NVIDIA A100", 3.12e14, 2.039e12, 8e10, link=3e11, network=2.5e10, host=3.2e10),
    _gpu("NVIDIA H100 PCIe", 7.56e14, 2.0e12, 8e10, link=6.4e10),
    _gpu("NVIDIA H100", 9.9e14, 3.35e12, 8e10, link=4.5e11),
    _gpu("NVIDIA H200", 9.9e14, 4.8e12, 1.41e11, link=4.5e11),
    _gpu("NVIDIA B200", 2.25e15, 8e12, 1.8e11, link=9e11),
    _gpu("NVIDIA B300", 2.25e15, 8e12, 2.88e11, link=9e11, network=1e11),
    _gpu("NVIDIA GB200", 2.5e15, 8e12, 1.86e11, link=9e11, switched=72, host=4.5e11),
    _gpu("NVIDIA GB300", 2.5e15, 8e12, 2.88e11, link=9e11, switched=72, network=1e11,
         host=4.5e11),
    _gpu("NVIDIA RTX A6000", 1.55e14, 7.68e11, 4.8e10, link=3.2e10, host=3.2e10),
    _gpu("NVIDIA RTX PRO 6000", 5.0e14, 1.79e12, 9.6e10, link=6.4e10),
    _gpu("Tesla V100", 1.25e14, 9e11, 1.6e10, link=1.5e11, network=1.25e10, host=1.6e10),
    _gpu("Tesla P100", 2.1e13, 7.3e11, 1.6e10, link=8e10, network=1.25e10, host=1.6e10),
)  # fmt: skip

# TPU figures, fitted to half of the public measurements of `benchmarks/accuracy`. `_LINKS`: bytes
# per second of a link in one direction. `HOP`: seconds a hop. `START`: seconds to start a transfer.
# `PERMUTE_STARTS`: starts that a permute takes, whose end is a separate instruction. `REACHED`: the
# share of HBM's speed. `ADDED`: the share of links in a sum over one dimension after the other.
_LINKS = {"TPU v5 lite": 4.32e10, "TPU v5": 8.63e10, "TPU v6 lite": 8.68e10, "TPU7x": 8.94e10}
HOP, START, PERMUTE_STARTS, REACHED, ADDED = 0.8e-6, 3e-6, 1.5, 0.82, 0.8

# An unknown chip: nothing takes any time.
NO_FIGURES = _gpu("", flops=inf, hbm=inf, capacity=inf, link=inf, network=inf, latency=0.0)


def chip_of(kind: str, num_cores: int | None = None) -> Chip | None:
    """Returns a device's figures; None: unknown. A TPU chip with two cores may be two devices."""
    whole = " MIG " not in kind  # no published figures for a part of a GPU
    chip = next((chip for chip in CHIPS if whole and kind.startswith(chip.kind)), None)
    if chip is None or num_cores is None or num_cores >= chip.cores:
        return chip
    share = num_cores / chip.cores
    return replace(
        chip,
        flops=chip.flops * share,
        hbm=chip.hbm * share,
        capacity=chip.capacity * share,
        cores=num_cores,
        network=chip.network * share,
    )


def with_measured_links(chip: Chip) -> Chip:
    link = _LINKS.get(chip.kind)
    return chip if link is None else replace(chip, link=link, latency=HOP, start=START)


def traced_chip() -> Chip | None:
    """Returns the chip of the enclosing shard_map; None: unknown."""
    # The mesh knows even described devices. The default backend does not.
    device = jax.sharding.get_abstract_mesh().abstract_device
    chip = None if device is None else chip_of(device.device_kind, device.num_cores)
    return None if chip is None else with_measured_links(chip)


def traced_for_cpu() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind.lower().startswith("cpu")


def traced_for_cpu_cluster() -> bool:
    """Returns whether the program is traced for CPUs of several processes."""
    # Only their transfers leave the cores free, and can overlap with matmuls.
    return traced_for_cpu() and jax.process_count() > 1
