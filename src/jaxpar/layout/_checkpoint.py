"""Checkpoints of arrays without padding and without a mesh, which any mesh reads its shards of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array

from jaxpar._calls import called, type_error, value_error
from jaxpar._extras import require
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._paths import arrays_of, path_text
from jaxpar.layout._problem import LayoutError, Problem, shape_text
from jaxpar.layout._rule import nearest

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout


def save(layout: Layout, folder: str | Path, params: Any) -> None:
    """What `Layout.save` says."""
    arrays, _ = arrays_of(layout.unpad(params))
    tree = _nested({found[0]: found[1] for found in arrays if found is not None})
    ocp = _orbax()
    with ocp.Checkpointer(_handler(ocp)) as checkpointer:
        checkpointer.save(Path(folder).absolute(), args=ocp.args.PyTreeSave(tree))


def restore(layout: Layout, folder: str | Path) -> Any:
    """What `Layout.restore` says."""
    ocp = _orbax()
    where = Path(folder).absolute()
    with ocp.Checkpointer(_handler(ocp)) as checkpointer:
        if not where.is_dir():
            raise value_error(f"there is no folder {where}; give the one that `save` wrote")
        found = checkpointer.metadata(where).item_metadata
        flat = jax.tree_util.tree_flatten_with_path(found.tree)[0]
        there = {path_text(path): (tuple(x.shape), np.dtype(x.dtype)) for path, x in flat}
        _check(layout, there, f"checkpoint {where}")
        shapes = _nested({path: _described(array) for path, array in layout.items()})
        wanted = jax.tree.map(
            lambda s: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape), shapes
        )
        args = ocp.args.PyTreeRestore(item=shapes, restore_args=wanted)
        tree = checkpointer.restore(where, args=args)
    read = {path_text(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return layout.pad(layout.tree_of(lambda array: read[array.path]))


def read_safetensors(
    layout: Layout, files: str | Path | Sequence[str | Path], names: Any, transposed: str
) -> Any:
    """What `Layout.read_safetensors` says."""
    safetensors = require("safetensors", "checkpoint", called())
    opened = [safetensors.safe_open(str(path), framework="numpy") for path in _files(files)]
    file_of = {name: file for file in opened for name in list(file.keys())}
    swapped = re.compile(transposed)
    tensors: dict[str, _Tensors] = {}
    for path in layout:
        given = _name_of(path, names)
        parts = (given,) if isinstance(given, str) else tuple(given)
        missing = [name for name in parts if name not in file_of]
        if missing:
            hint = nearest(missing[0], file_of, "the nearest there is {}")
            raise value_error(
                f"no tensor {missing[0]!r}, for {path!r}, in {files}{hint}; say in `names` what it "
                "is called"
            )
        slices = [file_of[name].get_slice(name) for name in parts]
        tensors[path] = _Tensors(slices, not isinstance(given, str), bool(swapped.fullmatch(path)))
    there = {path: (tensor.shape, tensor.dtype) for path, tensor in tensors.items()}
    _check(layout, there, f"{files}")
    return layout.tree_of(lambda array: tensors[array.path].placed(array))


class _Tensors:
    """One tensor of a file, or several as the layers of one array."""

    def __init__(self, slices: Sequence[Any], stacked: bool, transposed: bool) -> None:
        self.slices, self.stacked, self.transposed = slices, stacked, transposed
        one = tuple(slices[0].get_shape())
        if transposed:
            one = (*one[:-2], one[-1], one[-2])
        self.shape: tuple[int, ...] = (len(slices), *one) if stacked else one
        self.dtype = np.dtype(slices[0][(slice(0, 0),) * len(one) if one else ...].dtype)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, without reading the rest."""
        if self.stacked:
            layers = range(len(self.slices))[index[0]]
            parts = [self._part(self.slices[layer], index[1:]) for layer in layers]
            sizes = [along.stop - along.start for along in index]
            return np.stack(parts) if parts else np.zeros(sizes, self.dtype)
        return self._part(self.slices[0], index)

    def _part(self, tensor: Any, index: tuple[slice, ...]) -> np.ndarray:
        sizes = tuple(along.stop - along.start for along in index)
        if not all(sizes):  # a block of padding alone
            return np.zeros(sizes, self.dtype)
        if not index:
            return np.asarray(tensor[...]).reshape(())
        if not self.transposed:
            return np.asarray(tensor[index])
        return np.swapaxes(tensor[(*index[:-2], index[-1], index[-2])], -1, -2)

    def placed(self, array: ArrayLayout) -> Array:
        """The array on its devices, each of which reads its own block."""

        def block(index: Any) -> np.ndarray:
            inner, sizes = [], []
            for along, blocks in zip(index, array.blocks, strict=True):
                start, stop, _ = along.indices(blocks.padded)
                places = blocks.places()
                own = slice(*np.searchsorted(places, [start, stop]).tolist())
                inner.append(own)
                sizes.append((0, stop - start - (own.stop - own.start)))
            found = self.read(tuple(inner))
            return np.pad(found, sizes) if sizes else found

        return jax.make_array_from_callback(array.padded_shape, array.sharding, block)


def _check(layout: Layout, there: Mapping[str, tuple[tuple[int, ...], Any]], what: str) -> None:
    """Raises unless the arrays there are those of the layout."""
    problems: list[Problem] = []
    for path, array in layout.items():
        if path not in there:
            near = nearest(path, there, "the nearest there is {}")
            problems.append(
                Problem(path, None, f"{path!r} is not in {what}{near}", "restore what is there")
            )
            continue
        shape, dtype = there[path]
        if (shape, dtype) != (array.shape, np.dtype(array.dtype)):
            problems.append(
                Problem(
                    path,
                    array.rule,
                    f"{path!r} is {shape_text(dtype, shape)} in {what}, and "
                    f"{shape_text(array.dtype, array.shape)} here",
                    "make the layout of such arrays, and cast them then",
                )
            )
    more = [path for path in there if path not in layout]
    problems += [
        Problem(path, None, f"{path!r} of {what} is not in the layout", "make a layout with it")
        for path in more
    ]
    if problems:
        raise LayoutError(called(), problems)


def _described(array: ArrayLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.logical_sharding)


def _nested(flat: Mapping[str, Any]) -> Any:
    """Dicts within dicts by the parts of the paths: what a file knows of the containers."""
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = x
    return tree


def _orbax() -> Any:
    return require("orbax.checkpoint", "checkpoint", called())


def _handler(ocp: Any) -> Any:
    """Writes arrays, and nothing of the mesh that they were on."""
    arrays = ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _files(files: Any) -> list[Path]:
    given = [files] if isinstance(files, (str, Path)) else list(files)
    found: list[Path] = []
    for path in map(Path, given):
        found += sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not found:
        raise value_error(
            f"no safetensors files in {files}; name files, or folders with *.safetensors"
        )
    return found


def _name_of(path: str, names: Any) -> Any:
    if names is None or isinstance(names, Mapping):
        return dict[str, Any](names or {}).get(path, path.replace("/", "."))
    if callable(names):
        return names(path)
    raise type_error(f"names must be a function or a mapping of paths, got {names!r}")
