"""Comparing arrays with what is expected of them, and saying what differs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxpar.testing._oracle import Expected, Leaf
from jaxpar.testing._tolerance import tolerance, unit_roundoff

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
