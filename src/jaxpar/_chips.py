"""What is known of each chip, in one table, and which chip a program is being traced for."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """Published figures of one device."""

    kind: str  # as in `device_kind`, or its beginning
    flops: float  # bf16, per second
    link: float  # bytes per second over one link, one way
    torus: bool  # neighbours have links of their own in both directions
    latency: float = 1e-6  # seconds a hop
    # Programs on slices of at least this many devices get synchronous permutes from the compiler
    # (seen on v5e from 8x8 up): a ring then only loses.
    synchronous_from: int | None = None


# Sources: the vendors' product pages, and the public book "How to scale your model". The order
# matters where one kind begins another. tpu7x has two devices a chip; its figures are per device.
CHIPS = (
    Chip("TPU v4", flops=2.75e14, link=4.5e10, torus=True),
    Chip("TPU v5 lite", flops=1.97e14, link=4.5e10, torus=True, synchronous_from=64),
    Chip("TPU v5", flops=4.59e14, link=9e10, torus=True),
    Chip("TPU v6 lite", flops=9.18e14, link=9e10, torus=True),
    Chip("TPU7x", flops=1.1535e15, link=1e11, torus=True),
    Chip("NVIDIA A100", flops=3.12e14, link=3e11, torus=False),
    Chip("NVIDIA H100", flops=9.9e14, link=4.5e11, torus=False),
    Chip("NVIDIA H200", flops=9.9e14, link=4.5e11, torus=False),
    Chip("NVIDIA B200", flops=2.25e15, link=9e11, torus=False),
    Chip("NVIDIA GB200", flops=2.25e15, link=9e11, torus=False),
)


def traced_chip() -> Chip | None:
    """Returns the chip that the enclosing shard_map is traced for, None if it is not in the table.

    The mesh knows it, also for a described device that is not there; the default backend does not.
    """
    kind = _traced_device_kind()
    return next((chip for chip in CHIPS if kind.startswith(chip.kind)), None)


def traced_for_cpu() -> bool:
    """Tells whether the program is traced for CPU devices."""
    return _traced_device_kind().lower().startswith("cpu")


def _traced_device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def preferred_ring() -> str:
    """Returns the ring mode that uses the chip's links best.

    On a torus both directions have links of their own. Behind a switch one direction already fills
    a device's port, and two serialise.
    """
    chip = traced_chip()
    return "bidirectional" if chip is not None and chip.torus else "unidirectional"
