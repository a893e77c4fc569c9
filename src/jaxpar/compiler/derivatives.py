"""Declares derivatives: of any function, and of two that are each other's."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.compiler.compat import optimization_barrier

Function = Callable[..., Any]


def with_derivative(function: Function, fwd: Function, bwd: Function, statics: int = 1) -> Function:
    """Returns `function(how, *operands)` with a derivative, as in `jax.custom_vjp`.

    The first `statics` arguments are static. If `how.derived_by_jax`, JAX derives it.
    """
    ruled = jax.custom_vjp(function, nondiff_argnums=tuple(range(statics)))
    ruled.defvjp(fwd, bwd)

    def call(how: Any, *operands: Any) -> Any:
        return (function if how.derived_by_jax else ruled)(how, *operands)

    return call


def as_residuals(operands: Any) -> Any:
    """Returns operands as residuals of a rule."""
    # Without it, jax 0.10 to 0.12.0 passes a scalar if a scan is differentiated twice.
    return optimization_barrier(operands)


def linear_pair(forth: Function, back: Function) -> tuple[Function, Function]:
    """Returns two functions, each the derivative of the other in its last operand.

    Both are `(how, integers, x)`: `how` is static, and `x` a pytree, in which they are linear.
    There are no cotangents of integers.
    """

    def fwd_one(how: Any, integers: Any, x: Any) -> Any:
        return first(how, integers, x), integers

    def bwd_one(how: Any, integers: Any, cts: Any) -> Any:
        return None, second(how, integers, _differentiable(cts))  # integers have none

    def fwd_other(how: Any, integers: Any, x: Any) -> Any:
        return second(how, integers, x), integers

    def bwd_other(how: Any, integers: Any, cts: Any) -> Any:
        return None, first(how, integers, _differentiable(cts))

    first = with_derivative(forth, fwd_one, bwd_one)
    second = with_derivative(back, fwd_other, bwd_other)
    return first, second


def _differentiable(cts: Any) -> Any:
    return jax.tree.map(lambda ct: None if ct.dtype == jax.dtypes.float0 else ct, cts)
