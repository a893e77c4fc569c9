"""The TPU slices that devices are in: which dimensions close, and a grid of the devices."""

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jaxpar._torus import torus_order


def on_torus(device: Any) -> bool:
    """Whether the device has coordinates on the torus of a TPU slice."""
    # Other platforms may number their devices in an attribute of the same name.
    return getattr(device, "coords", None) is not None and device.device_kind.startswith("TPU")


def slice_of(device: Any) -> int:
    """Returns the number of the device's slice: 0 where there is but one."""
    return getattr(device, "slice_index", None) or 0


def closed_dims(device_kind: str, extent: Int[np.ndarray, " dims"]) -> Bool[np.ndarray, " dims"]:
    """Returns which dimensions of a slice have a link from the last chip to the first."""
    if "lite" in device_kind:  # v5e and v6e are called "TPU v5 lite" and "TPU v6 lite"
        return extent == 16
    return extent % 4 == 0  # each dimension on its own, whatever the others are


def slice_grid(devices: Sequence[Any], shape: Sequence[int]) -> Shaped[np.ndarray, "..."] | None:
    """Arranges TPU devices in a grid of `shape`; None unless they are boxes of one extent.

    Slices go to the first axes, as much as divides their sizes, and all are laid out alike.
    """
    if not all(on_torus(device) for device in devices):
        return None
    numbers = sorted({slice_of(device) for device in devices})
    boxes = [_box([device for device in devices if slice_of(device) == n]) for n in numbers]
    first = boxes[0]
    if first is None or any(box is None or box.shape != first.shape for box in boxes):
        return None

    across: list[int] = []
    for size in shape:
        across.append(gcd(size, len(numbers) // prod(across)))
    within = [size // slices for size, slices in zip(shape, across, strict=True)]
    *extent, cores = first.shape
    closed = closed_dims(first.flat[0].device_kind, np.array(extent))
    order = torus_order(within, extent, closed.tolist(), cores)
    grid = np.stack([box.reshape(-1)[order] for box in boxes if box is not None])
    axes = range(len(shape))
    grid = grid.reshape(*across, *within)
    return grid.transpose([i for axis in axes for i in (axis, axis + len(shape))]).reshape(shape)


def _box(devices: list[Any]) -> Shaped[np.ndarray, "*extent cores"] | None:
    """Puts the devices of a slice at their coordinates; None where that leaves holes."""
    coords = np.array([device.coords for device in devices])
    extent = coords.max(axis=0) - coords.min(axis=0) + 1
    cores, rest = divmod(len(devices), int(extent.prod()))
    if rest:
        return None
    # By chip, then by device of the chip.
    order = sorted(range(len(devices)), key=lambda i: (*coords[i], devices[i].core_on_chip))
    chips = coords[order].reshape(-1, cores, coords.shape[1])
    expected = np.indices(extent).reshape(len(extent), -1).T + coords.min(axis=0)
    if not (chips == expected[:, None]).all():
        return None
    box = np.empty(len(devices), object)
    box[:] = [devices[i] for i in order]
    return box.reshape(*extent, cores)
