"""TPU v5e.

Sources: Google Cloud's pages, the public book "How to scale your model", JAX's "TPU hardware
reference" for VMEM; for `measured` and `fitted`, `benchmarks/accuracy` and `sweep`.
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import WHOLE_MATMULS

V5E = Tpu(
    kind="TPU v5 lite", names=("v5e",), flops=1.97e14, hbm=8.1e11, capacity=2.0**34, vmem=2.0**27,
    cores=1, clock=1.5e9, dimensions=2, closed=16, synchronous_around=16, link=4.5e10,
    network=3.125e9, host=1.6e10,
    # It gathers beside a matmul.
    compiler=Compiler((WHOLE_MATMULS,), frees=frozenset({"all-gather"})), delays_transfers=False,
    cuts_first=False,
    fitted=Fitted(within=0.0, step_passes=2.0, chunk_passes=0.25, piece=3e-6, resident=0.3),
    measured=Observed(link=4.32e10, network=None, sustained=1.0, sparse_core_starts=1.0),
)  # fmt: skip
