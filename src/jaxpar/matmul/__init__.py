"""Overlapped matmuls: their collectives travel while they compute, forward and backward."""

from jaxpar.matmul._matmuls import all_gather_matmul as all_gather_matmul
from jaxpar.matmul._matmuls import matmul_all_reduce as matmul_all_reduce
from jaxpar.matmul._matmuls import matmul_reduce_scatter as matmul_reduce_scatter
from jaxpar.matmul._matmuls import ring_einsum as ring_einsum
