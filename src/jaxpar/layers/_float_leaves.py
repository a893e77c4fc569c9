"""Lists of arrays of which only the floats have gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = list[Any]


def is_float(x: Any) -> bool:
    """Tells whether an array has gradients."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats_of(arrays: Arrays) -> Arrays:
    """Returns the floats among `arrays`."""
    return [x for x in arrays if is_float(x)]


def with_floats(arrays: Arrays, floats: Arrays) -> Arrays:
    """Returns `arrays` with `floats` in the place of those that are floats."""
    given = iter(floats)
    return [next(given) if is_float(x) else x for x in arrays]


def all_gradients(arrays: Arrays, of_floats: Arrays) -> Arrays:
    """Returns the gradients of all arrays, those that are no floats have a zero of their own."""
    given = iter(of_floats)
    return [
        next(given).astype(x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in arrays
    ]
