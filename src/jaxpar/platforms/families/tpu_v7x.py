"""TPU7x, Ironwood.

Sources: Google Cloud's pages, the public book "How to scale your model", JAX's "TPU hardware
reference" for VMEM; for `measured` and `fitted`, `benchmarks/accuracy` and `sweep`.
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import COLLECTIVES, PERMUTES, WHOLE_MATMULS

TPU7X = Tpu(
    kind="TPU7x", names=("tpu7x",), flops=2.307e15, hbm=7.38e12, capacity=192 * 2.0**30,
    vmem=2.0**26, cores=2, clock=2.2e9, dimensions=3, closed=None, synchronous_around=None,
    link=1e11, network=1.25e10, host=3.2e10,
    # A SparseCore sends collectives without an option.
    compiler=Compiler((PERMUTES, WHOLE_MATMULS), frees=frozenset(COLLECTIVES)),
    delays_transfers=False, cuts_first=True,
    fitted=Fitted(within=0.0, step_passes=1.0, chunk_passes=1.0, piece=3e-6, resident=0.3),
    # 16384^3 products are published at 950 TFLOP/s in loops, and at 1103 in traces of single runs.
    measured=Observed(link=8.94e10, network=None, sustained=1.16, sparse_core_starts=4.0),
)  # fmt: skip
