"""Checks, pads, places and gathers the arrays of a layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.layout._array_layout import ArrayLayout, taken
from jaxpar.layout._bits import from_words, is_key, to_words, words_of
from jaxpar.layout._layout_error import LayoutProblem, refuse, shape_text
from jaxpar.layout._paths import arrays_of, described

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout


def pad(layout: Layout, params: Any, *, dtypes: bool = False) -> Any:
    return _changed(layout, params, True, dtypes)


def unpad(layout: Layout, params: Any, *, dtypes: bool = False) -> Any:
    return _changed(layout, params, False, dtypes)


def place(layout: Layout, params: Any) -> Any:
    return each(layout, params, attrgetter("shape"), _put, dtypes=True)


def gather(layout: Layout, params: Any) -> Any:
    return each(layout, params, attrgetter("padded_shape"), whole)


def whole(array: ArrayLayout, x: Any) -> Any:
    """Returns an array on the host, without padding; in all processes, or none."""
    here = getattr(x, "is_fully_addressable", True)
    if here and not is_key(x.dtype):
        return array.unpad(np.asarray(x))
    if not prod(array.shape):
        alone = SingleDeviceSharding(jax.local_devices()[0])
        none = zeros_of(array.shape, x.dtype, alone)
        return none if is_key(x.dtype) else np.asarray(none)
    words = jax.jit(to_words)(x)  # in a separate program: see `_moved`
    if not here:
        everywhere = NamedSharding(array.mesh, PartitionSpec())
        words = jax.jit(lambda y: y, out_shardings=everywhere)(words)
    full = from_words(jnp.asarray(np.asarray(words)), x.dtype)
    return array.unpad(full if is_key(x.dtype) else np.asarray(full))


def spread(layout: Layout, params: Any) -> Any:
    """Shards layers in the model's order, as the compiler would exchange unsharded ones."""
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return params
    mesh = Mesh(np.asarray(layout.mesh.devices), layout.mesh.axis_names)  # whose axes are automatic

    def shard(array: ArrayLayout, x: Any) -> Any:
        in_order = all(blocks.order == (1, 1) for blocks in array.blocks)
        sharding = NamedSharding(mesh, array.logical_spec)
        return x if in_order else jax.lax.with_sharding_constraint(x, sharding)

    return each(layout, params, attrgetter("shape"), shard)


def _changed(layout: Layout, params: Any, padded: bool, dtypes: bool) -> Any:
    shape, other = ("shape", "padded_shape") if padded else ("padded_shape", "shape")
    sharding = attrgetter("sharding" if padded else "logical_sharding")
    there: dict[str, Array] = {}

    def changed(array: ArrayLayout, x: Any) -> Any:
        return array.pad(x) if padded else array.unpad(x)

    def note(array: ArrayLayout, x: Any) -> None:
        if not array.is_plain and isinstance(x, Array) and not isinstance(x, Tracer):
            there[array.path] = x

    def result(array: ArrayLayout, x: Any) -> Any:
        return made[array.path] if array.path in made else changed(array, x)

    each(layout, params, attrgetter(shape), note, dtypes=dtypes)
    empty = {path: there.pop(path) for path in list(there) if not prod(layout[path].shape)}
    made = _moved(layout, there, changed, sharding) if there else {}
    for path, x in empty.items():
        made[path] = zeros_of(getattr(layout[path], other), x.dtype, sharding(layout[path]))
    return each(layout, params, attrgetter(shape), result)


def _moved(
    layout: Layout,
    arrays: dict[str, Array],
    changed: Callable[[ArrayLayout, Any], Any],
    sharding: Callable[[ArrayLayout], NamedSharding],
) -> dict[str, Array]:
    """Changes arrays on devices as their words, in three programs.

    In a single program, the compiler would turn words back into floats and widen 8-bit floats,
    which changes NaNs.
    """
    held = {path: layout[path].words(x.dtype) for path, x in arrays.items()}

    def move(words: dict[str, Array]) -> dict[str, Array]:
        return {path: changed(held[path], x) for path, x in words.items()}

    def back(words: dict[str, Array]) -> dict[str, Array]:
        return {path: from_words(x, arrays[path].dtype) for path, x in words.items()}

    words = jax.jit(lambda arrays: {path: to_words(x) for path, x in arrays.items()})(arrays)
    words = jax.jit(move, out_shardings={path: sharding(a) for path, a in held.items()})(words)
    shardings = {path: sharding(layout[path]) for path in arrays}
    made: dict[str, Array] = jax.jit(back, out_shardings=shardings)(words)
    return made


