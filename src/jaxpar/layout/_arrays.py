"""Arrays of a layout: checked to be those, padded, put on devices in shards, and gathered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._calls import called, type_error
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._paths import arrays_of
from jaxpar.layout._problem import LayoutError, Problem, shape_text

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout


def pad(layout: Layout, params: Any) -> Any:
    """What `Layout.pad` says."""
    return _changed(layout, params, lambda a: a.shape, lambda a, x: a.pad(x), lambda a: a.sharding)


def unpad(layout: Layout, params: Any) -> Any:
    """What `Layout.unpad` says."""
    return _changed(
        layout,
        params,
        lambda a: a.padded_shape,
        lambda a, x: a.unpad(x),
        lambda a: a.logical_sharding,
    )


def place(layout: Layout, params: Any) -> Any:
    """What `Layout.place` says."""
    return _each(layout, params, lambda a: a.shape, _put)


def gather(layout: Layout, params: Any) -> Any:
    """What `Layout.gather` says."""

    def whole(array: ArrayLayout, x: Any) -> np.ndarray:
        if not getattr(x, "is_fully_addressable", True):
            everywhere = NamedSharding(array.mesh, PartitionSpec())
            x = jax.jit(lambda y: y, out_shardings=everywhere)(x)
        found: Any = array.unpad(np.asarray(x))
        return found

    return _each(layout, params, lambda a: a.padded_shape, whole)


def _changed(
    layout: Layout,
    params: Any,
    shape_of: Callable[[ArrayLayout], tuple[int, ...]],
    function: Callable[[ArrayLayout, Any], Any],
    sharding_of: Callable[[ArrayLayout], Any],
) -> Any:
    """Changes arrays that have padding: those on devices in one program, shard by shard."""
    there: dict[str, Array] = {}

    def note(array: ArrayLayout, x: Any) -> Any:
        if array.padded_shape != array.shape and isinstance(x, Array) and not isinstance(x, Tracer):
            there[array.path] = x
        return x

    _each(layout, params, shape_of, note)

    def change(arrays: dict[str, Array]) -> dict[str, Any]:
        return {path: function(layout[path], x) for path, x in arrays.items()}

    shardings = {path: sharding_of(layout[path]) for path in there}
    moved: dict[str, Any] = jax.jit(change, out_shardings=shardings)(there) if there else {}

    def result(array: ArrayLayout, x: Any) -> Any:
        if array.padded_shape == array.shape:
            return x
        return moved[array.path] if array.path in moved else function(array, x)

    return _each(layout, params, shape_of, result)


def _each(
    layout: Layout,
    params: Any,
    shape_of: Callable[[ArrayLayout], tuple[int, ...]],
    function: Callable[[ArrayLayout, Any], Any],
) -> Any:
    """Maps over arrays that have been checked to be those of the layout."""
    arrays, _ = arrays_of(params)
    given = {found[0]: found[1] for found in arrays if found is not None}
    problems = [
        Problem(path, None, f"{path!r} is missing", "give all arrays of the layout")
        for path in layout
        if path not in given
    ]
    for path, x in given.items():
        array = layout.get(path)
        if array is None:
            problems.append(
                Problem(path, None, f"{path!r} is not in the layout", "make one of these arrays")
            )
            continue
        shape, wanted = tuple(jnp.shape(x)), shape_of(array)
        if shape != wanted:
            have = shape_text(jnp.result_type(x), shape)
            what = "with" if wanted == array.padded_shape != array.shape else "without"
            problems.append(
                Problem(
                    path,
                    array.rule,
                    f"{path!r} is {have}, but has shape {wanted} here, {what} padding",
                    "give such an array, or make a layout of these",
                )
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise type_error(f"{path!r} is a shape, {x}; give an array")
    if problems:
        raise LayoutError(called(), problems)
    leaves, tree = jax.tree.flatten(params)
    of_leaf = [None if found is None else layout[found[0]] for found in arrays]
    mapped = [
        x if array is None else function(array, x) for array, x in zip(of_leaf, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, mapped)


def _put(array: ArrayLayout, x: Any) -> Array:
    """Places one array; an array that another process holds a part of moves by itself."""
    if isinstance(x, Array) and not x.is_fully_addressable:
        padded: Array = jax.jit(array.pad, out_shardings=array.sharding)(x)
        return padded
    if isinstance(x, Array) and array.padded_shape == array.shape and jax.process_count() == 1:
        return jax.device_put(x, array.sharding)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return jax.device_put(array.pad(x), array.sharding)
    whole = array.pad(np.asarray(x))
    return jax.make_array_from_callback(whole.shape, array.sharding, lambda index: whole[index])
