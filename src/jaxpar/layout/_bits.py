"""Arrays as integers of the same bits ("words"), which move and are stored unchanged.

Programs that move padding may sum blocks with zeros and widen 8-bit floats, which changes -0.0 and
NaNs. The CPU lacks them for 4-bit numbers. Keys are words already.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def to_words(x: Array) -> Array:
    """Returns the bits, with a dimension for several words."""
    dtype = x.dtype
    if is_key(dtype):
        return jax.random.key_data(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return to_words(jnp.stack([x.real, x.imag], -1))
    if jnp.issubdtype(dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, f"uint{jnp.finfo(dtype).bits}")
    if x.dtype == bool or jnp.iinfo(x.dtype).bits < 8:
        return x.astype(jnp.int8)
    return x


def from_words(words: Array, dtype: Any) -> Array:
    if is_key(dtype):
        impl = jax.random.key_impl(jnp.empty((), dtype))  # only a key has it
        return jax.random.wrap_key_data(words, impl=impl)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_words(words, jnp.finfo(dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    if jnp.issubdtype(dtype, jnp.floating):
        whole = words.astype(f"uint{jnp.finfo(dtype).bits}")
        return lax.bitcast_convert_type(whole, dtype)
    return words.astype(dtype)


@lru_cache(maxsize=64)
def words_of(dtype: Any) -> jax.ShapeDtypeStruct:
    words: jax.ShapeDtypeStruct = jax.eval_shape(to_words, jax.ShapeDtypeStruct((), dtype))
    return words
