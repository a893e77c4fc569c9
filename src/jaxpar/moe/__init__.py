"""Mixture-of-experts layers, with experts sharded over devices, and their parts."""

# Dimensions in the annotations of this folder. The public Experts and Routing explain their own.
#   tokens (t)       this device's tokens
#   rows             rows of any array
#   copies           copies of rows in another order, such as the order of sending
#   pairs            pairs of a row and an expert of this device that it chose
#   k                choices of a token: experts, or devices
#   experts (E)      the experts of all devices
#   groups (e)       this device's experts; in grouped products, anything that has a weight
#   d, f             features of tokens, hidden features of experts
#   n                the devices of the ring
#   *row, ...        the shape of a row, one number or more; any shape

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.moe._capacity import expert_capacity, limit_capacity
    from jaxpar.moe._dispatcher import RaggedDispatcher
    from jaxpar.moe._experts import apply_experts
    from jaxpar.moe._grouped import grouped_matmul
    from jaxpar.moe._layer import moe_layer, routed_moe_layer
    from jaxpar.moe._mlp import Experts, as_experts
    from jaxpar.moe._routing import Routing, route, update_router_bias
    from jaxpar.moe._sharding import pad_experts
    from jaxpar.moe._statistics import (
        Statistics,
        load_balance_loss,
        router_z_loss,
        routing_statistics,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Experts",
    "RaggedDispatcher",
    "Routing",
    "Statistics",
    "apply_experts",
    "as_experts",
    "expert_capacity",
    "grouped_matmul",
    "limit_capacity",
    "load_balance_loss",
    "moe_layer",
    "pad_experts",
    "route",
    "routed_moe_layer",
    "router_z_loss",
    "routing_statistics",
    "update_router_bias",
]
