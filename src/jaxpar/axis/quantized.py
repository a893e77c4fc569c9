"""Arrays of numbers of at most 8 bits with scales."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxpar.arguments.calls import called, naming, readable, type_error
from jaxpar.arguments.dtypes import addition_dtype, as_dtype
from jaxpar.arguments.lazy_names import open_types
from jaxpar.arguments.types import Integer, Leaf
from jaxpar.axis.checks import as_array, check_whole

if TYPE_CHECKING:
    MaybeQuantized: TypeAlias = "Array | Quantized"
else:
    globals().update(open_types(__name__))


@readable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array as values of 8 or 4 bits and the scales that multiply them; a pytree.

    Given in place of an array to gather, it travels as it is. One that you make has no derivative.

    Args:
      values: int8, int4, float8 or float4, in the array's shape.
      scales: floats of the values' rank: along each dimension one, one for each entry, or for
        each block. In `jax.shard_map` they are of this device's values; blocks along a dimension
        that a matmul gathers need `check_vma=True`.
      exact: the array before rounding, which gets the gradient; set by jaxpar.
      dtype: the array's dtype, for `dequantized`. Matmuls use the other operand's dtype.
      block: entries of a block along all dimensions, or along each; the last may have fewer.
        None: as shapes tell. 5 scales of 576 entries are of blocks of 128; 2 of 192 are refused
        (96 and 96, or 128 and 64).

    Raises (at its use):
      ValueError: scales of another rank, or that are no blocks, or two kinds of blocks.

    Example:
      >>> q, scales = jnp.arange(8, dtype="int8").reshape(2, 4), jnp.array([[1, 0.5, 2, 3]])
      >>> Quantized(q, scales, dtype="float32").dequantized()[1]
      Array([ 4. ,  2.5, 12. , 21. ], dtype=float32)
    """

    values: Leaf
    scales: Leaf
    # The array before it was rounded, if the derivative is to ignore the rounding.
    exact: Leaf | None = None
    dtype: DTypeLike = field(default="bfloat16", kw_only=True, metadata={"static": True})
    block: Integer | tuple[Integer, ...] | None = field(
        default=None, kw_only=True, metadata={"static": True}
    )

    def __post_init__(self) -> None:
        with naming("Quantized"):
            object.__setattr__(self, "dtype", as_dtype("dtype", self.dtype))
            for size in self.block if isinstance(self.block, tuple) else [self.block]:
                if size is not None:
                    check_whole("block", size, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def size(self) -> int:
        return self.values.size

    def dequantized(self, dtype: DTypeLike | None = None) -> Array:
        """Returns values times scales, in the array's dtype or another."""
        from jaxpar.axis.scale_blocks import with_equal_blocks

        with naming(called("Quantized.dequantized")):
            whole = with_equal_blocks("scales", self)
        return read_as(whole, self.dtype if dtype is None else dtype)


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Returns a scale per value, along dimensions with several scales of equal blocks."""
    for dim, (have, want) in enumerate(zip(scales.shape, shape, strict=True)):
        if have not in (1, want):
            apart = jnp.expand_dims(scales, dim + 1)  # [..., have, 1, ...]
            apart = jnp.broadcast_to(
                apart, (*apart.shape[: dim + 1], want // have, *apart.shape[dim + 2 :])
            )
            scales = apart.reshape(*scales.shape[:dim], want, *scales.shape[dim + 1 :])
    return scales


def read_as(x: Any, dtype: DTypeLike) -> Array:
    """Reads an array, or a `Quantized` whose blocks are equal."""
    if not isinstance(x, Quantized):
        return x.astype(dtype)
    wide = addition_dtype(x.scales.dtype)  # bfloat16 scales become float32
    return (x.values.astype(wide) * spread(x.scales.astype(wide), x.shape)).astype(dtype)


def values_of(x: Any) -> Array:
    return x.values if isinstance(x, Quantized) else x


def exact_of(x: Any) -> Array:
    if not isinstance(x, Quantized):
        return x
    return read_as(x, x.dtype) if x.exact is None else x.exact


def as_operand(argument: str, x: Any) -> Any:
    if not isinstance(x, Quantized):
        return as_array(argument, x)
    from jaxpar.axis.scale_blocks import with_equal_blocks

    values = as_array(f"{argument}.values", x.values)
    scales = as_array(f"{argument}.scales", x.scales)
    if values.dtype.itemsize != 1 or values.dtype == bool:
        raise type_error(
            f"{argument}.values are {values.dtype}{list(values.shape)}; give numbers of 8 or 4 "
            "bits, or the array itself where it is not quantized"
        )
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise type_error(f"{argument}.scales are {scales.dtype}; give floats, float32 say")
    return with_equal_blocks(f"{argument}.scales", replace(x, values=values, scales=scales))
