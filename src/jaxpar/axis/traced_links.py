"""What is known of the links of a mesh's axes where programs are traced, which see no coordinates.

`make_mesh` notes it, by names and sizes of the axes and the kind of the devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxpar.mesh.walk import Walk

# The one ring over axes, disjoint rings, or a collective of XLA's own.
How = Literal["ring", "rings", "collective"]
# Names of axes, in the order of a ring, and how they send; to how many messages share the busiest
# link.
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
