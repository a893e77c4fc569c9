"""Arrays of 8-bit numbers with scales: how they are made, cut, and read again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.arguments.calls import naming, public, readable, type_error, value_error
from jaxpar.arguments.checks import as_array, check_dim
from jaxpar.arguments.dtypes import addition_dtype, as_dtype
from jaxpar.arguments.on_demand import open_types
from jaxpar.arguments.types import Integer, Leaf
from jaxpar.axis.wire import LowBit, gathered_by

# Rows of fewer numbers are those of weights of experts, or of scales: a few bytes, and exact.
SHORT = 32


if TYPE_CHECKING:
    MaybeQuantized: TypeAlias = "Array | Quantized"
else:
    globals().update(open_types(__name__))


@readable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array as 8-bit values and the scales by which they are multiplied; a pytree.

    Given in place of an array that is gathered, the values travel as they are: a checkpoint's
    weights, or an optimizer's, are not rounded again. They have no derivative.

    Args:
      values: int8 or float8, of the array's shape.
      scales: floats; each dimension is that of the values or divides it, and a scale holds for as
        many neighbours as there are for each. Along the dimension that is gathered there is one for
        each position, or one for a device's block.
      dtype: of the array that it stands for. A matmul reads it in the dtype of its partner.

    Raises (where it is used):
      TypeError: values that are no 8-bit numbers, or scales that are no floats.
      ValueError: scales whose shape does not divide that of the values.

    Example:
      >>> w = Quantized(jnp.ones((8, 4), "int8"), jnp.full((1, 4), 0.5), dtype="float32")
      >>> w.shape, w.dequantized()[0, 0]
      ((8, 4), Array(0.5, dtype=float32))
    """

    values: Leaf
    scales: Leaf
    # What the values were made of, if the derivative is to go on to that as if nothing was rounded.
    exact: Leaf | None = None
    dtype: DTypeLike = field(default="bfloat16", kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        with naming("Quantized"):
            object.__setattr__(self, "dtype", as_dtype("dtype", self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.values.size

    def dequantized(self, dtype: DTypeLike | None = None) -> Array:
        """Returns values times scales, in the array's dtype or another one."""
        wide = addition_dtype(self.scales.dtype)
        x = self.values.astype(wide) * spread(self.scales.astype(wide), self.shape)
        return x.astype(self.dtype if dtype is None else dtype)


@public
def quantize(
    x: Array,
    dtype: DTypeLike = "int8",
    *,
    dim: Integer = -1,
    columns: Integer | None = None,
    key: Array | None = None,
) -> Quantized:
    """Rounds an array to 8 bits, in blocks along a dimension that have a scale each.

    Args:
      x: floats of any shape; local, or not.
      dtype: `"int8"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
      dim: the dimension whose neighbours share a scale.
      columns: how many do at most: the largest divisor of the dimension. None: all.
      key: of `jax.random`, for int8: rounds up or down by chance, so that the mean over many
        roundings is exact. None: to the nearest.

    Returns:
      A `Quantized`, which has no derivative. The scale is the largest magnitude of a block over the
      largest number of the dtype; a block with a number that is not finite is NaN.

    Raises:
      TypeError: an array of no floats, an option of the wrong type, a key with float8.
      ValueError: a dim out of range, fewer columns than 1.

    Cost: x is read twice, and a quarter of float32 written.

    Example:
      >>> q = quantize(jnp.array([[1.0, -2.0], [100.0, 50.0]]))
      >>> q.values, float(q.scales[1, 0] * 127)
      (Array([[  64, -127],
             [ 127,   64]], dtype=int8), 100.0)

    Source: as `LowBit`; rounding by chance as in Gupta et al., "Deep learning with limited
    numerical precision" (2015).
    """
    how = LowBit(dtype, columns)
    x = as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(f"x is {x.dtype}{list(x.shape)}; give floats")
    along = check_dim("dim", dim, x.shape)
    check_chance(how, key)
    return codes_of(how, x, along, key)


def check_chance(how: LowBit, key: Any) -> None:
    """Raises where a key is given for what is not rounded by chance."""
    if key is not None and how.dtype != "int8":
        raise type_error(f"a key rounds int8 by chance, and not {how.dtype}; leave it out")


def codes_of(how: LowBit, x: Array, dim: int, key: Array | None = None) -> Quantized:
    """Quantizes x in blocks along `dim`."""
    wide = x.astype(addition_dtype(x.dtype))
    block = columns_of(how, x.shape[dim])
    apart = (*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
    # Infinity in the place of NaN, which the maximum of some thousand numbers loses on CPU.
    magnitudes = jnp.where(jnp.isnan(wide), jnp.inf, jnp.abs(wide))
    largest = jnp.max(magnitudes.reshape(apart), axis=dim + 1, initial=0)
    whole = jnp.issubdtype(how.dtype, jnp.integer)
    limit = float(jnp.iinfo(how.dtype).max if whole else jnp.finfo(how.dtype).max)
    # Smaller scales are no normal numbers: hardware takes them for zero, and divides by it. Of
    # larger ones the limit's multiple may be infinite.
    range_of = jnp.finfo(wide.dtype)
    top = float(range_of.max) / limit * (1 - float(range_of.eps))
    scales = jnp.clip(largest / limit, range_of.tiny, top)
    scales = jnp.where(jnp.isfinite(largest), scales, largest - largest)  # NaN of infinity
    scaled = wide / spread(scales, x.shape)
    if key is not None:
        scaled = jnp.floor(scaled + jax.random.uniform(key, x.shape, wide.dtype))
        scaled = jnp.clip(scaled, -limit, limit)  # 127 plus almost 1 is 128 in float32
    values = (jnp.rint(scaled) if whole else scaled).astype(how.dtype)
    return Quantized(values, scales, dtype=x.dtype)


def columns_of(how: LowBit, length: int) -> int:
    """How many neighbours of a row share a scale: of blocks that are alike, the longest."""
    most = max(1, min(how.columns or length, length))
    return next(block for block in range(most, 0, -1) if length % block == 0)


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Returns scales one for each number of a shape, or 1 for all along a dimension."""
    for dim, (have, want) in enumerate(zip(scales.shape, shape, strict=True)):
        if have not in (1, want):
            apart = jnp.expand_dims(scales, dim + 1)
            apart = jnp.broadcast_to(
                apart, (*apart.shape[: dim + 1], want // have, *apart.shape[dim + 2 :])
            )
            scales = apart.reshape(*scales.shape[:dim], want, *scales.shape[dim + 1 :])
    return scales


def row_dim(ndim: int, dim: int) -> int:
    """The dimension of a row of an array that is gathered along `dim`: the last other one."""
    return ndim - 1 if dim != ndim - 1 else ndim - 2


def encoded(wire: Any, x: Any, dim: int) -> Any:
    """Returns x as it is gathered along `dim`, a `Quantized` if the wire is of 8 bits."""
    return x if isinstance(x, Quantized) else _encoded(wire, x, dim)


def _encoded(wire: Any, x: Array, dim: int) -> Array | Quantized:
    how = gathered_by(wire, x.dtype)
    if how is None or x.ndim < 2 or not x.size:
        return x
    row = row_dim(x.ndim, dim)
    block, width = columns_of(how, x.shape[row]), x.dtype.itemsize
    if x.shape[row] < SHORT or block + addition_dtype(x.dtype).itemsize >= block * width:
        return x
    return codes_of(how, lax.stop_gradient(x), row)


def straight_through(wire: Any, x: Any, dim: int) -> Any:
    """Returns x as it is gathered along `dim`, with the derivative of x as it is."""
    codes = encoded(wire, x, dim)
    return replace(codes, exact=x) if codes is not x else x


def read_as(x: Any, dtype: DTypeLike) -> Array:
    """Returns what may be quantized as an array of a dtype."""
    return x.dequantized(dtype) if isinstance(x, Quantized) else x.astype(dtype)


def decoded(tree: Any) -> Any:
    """Returns a pytree with what is quantized of it as arrays."""
    return jax.tree.map(
        lambda x: x.dequantized() if _is_quantized(x) else x, tree, is_leaf=_is_quantized
    )


def scales_among(tree: Any) -> list[bool]:
    """Tells of each leaf of a pytree whether it is the scales of quantized values."""

    def marks(x: Any) -> Any:
        marked = jax.tree.map(lambda _: False, x)
        return replace(marked, scales=True) if _is_quantized(x) else marked

    return jax.tree.leaves(jax.tree.map(marks, tree, is_leaf=_is_quantized))


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def values_of(x: Any) -> Array:
    """Returns the array of numbers in what may be quantized."""
    return x.values if isinstance(x, Quantized) else x


def exact_of(x: Any) -> Array:
    """Returns the array that x, quantized or not, stands for: where it does not travel."""
    if not isinstance(x, Quantized):
        return x
    return x.dequantized() if x.exact is None else x.exact


def as_operand(argument: str, x: Any) -> Any:
    """Returns what a user gave, an array or a `Quantized`, checked."""
    if not isinstance(x, Quantized):
        return as_array(argument, x)
    values = as_array(f"{argument}.values", x.values)
    scales = as_array(f"{argument}.scales", x.scales)
    if values.dtype.itemsize != 1 or values.dtype == bool:
        raise type_error(
            f"{argument}.values are {values.dtype}{list(values.shape)}; give 8-bit numbers, or "
            "the array itself where it is not quantized"
        )
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise type_error(f"{argument}.scales are {scales.dtype}; give floats, float32 say")
    of, at = values.shape, scales.shape
    if len(of) != len(at) or any(n % m if m else n for n, m in zip(of, at, strict=True)):
        raise value_error(
            f"{argument}.scales have local shape {at}, which does not divide that of the values, "
            f"{of}; each dimension must divide the values' own (1: one scale for all of it)"
        )
    return replace(x, values=values, scales=scales)
