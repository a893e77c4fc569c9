"""The dtypes of sums, results and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.arguments.calls import called, naming, readable, type_error, value_error
from jaxpar.arguments.lazy_names import open_types
from jaxpar.arguments.types import Flag, Integer

LOW_BIT = ("int8", "float8_e4m3fn")

if TYPE_CHECKING:
    WireLike: TypeAlias = "DTypeLike | LowBit | None"
else:
    globals().update(open_types(__name__))


def sum_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of a matmul's partial sums: at least 32 bits."""
    return result_dtype(addition_dtype(dtype))


def addition_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of sums over devices: float32 for narrower floats."""
    # Integers keep theirs: a wider sum would wrap around alike.
    dtype = jnp.dtype(dtype)
    narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype("float32") if narrow else dtype


def result_dtype(dtype: DTypeLike) -> Any:
    """Returns the operands' dtype, but at least 32 bits for integers."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype("int32" if jnp.issubdtype(dtype, jnp.signedinteger) else "uint32")
    return dtype


def common_dtype(first: Any, second: Any) -> Any:
    """Returns the dtype that holds both, without JAX's promotion rules."""
    bits, other_bits = bits_of(first), bits_of(second)
    if first != second and bits == other_bits and jnp.issubdtype(first, jnp.floating):
        return jnp.dtype("float32")  # bfloat16 and float16
    return first if bits > other_bits else second


def as_dtype(argument: str, dtype: DTypeLike | None) -> Any:
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise type_error(
            f"{argument}={dtype!r} is not a dtype; pass one such as jnp.float32 or 'bfloat16'"
        ) from None


def check_holds(argument: str, dtype: Any, source: Any, what: str) -> None:
    """Raises if `dtype` would lose digits, signs, fractions or imaginary parts."""
    signed = jnp.issubdtype(source, jnp.signedinteger)
    narrower = jnp.issubdtype(source, jnp.integer) and bits_of(dtype) < bits_of(source)
    if (
        narrower
        or _KINDS.index(kind_of_dtype(dtype)) < _KINDS.index(kind_of_dtype(source))
        or (signed and jnp.issubdtype(dtype, jnp.unsignedinteger))
        or jnp.issubdtype(dtype, jnp.bool_)
    ):
        kind = "a wider" if narrower else "a signed" if signed else kind_of_dtype(source)
        raise type_error(
            f"{argument}={dtype} cannot hold {what} of {source} operands; choose {kind} "
            "dtype, or None"
        )


def loses_parts(added: Any, dtype: Any) -> bool:
    """Returns whether sums lose fractions or imaginary parts, or bools are added."""
    is_less = _KINDS.index(kind_of_dtype(dtype)) < _KINDS.index(kind_of_dtype(added))
    return is_less or bool(jnp.issubdtype(added, jnp.bool_))


NARROW = {jnp.dtype(f"{u}int{n}"): (n, jnp.dtype(f"{u}int8")) for u in ("", "u") for n in (2, 4)}
NARROW[jnp.dtype("float4_e2m1fn")] = 4, jnp.dtype("bfloat16")  # bits, and a dtype of bytes
_KINDS = ("an integer", "a float", "a complex")  # each kind includes those before it


def bits_of(dtype: Any) -> int:
    """Returns the bits of a number in memory: several of 2 or 4 bits share a byte."""
    return NARROW[dtype][0] if dtype in NARROW else 8 * dtype.itemsize


def kind_of_dtype(dtype: Any) -> str:
    real = "a float" if jnp.issubdtype(dtype, jnp.inexact) else "an integer"
    return "a complex" if jnp.issubdtype(dtype, jnp.complexfloating) else real


