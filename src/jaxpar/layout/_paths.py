"""Paths of arrays in a pytree, as text: the same for every kind of container."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jaxpar._calls import value_error


def arrays_of(tree: Any, name: str = "params") -> tuple[list[tuple[str, Any] | None], Any]:
    """Returns path and array of each leaf, None for leaves that are no arrays, and the treedef.

    Raises:
      ValueError: two arrays of one path.
    """
    flat, treedef = tree_flatten_with_path(tree)
    boxes = _paths_of_boxes(tree)
    found: list[tuple[str, Any] | None] = []
    seen: dict[str, Any] = {}
    for path, leaf in flat:
        # NNX's variables and Linen's boxes are nodes of their own, whose one leaf is `value`.
        text = path_text(path[:-1] if path[:-1] in boxes else path)
        if not is_array(leaf):
            found.append(None)
            continue
        if text in seen:
            raise value_error(
                f"{name} has two arrays of path {text!r}: {keystr(seen[text])} and {keystr(path)}; "
                "rename one of them, since rules tell arrays apart by their paths"
            )
        seen[text] = path
        found.append((text, leaf))
    return found, treedef


def path_text(path: Any) -> str:
    """Keys and indices of a path with slashes between them, as in `layers/0/query`."""
    return keystr(tuple(path), simple=True, separator="/")


def parts_of(path: str) -> tuple[str, ...]:
    """The keys of a path; those of published names have dots between them."""
    return tuple(re.split(r"[/.]", path))


def key_of(path: str) -> str:
    """The key of a rule for this path alone: the path itself, where it is a pattern."""
    try:
        re.compile(path)
    except re.error:
        return re.escape(path)
    return path


def pattern_of(path: str) -> str:
    """A pattern of this path, and of those that differ from it in an index."""
    return re.sub(r"(?:(?<=[/.])|^)\d+(?=/|\\\.|$)", r"\\d+", re.escape(path))


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, or is a number."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(
        leaf, (bool, int, float, complex)
    )


def _paths_of_boxes(tree: Any) -> set[Any]:
    """Where Flax's variables and boxes are; none without Flax."""
    kinds: list[type] = []
    if "flax.nnx" in sys.modules:
        kinds.append(sys.modules["flax.nnx"].Variable)
    if "flax.core.meta" in sys.modules:
        kinds.append(sys.modules["flax.core.meta"].AxisMetadata)
    if not kinds:
        return set()
    boxed = tuple(kinds)
    nodes = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, boxed))[0]
    return {
        path
        for path, node in nodes
        if isinstance(node, boxed) and len(jax.tree.leaves(node)) == 1 and _last_key(node)
    }


def _last_key(box: Any) -> bool:
    """Whether the one leaf of a box lies under a single name of its own."""
    ((path, _),) = tree_flatten_with_path(box)[0]
    return len(path) == 1 and isinstance(path[0], GetAttrKey)
