"""Explicit rank promotion, which JAX does by itself only if users allow it."""

from jax import Array, lax


def with_rank(rank: int, x: Array) -> Array:
    """Returns x with dimensions of size 1 before its own, `rank` in all.

    JAX does the same to the operand of lower rank, but warns or raises if users set
    `jax_numpy_rank_promotion`.
    """
    return lax.expand_dims(x, range(rank - x.ndim))
