"""Biases: whole or sharded further, and added so that their gradients are summed wide."""

import jax.numpy as jnp
from jax import Array

from jaxpar._axis import Ring
from jaxpar._calls import type_error, value_error
from jaxpar._varying import checks_varying, vary_wide, varying_axes
from jaxpar.layers._fsdp_gather import fsdp_gather


def whole_bias(weight: str, bias: Array, columns: int, fsdp: Ring | None) -> Array:
    """Returns the bias `[columns]` of a weight, gathered over `fsdp` if it is sharded over it."""
    if bias.shape == (columns,):
        return bias
    if fsdp is not None and checks_varying(fsdp.names):
        # It may be sharded over fewer axes than its weight is: types say which.
        over = tuple(name for name in fsdp.names if name in varying_axes(bias))
        if over and bias.shape == (columns // fsdp.over(over).size,):
            fsdp = fsdp.over(over)
    size = 1 if fsdp is None else fsdp.size
    if fsdp is None or columns % size or bias.shape != (columns // size,):
        further = f", or {columns // size} over {fsdp}" if size > 1 else ""
        raise value_error(
            f"the bias of {weight} has local shape {bias.shape}, but the result has "
            f"{columns} columns here; the bias needs as many{further}"
        )
    return fsdp_gather(bias, fsdp)


def add_bias(y: Array, bias: Array) -> Array:
    """Returns y + bias in the dtype of y; the gradient of the bias is summed in that of sums."""
    if jnp.iscomplexobj(bias) and not jnp.iscomplexobj(y):
        raise type_error(f"the bias is {bias.dtype}, but the result {y.dtype}; cast one of them")
    wide = vary_wide(varying_axes(y), bias.astype(y.dtype))
    return (y.astype(wide.dtype) + wide).astype(y.dtype)
