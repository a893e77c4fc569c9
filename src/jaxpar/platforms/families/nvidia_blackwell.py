"""NVIDIA's Blackwell.

Sources: NVIDIA's product pages, without sparsity. Hosts of eight devices by default, each with its
share of the host's network.
"""

from functools import partial

from jaxpar.platforms.chips import Gpu
from jaxpar.platforms.compilers import OF_GPUS

_blackwell = partial(Gpu, plugin_name=None, hbm=8e12, link=9e11, compiler=OF_GPUS)
B200 = _blackwell(
    kind="NVIDIA B200", names=("b200",),
    description=("NVIDIA B200", (10, 0), 148, 126 << 20, 1.965, 180 << 30, 8_000_000_000_000),
    flops=2.25e15, capacity=1.8e11, switched=8, network=5e10, host=6.4e10,
    tables=("sm_100_B200", "sm_100_B200"), timed=("sm_100_B200",), published="b200",
)  # fmt: skip
B300 = _blackwell(
    kind="NVIDIA B300", names=("b300",), description=None, flops=2.25e15, capacity=2.88e11,
    switched=8, network=1e11, host=6.4e10, tables=("sm_100_B200", "sm_103"), timed=(),
    published="b300",
)  # fmt: skip
# Racks of 72 behind one switch, with processors on the same board.
GB200 = _blackwell(
    kind="NVIDIA GB200", names=("gb200",), description=None, flops=2.5e15, capacity=1.86e11,
    switched=72, network=5e10, host=4.5e11, tables=("sm_100_B200", "sm_100_GB200"),
    timed=("sm_100_GB200",), published="gb200",
)  # fmt: skip
GB300 = _blackwell(
    kind="NVIDIA GB300", names=("gb300",), description=None, flops=2.5e15, capacity=2.88e11,
    switched=72, network=1e11, host=4.5e11, tables=("sm_100_B200", "sm_103"),
    timed=("sm_103",), published="gb300",
)  # fmt: skip
RTX_PRO_6000 = Gpu(
    kind="NVIDIA RTX PRO 6000", names=(), plugin_name=None, description=None, flops=5.0e14,
    hbm=1.79e12, capacity=9.6e10, link=6.4e10, switched=8, network=5e10, host=6.4e10,
    compiler=OF_GPUS, tables=None, timed=(), published=None,
)  # fmt: skip
