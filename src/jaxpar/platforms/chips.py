"""What is known of each kind of chip, and the chip for which a program is traced.

A `Platform` has no default: whoever adds a chip to `families` is asked for each field.
"""

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from importlib import import_module
from math import inf
from pkgutil import iter_modules

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


@dataclass(frozen=True)
class Option:
    """A compiler option. It makes the collective that it `frees` asynchronous."""

    name: str
    value: bool | str
    reason: str
    frees: str | None = None


@dataclass(frozen=True)
class Compiler:
    """Facts of a kind of chip's compiler. It `frees` collectives without options."""

    options: tuple[Option, ...] = ()
    frees: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fitted:
    """Constants of the cost model, fitted to a kind of chip by `benchmarks/sweep/fit.py`."""

    within: float  # time that a matmul loses by cutting an operand, relative to a copy
    # separate passes over float32 sums per piece, in steps; 0: the epilogue adds
    step_passes: float
    chunk_passes: float  # the same in chunks
    piece: float  # seconds of overhead per piece
    resident: float  # share of VMEM that holds an operand


@dataclass(frozen=True)
class Observed:
    """What public measurements show of a kind of TPU; None: there are none."""

    link: float | None  # bytes a second one way
    network: float | None  # bytes a second from a device to other slices
    sustained: float  # how much longer a cycle takes in programs of 0.1 s or more
    sparse_core_starts: float  # starts of a transfer that a gather or sum on a SparseCore takes


@dataclass(frozen=True, kw_only=True)
class Platform:
    """All that is known of one kind of device.

    `flops`, `hbm`, `capacity`, `link`, `network` and `host` are as in `Chip`.
    """

    kind: str  # JAX's `device_kind`, or its beginning; the longest that fits counts
    names: tuple[str, ...]  # in `target` and in measurements
    flops: float
    hbm: float
    capacity: float
    link: float
    network: float  # 0: unknown
    host: float
    compiler: Compiler

    @cached_property
    def chip(self) -> Chip:
        known = {f.name: getattr(self, f.name) for f in fields(Chip) if hasattr(self, f.name)}
        return Chip(torus=isinstance(self, Tpu), **known)


@dataclass(frozen=True, kw_only=True)
class Tpu(Platform):
    """A kind of TPU; `vmem`, `cores`, `dimensions`, `clock`, `synchronous_around` as in `Chip`."""

    vmem: float
    cores: int
    dimensions: int
    clock: float  # at which matrix units at full use reach the peak, in the compiler's cycles
    synchronous_around: int | None
    closed: int | None  # the size of closed dimensions; None: those of full cubes are closed
    # How `ring/order.py` writes a step: whether the compiler starts transfers late, and whether a
    # matmul that cuts its operand takes longer than both apart.
    delays_transfers: bool
    cuts_first: bool
    fitted: Fitted
    measured: Observed


@dataclass(frozen=True, kw_only=True)
class Gpu(Platform):
    """A kind of GPU."""

    switched: int  # devices that a switch joins
    plugin_name: str | None  # which of several in the CUDA plugin `names` mean
    # For plugins that describe no GPU (jax 0.10): its name, compute capability, multiprocessors,
    # bytes of L2 cache, GHz, bytes of memory, and their speed.
    description: tuple[str, tuple[int, int], int, int, float, int, int] | None
    # In the CUDA plugin: the tables of its matmuls and collectives; and those measured on it.
    tables: tuple[str, str] | None
    timed: tuple[str, ...]
    published: str | None  # its name in the table of published times


# TPU figures, fitted to half of the public measurements of `benchmarks/accuracy`. `HOP`: seconds a
# hop. `START`: seconds to start a transfer. `PERMUTE_STARTS`: starts that a permute takes, whose
# end is a separate instruction. `REACHED`: the share of HBM's speed. `ADDED`: the share of links in
# a sum over one dimension after the other.
HOP, START, PERMUTE_STARTS, REACHED, ADDED = 0.8e-6, 3e-6, 1.5, 0.82, 0.8

# An unknown chip: nothing takes any time, and the most common constants.
NO_FIGURES = Chip("", *(inf,) * 4, torus=False, switched=8, network=inf, latency=0.0, host=6.4e10)
_FITTED = Fitted(within=0.0, step_passes=0.0, chunk_passes=2.0, piece=3e-6, resident=0.3)


@cache
def platforms() -> tuple[Platform, ...]:
    """Returns the records of all files in `families`, which are loaded by the first question."""
    families = "jaxpar.platforms.families"
    files = iter_modules(import_module(families).__path__)
    modules = [import_module(f"{families}.{file.name}") for file in files]
    values = (value for module in modules for value in vars(module).values())
    return tuple(value for value in values if isinstance(value, Platform))


@cache
def platform_of(kind: str) -> Platform | None:
    """Returns what is known of a `device_kind`, by the longest beginning that fits."""
    fitting = [record for record in platforms() if kind.startswith(record.kind)]
    return max(fitting, key=lambda record: len(record.kind), default=None)


def is_tpu(kind: str) -> bool:
    return kind.startswith("TPU")


def compiler_of(kind: str) -> Compiler:
    known = platform_of(kind)
    if known is None and not is_tpu(kind):  # a vendor's GPUs have one compiler
        vendor = kind.partition(" ")[0]
        known = next((other for other in platforms() if other.kind.split()[0] == vendor), None)
    return known.compiler if known else Compiler()


def fitted_to(kind: str) -> Fitted:
    known = platform_of(kind)
    return known.fitted if isinstance(known, Tpu) else _FITTED


def chip_of(kind: str, num_cores: int | None = None) -> Chip | None:
    """Returns a device's figures; None: unknown. A TPU chip with two cores may be two devices."""
    # There are no published figures for a part of a GPU.
    known = None if " MIG " in kind else platform_of(kind)
    if known is None or num_cores is None or num_cores >= known.chip.cores:
        return known and known.chip
    chip, share = known.chip, num_cores / known.chip.cores
    return replace(
        chip,
        flops=chip.flops * share,
        hbm=chip.hbm * share,
        capacity=chip.capacity * share,
        cores=num_cores,
        network=chip.network * share,
    )


def with_measured_links(chip: Chip) -> Chip:
    known = platform_of(chip.kind)
    link = known.measured.link if isinstance(known, Tpu) else None
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
