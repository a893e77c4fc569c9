"""NVIDIA's Ampere.

Sources: NVIDIA's product pages, without sparsity. Hosts of eight devices by default, each with its
share of the host's network.
"""

from functools import partial

from jaxpar.platforms.chips import Gpu
from jaxpar.platforms.compilers import OF_GPUS

_a100 = partial(
    Gpu, flops=3.12e14, switched=8, network=2.5e10, host=3.2e10, compiler=OF_GPUS,
    tables=("sm_90", "sm_90"), timed=(), published="a100",
)  # fmt: skip
A100_40GB = _a100(
    kind="NVIDIA A100-SXM4-40GB", names=(), plugin_name=None, description=None, hbm=1.555e12,
    capacity=4e10, link=3e11,
)  # fmt: skip
A100_PCIE = _a100(
    kind="NVIDIA A100 80GB PCIe", names=(), plugin_name=None, description=None, hbm=1.935e12,
    capacity=8e10, link=3.2e10,
)  # fmt: skip
A100 = _a100(
    kind="NVIDIA A100", names=("a100",), plugin_name="a100-sxm4-80gb",
    description=("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 << 20, 1.41, 80 << 30, 2_039_000_000_000),
    hbm=2.039e12, capacity=8e10, link=3e11,
)  # fmt: skip
RTX_A6000 = Gpu(
    kind="NVIDIA RTX A6000", names=(), plugin_name=None, description=None, flops=1.55e14,
    hbm=7.68e11, capacity=4.8e10, link=3.2e10, switched=8, network=5e10, host=3.2e10,
    compiler=OF_GPUS, tables=None, timed=(), published=None,
)  # fmt: skip
