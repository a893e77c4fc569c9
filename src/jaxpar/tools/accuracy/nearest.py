"""The public measurement that is nearest to what somebody measures on a chip of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import jax.numpy as jnp

from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.private_names import Chip


@dataclass(frozen=True)
class Wanted:
    """What is compared: one device's part of an operation.

    Attributes:
      kinds: of measurements, as `Measurement.kind`: the first one that there are rows of is taken.
      sizes: m, k and n of one device's product.
      group: how many devices take part together.
      sent_bytes: by one device.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    group: int
    sent_bytes: float
    dtype: str

    @property
    def flops(self) -> float:
        """FLOPs of one device."""
        m, k, n = self.sizes
        return 2.0 * m * k * n


def is_sending(one: Wanted | Measurement, chip: Chip) -> bool:
    """Whether what travels takes longer than what is multiplied; of a torus two links are used."""
    links = 2 if chip.torus else 1
    width = jnp.dtype(one.dtype).itemsize
    return one.sent_bytes / (links * chip.link) > one.flops * width / (2 * chip.flops)


def nearest(wanted: Wanted, chip: Chip) -> Measurement | None:
    """Returns the row of the same kind and chip, and bound by the same, that is nearest in size.

    Of products, those of numbers of the same width go first. Sizes are as far apart as their
    logarithms: of products m, k and n, of what travels its bytes, and the devices that take part.
    """
    sends = is_sending(wanted, chip)
    rows = [one for one in measurements() if one.kind_of_chip == chip.kind]
    for kind in wanted.kinds:
        fitting = [one for one in rows if one.kind == kind and is_sending(one, chip) == sends]
        if fitting:
            return min(fitting, key=lambda one: _distance(wanted, one))
    return None


def _distance(wanted: Wanted, one: Measurement) -> tuple[bool, float]:
    """Whether the width of numbers is another one, where it matters; how far sizes are apart."""
    if not one.flops:
        ours, theirs = (wanted.group, wanted.sent_bytes), (one.group, one.sent_bytes)
        return False, _apart(ours, theirs)
    differs = jnp.dtype(one.dtype).itemsize != jnp.dtype(wanted.dtype).itemsize
    if not one.sent_bytes:
        return differs, _apart(wanted.sizes, one.shape)
    return differs, _apart((wanted.group, *wanted.sizes), (one.group, *one.shape))


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(ours, theirs, strict=True))
