"""Explicit rank promotion."""

from jax import Array, lax


def with_rank(rank: int, x: Array) -> Array:
    """Puts dimensions of size 1 in front of x."""
    # JAX's own promotion may warn or raise (`jax_numpy_rank_promotion`).
    return lax.expand_dims(x, range(rank - x.ndim))
