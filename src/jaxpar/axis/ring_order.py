"""Walks over the links of a mesh's axes, and the links that are known during tracing.

Traced programs see no coordinates, so `make_mesh` notes the links.
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
Place = Any  # an integer or int32[], counted over the dimensions, the last fastest


class Walk:
    """The hops by which a block visits all devices and returns to its own."""

    size: int
    exchanges: ClassVar[bool] = False  # a hop goes in both directions of a dimension

    @property
    def around(self) -> int:
        return self.size

    def behind(self, device: Place, distance: Any) -> Place:
        raise NotImplementedError

    def next(self, device: int, direction: int, hops: Any) -> int:
        """Returns a block's next device, after so many hops to this device."""
        raise NotImplementedError


def moved_on(place: Place, by: Any, size: int) -> Place:
    """Returns `(place + by) % size`, if both are less than `size` in magnitude."""
    # `%` of arrays is nine equations, needed twice a block.
    if not isinstance(place, Array):
        return (place + by) % size
    ahead = by % size if isinstance(by, int) else by + size
    if isinstance(ahead, int) and not ahead:
        return place
    return lax.rem(lax.add(place, as_int32(ahead)), np.int32(size))


def as_int32(x: Any) -> Any:
    """Returns a 32-bit index, without an equation for the conversion."""
    return x if isinstance(x, Array) else np.int32(x)


# One ring over all axes, disjoint rings, or an XLA collective.
How = Literal["ring", "rings", "collective"]
# From a ring's axes, and how they send, to the number of messages on the busiest link.
Sharing = Callable[[tuple[str, ...], How], int]


@dataclass(frozen=True)
class AxisLinks:
    """The links of a mesh's axes."""

    # of single axes that are a torus or a cube; they share no link
    walks: Mapping[str, tuple[Walk, ...]] = field(default_factory=dict[str, tuple[Walk, ...]])
    # on the busiest link if all rings send in both directions. None: unknown.
    messages: Sharing | None = None

    def common(self, other: "AxisLinks") -> "AxisLinks":
        walks = {name: w for name, w in self.walks.items() if other.walks.get(name) == w}
        ours, theirs = self.messages, other.messages
        if ours is None or theirs is None:
            return AxisLinks(walks)
        return AxisLinks(walks, lambda *rings: max(ours(*rings), theirs(*rings)))


_known: dict[tuple[Any, ...], AxisLinks] = {}


def note_links(mesh: Mesh, links: AxisLinks) -> None:
    """Remembers a mesh's links; similar meshes keep the common ones."""
    key = (mesh.axis_names, mesh.devices.shape, mesh.devices.flat[0].device_kind)
    _known[key] = _known[key].common(links) if key in _known else links


def traced_links() -> AxisLinks:
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    kind = "" if device is None else device.device_kind
    return _known.get((mesh.axis_names, mesh.axis_sizes, kind), AxisLinks())
