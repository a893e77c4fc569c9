"""The layout of an array on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpar.arguments.calls import readable
from jaxpar.arguments.unit_text import bytes_of
from jaxpar.axis.padding import AnyArray, Entries, PaddedDim
from jaxpar.layout._bits import from_words, is_key, to_words, words_of
from jaxpar.layout._layout_error import LayoutProblem
from jaxpar.layout._mesh import size_of

Change = Callable[[PaddedDim, AnyArray, int], AnyArray]  # pads or unpads a dimension


@readable
@dataclass(frozen=True)
class ArrayLayout:
    """The layout of an array.

    Attributes:
      path: the path in the pytree.
      shape: the global shape without padding.
      dtype: the array's dtype.
      rule: the matching rule's key, or None.
      spec: the padded array's spec, with as many entries as the rule.
      blocks: for each dimension, its `size`, a device's padded `block`, and the number of `parts`.
      mesh: the layout's mesh.

    Example:
      >>> layout = LayoutMap({"w": (None, "tp")}).layout({"w": jnp.ones((2, 8))}, make_mesh("tp=8"))
      >>> layout["w"].local_shape, layout["w"].bytes_per_device
      ((2, 1), 8)
      >>> print(layout["w"].picture())
      w: blocks [2, 1] of [2, 8]; rows: dimension 1 over tp
      0
      1
      2
      3
      4
      5
      6
      7
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    rule: str | None
    spec: PartitionSpec
    blocks: tuple[PaddedDim, ...]
    mesh: Mesh | AbstractMesh

    @cached_property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes of each dimension."""
        return axes_by_dim(self.spec, len(self.shape))

    @cached_property
    def logical_spec(self) -> PartitionSpec:
        """Returns the spec without padding. Padded dimensions are not sharded."""
        pairs = zip(self.spec, self.blocks, strict=False)
        return PartitionSpec(*(None if b.size != b.padded else entry for entry, b in pairs))

    @cached_property
    def is_plain(self) -> bool:
        """Returns whether nothing is padded or interleaved."""
        return all(blocks.is_plain for blocks in self.blocks)

    @property
    def sharding(self) -> NamedSharding:
        """Returns the sharding of the padded array."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def logical_sharding(self) -> NamedSharding:
        """Returns the sharding without padding."""
        return NamedSharding(self.mesh, self.logical_spec)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Returns the global shape with padding."""
        return tuple(blocks.padded for blocks in self.blocks)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of a block under `jax.shard_map`."""
        return tuple(blocks.block for blocks in self.blocks)

    @property
    def bytes_per_device(self) -> int:
        """Returns a block's bytes, with padding."""
        return bytes_of(self.local_shape, self.dtype)

    @property
    def shards(self) -> int:
        """Returns the number of different blocks."""
        return size_of(self.mesh, (name for axes in self.axes for name in axes))

    @property
    def copies(self) -> int:
        """Returns how many devices hold the same block."""
        return self.mesh.size // self.shards

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """Returns the axes that replicate the array. Its gradient is summed over them."""
        return tuple(n for n in self.mesh.axis_names if not any(n in axes for axes in self.axes))

    def picture(self) -> str:
        """Returns a picture of the devices that hold each block.

        Devices are numbered by their place in the mesh. Rows are blocks of the first sharded
        dimension, columns those of the others.
        """
        grid = np.arange(self.mesh.size).reshape(tuple(self.mesh.shape.values()))
        names = list(self.mesh.shape)
        sharded = [dim for dim, axes in enumerate(self.axes) if axes]
        order = [names.index(name) for dim in sharded for name in self.axes[dim]]
        order += [names.index(name) for name in self.gradient_axes]
        first = size_of(self.mesh, self.axes[sharded[0]]) if sharded else 1
        cells = grid.transpose(order).reshape(first, self.shards // first, self.copies)
        lines = [f"{self.path}: blocks {list(self.local_shape)} of {list(self.padded_shape)}"]
        if sharded:
            down = f"dimension {sharded[0]} over {', '.join(self.axes[sharded[0]])}"
            across = [f"dimension {d} over {', '.join(self.axes[d])}" for d in sharded[1:]]
            lines[0] += f"; rows: {down}" + (f"; columns: {'; '.join(across)}" if across else "")
        texts = [[",".join(map(str, sorted(cell.tolist()))) for cell in row] for row in cells]
        width = max(len(text) for row in texts for text in row)
        return "\n".join(
            [*lines, *("  ".join(t.ljust(width) for t in row).rstrip() for row in texts)]
        )

    def problem(self, text: str, remedy: str) -> LayoutProblem:
        return LayoutProblem(self.path, self.rule, f"{self.path!r} {text}", remedy)

    def pad(self, array: AnyArray) -> AnyArray:
        """Pads with zeros to `padded_shape`, and interleaves layers. Keys get zero bits."""
        return self._changed(lambda dim, *args: dim.pad(*args), array, self.spec)

    def unpad(self, array: AnyArray) -> AnyArray:
        """Removes padding, and puts layers in the model's order."""
        return self._changed(lambda dim, *args: dim.unpad(*args), array, self.logical_spec)

    def _changed(self, change: Change, array: AnyArray, spec: PartitionSpec) -> AnyArray:
        if self.is_plain:
            return array
        if isinstance(array, np.ndarray):
            return self._along_all(change, array)
        if is_key(array.dtype) or _is_narrow(array.dtype):
            words = self.words(array.dtype)._changed(change, to_words(array), spec)
            return from_words(jnp.asarray(words), array.dtype)
        held = jax.typeof(array).sharding.mesh
        kinds = dict(zip(held.axis_names, held.axis_types, strict=True))
        named = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
        if not named:
            return self._along_all(change, array)
        # No operation cuts a dimension with explicit axes into unequal parts.
        kept = [tuple(name for name in axes if name in named) for axes in axes_by_dim(spec)]
        sharding = NamedSharding(held, PartitionSpec(*kept))
        along_all = partial(self._along_all, change)
        automatic: Any = jax.sharding.auto_axes(along_all, out_sharding=sharding)
        return automatic(array)

    def _along_all(self, change: Change, array: AnyArray) -> AnyArray:
        for dim, blocks in enumerate(self.blocks):
            array = change(blocks, array, dim)
        return array

    def block(self, index: Any, read: Callable[[list[Entries]], np.ndarray]) -> np.ndarray:
        # With padding. `read` gets each dimension's entries.
        cuts = [dim.within(place) for place, dim in zip(index, self.blocks, strict=True)]
        part, padding = read([entries for entries, _ in cuts]), [(0, after) for _, after in cuts]
        return np.pad(part, padding) if any(map(any, padding)) else part

    def words(self, dtype: Any = None) -> ArrayLayout:
        # Of `to_words`, which may have a dimension more.
        word = words_of(self.dtype if dtype is None else dtype)
        whole = tuple(PaddedDim.evenly(size, 1) for size in word.shape)
        shape, blocks = (*self.shape, *word.shape), (*self.blocks, *whole)
        return replace(self, shape=shape, dtype=word.dtype, blocks=blocks)


def taken(array: np.ndarray, entries: Sequence[Entries]) -> np.ndarray:
    """Returns these entries of each dimension, without a copy where they are neighbours."""
    for dim, places in enumerate(entries):
        index = slice(places.start, places.stop) if isinstance(places, range) else places
        array = array[(slice(None),) * dim + (index,)]
    return array


@lru_cache(maxsize=4096)  # many arrays share few specs
def axes_by_dim(
    spec: PartitionSpec | tuple[Any, ...], rank: int = 0
) -> tuple[tuple[str, ...], ...]:
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return (*axes, *[()] * (rank - len(axes)))


def _is_narrow(dtype: Any) -> bool:
    """Returns whether entries are int2 or int4, which programs may move wrongly."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and jnp.iinfo(dtype).bits < 8