def is_wide_float(dtype: Any) -> bool:
    """Returns whether a dtype is of real floats, 16 bits or more."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize > 1


@readable
@dataclass(frozen=True)
class LowBit:
    """A format in which floats travel: 8 bits, and a scale for each block of a row.

    Give it as `wire_dtype`. A dtype alone, such as `"int8"`, has the defaults.

    Args:
      dtype: `"int8"`, or `"float8_e4m3fn"`, which is more exact only if a row's largest numbers are
        hundreds of times the others.
      columns: largest size of a block; blocks divide the row evenly. None: the full row.
      sums: dtype in which partial sums travel. None: their own. If 8-bit, it must equal `dtype`.
        Each hop of a ring rounds 8-bit sums; a collective rounds them once.
      cotangents: whether the backward pass gathers cotangents in 8 bits.

    A row runs along the last dimension that is not gathered. A scale (float32) is a block's largest
    magnitude over the dtype's largest number. A number that is not finite makes its block NaN.
    Vectors, integers, complex numbers, and rows of fewer than 32 numbers travel unchanged.

    Raises:
      TypeError: `dtype` is another dtype, or `sums` is another 8-bit dtype.
      ValueError: columns is less than 1.

    Cost: a block is read twice and written once. Half of bfloat16's bytes travel, and 4 bytes for
    each scale. int8 rounds by at most 1/254 of a block's largest number.

    Example:
      >>> Axis("tp", wire_dtype=LowBit("int8", columns=256)).wire_dtype.columns
      256

    Source: block-wise scales as in Dettmers et al., "8-bit optimizers via block-wise quantization"
    (2022); quantized gathers of weights as in Wang et al., "ZeRO++" (2023).
    """

    dtype: DTypeLike
    columns: Integer | None = None
    sums: DTypeLike | None = None
    cotangents: Flag = True

    def __post_init__(self) -> None:
        with naming(called("LowBit")):
            columns: Any = self.columns
            if columns is not None and (isinstance(columns, bool) or not isinstance(columns, int)):
                raise type_error(f"columns must be an integer or None, got {columns!r}")
            if columns is not None and columns < 1:
                raise value_error(f"columns must be 1 or more, got {columns}; None: a row")
            dtype, sums = as_dtype("dtype", self.dtype), as_dtype("sums", self.sums)
            if not is_low_bit(dtype):
                raise type_error(f"dtype={dtype} must be one of {', '.join(LOW_BIT)}")
            if sums is not None and sums.itemsize < 2 and sums != dtype:
                raise type_error(
                    f"sums={sums} cannot have scales beside dtype={dtype}; choose {dtype}, 16 bits "
                    "or more, or None"
                )
            object.__setattr__(self, "dtype", dtype)
            object.__setattr__(self, "sums", sums)


def is_low_bit(dtype: Any) -> bool:
    return dtype is not None and str(dtype) in LOW_BIT


def as_wire(argument: str, wire: Any) -> Any:
    if wire is None or isinstance(wire, LowBit):
        return wire
    dtype, of = as_dtype(argument, wire), ", ".join(LOW_BIT)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2 and not is_low_bit(dtype):
        raise type_error(f"{argument}={dtype} has no scales; choose {of}, or 16 bits or more")
    return dtype


def gathered_by(wire: Any, dtype: Any) -> LowBit | None:
    low_bit = wire if isinstance(wire, LowBit) else LowBit(wire) if is_low_bit(wire) else None
    return low_bit if is_wide_float(dtype) else None


def summed_as(wire: Any, dtype: Any) -> Any:
    """Returns the dtype in which sums travel; None: their own."""
    # int8 is for floats: integer sums would wrap around.
    wire = wire.sums if isinstance(wire, LowBit) else wire  # the rest is for gathered arrays
    if not is_low_bit(wire):
        return wire
    is_own = jnp.issubdtype(dtype, jnp.floating) or kind_of_dtype(wire) == kind_of_dtype(dtype)
    return None if is_own else wire


def check_wire(wire: Any, summed: Any) -> None:
    if (wire := summed_as(wire, summed)) is None:
        return
    if jnp.issubdtype(wire, jnp.bool_) or kind_of_dtype(wire) != kind_of_dtype(summed):
        raise type_error(
            f"wire_dtype={wire} cannot carry sums of {summed}; choose {kind_of_dtype(summed)} "
            "dtype, or None"
        )
    if jnp.issubdtype(summed, jnp.integer) and bits_of(wire) < bits_of(jnp.dtype(summed)):
        raise type_error(
            f"wire_dtype={wire} cannot carry sums of {summed}, which would wrap around; choose an "
            f"integer dtype of {bits_of(jnp.dtype(summed))} bits or more, or None"
        )
