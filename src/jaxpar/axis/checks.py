"""Checks of the arguments of public functions, in one wording."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jaxpar.arguments.calls import called, type_error, value_error
from jaxpar.axis.axis import Ring
from jaxpar.axis.vma import checks_varying, varying_axes

# The remedies for replicated shards, and for replicated partial sums.
SHARDED = "shard it in in_specs, or cut it with scatter_region"
PARTIAL_SUMS = "shard its operands in in_specs, or leave out an earlier sum over the axis"
_SAY_SO, _PCAST = ", say so", " by jax.lax.pcast("
# All axes over which a call in this process required varying operands.
_asked: set[str] = set()


def check_precision(precision: Any) -> None:
    if isinstance(precision, (tuple, list)):
        raise type_error(
            f"precision must be one value for both operands, got {precision!r}; "
            "operands change places in the derivatives"
        )


def check_dim(argument: str, dim: Any, shape: tuple[int, ...], *, stacked: bool = False) -> int:
    """Returns `dim` counted from the front, or raises.

    With `stacked`, it is a new dimension of the result.
    """
    dim, rank = _as_integer(argument, dim), len(shape) + stacked
    if not -rank <= dim < rank:
        result = f"a result of {rank} dimensions" if stacked else f"{rank} dimensions"
        remedy = f"choose from {-rank} to {rank - 1}" if rank else "reshape it to one"
        raise value_error(
            f"{argument}={dim} is out of range for a local shape {shape}, which has "
            f"{result}; {remedy}"
        )
    return dim % rank


def check_divides(
    argument: str,
    shape: tuple[int, ...],
    dim: int,
    ring: Ring,
    *,
    exactly: bool = False,
) -> None:
    """Raises unless the ring's size divides `dim`, or equals it (`exactly`)."""
    size = shape[dim]
    if exactly and size != ring.size:
        raise value_error(
            f"{argument} has local shape {shape}, whose dimension {dim} must have the "
            f"size of {ring} with tiled=False, but has {size}; "
            "pass tiled=True to cut it into blocks"
        )
    if size % ring.size:
        padded = size + -size % ring.size
        raise value_error(
            f"{argument} has local shape {shape}, whose dimension {dim} {ring} "
            f"does not divide: {size} = {size // ring.size} x {ring.size} + "
            f"{size % ring.size}; pad it to {padded}, or choose another dimension"
        )


def check_whole(
    argument: str,
    number: Any,
    low: int | None = None,
    high: int | None = None,
    what: str = "",
) -> int:
    number = _as_integer(argument, number)
    if (low is not None and number < low) or (high is not None and number > high):
        most = "" if high is None else f" and at most {high}, {what}"
        raise value_error(f"{argument}={number} must be at least {low}{most}")
    return number


def _as_integer(argument: str, number: Any) -> int:
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:  # arrays and traced values, too
        pass
    known = " known while tracing" if isinstance(number, Tracer) else ""
    raise type_error(
        f"{argument} must be an integer{known}, got {number!r} of type {type(number).__name__}"
    )


def as_array(argument: str, array: Any, use: str = "product", remedy: str = "pass one") -> Array:
    """Returns a user's array, or raises without this `use`."""
    try:
        x = jnp.asarray(array)
    except (TypeError, ValueError):
        if hasattr(array, "dequantized"):
            raise type_error(
                f"{argument} is Quantized{list(array.shape)}, which only an operand that is "
                f"gathered may be; pass {argument}.dequantized()"
            ) from None
        name = f"{array.__name__}, " if hasattr(array, "__name__") else ""
        kind = type(array).__name__
        if isinstance(array, np.ndarray):
            kind = f"{kind} of {array.dtype}"  # such as an array of texts
        raise type_error(
            f"{argument} is {name}of type {kind}, and no array of JAX; {remedy}"
        ) from None
    if use and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        instead = "give numbers" if use == "product" else "leave it out"  # x is a leaf of a tree
        raise type_error(f"{argument} is {x.dtype}{list(x.shape)}, which has no {use}; {instead}")
    if use == "sum" and x.dtype == bool:  # JAX's sums of bools count, are an "or", or raise
        raise type_error(f"{argument} is bool{list(x.shape)}, which has no sum; cast it to int32")
    return x


def check_own(
    argument: str, arrays: Any, ring: Ring, what: str, remedy: str = "", *, operand: bool = True
) -> None:
    """Raises if `arrays` are typed as replicated, but each device needs its own `what`.

    One varying array is enough. `check_uncast` ignores what is no `operand`.
    """
    if not checks_varying(ring.names):
        return
    if operand:
        _asked.update(ring.names)
    varying = varying_axes(arrays)
    copied = tuple(name for name in ring.names if name not in varying and lax.axis_size(name) > 1)
    if copied:
        shapes = [str(jnp.shape(x)) for x in jax.tree.leaves(arrays)]
        of = f"shapes {', '.join(shapes[:-1])} and {shapes[-1]} are"
        of = f"shape {shapes[0]} is" if len(shapes) == 1 else of
        raise value_error(
            f"{argument} of local {of} replicated over {sorted(copied)}, but each device of "
            f"{ring} needs {what} of its own; {remedy or SHARDED}. If each device does have its "
            f"own, and they are equal{_SAY_SO}{_PCAST}..., {copied}, to='varying')"
        )


def check_uncast(function: Callable[..., Any], arrays: Any, cast: Any, *args: Any) -> None:
    """Raises if an operand of `function` varies only by our own cast."""
    # `function` is traced again without the cast, which a transform needs.
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(cast), strict=True)
    added = frozenset[str]().union(*(varying_axes(y) - varying_axes(x) for x, y in pairs))
    if not added & _asked:
        return
    try:
        jax.eval_shape(lambda arrays: function(arrays, *args), arrays)
    except Exception as error:  # JAX may raise for loops whose carry was cast: ignore this
        refused, pcast, rest = str(error).rpartition(_PCAST)
        if pcast:
            refused = refused.rpartition(_SAY_SO)[0]  # from a nested transform
            raise ValueError(f"{refused}{_SAY_SO} before {called()}{pcast}{rest}") from None
