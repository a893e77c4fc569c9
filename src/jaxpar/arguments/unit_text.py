"""Sizes of arrays, and readable times and sizes."""

from collections.abc import Sequence
from math import prod
from typing import Any

from jaxpar.arguments.dtypes import bits_of
from jaxpar.arguments.types import Number


def bytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Returns an array's bytes on a device, where numbers of 2 and 4 bits share bytes."""
    return -(-prod(shape) * bits_of(dtype) // 8)


def size_text(size: Number) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def us(seconds: Number) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-2 else f"{seconds * 1e6:.0f} us"
