"""Checks of layers' and experts' arguments: numbers, tokens, sequences."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Integer as Integers

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.axis.axis import Ring
from jaxpar.axis.checks import as_array, check_dim
from jaxpar.axis.vma import varying_axes


def check_number(
    argument: str, number: Any, high: float | None = None, *, finite: str = ""
) -> float:
    """Returns a static number from 0 to `high`.

    `finite` says what to give in place of a forbidden infinity.
    """
    if isinstance(number, bool) or not isinstance(number, int | float | np.number):
        raise type_error(
            f"{argument} must be a number known while tracing, got {number!r} of type "
            f"{type(number).__name__}"
        )
    if not number >= 0 or (high is not None and number > high):
        most = "" if high is None else f" and at most {high}"
        raise value_error(f"{argument}={number} must be at least 0{most}")
    if finite and number == float("inf"):
        raise value_error(f"{argument}={number} must be finite; {finite}")
    return float(number)


def check_softcap(number: Any, otherwise: str) -> float | None:
    if number is None:
        return None
    softcap = check_number("softcap", number, finite=otherwise)
    if not softcap:
        raise value_error(f"softcap={number} must be above 0; {otherwise}")
    return softcap


def as_integers(argument: str, array: Any) -> Integers[Array, "..."]:
    """Returns integers, or raises, too, if JAX's 32 bits cannot hold NumPy's 64."""
    x = as_array(argument, array, use="")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise type_error(f"{argument} must be integers, got {x.dtype}; cast them")
    if isinstance(array, np.ndarray) and not np.array_equal(array, array.astype(x.dtype)):
        raise value_error(
            f"{argument} are {array.dtype} from {array.min()} to {array.max()}, of which "
            f"{x.dtype} does not hold all; number them anew, or set jax_enable_x64"
        )
    return x


def check_replicated(argument: str, tokens: Array, ring: Ring) -> None:
    varying = sorted(varying_axes(tokens) & set(ring.names))
    if varying:
        raise value_error(
            f"{argument} of local shape {tokens.shape} vary over {varying}, but "
            f"every device of {ring} needs the same; replicate them, by in_specs without that "
            "axis or by gather_region"
        )


def check_sequence_dim(argument: str, sequence_dim: Any, shape: tuple[int, ...]) -> int | None:
    """Returns `sequence_dim` from the front, or None; refuses the last."""
    if sequence_dim is None:
        return None
    dim = check_dim("sequence_dim", sequence_dim, shape)
    if dim == len(shape) - 1:
        raise value_error(
            f"sequence_dim={sequence_dim} is the last dimension of {argument}, local "
            f"shape {shape}, which holds features; choose one before it, such as -2"
        )
    return dim


def as_signed(tokens: Array) -> Array:
    """Returns `tokens` in a signed dtype: differences can be negative."""
    return tokens.astype("int64" if tokens.dtype.itemsize == 8 else "int32")
