"""Calls in a `jax.shard_map` that is evaluated without `jax.jit`, each compiled as one program.

JAX compiles every operation of such a function by itself, at every call: hundreds for one ring.
"""

from collections.abc import Callable
from typing import Any

import jax


def as_one_program(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function as one compiled program where JAX would evaluate operation by operation.

    Like JAX, it keeps nothing for the next call: functions among the arguments may read values that
    change in between.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function(*args, **kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))
    evaluated = [_is_evaluated(x) for x in leaves]
    if not any(evaluated):
        return function(*args, **kwargs)

    def program(arrays: list[jax.Array]) -> Any:
        given = iter(arrays)
        whole = [next(given) if known else x for x, known in zip(leaves, evaluated, strict=True)]
        args, kwargs = tree.unflatten(whole)
        return function(*args, **kwargs)

    return jax.jit(program)([x for x, known in zip(leaves, evaluated, strict=True) if known])


def _is_evaluated(x: Any) -> bool:
    """Whether x has a value on each device already. Only its class's name shows it."""
    return type(x).__name__ == "ShardMapTracer"
