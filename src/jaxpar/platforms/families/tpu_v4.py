"""TPU v4.

Sources: Google Cloud's pages, the public book "How to scale your model", JAX's "TPU hardware
reference" for VMEM; for `measured` and `fitted`, `benchmarks/accuracy` and `sweep`.
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import PERMUTES, WHOLE_MATMULS

V4 = Tpu(
    kind="TPU v4", names=("v4",), flops=2.75e14, hbm=1.23e12, capacity=2.0**35, vmem=2.0**24,
    cores=2, clock=1.05e9, dimensions=3, closed=None, synchronous_around=None, link=4.5e10,
    network=0.0, host=1.6e10,  # no page has a network between slices
    compiler=Compiler((PERMUTES, WHOLE_MATMULS)), delays_transfers=True, cuts_first=False,
    fitted=Fitted(within=0.0, step_passes=0.0, chunk_passes=2.0, piece=3e-6, resident=0.3),
    measured=Observed(link=None, network=None, sustained=1.0, sparse_core_starts=1.0),
)  # fmt: skip
