"""The numerical contract: in which dtype sums are kept and travel, and results are returned."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.arguments.calls import type_error


def sum_dtype(dtype: DTypeLike) -> Any:
    """The dtype of a matmul's partial sums: float32 or int32 for what is narrower."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float32") if _is_narrow_float(dtype) else result_dtype(dtype)


def addition_dtype(dtype: DTypeLike) -> Any:
    """The dtype in which arrays are summed over devices: float32 for narrower floats.

    Integers need no more room than the result has: they wrap around alike.
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype("float32") if _is_narrow_float(dtype) else dtype


def result_dtype(dtype: DTypeLike) -> Any:
    """The dtype of a matmul's result: that of its operands, but 32 bits for narrower integers."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype("int32" if jnp.issubdtype(dtype, jnp.signedinteger) else "uint32")
    return dtype


def common_dtype(first: Any, second: Any) -> Any:
    """The dtype that holds two of a kind, without JAX's promotion rules, which users may set."""
    if first == second:
        return first
    if first.itemsize == second.itemsize and jnp.issubdtype(first, jnp.floating):
        return jnp.dtype("float32")  # bfloat16 and float16
    return first if first.itemsize > second.itemsize else second


def as_dtype(argument: str, dtype: DTypeLike | None) -> Any:
    """Returns the dtype that a user named, None for None."""
    if dtype is None:
        return None
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise type_error(
            f"{argument}={dtype!r} is not a dtype; pass one such as jnp.float32 or 'bfloat16'"
        ) from None


def check_holds(argument: str, dtype: Any, given: Any, what: str) -> None:
    """Raises if `dtype` would lose digits of integers, signs, fractions or imaginary parts."""
    signed = jnp.issubdtype(given, jnp.signedinteger)
    narrower = jnp.issubdtype(given, jnp.integer) and dtype.itemsize < given.itemsize
    if (
        narrower
        or _KINDS.index(kind_of_dtype(dtype)) < _KINDS.index(kind_of_dtype(given))
        or (signed and jnp.issubdtype(dtype, jnp.unsignedinteger))
        or jnp.issubdtype(dtype, jnp.bool_)
    ):
        kind = "a wider" if narrower else "a signed" if signed else kind_of_dtype(given)
        raise type_error(
            f"{argument}={dtype} cannot hold {what} of {given} operands; choose {kind} "
            "dtype, or None"
        )


def loses_parts(added: Any, dtype: Any) -> bool:
    """Whether sums of `dtype` lose fractions or imaginary parts of what is added, or are none."""
    is_less = _KINDS.index(kind_of_dtype(dtype)) < _KINDS.index(kind_of_dtype(added))
    return is_less or bool(jnp.issubdtype(added, jnp.bool_))


_KINDS = ("an integer", "a float", "a complex")  # each holds what the ones before hold


def kind_of_dtype(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "a complex"
    return "a float" if jnp.issubdtype(dtype, jnp.inexact) else "an integer"


def is_wide_float(dtype: Any) -> bool:
    """Whether a dtype is of real floats of 16 bits or more."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize > 1


def _is_narrow_float(dtype: Any) -> bool:
    return dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
