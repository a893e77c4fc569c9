"""Ring collectives on any mesh, over one axis or several in any order."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.collectives._ragged import ragged_all_to_all
    from jaxpar.collectives._ring_collectives import (
        all_gather,
        all_reduce,
        reduce_scatter,
        ring_shift,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "ring_all_gather": ("all_gather", {}),
            "ring_all_reduce": ("all_reduce", {}),
            "ring_reduce_scatter": ("reduce_scatter", {}),
        },
    )

__all__ = [
    "all_gather",
    "all_reduce",
    "ragged_all_to_all",
    "reduce_scatter",
    "ring_shift",
]
