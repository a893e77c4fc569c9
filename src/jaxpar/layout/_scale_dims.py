"""The parts of a `Quantized` as one array: its scales are laid out as its values are.

Each device gets the scales of its own values, so that its block is a `Quantized`, too. Where scales
are fewer than devices, or blocks cross devices' edges, scales are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, tree_flatten_with_path

from jaxpar.arguments.calls import naming
from jaxpar.axis.padding import AnyArray, Entries, PaddedDim
from jaxpar.axis.quantized import Quantized
from jaxpar.axis.scale_blocks import block_sizes
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._paths import key_of, path_text
from jaxpar.layout._rule import Axes, Rule, axes_of, trimmed
from jaxpar.layout._split import Split

if TYPE_CHECKING:
    from jaxpar.layout._apply_rules import Shaped
    from jaxpar.layout._map import LayoutMap


@dataclass(frozen=True)
class RepeatedDim(PaddedDim):
    """A dimension of scales in which each place on the devices has one of `size` scales."""

    scales: tuple[int, ...] = ()  # -1: a place of padding alone

    @property
    def is_plain(self) -> bool:
        return False

    def pad(self, array: AnyArray, dim: int) -> AnyArray:
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        places = np.array(self.scales)
        repeated = xp.take(array, np.maximum(places, 0), axis=dim)
        kept = np.expand_dims(places >= 0, [d for d in range(array.ndim) if d != dim])
        return repeated if kept.all() else xp.where(kept, repeated, xp.zeros_like(repeated))

    def unpad(self, array: AnyArray, dim: int) -> AnyArray:
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        _, first = np.unique(self.scales, return_index=True)
        return xp.take(array, first[-self.size :], axis=dim)

    def within(self, block: slice) -> tuple[Entries, int]:
        places = np.array(self.scales[block])
        entries = places[places >= 0]  # padding is at the end of each device's block
        return entries, len(places) - len(entries)


def with_values(tree: Any, arrays: Sequence[Shaped | None]) -> list[Shaped | None]:
    """Tells scales, and arrays before rounding, the values of their `Quantized`."""
    by_path = {array.path: array for array in arrays if array is not None}
    nodes = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Quantized))[0]
    for path, node in nodes:
        if not isinstance(node, Quantized):
            continue
        values = by_path.get(path_text((*path, GetAttrKey("values"))))
        for name in ("scales", "exact"):
            part = by_path.get(path_text((*path, GetAttrKey(name))))
            if part is not None and values is not None:
                by_path[part.path] = replace(part, values=values, block=node.block)
    return [array and by_path[array.path] for array in arrays]


def scales_layout(array: Shaped, values: ArrayLayout) -> ArrayLayout | LayoutProblem:
    whole = tuple(PaddedDim.at_the_end(size, 1, size) for size in array.shape)
    if all(blocks.parts == 1 and blocks.is_plain for blocks in values.blocks):
        spec, blocks = PartitionSpec(), whole
        return ArrayLayout(
            array.path, array.shape, array.dtype, values.rule, spec, blocks, values.mesh
        )
    try:
        with naming(""):
            sizes = block_sizes("scales", values.shape, array.shape, array.block)
    except ValueError as reason:
        text, _, remedy = str(reason).removeprefix(": ").replace(" local", "").rpartition("; ")
        return array.problem(f"{array} beside {values.path!r}: {text}", remedy)
    blocks = tuple(
        scales_dim(dim, count, size)
        for dim, count, size in zip(values.blocks, array.shape, sizes, strict=True)
    )
    pairs = zip(values.spec, values.blocks, blocks, strict=False)
    entries = trimmed(None if dim.size == 1 != its.size else entry for entry, its, dim in pairs)
    spec = PartitionSpec(*entries)
    return ArrayLayout(array.path, array.shape, array.dtype, values.rule, spec, blocks, values.mesh)


@lru_cache(maxsize=4096)  # layers share sizes
def scales_dim(values: PaddedDim, count: int, size: int) -> PaddedDim:
    """Returns how `count` scales of blocks of this size lie beside a dimension of values."""
    if count == values.size:
        return values
    if count == 1 or (values.parts == 1 and values.is_plain):
        return PaddedDim.at_the_end(count, 1, count)
    places = np.asarray(values.pad(np.arange(values.size) // size + 1, 0)) - 1
    widths = (n for n in range(values.block, 0, -1) if values.block % n == 0)
    scales = next(each for n in widths if (each := _one_for_each(places.reshape(-1, n))))
    block = len(scales) // values.parts
    if scales == tuple(range(count)):
        return PaddedDim.at_the_end(count, values.parts, block)
    at_the_end = PaddedDim.at_the_end(count, values.parts, block)
    return RepeatedDim(count, block, values.parts, at_the_end.full, at_the_end.rest, scales=scales)


def _one_for_each(parts: np.ndarray) -> tuple[int, ...]:
    """Returns the only scale of each part, or nothing if some have several."""
    scales = parts.max(1)
    alike = (parts == scales[:, None]) | (parts < 0)
    return tuple(scales.tolist()) if alike.all() else ()


def laid_like_values(
    array: Shaped, values: ArrayLayout, rules: LayoutMap | None, problems: list[LayoutProblem]
) -> ArrayLayout | None:
    """Returns the layout of scales; adds what is wrong with it, or with rules that match them."""
    if any(problem.path == values.path for problem in problems):
        return None
    laid = scales_layout(array, values)
    if isinstance(laid, LayoutProblem):
        problems.append(laid)
        return None
    if rules is not None:
        for key in rules.matching(array.path):
            wrong = _at_odds(array, laid, values, key, rules.rule(key))
            problems += [wrong] if wrong else []
    return laid


def without_padding(array: Shaped, values: ArrayLayout) -> tuple[int, ...]:
    """Returns the shape of scales beside values that may be padded."""
    sizes = zip(array.shape, values.padded_shape, values.shape, strict=False)
    return tuple(size if count == padded else count for count, padded, size in sizes)


def _at_odds(
    array: Shaped, laid: ArrayLayout, values: ArrayLayout, key: str, rule: Rule
) -> LayoutProblem | None:
    """Returns the problem of a rule that would lay out scales unlike their values."""
    entries = [*map(axes_of, rule.entries), *[()] * len(array.shape)]
    if isinstance(rule.action, Split):  # its dimension may count from the end
        entries = [*[()] * (rule.action.dim % len(array.shape)), rule.mesh_axes, *entries]
    mesh = laid.mesh.shape

    def several(axes: Axes) -> Axes:
        return tuple(name for name in axes if mesh.get(name, 2) > 1)

    if all(
        several(axes) == several(mine) or (size == 1 and several(axes) == several(its))
        for axes, mine, its, size in zip(entries, laid.axes, values.axes, array.shape, strict=False)
    ):
        return None
    return LayoutProblem(
        array.path,
        key,
        f"{array}: rule {key!r} is {rule.layout}, and the scales of a `Quantized` are laid out as "
        f"{values.path!r} is, by {values.rule!r}: here {laid.spec}",
        f"leave the rule out, or add {key_of(array.path)!r}: {tuple(laid.spec)!r}",
    )
