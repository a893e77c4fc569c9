"""What is known of the links of a mesh's axes where programs are traced, which see no coordinates.

`make_mesh` notes it, by names and sizes of the axes and the kind of the devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.mesh.walk import Walk


@dataclass(frozen=True)
class AxisLinks:
    """The links of axes.

    Attributes:
      closed: the axes that are closed rings of one link each, or two devices with one between them;
        and of each how many messages share a link where all its rings send both ways.
      walks: of axes by themselves that are a torus or a cube, the walks that share no link.
    """

    closed: Mapping[str, int] = field(default_factory=dict[str, int])
    walks: Mapping[str, tuple[Walk, ...]] = field(default_factory=dict[str, tuple[Walk, ...]])

    def common(self, other: "AxisLinks") -> "AxisLinks":
        """What holds for two meshes."""
        both = self.closed.keys() & other.closed.keys()
        closed = {name: max(self.closed[name], other.closed[name]) for name in both}
        walks = {name: w for name, w in self.walks.items() if other.walks.get(name) == w}
        return AxisLinks(closed, walks)


_known: dict[tuple[Any, ...], AxisLinks] = {}


def note_links(mesh: Mesh, links: AxisLinks) -> None:
    """Remembers the links of a mesh's axes; of meshes that look alike, what holds for all."""
    key = (mesh.axis_names, mesh.devices.shape, mesh.devices.flat[0].device_kind)
    _known[key] = _known.get(key, links).common(links)


def traced_links() -> AxisLinks:
    """Returns what is known of the mesh that is traced over."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    kind = "" if device is None else device.device_kind
    return _known.get((mesh.axis_names, mesh.axis_sizes, kind), AxisLinks())
