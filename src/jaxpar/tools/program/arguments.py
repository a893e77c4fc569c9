"""The arguments of a program: those that are arrays, and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax

from jaxpar.tools.private_names import is_array


def of_arrays(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function of the arrays alone, and its arguments with None for other leaves.

    A pytree may hold functions, text and other objects, which `jax.jit` refuses. The function gets
    them as they are, and what it returns has None in their places.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    if all(map(is_array, leaves)):
        return function, tuple(args)

    @wraps(function)
    def of_given(*given: Any) -> Any:
        arrays = iter(jax.tree.leaves(given))
        filled = tree.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, function(*filled))

    return of_given, tree.unflatten([leaf if is_array(leaf) else None for leaf in leaves])
