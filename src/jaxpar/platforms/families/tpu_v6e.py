"""TPU v6e, Trillium.

Sources: Google Cloud's pages, the public book "How to scale your model", JAX's "TPU hardware
reference" for VMEM; for `measured` and `fitted`, `benchmarks/accuracy` and `sweep`.
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import SPARSE_CORES, WHOLE_MATMULS

V6E = Tpu(
    kind="TPU v6 lite", names=("v6e",), flops=9.18e14, hbm=1.64e12, capacity=2.0**35, vmem=2.0**27,
    cores=1, clock=1.75e9, dimensions=2, closed=16, synchronous_around=None, link=9e10,
    network=1.25e10, host=3.2e10, compiler=Compiler((*SPARSE_CORES, WHOLE_MATMULS)),
    delays_transfers=True, cuts_first=True,
    fitted=Fitted(within=0.0, step_passes=1.0, chunk_passes=1.0, piece=4.2e-6, resident=0.5),
    # Between slices: one measurement.
    measured=Observed(link=8.68e10, network=4.11e9, sustained=1.0, sparse_core_starts=1.0),
)  # fmt: skip
