"""Overlapped matmuls: their collectives travel while they compute, forward and backward."""

from typing import TYPE_CHECKING

from jaxpar.arguments.for_checkers import names_on_demand

if TYPE_CHECKING:
    from jaxpar.matmul._matmuls import (
        all_gather_matmul,
        collective_einsum,
        matmul_all_reduce,
        matmul_reduce_scatter,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__, __file__)

__all__ = [
    "all_gather_matmul",
    "collective_einsum",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]
