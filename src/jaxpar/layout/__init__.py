"""Layouts of models on meshes."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.layout._array_layout import ArrayLayout
    from jaxpar.layout._layout import Layout
    from jaxpar.layout._layout_error import LayoutError, LayoutProblem
    from jaxpar.layout._map import LayoutMap
    from jaxpar.layout._ready_maps import (
        data_parallel,
        expert_parallel,
        fully_sharded,
        tensor_parallel,
    )
    from jaxpar.layout._rule import REPLICATED
    from jaxpar.layout._split import Interleaved, Padded, Replicate, Split
    from jaxpar.layout._table import Table
    from jaxpar.tools.layouts.explain_layout import explain_layout as explain_layout
    from jaxpar.tools.layouts.infer import infer_layout
    from jaxpar.tools.layouts.layout_costs import Cost, LayoutCosts, TriedRule
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "REPLICATED",
    "ArrayLayout",
    "Cost",
    "Interleaved",
    "Layout",
    "LayoutCosts",
    "LayoutError",
    "LayoutMap",
    "LayoutProblem",
    "Padded",
    "Replicate",
    "Split",
    "Table",
    "TriedRule",
    "data_parallel",
    "expert_parallel",
    "fully_sharded",
    "infer_layout",
    "tensor_parallel",
]
