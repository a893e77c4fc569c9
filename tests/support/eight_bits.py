"""Rounding to 8 bits in NumPy, in float64, and what a program sends in how many bits."""

from collections import Counter
from itertools import chain

import jax
import ml_dtypes
import numpy as np

from jaxpar.compiler.jaxprs import COLLECTIVES, LAX_NAMES, subjaxprs

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}


def blocks_of(x, dim, columns):
    """[..., blocks, numbers of a block] of rows along a dimension: of equal blocks the longest."""
    rows = np.moveaxis(np.asarray(x, "float64"), dim, -1)
    length = rows.shape[-1]
    most = min(columns or length, length)
    block = max(n for n in range(1, most + 1) if length % n == 0)
    return rows.reshape(*rows.shape[:-1], length // block, block)


def coded(scaled, dtype):
    """The nearest numbers of a dtype of 8 bits."""
    if dtype == "int8":
        return np.rint(scaled)
    return scaled.astype(ml_dtypes.finfo(dtype).dtype).astype("float64")


def rounded(x, dtype="int8", *, dim=-1, columns=None):
    """Returns x as it arrives: each block along a dimension in multiples of its scale."""
    blocks = blocks_of(x, dim, columns)
    scales = np.abs(blocks).max(-1, keepdims=True) / LIMITS[dtype]
    scales[scales == 0] = 1
    rows = (coded(blocks / scales, dtype) * scales).reshape(np.moveaxis(x, dim, -1).shape)
    return np.moveaxis(rows, -1, dim)


def gathered(x, along, dtype="int8", columns=None):
    """The same of what is gathered along a dimension: rows are along the last other one."""
    return rounded(x, dtype, dim=-1 if along % x.ndim != x.ndim - 1 else -2, columns=columns)


def without_ties(x, dtype="int8", *, dim=-1, columns=None):
    """Returns x with 0 for what the last digit of a scale could round to another number."""
    blocks = blocks_of(x, dim, columns)
    scaled = blocks / np.abs(blocks).max(-1, keepdims=True) * LIMITS[dtype]
    near = coded(scaled * (1 - 1e-5), dtype) != coded(scaled * (1 + 1e-5), dtype)
    near[np.abs(blocks) == np.abs(blocks).max(-1, keepdims=True)] = False
    near = np.moveaxis(near.reshape(np.moveaxis(x, dim, -1).shape), -1, dim)
    return np.where(near, np.zeros((), x.dtype), x)


def travelling(fn, *args):
    """How often a program, read as its jaxpr, sends arrays of which dtype by which collective."""
    return Counter(_travelling(jax.make_jaxpr(fn)(*args).jaxpr))


def _travelling(jaxpr):
    for eqn in jaxpr.eqns:
        name = LAX_NAMES.get(eqn.primitive.name, eqn.primitive.name)
        if name in COLLECTIVES:
            yield from ((name, str(var.aval.dtype)) for var in eqn.invars)
        else:
            yield from chain.from_iterable(map(_travelling, subjaxprs(eqn.params)))


def with_gradients(fn):
    """The results, and the gradients for cotangents."""

    @jax.jit
    def run(ct, *args):
        found, pull = jax.vjp(fn, *args)
        return found, pull(ct)

    return run
