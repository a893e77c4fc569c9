"""The numerical contract: in which dtype sums are kept, and in which results are returned."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike


def sum_dtype(dtype: DTypeLike) -> Any:
    """The dtype of partial sums: float32 for narrower floats, int32 for narrower integers."""
    return _at_least_32_bits(dtype, narrow_floats=True)


def result_dtype(dtype: DTypeLike) -> Any:
    """The dtype of a matmul's result: that of its operands, but int32 for narrower integers."""
    return _at_least_32_bits(dtype, narrow_floats=False)


def _at_least_32_bits(dtype: DTypeLike, *, narrow_floats: bool) -> Any:
    dtype = jnp.dtype(dtype)
    if dtype.itemsize < 4:
        if narrow_floats and jnp.issubdtype(dtype, jnp.floating):
            return jnp.dtype("float32")
        if jnp.issubdtype(dtype, jnp.signedinteger):
            return jnp.dtype("int32")
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            return jnp.dtype("uint32")
    return dtype
