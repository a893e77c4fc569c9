"""Loops and branches of `jax.lax` that stay compiled under `jax.disable_jit`.

Otherwise JAX runs them in Python, which cannot read conditions that differ by device.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax
from jax import lax

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _compiled(control: Callable[Given, Result]) -> Callable[Given, Result]:
    @wraps(control)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with jax.disable_jit(False):
            return control(*args, **kwargs)

    return call


cond = _compiled(lax.cond)
fori_loop = _compiled(lax.fori_loop)
platform_dependent = _compiled(lax.platform_dependent)
while_loop = _compiled(lax.while_loop)
