"""NVIDIA's Hopper.

Sources: NVIDIA's product pages, without sparsity. Hosts of eight devices by default, each with its
share of the host's network.
"""

from functools import partial

from jaxpar.platforms.chips import Gpu
from jaxpar.platforms.compilers import OF_GPUS

_hopper = partial(
    Gpu, switched=8, network=5e10, host=6.4e10, compiler=OF_GPUS, tables=("sm_90", "sm_90"),
)  # fmt: skip
H100_PCIE = _hopper(
    kind="NVIDIA H100 PCIe", names=(), plugin_name=None, description=None, flops=7.56e14,
    hbm=2.0e12, capacity=8e10, link=6.4e10, timed=(), published="h100",
)  # fmt: skip
H100 = _hopper(
    kind="NVIDIA H100", names=("h100",), plugin_name="h100-80gb-hbm3",
    description=("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 << 20, 1.98, 80 << 30, 3_352_000_000_000),
    flops=9.9e14, hbm=3.35e12, capacity=8e10, link=4.5e11, timed=("sm_90",), published="h100",
)  # fmt: skip
H200 = _hopper(
    kind="NVIDIA H200", names=("h200",), plugin_name="h200-141gb-hbm3e",
    description=("NVIDIA H200 141GB HBM3e", (9, 0), 132, 60 << 20, 1.98, 141 << 30, 48 * 10**11),
    flops=9.9e14, hbm=4.8e12, capacity=1.41e11, link=4.5e11, timed=(), published="h200",
)  # fmt: skip
