"""Comparisons of arrays with expected values: tolerances, and reports of differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxpar.arguments.calls import readable
from jaxpar.testing._oracle import Expected, Leaf

# A rounding error is at most u, and n independent ones sum to about u * sqrt(n). Six of these
# standard deviations are not exceeded by any of a million entries.
_DEVIATIONS = 6.0


@readable
def tolerance(dtype: Any, reduction_depth: int = 1) -> float:
    r"""Returns a bound on the rounding error of a sum of products, relative to its terms' size.

    It is $6 (u + u_{acc} \sqrt{K})$. $u$ is the unit roundoff of `dtype`, and $u_{acc}$ that of
    partial sums: float32 for narrower floats, else `dtype`. $K$ is the `reduction_depth`. The
    factor 6 covers the largest of very many entries, and the additional roundings of a sharded sum
    in 16 bits.

    The size of the terms is the root of their sum of squares, $\sqrt K$ for standard normal terms.
    The sum itself may be much smaller.

    Args:
      dtype: a float dtype: the coarser of result and intermediate results.
      reduction_depth: the number of terms that an entry sums over, on all devices.

    Returns:
      The tolerance; 0 for integers and booleans, which are exact.

    Raises:
      ValueError: `reduction_depth` is not positive.

    Example:
      >>> tolerance(jnp.bfloat16, 64)
      0.0234403...
      >>> tolerance(jnp.int32, 64)
      0.0

    Source: Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
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
    """Returns half the distance from 1 to the next float."""
    return float(jnp.finfo(dtype).eps) / 2


Place: TypeAlias = Callable[[tuple[int, ...]], str]


@dataclass
class Report:
    """The comparisons of an assertion.

    Attributes:
      rounding: the dtype of intermediate results, unless the array is coarser.
      depth: the number of terms that an entry sums.
      wrong: a line for each array that differs.
    """

    rounding: Any
    depth: int
    wrong: list[str] = field(default_factory=list[str])
    compared: int = 0
    shapes_differ: bool = False

    def compare(
        self,
        what: str,
        returned: Any,
        expected: Expected,
        project: Callable[[Leaf], Leaf] = np.asarray,
        place: Place = "entry {}".format,
    ) -> None:
        """Compares `project(returned)` with `expected`, in the precision of `returned`.

        `place` describes an index of `project(returned)` in words.
        """
        self.compared += 1
        array = np.asarray(returned)
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
        with np.errstate(invalid="ignore"):  # infinities are right where both have them
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
    return first if unit_roundoff(first) >= unit_roundoff(second) else second
