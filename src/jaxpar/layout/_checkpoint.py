"""Checkpoints without padding or mesh, which any mesh can read.

A checkpoint is an Orbax dict from paths to arrays. Orbax cannot store all: keys and 8-bit floats
become words, empty arrays a zero, with dtypes and shapes in Orbax's metadata, under `NOTES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxpar.arguments.calls import called, value_error
from jaxpar.arguments.optional_packages import require
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._arrays import of_words, pad, unpad, zeros_of
from jaxpar.layout._bits import is_key, to_words
from jaxpar.layout._layout_error import LayoutProblem, refuse, shape_text
from jaxpar.layout._paths import arrays_of, path_text
from jaxpar.layout._rule import REPLICATED, Nearest

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout

NOTES = "jaxpar"


def save(layout: Layout, folder: str | Path, params: Any) -> None:
    ocp, where = _orbax(), _absolute(folder)
    if where.exists():
        raise value_error(f"{where} exists already; give a folder that does not")
    _check_saved(layout, params)
    arrays = filter(None, arrays_of(unpad(layout, params, dtypes=True))[0])
    tree = {path: _written(layout[path], x) for path, x in arrays}
    notes: dict[str, Any] = {
        path: {"dtype": str(array.dtype), "shape": list(array.shape)}
        for path, array in layout.items()
        if _in_words(array) or not prod(array.shape)
    }
    if not tree:  # Orbax refuses an empty checkpoint
        tree = {"": zeros_of((1,), np.int32, NamedSharding(layout.mesh, REPLICATED))}
        notes = {"": None}
    with ocp.Checkpointer(_writer(ocp)) as checkpointer:
        args = ocp.args.PyTreeSave(tree, custom_metadata={NOTES: notes})
        checkpointer.save(where, args=args)


def restore(layout: Layout, folder: str | Path) -> Any:
    ocp, where = _orbax(), _absolute(folder)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = _metadata(checkpointer, where)
        flat, tree = jax.tree_util.tree_flatten_with_path(metadata.tree)
        paths = [path_text(keys) for keys, _ in flat]
        there = {  # plain Orbax checkpoints may store text, too
            path: shape_text(x.dtype, x.shape)
            for path, (_, x) in zip(paths, flat, strict=True)
            if hasattr(x, "dtype")
        }
        notes: dict[str, Any] = dict(metadata.custom_metadata or {}).get(NOTES, {})
        for path, note in notes.items():
            there[path] = note and shape_text(note["dtype"], note["shape"])
        _check(layout, {path: text for path, text in there.items() if text}, str(where))
        if not layout:
            return layout.filled({})
        stored = [_stored(layout[p], p in notes) if p in layout else "" for p in paths]
        wanted = [
            ocp.RestoreArgs()
            if isinstance(x, str)
            else ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape)
            for x in stored
        ]
        args = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(tree, stored), restore_args=jax.tree.unflatten(tree, wanted)
        )
        read = jax.tree.leaves(checkpointer.restore(where, args=args))
    arrays = {
        path: _read(layout[path], x, path in notes)
        for path, x in zip(paths, read, strict=True)
        if path in layout
    }
    return pad(layout, layout.filled(arrays))


def _check_saved(layout: Layout, params: Any) -> None:
    problems = [
        layout.get(path) and _unsaved(layout[path], x)
        for path, x in filter(None, arrays_of(params)[0])
    ]
    refuse([problem for problem in problems if problem])


def _unsaved(array: ArrayLayout, x: Any) -> LayoutProblem | None:
    if isinstance(x, Tracer):
        text, remedy = "is traced", "call it outside of jax.jit, with the arrays of its results"
    elif not isinstance(x, Array) or (
        x.is_fully_addressable and not array.sharding.is_fully_addressable
    ):
        text, remedy = (
            f"is a {type(x).__name__} outside of the mesh",
            "save what `Layout.place` gives",
        )
    elif x.is_deleted():
        text, remedy = "has been donated or deleted", "save the array that took its place"
    elif any("\ud800" <= letter <= "\udfff" for letter in array.path):
        text, remedy = "has a name that is no Unicode text", "rename it"
    else:
        return None
    return array.problem(text, remedy)


def _in_words(array: ArrayLayout) -> bool:
    """Returns whether an array is stored as words.

    TensorStore lacks some dtypes below 16 bits, and changes some NaNs of others.
    """
    if is_key(array.dtype):
        return True
    dtype = np.dtype(array.dtype)
    return dtype.itemsize == 1 and dtype.name not in ("bool", "int8", "uint8")


def _stored(array: ArrayLayout, noted: bool) -> jax.ShapeDtypeStruct:
    if not prod(array.shape):
        everywhere = NamedSharding(array.mesh, REPLICATED)
        return jax.ShapeDtypeStruct((1,), np.int32, sharding=everywhere)
    held = array.words() if noted else array
    return jax.ShapeDtypeStruct(held.shape, held.dtype, sharding=held.logical_sharding)


def _written(array: ArrayLayout, x: Any) -> Array:
    if not prod(array.shape):
        stored = _stored(array, noted=True)
        return zeros_of(stored.shape, stored.dtype, stored.sharding)
    return to_words(x) if _in_words(array) else x


def _read(array: ArrayLayout, x: Array, noted: bool) -> Array:
    if not prod(array.shape):
        return zeros_of(array.shape, array.dtype, array.logical_sharding)
    return of_words(x, array.dtype, array.logical_sharding) if noted else x


def _absolute(folder: str | Path) -> Any:
    """Returns an absolute folder, or Orbax's gs://bucket/folder."""
    from jaxpar.arguments.local_paths import local_path

    path = require("etils.epath", "checkpoint", called()).Path
    try:
        where = path(folder)
    except KeyError:  # a site that it does not know
        where = local_path("folder", folder)
    if where.is_absolute():
        return where
    if str(folder).startswith("gs:/"):
        raise value_error(
            f"folder={str(folder)!r} has lost a slash in pathlib; give text, 'gs://bucket/folder'"
        )
    return local_path("folder", folder).absolute()


