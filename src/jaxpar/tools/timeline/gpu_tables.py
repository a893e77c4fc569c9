"""Measured times of GPU matmuls and collectives: XLA's, from the CUDA plugin, and published ones.

Times are interpolated in logarithms, and grow with the work beyond the largest size. Below the
smallest matmul there are none. A GPU without a table uses another's, scaled by peaks or links.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import exp, log, prod
from pathlib import Path
from typing import Any

from jaxpar.tools.program.protobuf import fields_of, number_at, numbers_of
from jaxpar.tools.timeline.gpu_times import PublicProducts, Series, never_falling
from jaxpar.tools.toolkit_api import Chip, Gpu, platform_of, platforms

_HEAD = b"# proto-message: xla.GemmPerfTable"
_SHAPE = re.compile(r"entries \{\s+b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)((?:\s+flops \{.*\})+)")
_RATE = re.compile(r'key: "([^"]+)" value: (\d+)')

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class GpuTables:
    """Seconds of matmuls by dtypes and [b, m, n, k]; of collectives by kind, group and bytes.

    Permutes have no group: behind a switch each device has its own port.
    """

    matmuls: Mapping[str, Mapping[Sizes, float]]
    collectives: Mapping[tuple[str, int], Mapping[Sizes, float]]
    products: PublicProducts | None = None  # published times, which count before XLA's
    slower_by: float = 1.0  # than the GPU of `products`

    def matmul(self, dtypes: str, sizes: Sizes) -> float | None:
        """Returns the seconds of a product such as `"bf16xbf16->bf16"` of sizes [b, m, n, k].

        8 bits take at least half of bfloat16's time: some rates of the tables exceed the peak.
        """
        if not sizes:
            return None
        bits = _bits(dtypes)
        if bits == 16 and (published := self._published(sizes)):
            return published
        seconds = _between(self._of(dtypes), sizes)
        wide = _between(self._of("bf16xbf16"), sizes)
        if bits > 16 or wide is None:
            return seconds
        return max(seconds or 0.0, wide * bits / 16)

    def _published(self, sizes: Sizes) -> float | None:
        batch, m, n, k = sizes
        if batch > 1 or self.products is None or not self.products.has(m, k, n):
            return None
        return self.slower_by * self.products.of(m, k, n)

    def has(self, dtypes: str, sizes: Sizes) -> bool:
        if _bits(dtypes) == 16 and sizes and self._published(sizes):
            return True
        narrow = {} if _bits(dtypes) > 16 else self._of("bf16xbf16")
        return _is_within(self._of(dtypes) or narrow, sizes)

    def _of(self, dtypes: str) -> Mapping[Sizes, float]:
        operands = dtypes.partition("->")[0]
        named = (table for key, table in self.matmuls.items() if key.startswith(f"{operands}->"))
        return next(named, {})

    def has_collective(self, kind: str, group: int, whole: float) -> bool:
        table = self.collectives.get((kind, group), {})
        return _is_within(table, (max(whole, *min(table, default=(0,))),))

    def collective(self, kind: str, group: int, whole: float) -> float | None:
        # `whole` is the array's bytes.
        table = self.collectives.get((kind, group), {})
        return _between(table, (max(whole, *min(table, default=(0,))),))

    def latency(self, kind: str, group: int, whole: float) -> float:
        """Returns the seconds besides those that the bytes take at the rate of the largest size.

        At most those of the smallest size: larger ones do not reach that rate either.
        """
        table = self.collectives[kind, group]
        (least,), (most,) = min(table), max(table)
        seconds = self.collective(kind, group, whole) or 0.0
        return min(table[least,], max(0.0, seconds - whole * table[most,] / most))

    def before(self, others: "GpuTables") -> "GpuTables":
        """Returns these tables, and the others' where these have none."""
        merged = {**others.collectives, **self.collectives}
        return replace(self, matmuls={**others.matmuls, **self.matmuls}, collectives=merged)

    def slower(self, matmuls: float, collectives: float) -> "GpuTables":
        """Returns the tables of a GPU that is slower by these factors.

        Links more than twice as slow have unknown latencies, so collectives get no times.
        """
        return GpuTables(
            {key: _times(table, matmuls) for key, table in self.matmuls.items()},
            {key: _times(table, collectives) for key, table in self.collectives.items()}
            if collectives <= 2
            else {},
            self.products,
            matmuls,
        )


def _bits(dtypes: str) -> int:
    # The wider operand counts; truth values count as 32.
    operands = dtypes.partition("->")[0]
    return max(map(int, re.findall(r"(?:^|x)[a-z]+(\d+)", operands)), default=32)


def _times(table: Mapping[Sizes, float], factor: float) -> dict[Sizes, float]:
    return {sizes: factor * seconds for sizes, seconds in table.items()}


def _is_within(table: Mapping[Sizes, float], sizes: tuple[float, ...]) -> bool:
    grids = _grids(tuple(table))
    return len(grids) == len(sizes) and all(
        grid[0] <= size <= grid[-1] for size, grid in zip(sizes, grids, strict=True)
    )


