"""Paths of arrays in any pytree, as text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jaxpar.arguments.calls import called, type_error, value_error


def arrays_of(tree: Any, name: str = "params") -> tuple[list[tuple[str, Any] | None], Any]:
    """Returns paths and arrays, and treedef; refuses equal paths."""
    flat, treedef = tree_flatten_with_path(tree)
    boxes = _paths_of_boxes(tree)
    pairs: list[tuple[str, Any] | None] = []
    seen: dict[str, Any] = {}
    for path, leaf in flat:
        # NNX's variables and Linen's boxes are nodes with a leaf, `value`.
        text = path_text(path[:-1] if path[:-1] in boxes else path)
        if not is_array(leaf):
            pairs.append(None)
            continue
        if text in seen:
            raise value_error(
                f"{name} has two arrays of path {text!r}: {keystr(seen[text])} and {keystr(path)}; "
                "rename one of them, since rules tell arrays apart by their paths"
            )
        seen[text] = path
        pairs.append((text, leaf))
    return pairs, treedef


def path_text(path: Any) -> str:
    """Joins keys by slashes, as in `layers/0/query`."""
    return keystr(tuple(path), simple=True, separator="/")


def parts_of(path: str) -> tuple[str, ...]:
    return tuple(re.split(r"[/.]", path))


_PLAIN = re.compile(r"[\w/.-]*")  # always valid: no compilation for thousands of paths


def key_of(path: str) -> str:
    """Returns a rule's key for this path alone."""
    try:
        if not _PLAIN.fullmatch(path):
            re.compile(path)
    except re.error:
        return re.escape(path)
    return path


NUMBER = re.compile(r"(\d+)")
INDEX = re.compile(r"(?:(?<=[/.])|^)(\d+)(?=/|\\\.|$)")  # of an escaped path


def pattern_of(path: str) -> str:
    return INDEX.sub(r"\\d+", re.escape(path))


def without_numbers(path: str) -> str:
    return NUMBER.sub("#", path)


def _as_jax(dtype: Any) -> Any:
    return jnp.result_type(jax.ShapeDtypeStruct((), dtype))


_narrow = lru_cache(maxsize=64)(_as_jax)  # called for thousands of arrays


def part_of(tree: Any, path: str) -> Any:
    missed: list[tuple[str, list[str]]] = []
    parts = list(_parts(tree, path, missed))
    if len(parts) == 1:
        return parts[0]
    if parts:
        raise KeyError(f"{called()}: {path!r} is the path of {len(parts)} parts; rename one")
    rest, keys = min(missed, key=lambda end: len(end[0]))
    known = ", ".join(map(repr, keys)) or "is an array"
    raise KeyError(f"{called()}: {path!r} has no part {rest.split('/')[0]!r}, but {known}")


def _parts(node: Any, path: str, missed: list[tuple[str, list[str]]]) -> Iterator[Any]:
    """Yields parts; adds each dead end's rest and keys to `missed`."""
    children = [
        (path_text(keys), child)
        for keys, child in tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        if keys
    ]
    onward = [(k, child) for k, child in children if path == k or path.startswith(f"{k}/")]
    if not onward:
        missed.append((path, [key for key, _ in children]))
    for key, child in onward:
        if path == key:
            yield child
        else:
            yield from _parts(child, path[len(key) + 1 :], missed)


def is_array(leaf: Any) -> bool:
    is_shaped = isinstance(getattr(leaf, "shape", None), tuple)  # np.float32.shape is a descriptor
    return (is_shaped and hasattr(leaf, "dtype")) or is_number(leaf)


def is_number(leaf: Any) -> bool:
    """Returns whether it is a Python number, never traced: functions may branch on it."""
    return isinstance(leaf, (bool, int, float, complex))


def filling(tree: Any) -> Callable[[Iterable[Any]], Any]:
    """Returns a function that replaces arrays, not Python numbers."""
    leaves, treedef = jax.tree.flatten(tree)

    def filled(arrays: Iterable[Any]) -> Any:
        left = iter(arrays)
        pairs = [(leaf, next(left) if is_array(leaf) else leaf) for leaf in leaves]
        return treedef.unflatten([leaf if is_number(leaf) else x for leaf, x in pairs])

    return filled


def described(path: str, leaf: Any) -> tuple[str, tuple[int, ...], Any]:
    """Returns path, shape and JAX dtype, often 32 bits."""
    dtype = getattr(leaf, "dtype", None)
    try:
        if dtype is None:
            return path, tuple(jnp.shape(leaf)), jnp.result_type(leaf)
        narrow = getattr(dtype, "itemsize", 8) < 8  # `jax_enable_x64` does not change it
        return path, tuple(leaf.shape), _narrow(dtype) if narrow else _as_jax(dtype)
    except TypeError:
        raise type_error(
            f"{path!r} is an array of dtype {dtype} ({type(leaf).__name__}), which no array of "
            "JAX can have; make it numeric, or remove it from the pytree"
        ) from None


def _paths_of_boxes(tree: Any) -> set[Any]:
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
    """Returns whether a box's leaf has one attribute name."""
    ((path, _),) = tree_flatten_with_path(box)[0]
    return len(path) == 1 and isinstance(path[0], GetAttrKey)
