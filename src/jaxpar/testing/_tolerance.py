"""How far a sharded result may be from the float64 reference."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

# A rounding error is within u, and n of them that are independent sum to about u * sqrt(n). Six of
# those standard deviations are not exceeded by any of a million entries.
_DEVIATIONS = 6.0


def tolerance(dtype: Any, reduction_depth: int = 1) -> float:
    r"""Largest rounding error of a sum of products, relative to the size of its terms.

    $6 (u + u_{acc} \sqrt{K})$, where $u$ is the unit roundoff of `dtype`, $u_{acc}$ that of the
    dtype in which sums of it accumulate (float32 for 16-bit floats, else `dtype`), and $K$ the
    `reduction_depth`. The errors of $K$ additions are independent to first order, so they grow
    like a random walk. The factor 6 covers the largest of very many entries, and, for 16-bit
    floats, the few roundings to `dtype` that a sharded sum has and a local one has not: each
    device's partial sum, what travels, a bias added last.

    The size of the terms is their root sum of squares and not the size of the sum, which may
    cancel: for standard normal terms $\sqrt K$. Under it a dropped block of one in $n$ is an
    error of $1/\sqrt n$, against 0.024 for bfloat16 and 0.000003 for float32 at $K = 64$.

    Args:
        dtype: a float dtype: that of the result, or of intermediate results if coarser.
        reduction_depth: the number of terms that one entry sums over, all devices together.

    Returns:
        The tolerance; 0 for integers and booleans, which are exact.

    Raises:
        ValueError: `reduction_depth` is not positive.

    Example:
        >>> tolerance(jnp.bfloat16, 64)
        0.0234403...
        >>> tolerance(jnp.int32, 64)
        0.0

    References:
        Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
        Comput. 41 (2019).
    """
    if reduction_depth < 1:
        raise ValueError(f"tolerance: reduction_depth={reduction_depth} must be at least 1")
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    unit = unit_roundoff(dtype)
    accumulating = min(unit, unit_roundoff(np.float32))
    return _DEVIATIONS * (unit + math.sqrt(reduction_depth) * accumulating)


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next number of a float dtype."""
    return float(jnp.finfo(dtype).eps) / 2
