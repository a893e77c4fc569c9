"""What every ring function checks of its arguments, in one wording."""

import operator
from typing import Any

from jaxpar._axis import Ring
from jaxpar._calls import type_error, value_error


def check_precision(precision: Any) -> None:
    """Raises unless `precision` is that of both operands of a matmul."""
    if isinstance(precision, (tuple, list)):
        raise type_error(
            f"precision must be one value for both operands, got {precision!r}; "
            "operands change places in the derivatives"
        )


def check_dim(argument: str, dim: Any, shape: tuple[int, ...], *, stacked: bool = False) -> int:
    """Returns `dim` counted from the front, or raises if the local `shape` has no such dimension.

    With `stacked`, `dim` is a new dimension's place in the result.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise type_error(f"{argument} must be an integer, got {dim!r} of type {type(dim).__name__}")
    dim, rank = operator.index(dim), len(shape) + stacked
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
    """Raises unless the ring's size divides (or, `exactly`, equals) dimension `dim` of `shape`."""
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