def _between(table: Mapping[Sizes, float], sizes: tuple[float, ...]) -> float | None:
    grids = _grids(tuple(table))
    if not grids or any(size < grid[0] for size, grid in zip(sizes, grids, strict=True)):
        return None
    inside = [min(size, grid[-1]) for size, grid in zip(sizes, grids, strict=True)]
    corners = [_neighbours(grid, size) for grid, size in zip(grids, inside, strict=True)]
    logarithm = 0.0
    for corner in product(*corners):
        share = prod(part for _, part in corner)
        if share:
            logarithm += share * log(table[tuple(size for size, _ in corner)])
    return exp(logarithm) * prod(sizes) / prod(inside)


@cache
def _grids(known: tuple[Sizes, ...]) -> list[list[int]]:
    return [sorted(set(dim)) for dim in zip(*known, strict=True)]


def _neighbours(grid: list[int], size: float) -> list[tuple[int, float]]:
    above = next(i for i, known in enumerate(grid) if known >= size)
    if grid[above] == size:
        return [(grid[above], 1.0)]
    low, high = grid[above - 1], grid[above]
    share = log(size / low) / log(high / low)
    return [(low, 1 - share), (high, share)]


def published(products: PublicProducts | None, collectives: Series) -> GpuTables:
    """Returns published times alone."""
    series = {key: never_falling(times) for key, times in collectives.items()}
    return GpuTables({}, series, products)


def measured_on(kind: str) -> tuple[Chip, Chip] | None:
    """Returns the GPUs behind a kind's tables."""
    owners = {key: gpu.chip for gpu in platforms() if isinstance(gpu, Gpu) for key in gpu.timed}
    return (owners[keys[0]], owners[keys[1]]) if (keys := _keys(kind)) else None


def _keys(kind: str) -> tuple[str, str] | None:
    known = platform_of(kind)
    return known.tables if isinstance(known, Gpu) else None


@cache
def tables_of(plugin: str, kind: str) -> GpuTables | None:
    keys, spec = _keys(kind), importlib.util.find_spec(plugin)
    if keys is None or spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    with (
        (folder / "xla_cuda_plugin.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        tables = GpuTables(_matmuls(data, keys[0]), _collectives(data, keys[1]))
    return tables if tables.matmuls or tables.collectives else None


def _matmuls(data: Any, key: str) -> dict[str, dict[Sizes, float]]:
    times: dict[str, dict[Sizes, float]] = defaultdict(dict)
    start = data.find(_HEAD)
    if start >= 0:
        end = data.find(b"\0", start)
        # Devices are keys at the first level of the text.
        text = data[start:end].decode("ascii", "ignore")
        parts = re.split(r'^  key: "(.*)"', text, flags=re.MULTILINE)
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            for shape in _SHAPE.finditer(part) if name == key else ():
                sizes = tuple(map(int, shape.groups()[:4]))
                for dtypes, rate in _RATE.findall(shape[5]):
                    times[dtypes][sizes] = 2 * prod(sizes) / int(rate)
    return dict(times)


# -- collectives: a protobuf of bytes per second --------------------------------------------------


def _collectives(data: Any, key: str) -> dict[tuple[str, int], dict[Sizes, float]]:
    name = b"\x0a" + bytes([len(key)]) + key.encode() + b"\x12"
    times: dict[tuple[str, int], dict[Sizes, float]] = defaultdict(dict)
    if (at := data.find(name)) < 0:
        return {}
    length, start = number_at(data, at + len(name))
    for _, entry in fields_of(data[start : start + length]):
        fields = dict(fields_of(entry))
        instruction, rate = dict(fields_of(fields[1])), fields.get(6, 0)
        kind = instruction[2].decode()
        if not rate:
            continue
        group = dict(fields_of(instruction.get(92, b""))).get(2, 0)
        if kind == "collective-permute":  # each pair is its own field
            pairs = [dict(fields_of(value)) for key, value in fields_of(fields[1]) if key == 52]
            kind = kind_of_permute([(pair.get(1, 0), pair.get(2, 0)) for pair in pairs])
        elif not group:
            continue
        elements = prod(numbers_of(dict(fields_of(instruction[3]))[3]))
        # The rate is of the full array; a reduce-scatter's result is a part of it.
        whole = 4 * elements * (group if kind == "reduce-scatter" else 1)
        times[kind, group][whole,] = whole / rate
    return {key: never_falling(table) for key, table in times.items()}


def kind_of_permute(pairs: Sequence[tuple[int, int]]) -> str:
    """Returns the kind: swapping, one way, or neither."""
    sources, targets = ({pair[end] for pair in pairs} for end in (0, 1))
    if set(pairs) == {(target, source) for source, target in pairs}:
        return "collective-permute, swapping"
    return "collective-permute" + (", one way" if sources.isdisjoint(targets) else "")
