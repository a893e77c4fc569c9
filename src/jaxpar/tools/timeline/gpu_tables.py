"""What XLA measured of GPUs: times of matmuls and collectives, from tables in the CUDA plugin.

XLA's own cost model of GPUs has them in it, by the GPU's compute capability. Between two sizes of a
table times are interpolated in their logarithms. Beyond its largest size they grow as the work
does. Below its smallest one there is nothing to go by.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp, log, prod
from pathlib import Path
from typing import Any

# What the tables call a GPU, by what JAX calls it.
KEYS = {
    "NVIDIA H100": "sm_90",
    "NVIDIA H200": "sm_90",
    "NVIDIA B200": "sm_100_B200",
    "NVIDIA GB200": "sm_100_GB200",
    "NVIDIA B300": "sm_103",
    "NVIDIA GB300": "sm_103",
}
_HEAD = b"# proto-message: xla.GemmPerfTable"
_SHAPE = re.compile(r"entries \{\s+b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)((?:\s+flops \{.*\})+)")
_RATE = re.compile(r'key: "([^"]+)" value: (\d+)')

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class GpuTables:
    """Seconds of matmuls by dtypes and [b, m, n, k]; of collectives by kind, group and bytes."""

    matmuls: Mapping[str, Mapping[Sizes, float]]
    collectives: Mapping[tuple[str, int], Mapping[Sizes, float]]

    def matmul(self, dtypes: str, sizes: Sizes) -> float | None:
        """Seconds of a product such as `"bf16xbf16->bf16"` of sizes [b, m, n, k]."""
        operands = dtypes.partition("->")[0]
        operands = "bf16xbf16" if operands == "f16xf16" else operands  # as fast
        named = (x for x in self.matmuls if x.partition("->")[0] == operands)
        table = self.matmuls.get(dtypes) or self.matmuls.get(next(named, ""), {})
        return _between(table, sizes) if sizes else None

    def collective(self, kind: str, group: int, whole: float) -> float | None:
        """Seconds of a collective over groups of so many devices, of an array of so many bytes."""
        return _between(self.collectives.get((kind, group), {}), (whole,))


def _between(table: Mapping[Sizes, float], sizes: tuple[float, ...]) -> float | None:
    """The time at sizes between those of a table; None below them, or of no table."""
    grids = [sorted(set(dim)) for dim in zip(*table, strict=True)]
    if not grids or any(size < grid[0] for size, grid in zip(sizes, grids, strict=True)):
        return None
    inside = [min(size, grid[-1]) for size, grid in zip(sizes, grids, strict=True)]
    corners = [_neighbours(grid, size) for grid, size in zip(grids, inside, strict=True)]
    found = 0.0
    for corner in product(*corners):
        share = prod(part for _, part in corner)
        if share:
            found += share * log(table[tuple(size for size, _ in corner)])
    return exp(found) * prod(sizes) / prod(inside)


def _neighbours(grid: list[int], size: float) -> list[tuple[int, float]]:
    """The sizes on both sides, and how near each one is, of 1, in logarithms."""
    above = next(i for i, known in enumerate(grid) if known >= size)
    if grid[above] == size:
        return [(grid[above], 1.0)]
    low, high = grid[above - 1], grid[above]
    share = log(size / low) / log(high / low)
    return [(low, 1 - share), (high, share)]


@cache
def tables_of(plugin: str, kind: str) -> GpuTables | None:
    """The tables that an installed plugin has of a kind of GPU, None where it has none."""
    key = next((key for known, key in KEYS.items() if kind.startswith(known)), None)
    spec = importlib.util.find_spec(plugin)
    if key is None or spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    with (
        (folder / "xla_cuda_plugin.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = GpuTables(_matmuls(data, key), _collectives(data, key))
    return found if found.matmuls or found.collectives else None


def _matmuls(data: Any, key: str) -> dict[str, dict[Sizes, float]]:
    """FLOPs per second, as text."""
    times: dict[str, dict[Sizes, float]] = defaultdict(dict)
    start = data.find(_HEAD)
    if start >= 0:
        end = data.find(b"\0", start)
        # Devices stand at the first level of the text.
        text = data[start:end].decode("ascii", "ignore")
        parts = re.split(r'^  key: "(.*)"', text, flags=re.MULTILINE)
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            for shape in _SHAPE.finditer(part) if name == key else ():
                sizes = tuple(map(int, shape.groups()[:4]))
                for dtypes, rate in _RATE.findall(shape[5]):
                    times[dtypes][sizes] = 2 * prod(sizes) / int(rate)
    return dict(times)


# -- a protobuf: of collectives, bytes per second -------------------------------------------------


def _collectives(data: Any, key: str) -> dict[tuple[str, int], dict[Sizes, float]]:
    """Entries of `DeviceHloInstructionProfiles`, whose map has devices as keys."""
    name = b"\x0a" + bytes([len(key)]) + key.encode() + b"\x12"
    times: dict[tuple[str, int], dict[Sizes, float]] = defaultdict(dict)
    if (at := data.find(name)) < 0:
        return {}
    length, start = _number(data, at + len(name))
    for _, entry in _fields(data[start : start + length]):
        fields = dict(_fields(entry))
        instruction, rate = dict(_fields(fields[1])), fields.get(6, 0)
        kind = instruction[2].decode()
        if 92 not in instruction or not rate:  # a permute has no groups
            continue
        group = dict(_fields(instruction[92])).get(2, 0)
        elements = prod(_numbers(dict(_fields(instruction[3]))[3]))
        # The rate is that of the whole array, of which a reduce-scatter leaves a part.
        whole = 4 * elements * (group if kind == "reduce-scatter" else 1)
        times[kind, group][whole,] = whole / rate
    return dict(times)


def _number(data: Any, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return found, at


def _numbers(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        number, at = _number(packed, at)
        yield number


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message by their numbers: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        width = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 == 0:
            value, at = _number(data, at)
        else:
            if not width:
                width, at = _number(data, at)
            value, at = data[at : at + width], at + width
        yield key >> 3, value
