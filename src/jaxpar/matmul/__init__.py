"""Overlapped matmuls: collectives run while the matmuls compute, forward and backward."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.matmul._matmuls import (
        all_gather_matmul,
        collective_einsum,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"ring_einsum": ("collective_einsum", {})})

__all__ = [
    "all_gather_matmul",
    "collective_einsum",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
