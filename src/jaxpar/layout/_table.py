"""A table of each device's memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jaxpar.arguments.calls import readable
from jaxpar.arguments.unit_text import size_text

if TYPE_CHECKING:
    from jaxpar.layout._array_layout import ArrayLayout
    from jaxpar.layout._layout import Layout

SHOWN = 30  # rows of a printed table
TITLES = ("path", "shape", "spec", "a device's block", "bytes a device", "copies", "padding")


@readable
class Table:
    """Arrays' paths, shapes, specs, blocks and bytes, the most replicated bytes first.

    Attributes:
      rows: a dict for each array.
      devices: the number of devices.
      bytes_per_device: bytes of all blocks of a device.
      replicated_per_device: bytes that a device would save if no array were replicated.

    Example:
      >>> layout = LayoutMap({"w": (None, "tp")}).layout({"w": jnp.ones((2, 8))}, make_mesh("tp=8"))
      >>> print(layout.table())
      path  shape         spec   a device's block  bytes a device  copies  padding
      w     float32[2,8]  -, tp  [2,1]             8 B             1
      1 arrays on 8 devices (tp=8): 8 B a device, 0 B of it redundant
    """

    def __init__(self, layout: Layout) -> None:
        self.mesh = dict(layout.mesh.shape)
        self.devices = layout.mesh.size
        arrays = sorted(layout.values(), key=lambda a: (-_spare(a), -a.bytes_per_device, a.path))
        self.rows = [_row(array) for array in arrays]
        self.bytes_per_device = sum(row["bytes_per_device"] for row in self.rows)
        self.replicated_per_device = sum(row["replicated_per_device"] for row in self.rows)

    def json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(
            {
                "mesh": self.mesh,
                "bytes_per_device": self.bytes_per_device,
                "replicated_per_device": self.replicated_per_device,
                "arrays": self.rows,
            },
            indent=1,
        )

    def text(self, rows: int | None = SHOWN) -> str:
        """Returns the table as text with at most `rows` rows. None: all."""
        shown = self.rows[:rows]
        cells = [TITLES, *map(_cells, shown)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(TITLES))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        if len(self.rows) > len(shown):
            lines.append(f"... and {len(self.rows) - len(shown)} arrays more")
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        held = size_text(self.bytes_per_device)
        spare = size_text(self.replicated_per_device)
        lines.append(
            f"{len(self.rows)} arrays on {self.devices} devices ({mesh}): {held} a device, "
            f"{spare} of it redundant"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _spare(array: ArrayLayout) -> float:
    """Returns bytes a device that sharding over all devices would save."""
    return array.bytes_per_device * (1 - 1 / array.copies)


def _row(array: ArrayLayout) -> dict[str, Any]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "rule": array.rule,
        "spec": [list(axes) for axes in array.axes],
        "virtual_stages": [blocks.order[1] for blocks in array.blocks],
        "local_shape": list(array.local_shape),
        "padded_shape": list(array.padded_shape),
        "bytes_per_device": array.bytes_per_device,
        "copies": array.copies,
        "replicated_per_device": _spare(array),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    spec = ", ".join(
        ("+".join(axes) or "-") + (f" ({stages} stages)" if stages > 1 else "")
        for axes, stages in zip(row["spec"], row["virtual_stages"], strict=True)
    )
    added = [p - n for p, n in zip(row["padded_shape"], row["shape"], strict=True)]
    return (
        row["path"] or "(the array)",
        f"{row['dtype']}[{','.join(map(str, row['shape']))}]",
        spec or "-",
        f"[{','.join(map(str, row['local_shape']))}]",
        size_text(row["bytes_per_device"]),
        str(row["copies"]),
        ",".join(map(str, added)) if any(added) else "",
    )
