"""Unwritten memory, which tests fill with the worst values."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

poisoned = False  # read while tracing; set by `jaxpar.testing.poisoned_rows`


def unwritten(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Returns memory for an array, not yet varying over any mesh axis."""
    # On CPU it often reads as zero, which hides wrong reads. Poisoned memory reads as NaN, True, or
    # an integer too large for an index.
    if not poisoned:
        return lax.empty(shape, dtype)
    return jnp.full(shape, _poison(jnp.dtype(dtype)), dtype)


def _poison(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        # 0x7f..., for unsigned ones too: they carry bits, which are NaN in any float dtype.
        info = jnp.iinfo(dtype)
        return info.max if info.min else info.max >> 1
    return jnp.nan
