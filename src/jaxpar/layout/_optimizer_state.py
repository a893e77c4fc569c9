"""Layouts of pytrees like the parameters, such as optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.axis.padding import PaddedDim
from jaxpar.layout._apply_rules import Shaped, fit, replicated, shapes_in, unused_rules
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._layout_error import LayoutProblem, refuse
from jaxpar.layout._paths import key_of

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout
    from jaxpar.layout._map import LayoutMap


def like(layout: Layout, tree: Any, rules: LayoutMap | None) -> Layout:
    shapes, treedef = shapes_in(tree, "tree")
    arrays = list(filter(None, shapes))
    scales = [array for array in arrays if array.values]
    by_path: dict[str, ArrayLayout] = {}
    ruled: list[Shaped] = []  # by `rules`, which override parameters
    owns: dict[str, ArrayLayout] = {}
    problems: list[LayoutProblem] = []
    of_quantized = {array.values.path for array in scales if array.values}
    for array in arrays:
        if array.values:
            continue
        path = array.path
        base = array_like(layout, array)
        if base is None and path in of_quantized:
            base = array_like(layout, replace(array, path=path.removesuffix("values").rstrip("/")))
            base = base and replace(base, path=path)
        if rules is not None and rules.matching(path):
            if base is not None:
                owns[path], array = base, replace(array, shape=base.padded_shape)
            ruled.append(array)
        elif base is not None:
            by_path[path] = base
        elif prod(array.shape) <= 1:
            by_path[path] = replicated(array, layout.mesh)
        elif rules is not None:
            ruled.append(array)
        else:
            problems.append(_problem(layout, array))
    if rules is not None:
        laid, wrong = fit(rules, ruled, layout.mesh, strict=True)
        problems += [problem for problem in wrong if problem.path is not None]
        used = {key for array in (*ruled, *scales) for key in rules.matching(array.path)}
        problems += unused_rules(rules, used, [array.path for array in arrays])
        for array in laid:
            padded = _padded_like(owns.get(array.path), array)
            if isinstance(padded, LayoutProblem):
                problems.append(padded)
            else:
                by_path[array.path] = padded
    for array in scales:
        from jaxpar.layout._scale_dims import laid_like_values, without_padding

        values, base = array.values and by_path.get(array.values.path), array_like(layout, array)
        if values:
            array = replace(array, shape=base.shape if base else without_padding(array, values))
            laid = laid_like_values(array, values, rules, problems)
            by_path[array.path] = laid or replicated(array, layout.mesh)
    refuse(problems)
    leaves = jax.tree.leaves(tree)
    laid_out = [shape and by_path[shape.path] for shape in shapes]
    return type(layout)(layout.rules, layout.mesh, laid_out, treedef, leaves, frozenset(owns))


def _padded_like(base: ArrayLayout | None, array: ArrayLayout) -> ArrayLayout | LayoutProblem:
    """Returns a rule's array with its parameter's padding.

    The rule was fitted to the padded shape, but a checkpoint has no padding.
    """
    if base is None:
        return array
    if array.padded_shape != base.padded_shape:
        return array.problem(
            f"is padded to {array.padded_shape} by rule {array.rule!r}, but its parameter to "
            f"{base.padded_shape}: an update could not add them",
            "shard a dimension that the axes divide, or pad the parameter likewise in its own rule",
        )
    blocks = list(array.blocks)
    for dim, (mine, its) in enumerate(zip(array.blocks, base.blocks, strict=True)):
        if mine.order not in ((1, 1), its.order):
            return array.problem(
                f"is interleaved along dimension {dim} by rule {array.rule!r}, and its parameter "
                "is not, or otherwise: an update would add other layers",
                f"write the axes alone, {array.axes[dim]}, as its order is the parameter's",
            )
        if its.is_plain:
            continue
        if array.axes[dim] == base.axes[dim]:
            blocks[dim] = its
        elif its == PaddedDim.at_the_end(its.size, its.parts, its.block, its.order):
            blocks[dim] = PaddedDim.at_the_end(its.size, mine.parts, mine.block, its.order)
        else:
            return array.problem(
                f"is sharded along dimension {dim} by rule {array.rule!r} unlike its parameter, "
                "each of whose shards has padding",
                f"shard it over {base.axes[dim]}, too, or pad the parameter at its end by Padded",
            )
    return replace(array, shape=base.shape, blocks=tuple(blocks))


def array_like(layout: Layout, array: Shaped) -> ArrayLayout | None:
    parameter = _parameter(layout, array.path)
    return parameter and _shaped_like(parameter, array)


def parameter_of(layout: Layout, path: str) -> str | None:
    """Returns the longest parameter path that ends `path`."""
    keys = path.split("/")
    endings = ("/".join(keys[start:]) for start in range(len(keys) + 1))
    return next((ending for ending in endings if ending in layout), None)


def _parameter(layout: Layout, path: str) -> ArrayLayout | None:
    ending = parameter_of(layout, path)
    return None if ending is None else layout[ending]


def _shaped_like(parameter: ArrayLayout, array: Shaped) -> ArrayLayout | None:
    if array.shape in (parameter.shape, parameter.padded_shape):
        return replace(parameter, path=array.path, dtype=array.dtype)
    rank = len(parameter.shape)
    entries = (*parameter.spec, *[None] * (rank - len(parameter.spec)))
    candidates = [
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
    ]
    return _shared(candidates) if candidates else None


def _shared(candidates: Sequence[ArrayLayout]) -> ArrayLayout | None:
    first, *others = candidates

    def held(array: ArrayLayout) -> list[Any]:
        return [(blocks.size, blocks.padded, blocks.order) for blocks in array.blocks]

    if any(held(other) != held(first) for other in others):
        return None
    spec, blocks = list(first.spec), list(first.blocks)
    for dim, cut in enumerate(first.blocks):
        if any((other.spec[dim], other.blocks[dim]) != (spec[dim], cut) for other in others):
            spec[dim], blocks[dim] = None, PaddedDim.at_the_end(cut.size, 1, cut.padded, cut.order)
    return replace(first, spec=PartitionSpec(*spec), blocks=tuple(blocks))


def _without(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _problem(layout: Layout, array: Shaped) -> LayoutProblem:
    parameter = _parameter(layout, array.path)
    other = parameter and f"{parameter.path!r} has shape {parameter.shape}"
    return array.problem(
        f"{array} is like no parameter: {other or 'its path ends in none'}",
        f"give a rule for it, rules=LayoutMap({{{key_of(array.path)!r}: REPLICATED}})",
    )
