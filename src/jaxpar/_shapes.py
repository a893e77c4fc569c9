"""Shapes that go together, said: JAX lengthens the shorter one only where it is allowed to."""

from jax import Array, lax


def with_rank(rank: int, x: Array) -> Array:
    """Returns x with dimensions of size 1 before its own, `rank` in all.

    As JAX would put them before an operand of fewer dimensions than the other; but where users set
    `jax_numpy_rank_promotion`, it warns or raises.
    """
    return lax.expand_dims(x, range(rank - x.ndim))
