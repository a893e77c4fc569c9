"""Pytrees that a user gives: their leaves as arrays, and which of them must differ over devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._axis import Ring
from jaxpar._calls import type_error
from jaxpar._checks import check_own
from jaxpar._quantized import check_exact, scales_among


def as_arrays(argument: str, tree: Any, use: str = "") -> Any:
    """Returns a pytree with arrays as leaves, or raises and names the leaf that is none.

    With a `use` of numbers, such as a sum, keys of random numbers are refused, too.
    """

    def as_array(path: Any, leaf: Any) -> Any:
        place = f"{argument}{jax.tree_util.keystr(path)}"
        try:
            x = jnp.asarray(leaf)
        except TypeError:
            name = getattr(leaf, "__name__", "")
            raise type_error(
                f"{place} is {f'{name}, ' if name else ''}of type {type(leaf).__name__}, and no "
                "array; take out what is none before the call, as equinox.partition(tree, "
                "equinox.is_array) does, and let functions close over it"
            ) from None
        if use and jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise type_error(
                f"{place} is {x.dtype}{list(x.shape)}, which has no {use}; leave it out"
            )
        return x

    return jax.tree_util.tree_map_with_path(as_array, tree)


def as_addends(argument: str, tree: Any) -> Any:
    """Returns a pytree with arrays as leaves, or raises and names the leaf that has no sum."""
    check_exact(argument, tree)
    tree = as_arrays(argument, tree, "sum")
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if x.dtype == bool:  # of JAX's own sums some count, some are an "or", some raise
            place = f"{argument}{jax.tree_util.keystr(path)}"
            raise type_error(f"{place} is bool{list(x.shape)}, which has no sum; cast it to int32")
    return tree


def check_own_leaves(
    argument: str,
    tree: Any,
    ring: Ring,
    what: str,
    remedy: str = "",
    dims: list[int | None] | None = None,
) -> None:
    """Raises if a leaf is typed as the same on devices that need `what` of their own.

    Scales of quantized values may be the same, and so may leaves whose entry in `dims` is None.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for at, ((path, leaf), scales) in enumerate(zip(leaves, scales_among(tree), strict=True)):
        if not scales and (dims is None or dims[at] is not None):
            place = f"{argument}{jax.tree_util.keystr(path)}"
            check_own(place, leaf, ring, what, remedy)
