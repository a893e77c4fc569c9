"""Collective matmuls, ring collectives, layers and experts for manual `jax.shard_map`."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar import collectives as collectives
    from jaxpar import layers as layers
    from jaxpar import layout as layout
    from jaxpar import matmul as matmul
    from jaxpar import mesh as mesh
    from jaxpar import moe as moe
    from jaxpar import pipeline as pipeline
    from jaxpar import schedule as schedule
    from jaxpar import testing as testing
    from jaxpar.arguments.dtypes import LowBit
    from jaxpar.arguments.types import Mode as Mode
    from jaxpar.axis.axis import Axis
    from jaxpar.axis.axis import AxisLike as AxisLike
    from jaxpar.axis.quantized import Quantized
    from jaxpar.axis.rounding import quantize
    from jaxpar.choose.jit import jit
    from jaxpar.choose.tuning import Tuning, tuned
    from jaxpar.collectives import (
        all_gather,
        all_reduce,
        ragged_all_to_all,
        reduce_scatter,
        ring_shift,
    )
    from jaxpar.compiler.options import compiled_with, compiler_options
    from jaxpar.matmul import (
        all_gather_matmul,
        collective_einsum,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
    from jaxpar.mesh import edge_disjoint_rings, make_mesh, ring_hops, ring_order
    from jaxpar.processes.agree import agree
    from jaxpar.processes.describe import Description, describe
    from jaxpar.processes.start import initialize
    from jaxpar.tools.guard.guard import guard
    from jaxpar.tools.ways.call_sites import ways
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "ring_all_gather": ("all_gather", {}),
            "ring_all_reduce": ("all_reduce", {}),
            "ring_einsum": ("collective_einsum", {}),
            "ring_reduce_scatter": ("reduce_scatter", {}),
        },
    )

__all__ = [
    "Axis",
    "Description",
    "LowBit",
    "Quantized",
    "Tuning",
    "agree",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "collective_einsum",
    "compiled_with",
    "compiler_options",
    "describe",
    "edge_disjoint_rings",
    "guard",
    "initialize",
    "jit",
    "make_mesh",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "quantize",
    "ragged_all_to_all",
    "reduce_scatter",
    "ring_hops",
    "ring_order",
    "ring_shift",
    "tuned",
    "ways",
]

__version__ = "0.6.0"
