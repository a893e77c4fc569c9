"""Balance without a loss: a bias that follows the loads of experts."""

import jax.numpy as jnp
from jax import Array

from jaxpar._calls import public, type_error, value_error
from jaxpar._types import Number, Values


@public
def update_router_bias(
    bias: Values, tokens_per_expert: Values, rate: Number | Array = 1e-3
) -> Array:
    """Moves each expert's bias up if it got fewer tokens than the mean, and down if more.

    For balance without a loss: after each training step, on the bias that `route` takes.

    Args:
      bias: floats `[E]`, best float32, in which small steps are not lost.
      tokens_per_expert: `[E]` integers, of all devices, as `routing_statistics` returns them; of
        several microbatches their sum.
      rate: the size of the step; a number or a scalar array.

    Returns:
      `bias + rate * sign(mean(tokens_per_expert) - tokens_per_expert)`, in the dtype of the bias.

    Raises:
      TypeError: a bias that is no float, or tokens that are no integers.
      ValueError: different shapes.

    Cost: E operations; nothing is sent.

    Example:
      >>> update_router_bias(jnp.zeros(4), jnp.array([5, 1, 3, 3]), 0.5)
      Array([-0.5,  0.5,  0. ,  0. ], dtype=float32)

    Source: Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts"
    (2024).
    """
    bias, tokens_per_expert = jnp.asarray(bias), jnp.asarray(tokens_per_expert)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise type_error(f"bias must be floats, got {bias.dtype}; cast it")
    if not jnp.issubdtype(tokens_per_expert.dtype, jnp.integer):
        raise type_error(
            f"tokens_per_expert must be integers, got {tokens_per_expert.dtype}; cast them"
        )
    if bias.ndim != 1 or bias.shape != tokens_per_expert.shape:
        raise value_error(
            f"bias has local shape {bias.shape} and tokens_per_expert "
            f"{tokens_per_expert.shape}; both need one entry for each of all experts"
        )
    # In integers: the mean, where it is no integer, is between `floor` and the next.
    total = jnp.sum(tokens_per_expert, dtype=tokens_per_expert.dtype)
    floor, rest = jnp.divmod(total, jnp.asarray(len(bias), total.dtype))
    below = (tokens_per_expert < floor) | ((tokens_per_expert == floor) & (rest > 0))
    above = tokens_per_expert > floor
    sign = below.astype(bias.dtype) - above.astype(bias.dtype)
    return bias + jnp.asarray(rate, bias.dtype) * sign
