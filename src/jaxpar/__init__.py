"""Collective matmuls and ring collectives for hand-written `jax.shard_map` programs."""

from jaxpar.collectives import ring_all_gather as ring_all_gather
from jaxpar.collectives import ring_all_reduce as ring_all_reduce
from jaxpar.collectives import ring_reduce_scatter as ring_reduce_scatter
from jaxpar.collectives import ring_shift as ring_shift
from jaxpar.matmul import all_gather_matmul as all_gather_matmul
from jaxpar.matmul import matmul_all_reduce as matmul_all_reduce
from jaxpar.matmul import matmul_reduce_scatter as matmul_reduce_scatter
from jaxpar.matmul import ring_einsum as ring_einsum
from jaxpar.mesh import make_mesh as make_mesh
from jaxpar.mesh import ring_hops as ring_hops
from jaxpar.mesh import ring_order as ring_order

__version__ = "0.1.0"
