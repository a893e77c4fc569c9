"""Arrays of 8-bit numbers with scales."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxpar.arguments.calls import naming, readable, type_error, value_error
from jaxpar.arguments.checks import as_array
from jaxpar.arguments.dtypes import addition_dtype, as_dtype
from jaxpar.arguments.on_demand import open_types
from jaxpar.arguments.types import Leaf

if TYPE_CHECKING:
    MaybeQuantized: TypeAlias = "Array | Quantized"
else:
    globals().update(open_types(__name__))


@readable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array as 8-bit values and the scales that multiply them; a pytree.

    Given in place of an array to gather, it travels as it is. One that you make has no derivative.

    Args:
      values: int8 or float8, in the array's shape.
      scales: floats of the values' rank. Each dimension divides that of the values; one scale
        serves a block. Along the gathered dimension, give one for each device's block, or one for
        each position.
      exact: the array before rounding, which gets the gradient; set by jaxpar.
      dtype: the array's dtype, for `dequantized`. Matmuls use the other operand's dtype.

    Raises (at its use):
      ValueError: the scales' shape does not divide that of the values.

    Example:
      >>> w = Quantized(jnp.ones((8, 4), "int8"), jnp.full((1, 4), 0.5), dtype="float32")
      >>> w.shape, w.dequantized()[0, 0]
      ((8, 4), Array(0.5, dtype=float32))
    """

    values: Leaf
    scales: Leaf
    # The array before it was rounded, if the derivative is to ignore the rounding.
    exact: Leaf | None = None
    dtype: DTypeLike = field(default="bfloat16", kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        with naming("Quantized"):
            object.__setattr__(self, "dtype", as_dtype("dtype", self.dtype))

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
        """Returns values times scales, in the array's dtype or another one."""
        wide = addition_dtype(self.scales.dtype)  # bfloat16 scales become float32
        x = self.values.astype(wide) * spread(self.scales.astype(wide), self.shape)
        return x.astype(self.dtype if dtype is None else dtype)


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Returns a scale per value, along dimensions with several scales."""
    for dim, (have, want) in enumerate(zip(scales.shape, shape, strict=True)):
        if have not in (1, want):
            apart = jnp.expand_dims(scales, dim + 1)  # [..., have, 1, ...]
            apart = jnp.broadcast_to(
                apart, (*apart.shape[: dim + 1], want // have, *apart.shape[dim + 2 :])
            )
            scales = apart.reshape(*scales.shape[:dim], want, *scales.shape[dim + 1 :])
    return scales


def read_as(x: Any, dtype: DTypeLike) -> Array:
    return x.dequantized(dtype) if isinstance(x, Quantized) else x.astype(dtype)


def values_of(x: Any) -> Array:
    return x.values if isinstance(x, Quantized) else x


def exact_of(x: Any) -> Array:
    if not isinstance(x, Quantized):
        return x
    return x.dequantized() if x.exact is None else x.exact


def as_operand(argument: str, x: Any) -> Any:
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
            f"{of}; each dimension must divide the values' own (1: one scale for all entries)"
        )
    return replace(x, values=values, scales=scales)
