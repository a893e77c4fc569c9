"""Rounding to 8 bits with scales, for users and for transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.arguments.calls import public, type_error
from jaxpar.arguments.dtypes import LowBit, addition_dtype, gathered_by
from jaxpar.arguments.types import Integer
from jaxpar.axis.checks import as_array, check_dim
from jaxpar.axis.quantized import Quantized, spread

# Shorter rows are few bytes, such as the experts' weights of tokens, or scales: keep them exact.
SHORT = 32


@public
def quantize(
    x: Array,
    dtype: DTypeLike = "int8",
    *,
    dim: Integer = -1,
    columns: Integer | None = None,
    key: Array | None = None,
) -> Quantized:
    """Rounds an array to 8 bits, with a scale for each block along a dimension.

    Args:
      x: floats of any shape.
      dtype: `"int8"` or `"float8_e4m3fn"`.
      dim: the dimension that is cut into blocks.
      columns: as in `LowBit`, along `dim`. None: one block.
      key: a `jax.random` key for stochastic rounding, only for int8. None: to nearest.

    Returns:
      A `Quantized` without derivative: values in x's shape, and a scale for each block along `dim`,
      as in `LowBit`.

    Raises:
      TypeError: x is not of floats, or float8 has a key.
      ValueError: dim is out of range, or columns is less than 1.

    Cost: x is read twice. A quarter of float32's bytes is written.

    Example:
      >>> q = quantize(jnp.array([[1.0, -2.0], [100.0, 50.0]]))
      >>> q.values, float(q.scales[1, 0] * 127)
      (Array([[  64, -127],
             [ 127,   64]], dtype=int8), 100.0)

    Source: as `LowBit`; random rounding as in Gupta et al., "Deep learning with limited numerical
    precision" (2015).
    """
    low_bit = LowBit(dtype, columns)
    x = as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(f"x is {x.dtype}{list(x.shape)}; give floats")
    along = check_dim("dim", dim, x.shape)
    check_chance(low_bit, key)
    codes, size = codes_of(low_bit, x, along, key), columns_of(low_bit, x.shape[along])
    # Shapes tell powers of two, also of a device's part.
    return replace(codes, block=size) if size & (size - 1) and size < x.shape[along] else codes


def check_chance(low_bit: LowBit, key: Any) -> None:
    if key is not None and low_bit.dtype != "int8":
        raise type_error(f"a key rounds int8 by chance, and not {low_bit.dtype}; leave it out")


def codes_of(low_bit: LowBit, x: Array, dim: int, key: Array | None = None) -> Quantized:
    block = columns_of(low_bit, x.shape[dim])
    apart = (*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
    wide = x.astype(addition_dtype(x.dtype))
    # Replace NaN by infinity: on CPU, the maximum of some thousand numbers loses NaN.
    magnitudes = jnp.where(jnp.isnan(wide), jnp.inf, jnp.abs(wide))
    largest = jnp.max(magnitudes.reshape(apart), axis=dim + 1, initial=0)
    whole = jnp.issubdtype(low_bit.dtype, jnp.integer)
    limit = float(jnp.iinfo(low_bit.dtype).max if whole else jnp.finfo(low_bit.dtype).max)
    # Hardware may treat smaller scales, which are subnormal, as zero, and then divide by zero.
    # Larger scales times the limit may be infinite.
    range_of = jnp.finfo(wide.dtype)
    top = float(range_of.max) / limit * (1 - float(range_of.eps))
    scales = jnp.clip(largest / limit, range_of.tiny, top)
    scales = jnp.where(jnp.isfinite(largest), scales, largest - largest)  # infinity gives NaN
    scaled = wide / spread(scales, x.shape)
    if key is not None:
        scaled = jnp.floor(scaled + jax.random.uniform(key, x.shape, wide.dtype))
        scaled = jnp.clip(scaled, -limit, limit)  # 127 plus almost 1 is 128 in float32
    values = (jnp.rint(scaled) if whole else scaled).astype(low_bit.dtype)
    return Quantized(values, scales, dtype=x.dtype)


def columns_of(low_bit: LowBit, length: int) -> int:
    most = max(1, min(low_bit.columns or length, length))
    return next(block for block in range(most, 0, -1) if length % block == 0)


def row_dim(ndim: int, dim: int) -> int:
    """Returns the rows' dimension in a gather along `dim`."""
    return ndim - 1 if dim != ndim - 1 else ndim - 2


def encoded(wire: Any, x: Any, dim: int) -> Any:
    """Returns x as it is gathered, quantized if the wire says so."""
    if isinstance(x, Quantized):
        return x
    low_bit = gathered_by(wire, x.dtype)
    if low_bit is None or x.ndim < 2 or not x.size:
        return x
    row = row_dim(x.ndim, dim)
    block, width = columns_of(low_bit, x.shape[row]), x.dtype.itemsize
    if x.shape[row] < SHORT or block + max(4, width) >= block * width:  # a scale has 4 bytes or 8
        return x
    return codes_of(low_bit, lax.stop_gradient(x), row)


def straight_through(wire: Any, x: Any, dim: int) -> Any:
    """Returns x as it is gathered; the derivative ignores the rounding."""
    codes = encoded(wire, x, dim)
    return replace(codes, exact=x) if codes is not x else x


def scales_among(tree: Any) -> list[bool]:
    """Returns for each leaf whether it is scales."""

    def marks(x: Any) -> Any:
        marked = jax.tree.map(lambda _: False, x)
        return replace(marked, scales=True) if is_quantized(x) else marked

    return jax.tree.leaves(jax.tree.map(marks, tree, is_leaf=is_quantized))


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)
