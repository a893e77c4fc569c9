"""Meshes by axis names, and their rings."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.mesh.meshes import edge_disjoint_rings, make_mesh, ring_hops, ring_order
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = ["edge_disjoint_rings", "make_mesh", "ring_hops", "ring_order"]
