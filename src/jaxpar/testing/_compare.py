"""Comparing arrays with what is expected of them: how far they may be off, and what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxpar.arguments.calls import readable
from jaxpar.testing._oracle import Expected, Leaf

# A rounding error is within u, and n of them that are independent sum to about u * sqrt(n). Six of
# those standard deviations are not exceeded by any of a million entries.
_DEVIATIONS = 6.0


@readable
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


Place: TypeAlias = Callable[[tuple[int, ...]], str]


@dataclass
class Report:
    """The comparisons of one assertion.

    Attributes:
        rounding: the dtype that intermediate results are rounded to, unless the array is coarser.
        depth: the number of terms an entry sums.
        wrong: a line for each array that differs.
        compared: how many arrays were compared.
        shapes_differ: whether some array has another shape than the reference's.
    """

    rounding: Any
    depth: int
    wrong: list[str] = field(default_factory=list[str])
    compared: int = 0
    shapes_differ: bool = False

    def compare(
        self,
        what: str,
        found: Any,
        expected: Expected,
        project: Callable[[Leaf], Leaf] = np.asarray,
        place: Place = "entry {}".format,
    ) -> None:
        """Compare `project(found)` with `expected`, in the precision of `found`.

        `place` says in words where in `found` an index of `project(found)` is.
        """
        self.compared += 1
        array = np.asarray(found)
        actual = project(array)
        if np.shape(actual) != np.shape(expected.value):
            self.shapes_differ = True
            reason = f"the reference has shape {np.shape(expected.value)}"
        elif jnp.issubdtype(array.dtype, jnp.inexact):
            reason = self._differing_floats(
                actual, expected, coarser(array.dtype, self.rounding), place
            )
        else:
            right = actual == expected.value
            reason = _differing(actual, expected.value, right, np.zeros(actual.shape), place)
        if reason:
            self.wrong.append(f"{what}, {array.dtype}{list(array.shape)}: {reason}")

    def _differing_floats(self, actual: Leaf, expected: Expected, dtype: Any, place: Place) -> str:
        allowed = tolerance(dtype, self.depth) * expected.terms + expected.slack
        # Below the smallest normal number precision is lost, and some backends flush to zero.
        allowed = allowed + float(jnp.finfo(dtype).tiny)
        got, wanted = np.asarray(actual, np.float64), np.asarray(expected.value, np.float64)
        with np.errstate(invalid="ignore"):  # infinities, which are right where both have them
            right = (got == wanted) | (np.abs(got - wanted) <= allowed)
        return _differing(got, wanted, right, allowed, place)


def _differing(got: Leaf, wanted: Leaf, right: Leaf, allowed: Leaf, place: Place) -> str:
    if np.all(right):
        return ""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))
        # A NaN is worse than any number.
        excess = np.nan_to_num(error / (allowed + np.finfo(np.float64).tiny), nan=np.inf)
    excess = np.where(right, -1.0, excess)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(excess), np.shape(right)))
    return (
        f"{np.sum(~right)} of {np.size(right)} wrong, worst at {place(at)}: "
        f"got {got[at]:.6g}, expected {wanted[at]:.6g}, error {error[at]:.3g}, "
        f"allowed {allowed[at]:.3g}"
    )


def coarser(first: Any, second: Any) -> Any:
    """The float dtype of the two that rounds more."""
    return first if unit_roundoff(first) >= unit_roundoff(second) else second
