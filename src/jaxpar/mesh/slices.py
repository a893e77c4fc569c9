"""Which devices have places on a torus, and on which slice."""

from typing import Any


def on_torus(device: Any) -> bool:
    # Devices of other platforms may have an attribute of the same name.
    return getattr(device, "coords", None) is not None and device.device_kind.startswith("TPU")


def slice_of(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0
