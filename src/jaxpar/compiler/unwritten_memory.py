"""Memory that nobody wrote, which reads as anything: in tests as the worst that it can be."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

poisoned = False  # read while tracing; set by `jaxpar.testing.poisoned_rows`


def unwritten(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Returns memory for an array, not yet varying over any mesh axis.

    On CPU it usually reads as zero, which hides that somebody read it. Poisoned it reads as NaN, or
    as an integer so large that it indexes nothing, or as True.
    """
    if not poisoned:
        return lax.empty(shape, dtype)
    return jnp.full(shape, _poison(jnp.dtype(dtype)), dtype)


def _poison(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        # 0x7f..., for unsigned ones too: they carry bits, and of any float dtype these are NaN.
        info = jnp.iinfo(dtype)
        return info.max if info.min else info.max >> 1
    return jnp.nan
