"""TPU v5p.

Sources: Google Cloud's pages, the public book "How to scale your model", JAX's "TPU hardware
reference" for VMEM; for `measured` and `fitted`, `benchmarks/accuracy` and `sweep`.
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import PERMUTES, SPARSE_CORES, WHOLE_MATMULS

V5P = Tpu(
    kind="TPU v5", names=("v5p",), flops=4.59e14, hbm=2.76e12, capacity=95 * 2.0**30, vmem=2.0**26,
    cores=2, clock=1.75e9, dimensions=3, closed=None, synchronous_around=None, link=9e10,
    network=6.25e9, host=1.6e10, compiler=Compiler((*SPARSE_CORES, PERMUTES, WHOLE_MATMULS)),
    delays_transfers=True, cuts_first=True,
    fitted=Fitted(within=0.5, step_passes=0.0, chunk_passes=0.0, piece=1.8e-6, resident=0.3),
    measured=Observed(link=8.63e10, network=None, sustained=1.0, sparse_core_starts=1.0),
)  # fmt: skip
