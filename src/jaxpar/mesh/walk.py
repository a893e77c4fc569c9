"""Walks over the links of a mesh's axes, and what is known of those where programs are traced.

Tracing sees no coordinates: `make_mesh` notes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Int32

Index = Int32[Array, ""]  # the logical index of a device
Place = Any  # an integer, or an int32[]: counted over the dimensions, the last one fastest


class Walk:
    """By which hops what a device holds comes past all others, and back to it in the end."""

    size: int
    exchanges: ClassVar[bool] = False  # hops go both ways at once, over a dimension each

    @property
    def around(self) -> int:
        """How many devices that is."""
        return self.size

    def behind(self, device: Place, distance: Any) -> Place:
        """The logical index of the device from which so many hops lead to another one."""
        raise NotImplementedError

    def next(self, device: int, direction: int, hops: Any) -> int:
        """The device to which a device sends on what so many hops have brought to it."""
        raise NotImplementedError


def moved_on(place: Place, by: Any, size: int) -> Place:
    """Returns `(place + by) % size`, for a `place` and a `by` of less than `size` either way.

    `%` of arrays is nine equations, as its operands may be negative. Rings take it twice a block.
    """
    if not isinstance(place, Array):
        return (place + by) % size
    ahead = by % size if isinstance(by, int) else by + size
    if isinstance(ahead, int) and not ahead:
        return place
    return lax.rem(lax.add(place, as_int32(ahead)), np.int32(size))


def as_int32(x: Any) -> Any:
    """Returns an index as one of 32 bits, also where numbers have 64: no equation converts it."""
    return x if isinstance(x, Array) else np.int32(x)


# The one ring over axes, disjoint rings, or a collective of XLA's own.
How = Literal["ring", "rings", "collective"]
# Axes in the order of a ring, and how they send; to how many messages share the busiest link.
Sharing = Callable[[tuple[str, ...], How], int]


@dataclass(frozen=True)
class AxisLinks:
    """The links of axes.

    Attributes:
      walks: of axes by themselves that are a torus or a cube, the walks that share no link.
      messages: how many share the busiest link, where all rings over axes send both ways at once;
        None: nothing is known of the mesh.
    """

    walks: Mapping[str, tuple[Walk, ...]] = field(default_factory=dict[str, tuple[Walk, ...]])
    messages: Sharing | None = None

    def common(self, other: "AxisLinks") -> "AxisLinks":
        """What holds for two meshes."""
        walks = {name: w for name, w in self.walks.items() if other.walks.get(name) == w}
        one, two = self.messages, other.messages
        if one is None or two is None:
            return AxisLinks(walks)
        return AxisLinks(walks, lambda *rings: max(one(*rings), two(*rings)))


_known: dict[tuple[Any, ...], AxisLinks] = {}


def note_links(mesh: Mesh, links: AxisLinks) -> None:
    """Remembers the links of a mesh's axes; of meshes that look alike, what holds for all."""
    key = (mesh.axis_names, mesh.devices.shape, mesh.devices.flat[0].device_kind)
    _known[key] = _known[key].common(links) if key in _known else links


def traced_links() -> AxisLinks:
    """Returns what is known of the mesh that is traced over."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    kind = "" if device is None else device.device_kind
    return _known.get((mesh.axis_names, mesh.axis_sizes, kind), AxisLinks())
