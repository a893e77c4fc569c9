"""Readable times and sizes."""

from jaxpar.arguments.types import Number


def size_text(size: Number) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def us(seconds: Number) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-2 else f"{seconds * 1e6:.0f} us"
