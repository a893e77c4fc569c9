"""Described TPUs of two slices, as a pod that a network joins has them."""

from jax.experimental.topologies import get_topology_desc

from jaxpar import make_mesh
from jaxpar.tools.timeline import target as targets


def two_slices(mesh="tp=8"):
    """Two slices of four devices each, at the same coordinates."""
    with targets._environment(targets._OFFLINE):
        both = get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2)
    return targets.target_of(make_mesh(mesh, devices=both.devices), "two of v5e:2x2")
