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


def is_sending(work: Wanted | Measurement, chip: Chip) -> bool:
    links = 2 if chip.torus else 1
    width = jnp.dtype(work.dtype).itemsize
    return work.sent_bytes / (links * chip.link) > work.flops * width / (2 * chip.flops)


def nearest(wanted: Wanted, chip: Chip) -> Measurement | None:
    """Returns the row nearest in size, of the same kind, chip and bound.

    Products prefer the same width of numbers. Distances are logarithmic in m, k, n, bytes, and the
    number of devices.
    """
    sends = is_sending(wanted, chip)
    rows = [row for row in measurements() if row.kind_of_chip == chip.kind]
    for kind in wanted.kinds:
        fitting = [row for row in rows if row.kind == kind and is_sending(row, chip) == sends]
        if fitting:
            return min(fitting, key=lambda row: _distance(wanted, row))
    return None


def _distance(wanted: Wanted, row: Measurement) -> tuple[bool, float]:
    """Returns whether widths differ, and sizes' distance."""
    if not row.flops:
        ours, theirs = (wanted.group, wanted.sent_bytes), (row.group, row.sent_bytes)
        return False, _apart(ours, theirs)
    differs = jnp.dtype(row.dtype).itemsize != jnp.dtype(wanted.dtype).itemsize
    if not row.sent_bytes:
        return differs, _apart(wanted.sizes, row.shape)
    return differs, _apart((wanted.group, *wanted.sizes), (row.group, *row.shape))


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(ours, theirs, strict=True))
