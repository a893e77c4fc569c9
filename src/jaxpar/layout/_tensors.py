"""A layout's arrays from named tensors of files, and back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from jaxpar.arguments.calls import of_user, type_error, value_error
from jaxpar.arguments.local_paths import local_path
from jaxpar.axis.padding import Entries
from jaxpar.layout._array_layout import ArrayLayout, taken
from jaxpar.layout._arrays import each, on_host, whole
from jaxpar.layout._bits import is_key
from jaxpar.layout._layout_error import LayoutProblem, refuse, shape_text
from jaxpar.layout._paths import described
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._rule import Nearest, nearest
from jaxpar.layout._safetensors import KINDS, Files, Kind, Tensor, tensors_of

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout

Axes = Sequence[int] | None  # None: the last two are exchanged


def read_safetensors(layout: Layout, files: Any, names: Any, transposed: Any, unused: Any) -> Any:
    tensors = tensors_of(files)
    left = Pattern("unused", "" if unused is None else unused, list(tensors)).check()
    stacks = _stacks(layout, names, transposed)
    near = Nearest(tensors)
    problems = [wrong for stack in stacks for wrong in stack.problems(tensors, f"{files}", near)]
    read = {name for stack in stacks for name in stack.names}
    problems += [
        LayoutProblem(
            None,
            None,
            f"{name!r} {tensor.text} of {files} is read into no array",
            "read it by `names`, or let `unused` match it",
        )
        for name, tensor in tensors.items()
        if name not in read and name not in left
    ]
    refuse(problems)
    return layout.filled({stack.array.path: stack.placed(tensors) for stack in stacks})


def write_safetensors(
    layout: Layout, folder: str | Path, params: Any, names: Any, transposed: Any, most: int
) -> None:
    where = local_path("where", folder, writes=True)
    stacks = {stack.array.path: stack for stack in _stacks(layout, names, transposed)}
    tensors: dict[str, Kind] = {}
    problems = [
        problem for stack in stacks.values() for problem in stack.unwritable(f"{where}", tensors)
    ]
    refuse(problems)
    written: set[str] = set()
    files = Files(where)

    def write(stack: _Stack, x: np.ndarray) -> None:
        for name, part in stack.parts(x):
            slot = files.slots[name]
            if name not in written:
                slot.write(part)
            elif slot.read().tobytes() != part.tobytes():
                raise value_error(
                    f"tensor {name!r} is written for two arrays, and {stack.array.path!r} has "
                    "other numbers than the first; give each a name of its own in `names`"
                )
            written.add(name)

    def write_each(array: ArrayLayout, x: Any) -> None:
        # Of a copy: JAX keeps an array's NumPy form as long as the array.
        held = whole(array, x.copy() if isinstance(x, Array) else x)
        _in_first(where, lambda: write(stacks[array.path], held))

    shape_of = attrgetter("padded_shape")
    each(layout, params, shape_of, lambda array, x: None, dtypes=True)  # before there are files
    try:
        _in_first(where, lambda: files.begin(tensors, most))
        each(layout, params, shape_of, write_each)
        _in_first(where, files.finish)
    finally:
        files.remove()


def _in_first(where: Path, act: Callable[[], None]) -> None:
    """Acts in process 0. If that fails, all processes raise: none waits for it later."""
    reason = None
    if jax.process_index() == 0:
        try:
            act()
        except (OSError, ValueError) as raised:
            reason = raised
    failed = np.asarray(reason is not None)
    if jax.process_count() > 1:
        failed = multihost_utils.broadcast_one_to_all(failed)
    if reason is not None:
        raise reason
    if failed:
        raise value_error(f"process 0 could not write {where}; its error says why")


def _stacks(layout: Layout, names: Any, transposed: Any) -> list[_Stack]:
    axes_of = _axes_of(layout, transposed)
    stacks: list[_Stack] = []
    for path, nested in _names_of(layout, names):
        array, (lead, parts) = layout[path], _nested(path, nested)
        order = _order(array, len(lead), axes_of[path]) if path in axes_of else None
        stacks.append(_Stack(array, lead, parts, order))
    return stacks


@dataclass(frozen=True)
class _Stack:
    """An array's tensors, a tensor for each leading place."""

    array: ArrayLayout
    lead: tuple[int, ...]
    names: list[str]
    order: tuple[int, ...] | None  # of a tensor's axes, for `numpy.transpose`

    def problems(
        self, tensors: Mapping[str, Tensor], where: str, near: Nearest
    ) -> Iterator[LayoutProblem]:
        array = self.array
        if wrong := self._miscounted(where):
            yield wrong
            return
        each = shape_text(array.dtype, array.shape[len(self.lead) :])
        every = f", each of {' x '.join(map(str, self.lead))}" if self.lead else ""
        for name in self.names:
            tensor = tensors.get(name)
            if tensor is None:
                text = f"no tensor {name!r}, for {array.path!r}, in {where}{near.hint(name)}"
                yield LayoutProblem(array.path, array.rule, text, "give its name in `names`")
            elif self._read_as(tensor) != each:
                have = f"{self._read_as(tensor)}{' transposed' if self.order else ''}"
                text = f"is {have} in {where} ({name!r}), and {each} here{every}"
                yield array.problem(text, _remedy(tensor))

    def _miscounted(self, where: str) -> LayoutProblem | None:
        array, count = self.array, len(self.lead)
        if self.lead == array.shape[:count]:
            return None
        have = shape_text(array.dtype, (*self.lead, *array.shape[count:]))
        text = f"is {have} in {where}, and {shape_text(array.dtype, array.shape)} here"
        return array.problem(text, "name as many tensors as the array has layers")

    def unwritable(self, where: str, tensors: dict[str, Kind]) -> Iterator[LayoutProblem]:
        """Adds the tensors to those of a file, or yields why it cannot have them."""
        array, shape = self.array, self.array.shape[len(self.lead) :]
        text = f"is {shape_text(array.dtype, array.shape)}, a dtype that no safetensors file has"
        if wrong := self._miscounted(where):
            yield wrong
        elif is_key(array.dtype):
            yield array.problem(text, "make the layout of jax.random.key_data of it")
        elif np.dtype(array.dtype) not in KINDS:
            yield array.problem(text, f"cast it to {_wider(array.dtype)}, and make the layout so")
        else:
            kind = np.dtype(array.dtype), tuple(shape[axis] for axis in self.inverse)
            for name in self.names:
                if name == "__metadata__":
                    yield array.problem(f"cannot be named {name!r}", "give another name in `names`")
                elif tensors.setdefault(name, kind) != kind:
                    there = shape_text(*tensors[name])
                    text = f"is {shape_text(*kind)} in {where} ({name!r}), and another is {there}"
                    yield array.problem(text, "give each a name of its own in `names`")

    @property
    def inverse(self) -> tuple[int, ...]:
        """The array's axes in a tensor's order, after stacked ones."""
        order = self.order or tuple(range(len(self.array.shape) - len(self.lead)))
        return tuple(sorted(range(len(order)), key=order.__getitem__))

    def parts(self, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each tensor, as it is in the file."""
        shape = self.array.shape[len(self.lead) :]
        for name, part in zip(self.names, x.reshape(len(self.names), *shape), strict=True):
            yield name, part.transpose(self.inverse)

    def _read_as(self, tensor: Tensor) -> str:
        shape = tensor.shape
        if self.order and len(self.order) == len(shape):
            shape = tuple(shape[axis] for axis in self.order)
        if tensor.dtype is None:
            return shape_text(tensor.kind, shape)
        as_jax = described(tensor.name, jax.ShapeDtypeStruct(shape, tensor.dtype))
        return shape_text(as_jax[2], shape)

    def placed(self, tensors: Mapping[str, Tensor]) -> Array:
        array = self.array
        views = [tensors[name].array() for name in self.names]
        if self.order is not None:
            views = [view.transpose(self.order) for view in views]

        def read(entries: list[Entries]) -> np.ndarray:
            count = len(self.lead)
            layers = taken(np.arange(len(views)).reshape(self.lead), entries[:count])
            parts = [taken(views[layer], entries[count:]) for layer in layers.ravel().tolist()]
            shape = [len(places) for places in entries]
            block = np.stack(parts).reshape(shape) if parts else np.zeros(shape, array.dtype)
            return on_host(array, block)

        return jax.make_array_from_callback(
            array.padded_shape, array.sharding, lambda index: array.block(index, read)
        )


def _remedy(tensor: Tensor) -> str:
    if tensor.dtype is None:
        return "unpack it first: numbers of 4 and 6 bits share bytes in a file"
    if tensor.kind.startswith("F8"):
        return (
            "make the layout of `Quantized` weights, with names for both their values and their "
            "scales"
        )
    return "make the layout of such arrays, and cast them afterwards"


def _wider(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return "uint8"
    return "int8" if jnp.issubdtype(dtype, jnp.integer) else "bfloat16"


def _names_of(layout: Layout, names: Any) -> Iterator[tuple[str, Any]]:
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise type_error(f"names must be a function or a mapping of paths, got {names!r}")
    by_path = dict[str, Any](names) if isinstance(names, Mapping) else {}
    for path in by_path:
        if path not in layout:
            raise value_error(
                f"names has {path!r}, which is no path of the layout; leave it out, or give one of "
                f"its paths{nearest(str(path), layout)}"
            )
    for path in layout:
        nested = of_user(names, "names")(path) if callable(names) else by_path.get(path)
        yield path, path.replace("/", ".") if nested is None else nested


def _nested(path: str, names: Any) -> tuple[tuple[int, ...], list[str]]:
    if isinstance(names, str):
        return (), [names]
    if not isinstance(names, Sequence):
        raise type_error(
            f"names has {names!r} for {path!r}; give a name, or a list of names, nested where "
            "several dimensions are stacked"
        )
    parts = [_nested(path, part) for part in names]
    shapes = sorted({shape for shape, _ in parts})
    if len(shapes) != 1:
        raise value_error(
            f"names has a list of {len(parts)} parts for {path!r}, of shapes {shapes}; give one "
            "name, or as many, for each layer"
        )
    return (len(parts), *shapes[0]), [name for _, leaves in parts for name in leaves]


def _axes_of(layout: Layout, transposed: Any) -> dict[str, Axes]:
    if not transposed:
        return {}
    orders = transposed.items() if isinstance(transposed, Mapping) else [(transposed, None)]
    by_path: dict[str, tuple[str, Axes]] = {}
    for key, order in orders:
        pattern = Pattern("transposed", key, list(layout)).check()
        try:
            axes = order if order is None else tuple(operator.index(axis) for axis in order)
        except TypeError:
            raise type_error(
                f"transposed has {order!r} for {key!r}; give the order of a tensor's axes, (1, 0) "
                "for instance, or None for the last two exchanged"
            ) from None
        for path in (path for path in layout if path in pattern):
            if path in by_path:
                raise value_error(
                    f"{path!r} is matched by two patterns of transposed, {by_path[path][0]!r} and "
                    f"{key!r}; let only one of them match it"
                )
            by_path[path] = key, axes
    return {path: axes for path, (_, axes) in by_path.items()}


def _order(array: ArrayLayout, stacked: int, axes: Axes) -> tuple[int, ...]:
    """Returns a tensor's axes in order, after stacked ones."""
    rank = len(array.shape) - stacked
    order = tuple(range(rank))
    if axes is None and rank >= 2:
        return (*order[:-2], order[-1], order[-2])
    if axes is None or sorted(axes) != list(order):
        what = "the last two" if axes is None else tuple(axes)
        raise value_error(
            f"transposed exchanges {what} of the axes of {array.path!r}, whose tensors have "
            f"{rank}; give an order of {order}, or a pattern that does not match this path"
        )
    return tuple(axes)