def _metadata(checkpointer: Any, where: Any) -> Any:
    if not where.is_dir():
        begun = next(where.parent.glob(f"{where.name}.orbax-checkpoint-tmp*"), None)
        more = f"; a save into it was interrupted and left {begun}" if begun else ""
        raise value_error(f"there is no folder {where}; give the one that `save` wrote{more}")
    metadata = checkpointer.metadata(where).item_metadata
    if metadata is None:
        # Orbax's managers, and its newer functions, write the arrays into a folder inside.
        parts = [
            str(file.parent.relative_to(where))
            for pattern in ("*/_METADATA", "*/*/_METADATA")
            for file in sorted(where.glob(pattern))
        ]
        if parts:
            names = ", ".join(map(repr, parts[:5])) + ", ..." * (len(parts) > 5)
            last = f"{'one of them, such as ' * (len(parts) > 1)}{where / parts[-1]}"
            text = f"there is no checkpoint in {where} itself, but in its {names}; give {last}"
            raise value_error(text)
        raise value_error(f"there is no checkpoint in {where}; give a folder that `save` wrote")
    return metadata


def _check(layout: Layout, there: Mapping[str, str], where: str) -> None:
    what = f"checkpoint {where}"
    problems: list[LayoutProblem] = []
    near = Nearest(there)
    for path, array in layout.items():
        here = shape_text(array.dtype, array.shape)
        if path not in there:
            text = f"{path!r} is not in {what}{near.hint(path)}"
            remedy = "make the layout without it"
        elif there[path] != here:
            text = f"{path!r} is {there[path]} in {what}, and {here} here"
            remedy = "make the layout of such arrays, and cast them afterwards"
            if "64[" in there[path] and not jax.config.read("jax_enable_x64"):
                remedy = f"set jax_enable_x64, {remedy}"
        else:
            continue
        problems.append(LayoutProblem(path, array.rule, text, remedy))
    problems += [
        LayoutProblem(
            path, None, f"{path!r} of {what} is not in the layout", "make a layout with it"
        )
        for path in there
        if path not in layout
    ]
    refuse(problems)


def _orbax() -> Any:
    return require("orbax.checkpoint", "checkpoint", called())


def _writer(ocp: Any) -> Any:
    arrays = ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
