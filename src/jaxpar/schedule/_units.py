"""Times and sizes as a reader wants them."""

from jaxpar._types import Number


def us(seconds: Number) -> str:
    """Microseconds, to four digits."""
    return f"{seconds * 1e6:,.0f} us" if seconds >= 0.01 else f"{seconds * 1e6:.4g} us"


def size(count: Number) -> str:
    """Bytes in the unit that fits."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
