"""Published times of NCCL's collectives and of bfloat16 products on GPUs.

They come from a table of the package (`benchmarks/accuracy/gpu_times.py` makes it). XLA's own
tables are of an older NCCL, and have few small, tall and thin products.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxpar.tools.toolkit_api import Gpu, platform_of

LEAST, SIZES = 512, 21  # the first size of a series in bytes; each next size is twice as large

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NEAREST = 8  # products of which a time is interpolated

Series = Mapping[tuple[str, int], Mapping[tuple[int, ...], float]]


def gpu_of(kind: str) -> str | None:
    """Returns the table's name of a GPU, such as `"h100"`."""
    known = platform_of(kind)
    return known.published if isinstance(known, Gpu) else None


def installed_nccl() -> str:
    """Returns the version of the NCCL that CUDA plugins load, or an empty text."""
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return ""


@cache
def _table() -> dict[str, Any]:
    return json.loads(files("jaxpar.tools.timeline").joinpath("gpu_times.json").read_text())


def versions(gpu: str) -> list[str]:
    """Returns the NCCL versions that were measured, the oldest first."""
    return sorted({name.split()[0] for name in _table()["collectives"][gpu]}, key=_order)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def nearest_version(gpu: str, wanted: str) -> str:
    """Returns the newest that was measured and is not newer; the oldest where all are.

    Without a wanted version: the newest.
    """
    known = versions(gpu)
    parts = len(_order(wanted))
    older = [old for old in known if _order(old)[:parts] <= _order(wanted)] if wanted else known
    return (older or known[:1])[-1]


@cache
def collectives(gpu: str, nccl: str) -> Series:
    """Returns seconds by kind and devices, and by bytes as XLA counts them."""
    series: dict[tuple[str, int], dict[tuple[int, ...], float]] = {}
    for name, times in _table()["collectives"][gpu].items():
        of, kind, group = name.split()
        if of == nccl:
            series[kind, int(group)] = {
                (LEAST << number,): 1e-6 * time
                for number, time in enumerate(times)
                if time is not None
            }
    return series


def never_falling(times: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Returns times in which no size takes longer than a larger size.

    Single points are far off: 1 KiB takes 18 us where 2 KiB take 7, with one version of NCCL and
    not with the next.
    """
    sizes = sorted(times)
    least = np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1]
    return dict(zip(sizes, least.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class PublicProducts:
    """Seconds of bfloat16 products, and a roofline whose errors are interpolated."""

    sizes: Float[np.ndarray, "products 3"]
    seconds: Float[np.ndarray, "products"]
    flops: float
    hbm: float
    known: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)

    def has(self, m: int, k: int, n: int) -> bool:
        sizes = zip((m, k, n), self._range, strict=True)
        return all(low <= size <= high for size, (low, high) in sizes)

    @cached_property
    def _range(self) -> list[tuple[float, float]]:
        return list(zip(self.sizes.min(0).tolist(), self.sizes.max(0).tolist(), strict=True))

    def of(self, m: int, k: int, n: int) -> float:
        """Returns the seconds of a product [m, k] x [k, n].

        The nearest in logarithms of sizes tell how much longer than the roofline it takes; a
        nearer product counts more, by the square of its distance.
        """
        if (m, k, n) not in self.known:
            self.known[m, k, n] = self.between(np.array([m, k, n], float))
        return self.known[m, k, n]

    def between(self, sizes: Float[np.ndarray, "3"], left_out: int = 0) -> float:
        """Interpolates, without so many of the nearest."""
        apart = np.square(np.log2(self.sizes / sizes)).sum(1)
        near = np.argsort(apart, kind="stable")[left_out : left_out + _NEAREST]
        weights = 1 / (apart[near] + 1e-6)
        longer = np.log(self.seconds[near] / self._roofline(self.sizes[near]))
        return float(self._roofline(sizes[None])[0] * np.exp(longer @ weights / weights.sum()))

    def _roofline(self, sizes: Float[np.ndarray, "sizes 3"]) -> Float[np.ndarray, "sizes"]:
        m, k, n = sizes.T
        multiplying = 2 * m * k * n / self.flops
        moving = 2 * (m * k + k * n + m * n) / self.hbm
        return np.maximum(multiplying, moving) / 0.8 + 2e-6


@cache
def products(gpu: str, flops: float, hbm: float) -> PublicProducts | None:
    """Returns what was measured of a GPU with these figures."""
    if gpu not in _table()["matmuls"]:
        return None
    *sizes, times = map(np.array, _table()["matmuls"][gpu])
    return PublicProducts(np.stack(sizes, 1).astype(float), 1e-6 * times, flops, hbm)
