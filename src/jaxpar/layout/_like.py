"""Layouts of what is made like the parameters: states of optimizers, averages, gradients."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxpar._calls import called
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._fit import Shaped, fit, replicated
from jaxpar.layout._paths import arrays_of, described
from jaxpar.layout._problem import LayoutError, Problem

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout
    from jaxpar.layout._map import LayoutMap


def like(layout: Layout, tree: Any, rules: LayoutMap | None) -> Layout:
    """What `Layout.like` says."""
    from jaxpar.layout._layout import Layout

    leaves, treedef = arrays_of(tree, "tree")
    found: dict[str, ArrayLayout] = {}
    others: list[Shaped] = []
    for leaf in leaves:
        if leaf is None:
            continue
        array = Shaped(*described(*leaf))
        path = array.path
        own = array_like(layout, array)
        if own is not None:
            found[path] = own
        elif prod(array.shape) <= 1:
            found[path] = replicated(array, layout.mesh)
        else:
            others.append(array)
    if others and rules is not None:
        laid, problems = fit(rules, others, layout.mesh, strict=True)
        problems = [problem for problem in problems if problem.path is not None]
        found |= {array.path: array for array in laid}
    else:
        problems = [_problem(layout, array) for array in others]
    if problems:
        raise LayoutError(called(), problems)
    arrays = [None if leaf is None else found[leaf[0]] for leaf in leaves]
    return Layout(layout.rules, layout.mesh, arrays, treedef, jax.tree.leaves(tree))


def array_like(layout: Layout, array: Shaped) -> ArrayLayout | None:
    """How an array lies that is like a parameter: its path ends in the parameter's; else None."""
    parameter = _parameter(layout, array.path)
    return parameter and _shaped_like(parameter, array)


def parameter_of(layout: Layout, path: str) -> str | None:
    """The path of a parameter in which this one ends, the longest."""
    keys = path.split("/")
    endings = ("/".join(keys[start:]) for start in range(len(keys) + 1))
    return next((ending for ending in endings if ending in layout), None)


def _parameter(layout: Layout, path: str) -> ArrayLayout | None:
    found = parameter_of(layout, path)
    return None if found is None else layout[found]


def _shaped_like(parameter: ArrayLayout, array: Shaped) -> ArrayLayout | None:
    """The parameter's layout for this array: whole, or without one of its dimensions."""
    if array.shape in (parameter.shape, parameter.padded_shape):
        return replace(parameter, path=array.path, dtype=array.dtype)
    rank = len(parameter.shape)
    entries = (*parameter.spec, *[None] * (rank - len(parameter.spec)))
    candidates = {
        replace(
            parameter,
            path=array.path,
            dtype=array.dtype,
            shape=_without(parameter.shape, dim),
            spec=PartitionSpec(*_without(entries, dim)),
            blocks=_without(parameter.blocks, dim),
        )
        for dim in range(rank)
        if array.shape in (_without(parameter.shape, dim), _without(parameter.padded_shape, dim))
    }
    # Of a square weight either dimension may be gone: such a vector is small, and has no layout.
    return candidates.pop() if len(candidates) == 1 else None


def _without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _problem(layout: Layout, array: Shaped) -> Problem:
    parameter = _parameter(layout, array.path)
    why = (
        f"{array} is like no parameter: its path ends in none"
        if parameter is None
        else f"{array} is like no parameter: {parameter.path!r} has shape {parameter.shape}"
    )
    return Problem(
        array.path,
        None,
        why,
        f"give a rule for it, rules=LayoutMap({{{array.path!r}: REPLICATED}})",
    )
