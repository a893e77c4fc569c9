"""Finds the public measurement nearest to the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import jax.numpy as jnp

from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.toolkit_api import Chip


@dataclass(frozen=True)
class Wanted:
    """One device's part of an operation to compare.

    The first of `kinds` with rows counts. `sizes` are m, k and n.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    group: int
    sent_bytes: float
    dtype: str

    @property
    def flops(self) -> float:
        m, k, n = self.sizes
        return 2.0 * m * k * n


def is_sending(one: Wanted | Measurement, chip: Chip) -> bool:
    links = 2 if chip.torus else 1
    width = jnp.dtype(one.dtype).itemsize
    return one.sent_bytes / (links * chip.link) > one.flops * width / (2 * chip.flops)


def nearest(wanted: Wanted, chip: Chip) -> Measurement | None:
    """Returns the row nearest in size, of the same kind, chip and bound.

    Products prefer the same width of numbers. Distances are logarithmic in m, k, n, bytes, and the
    number of devices.
    """
    sends = is_sending(wanted, chip)
    rows = [one for one in measurements() if one.kind_of_chip == chip.kind]
    for kind in wanted.kinds:
        fitting = [one for one in rows if one.kind == kind and is_sending(one, chip) == sends]
        if fitting:
            return min(fitting, key=lambda one: _distance(wanted, one))
    return None


def _distance(wanted: Wanted, one: Measurement) -> tuple[bool, float]:
    """Returns whether widths differ, and sizes' distance."""
    if not one.flops:
        ours, theirs = (wanted.group, wanted.sent_bytes), (one.group, one.sent_bytes)
        return False, _apart(ours, theirs)
    differs = jnp.dtype(one.dtype).itemsize != jnp.dtype(wanted.dtype).itemsize
    if not one.sent_bytes:
        return differs, _apart(wanted.sizes, one.shape)
    return differs, _apart((wanted.group, *wanted.sizes), (one.group, *one.shape))


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(ours, theirs, strict=True))
