"""Keys of `jax.random` as their words: what host memory, padding and files can hold of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def is_key(dtype: Any) -> bool:
    """Whether entries of this dtype are keys of `jax.random.key`."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@lru_cache(maxsize=16)
def words_of(dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the words of one key."""
    key = jax.ShapeDtypeStruct((), dtype)
    words: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, key)
    return words


def keys_of(words: Any, dtype: Any) -> Array:
    """Returns the keys that have these words."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_algorithm(dtype))


@lru_cache(maxsize=16)
def _algorithm(dtype: Any) -> Any:
    """The `impl` of keys of a dtype, of which only keys know."""
    found: list[Any] = []

    def look(key: Array) -> Array:
        found.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]