def zeros_of(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Array:
    """Makes zeros without a program: jax 0.10 gives empty results wrong shard shapes."""
    if is_key(dtype):
        words = words_of(dtype)
        return from_words(zeros_of((*shape, *words.shape), words.dtype, sharding), dtype)
    zeros = np.zeros(shape, dtype)
    return jax.make_array_from_callback(shape, sharding, lambda index: zeros[index])


def each(
    layout: Layout,
    params: Any,
    shape_of: Callable[[ArrayLayout], tuple[int, ...]],
    function: Callable[[ArrayLayout, Any], Any],
    *,
    dtypes: bool = False,
) -> Any:
    arrays, _ = arrays_of(params)
    by_path = {pair[0]: pair[1] for pair in arrays if pair is not None}
    problems = [
        LayoutProblem(path, None, f"{path!r} is missing", "give all arrays of the layout")
        for path in layout
        if path not in by_path
    ]
    for path, x in by_path.items():
        array = layout.get(path)
        problem = (
            LayoutProblem(path, None, f"{path!r} is not in the layout", "make one of these arrays")
            if array is None
            else _unlike(array, x, shape_of(array), dtypes)
        )
        problems += [problem] if problem else []
        if isinstance(x, jax.ShapeDtypeStruct):
            raise type_error(f"{path!r} is a shape, {x}; give an array")
    refuse(problems)
    leaves, tree = jax.tree.flatten(params)
    of_leaf = [None if pair is None else layout[pair[0]] for pair in arrays]
    mapped = [
        x if array is None else function(array, x) for array, x in zip(of_leaf, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, mapped)


def _unlike(
    array: ArrayLayout, x: Any, wanted: tuple[int, ...], dtypes: bool
) -> LayoutProblem | None:
    _, shape, dtype = described(array.path, x)
    have = f"is {shape_text(dtype, shape)}"
    if shape != wanted:
        what = "with" if wanted == array.padded_shape != array.shape else "without"
        text = f"{have}, but has shape {wanted} here, {what} padding"
        return array.problem(text, "give such an array, or make the layout of this one")
    if dtypes and dtype != array.dtype and not _takes(array, x):
        text = f"{have}, and {shape_text(array.dtype, wanted)} in the layout"
        return array.problem(text, "cast it, or make the layout of such arrays")
    return None


def _takes(array: ArrayLayout, number: Any) -> bool:
    kinds = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}
    if type(number) not in kinds:
        return False
    wider = list(kinds.values())[list(kinds).index(type(number)) :]
    return any(jnp.issubdtype(array.dtype, kind) for kind in wider)


def _put(array: ArrayLayout, x: Any) -> Array:
    if not prod(array.shape):
        return zeros_of(array.padded_shape, array.dtype, array.sharding)
    if isinstance(x, Array) and not x.is_fully_addressable:
        words = jax.jit(array.words().pad)(to_words(x))
        return of_words(words, array.dtype, array.sharding)
    if isinstance(x, Array) and array.is_plain and jax.process_count() == 1:
        return jax.device_put(x, array.sharding)
    if is_key(array.dtype):
        words = _put(array.words(), np.asarray(to_words(x)))
        return of_words(words, array.dtype, array.sharding)
    held = on_host(array, x)
    return jax.make_array_from_callback(
        array.padded_shape, array.sharding, lambda index: array.block(index, partial(taken, held))
    )


def of_words(words: Array, dtype: Any, sharding: NamedSharding) -> Array:
    placed: Array = jax.jit(lambda words: from_words(words, dtype), out_shardings=sharding)(words)
    return placed


def on_host(array: ArrayLayout, x: Any) -> np.ndarray:
    """Returns a host array; refuses integers beyond 32 bits."""
    numbers = np.asarray(x)
    cast = numbers.astype(array.dtype, copy=False)
    if numbers.dtype.kind in "iu" and numbers.dtype != cast.dtype and (numbers != cast).any():
        raise value_error(
            f"{array.path!r} is {numbers.dtype} and has {numbers[numbers != cast][0]}, which is no "
            f"{cast.dtype}; set jax_enable_x64, or give smaller numbers"
        )
    return cast
