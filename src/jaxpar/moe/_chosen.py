"""Between what each token has for its chosen experts, [t, k], and for all experts, [t, E].

By comparing every choice with every expert, which fuses into its neighbours: gathers, and above all
the scatter that is their derivative, are slow on TPU where rows are so short.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.checkpoint, prevent_cse=False)  # or [t, k, E] is kept for the backward pass
def of_chosen(values: Array, experts: Array) -> Array:
    """Returns `values` [t, E] of `experts` [t, k], and 0 where these are none."""
    matches = _matches(experts, values.shape[-1])
    return jnp.sum(jnp.where(matches, values[:, None, :], 0), axis=2, dtype=values.dtype)


def of_experts(values: Array, experts: Array, count: int) -> Array:
    """Returns `values` [t, k] at their experts, [t, count], and 0 at experts not chosen."""
    matches = _matches(experts, count)
    return jnp.sum(jnp.where(matches, values[..., None], 0), axis=1, dtype=values.dtype)


def _matches(experts: Array, count: int) -> Array:
    return experts[..., None] == jnp.arange(count, dtype=experts.dtype)  # [t, k, E]
