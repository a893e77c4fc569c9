"""NVIDIA's Pascal and Volta, whose names begin with Tesla.

Sources: NVIDIA's product pages, without sparsity. Hosts of eight devices by default, each with its
share of the host's network.
"""

from functools import partial

from jaxpar.platforms.chips import Compiler, Gpu

_tesla = partial(
    Gpu, names=(), plugin_name=None, description=None, capacity=1.6e10, switched=8, network=1.25e10,
    host=1.6e10, compiler=Compiler(), tables=None, timed=(), published=None,
)  # fmt: skip
P100 = _tesla(kind="Tesla P100", flops=2.1e13, hbm=7.3e11, link=8e10)
V100 = _tesla(kind="Tesla V100", flops=1.25e14, hbm=9e11, link=1.5e11)
