"""Finds the dimensions of a weight's parts, and weights that cannot be cut without a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._roles import Roles
from jaxpar.layout._weight_formats import cut, side_of
from jaxpar.layout._weights import NamedArray, Part, Weight, WeightGroups

Dim: TypeAlias = int | LayoutProblem | None  # sharded, refused, or replicated


class PartDims:
    """Dimensions of parts.

    Args:
      dim_of: returns a weight's dimension.
      own_rule: returns the edit that gives an array its own rule.
    """

    def __init__(
        self,
        weights: WeightGroups,
        roles: Roles,
        dim_of: Callable[[Weight], Dim],
        own_rule: Callable[[NamedArray, str], str],
        devices: int,
    ) -> None:
        self._weights, self._roles = weights, roles
        self._dim_of, self._own_rule = dim_of, own_rule
        self._devices = devices

    def uncut(self, weight: Weight, dim: Dim) -> Dim:
        """Returns the dimension, or the problem that its blocks cut those of an array."""
        if not isinstance(dim, int):
            return dim
        array, parts = weight.array, self._weights.parts_of[weight.array.path]
        shapes = [(array, array.shape[weight.first :])]
        # Layouts repeat the scales of a `Quantized` where devices share a block.
        counted = self._counts_groups(weight)
        shapes += [(p.array, p.shape) for p in parts if not (p.array.values or counted)]
        for array, shape in shapes:
            if len(shape) >= len(weight.shape):
                wrong = cut(weight.shape, shape, dim, self._devices)
                if wrong is not None:
                    return weight.array.problem(
                        f"{array} {wrong}",
                        f"replicate the weight, whole={weight.pattern!r}, or use fewer devices "
                        "along this axis",
                    )
        return dim

    def dim(self, part: Part) -> Dim:
        weight, array = part.weight, part.array
        if part.given == "whole" or all(size == 1 for size in part.shape):
            return None
        if part.given and not weight.given:
            weight = replace(weight, given=part.given)
        if len(part.shape) == 1 < len(weight.shape):
            return self._of_vector(part, weight)
        dim = self._dim_of(weight)
        if isinstance(dim, LayoutProblem):
            return _refused(array, weight)
        if dim is None:
            return None
        if len(part.shape) < len(weight.shape):
            return self._unclear(part, "has fewer dimensions than")
        return None if part.shape[dim] == 1 or self._counts_groups(weight) else dim

    def _counts_groups(self, weight: Weight) -> bool:
        """Returns whether sharded inputs have numbers of the whole weight's groups."""
        parts = self._weights.parts_of[weight.array.path]
        return any(p.names[0] == "g_idx" for p in parts) and self._roles.of(weight) == "rows"

    def _of_vector(self, part: Part, weight: Weight) -> Dim:
        """Returns 0 if a vector's entries are those of its weight's sharded dimension."""
        side, (size,) = side_of(part.names), part.shape
        if side == "neither":
            return None
        dim = self._dim_of(weight)
        if dim is None:
            return None
        if isinstance(dim, LayoutProblem):
            return _refused(part.array, weight)
        if len(weight.shape) == 2:
            role = self._roles.of(weight)
            whose = {"columns": "outputs", "rows": "inputs"}.get(str(role))
            likely = [d for d in (0, 1) if weight.shape[d] == size]
            if side and whose:
                likely = [d for d in likely if (d == dim) == (side == whose)]
            if len(likely) == 1:
                return 0 if likely[0] == dim else None
        if part.given == "columns":
            return 0
        return self._unclear(part, "may be of the inputs, the outputs or none of")

    def _unclear(self, part: Part, what: str) -> LayoutProblem:
        array, weight = part.array, part.weight.array
        return array.problem(f"{array} {what} {weight}", self._own_rule(array, part.pattern))


def _refused(array: NamedArray, weight: Weight) -> LayoutProblem:
    path = weight.array.path
    return array.problem(f"{array} belongs to {path!r}, which is refused", f"decide on {path!r}")
