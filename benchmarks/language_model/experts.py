"""What a mixture of experts adds: its layer, the losses of its router, and what is told of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpar import Axis, LowBit
from jaxpar.moe import Experts, Statistics, routed_moe_layer
from language_model.config import Model, Training


def mixture(
    model: Model, w: Any, x: Array, is_token: Array, dispatch: str, wire_dtype: LowBit | None
) -> Any:
    """Applies the experts of one layer to x, [b, s/(cp*tp), d]; returns statistics of all tokens.

    With one expert a token its weight is its score: divided by itself it would teach nothing.
    """
    return routed_moe_layer(
        x,
        w["router"],
        Experts(up=w["up"], down=w["down"], gate=w["gate"]),
        axis=Axis("ep", wire_dtype=wire_dtype),
        data_axis=("dp", "fsdp", "cp"),
        tp_axis=Axis("tp", wire_dtype=wire_dtype),
        top_k=model.top_k,
        normalize=model.top_k > 1,
        capacity_factor=model.capacity_factor,
        dispatch=dispatch,
        mask=is_token,
    )


def no_statistics(model: Model, layers: int) -> Statistics | None:
    """Returns a place for each layer's statistics, `[layers, ...]`, to be handed on by layers."""
    if not model.experts:
        return None
    whole, real = (jnp.zeros(layers, dtype) for dtype in ("int32", model.weight_dtype))
    loads = jnp.zeros((layers, model.experts), "int32")
    return Statistics(loads, whole, whole, real, real, real, real)


def append(found: Statistics, new: Statistics) -> Statistics:
    """Moves all up by one place, and puts those of the next layer into the last."""
    return jax.tree.map(lambda all, x: jnp.concatenate([all[1:], x[None]]), found, new)


def router_loss(training: Training, found: Statistics) -> Array:
    """Returns what balances the experts, and what keeps logits small: means over layers."""
    of_layers = (
        training.balance_loss * found.load_balance_loss
        + training.router_z_loss * found.router_z_loss
    )
    return jnp.mean(of_layers)


def record(found: Statistics) -> dict[str, Any]:
    """Returns what a log has of one step, of statistics `[microbatches, layers, ...]`."""
    loads = np.sum(found.tokens_per_expert, axis=0)  # [layers, E]
    return {
        "loads": loads.tolist(),
        "dropped": int(np.sum(found.dropped)),
        "entropy": float(np.mean(found.entropy)),
    }


def largest_load(step: dict[str, Any]) -> float:
    """Returns the load of a layer's busiest expert over the mean: the mean over layers."""
    loads = np.asarray(step["loads"], float)
    return float(np.mean(loads.max(axis=1) / loads.mean(axis=1)))
