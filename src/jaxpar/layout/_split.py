"""Actions that split, pad or replicate an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int

from jaxpar.arguments.calls import naming, public, readable, type_error, value_error
from jaxpar.arguments.types import Integer, Leaf
from jaxpar.axis.axis import AxisLike, axis_names, bind
from jaxpar.axis.checks import check_dim, check_whole
from jaxpar.axis.padding import AnyArray, PaddedDim


@readable
@dataclass(frozen=True)
class Split:
    """Splits arrays along a dimension into nearly equal shards.

    `Split(3)(array)` returns shards of 4, 3 and 3 of 10 rows, and `undo` joins them. Both accept
    NumPy and JAX arrays, also inside `jax.jit`.

    In a rule it shards the dimension over a mesh axis. Blocks then have the largest shard's size,
    with zeros at the end (`local`, `local_size`, `local_mask`).

    Args:
      count: the number of shards, or mesh axes whose devices have a shard each.
      dim: the dimension; negative counts from the end.

    Raises:
      ValueError: fewer than one shard.

    Example:
      >>> [shard.tolist() for shard in Split(3)(jnp.arange(10))]
      [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    """

    count: Integer | AxisLike
    dim: Integer = 0

    def __post_init__(self) -> None:
        with naming("Split"):
            count: Any = self.count
            if isinstance(count, bool) or not hasattr(count, "__index__"):
                object.__setattr__(self, "count", axis_names(count, "count"))
            else:
                object.__setattr__(self, "count", check_whole("count", count, 1))
            object.__setattr__(self, "dim", check_whole("dim", self.dim))

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the mesh axes; none if it has a number."""
        return () if isinstance(self.count, int) else axis_names(self.count)

    def blocks(self, shape: Sequence[int], count: int | None = None) -> tuple[int, PaddedDim]:
        if count is None:
            if not isinstance(self.count, int):
                raise value_error(
                    f"Split({self.count!r}, {self.dim}) is over mesh axes, and a mesh knows their "
                    "size; use it in a rule or inside jax.shard_map (`local`), or give "
                    f"the number of shards, as in Split(4, {self.dim})"
                )
            count = self.count
        dim = check_dim("dim", self.dim, tuple(shape))
        return dim, PaddedDim.evenly(shape[dim], count)

    @public
    def __call__(self, array: Leaf) -> list[AnyArray]:
        """Returns the shards, in the order of their devices."""
        whole = _as_array(array)
        dim, blocks = self.blocks(whole.shape)
        ends = np.cumsum(blocks.sizes)
        return [
            whole[(slice(None),) * dim + (slice(end - size, end),)]
            for end, size in zip(ends.tolist(), blocks.sizes, strict=True)
        ]

    @public
    def undo(self, shards: Sequence[AnyArray]) -> AnyArray:
        """Joins shards.

        Raises:
          ValueError: another number of shards, or shards that do not belong to one array.
        """
        arrays = [_as_array(shard) for shard in shards]
        count = self.count if isinstance(self.count, int) else len(arrays)
        if len(arrays) != count:
            raise value_error(
                f"Split({self.count}, {self.dim}) has {count} shards, got {len(arrays)}; give "
                "all of them, in the order in which it returned them"
            )
        if not arrays:
            raise value_error("no shards")
        dim = check_dim("dim", self.dim, arrays[0].shape)
        shapes = [shard.shape for shard in arrays]
        alike = {(shape[:dim], shape[dim + 1 :]) for shape in shapes}
        if len(alike) > 1 or len({shard.dtype for shard in arrays}) > 1:
            raise value_error(
                f"shards must have one dtype, and differ in dimension {dim} alone, got "
                f"{', '.join(f'{shard.dtype}{list(shard.shape)}' for shard in arrays)}"
            )
        sizes = tuple(shape[dim] for shape in shapes)
        wanted = PaddedDim.evenly(sum(sizes), count).sizes
        if sizes != wanted:
            raise value_error(
                f"shards have {sizes} entries along dimension {dim}, but {sum(sizes)} entries in "
                f"{count} shards are {wanted}; give them in order, and without padding"
            )
        xp = np if all(isinstance(shard, np.ndarray) for shard in arrays) else jnp
        return xp.concatenate(arrays, axis=dim)

    @public
    def local(self, array: Array) -> Array:
        """Returns this device's block of an unsharded array, inside `jax.shard_map`.

        It has this device's entries, then zeros up to the largest shard's size.
        """
        array = jnp.asarray(array)
        dim, blocks, index = self._here(array.shape)
        return lax.dynamic_slice_in_dim(
            blocks.pad(array, dim), index * blocks.block, blocks.block, dim
        )

    @public
    def local_size(self, size: int) -> Int[Array, ""]:
        """Returns how many of `size` entries this device has, inside `jax.shard_map`."""
        _, blocks, index = self._here((size,) * (1 + abs(self.dim)))
        return jnp.asarray(blocks.sizes, jnp.int32)[index]

    @public
    def local_mask(self, size: int) -> Bool[Array, " block"]:
        """Returns which entries of this device's block are real, inside `jax.shard_map`."""
        _, blocks, index = self._here((size,) * (1 + abs(self.dim)))
        return jnp.arange(blocks.block, dtype="int32") < jnp.asarray(blocks.sizes, jnp.int32)[index]

    def _here(self, shape: Sequence[int]) -> tuple[int, PaddedDim, Array]:
        if isinstance(self.count, int):
            raise value_error(
                f"Split({self.count}, {self.dim}) has no mesh axis, which alone has a device's own "
                f"shard; name one, as in Split('tp', {self.dim})"
            )
        ring = bind(self.count, "count")
        return (*self.blocks(shape, ring.size), ring.index())


@readable
@dataclass(frozen=True)
class Replicate:
    """Copies an array for each of `count` devices. In a rule, it is the same as `REPLICATED`.

    Args:
      count: devices; in a rule, the size of the mesh.

    Raises:
      ValueError: fewer than one device.

    Example:
      >>> action = Replicate(2)
      >>> action.undo(action(jnp.arange(3.0)))
      Array([0., 1., 2.], dtype=float32)
    """

    count: Integer

    def __post_init__(self) -> None:
        with naming("Replicate"):
            object.__setattr__(self, "count", check_whole("count", self.count, 1))

    @public
    def __call__(self, array: Leaf) -> list[AnyArray]:
        """Returns the array `count` times."""
        return [_as_array(array)] * self.count

    @public
    def undo(self, shards: Sequence[AnyArray]) -> AnyArray:
        """Returns the first copy.

        Raises:
          ValueError: another number of copies, or different shapes or dtypes.
        """
        copies = [_as_array(shard) for shard in shards]
        if len(copies) != self.count:
            raise value_error(
                f"Replicate({self.count}) must have {self.count} copies, got {len(copies)}"
            )
        if len({(shard.shape, shard.dtype) for shard in copies}) > 1:
            raise value_error(
                "copies must have one shape and dtype, got "
                f"{', '.join(f'{shard.dtype}{list(shard.shape)}' for shard in copies)}"
            )
        return copies[0]


@readable
@dataclass(frozen=True)
class Padded:
    """Mesh axes for a dimension that they need not divide. It gets zeros at its end.

    Rules and `axes` take it in the place of a mesh axis. The zeros stay zero in training if they
    reach no result: a softmax must mask them (`vocabulary` of `vocab_parallel_cross_entropy`).

    Args:
      axes: mesh axes.
      multiple: entries that stay together on one device, such as the size of a head.
      size: the padded size. None: the smallest that `axes` and `multiple` allow.

    Raises:
      ValueError: sizes below 1.

    Example:
      >>> rules = LayoutMap({"embedding": (Padded("tp"), None)})
      >>> layout = rules.layout({"embedding": jnp.ones((10, 4))}, make_mesh("tp=8"))
      >>> layout["embedding"].padded_shape
      (16, 4)
    """

    axes: AxisLike
    multiple: Integer = 1
    size: Integer | None = None

    def __post_init__(self) -> None:
        with naming("Padded"):
            object.__setattr__(self, "axes", axis_names(self.axes, "axes"))
            object.__setattr__(self, "multiple", check_whole("multiple", self.multiple, 1))
            if self.size is not None:
                object.__setattr__(self, "size", check_whole("size", self.size, 1))

    def blocks(self, size: int, count: int) -> PaddedDim:
        if self.size is not None and (self.size < size or self.size % (count * self.multiple)):
            with naming("Padded"):
                raise value_error(
                    f"size={self.size} must be at least the dimension's {size}, and a multiple of "
                    f"{count} devices x {self.multiple}; give such a size, or none"
                )
        unit = count * self.multiple
        padded = self.size or -(-size // unit) * unit
        return PaddedDim.at_the_end(size, count, padded // count)


@readable
@dataclass(frozen=True)
class Interleaved:
    """Mesh axes of a pipeline, for a dimension that stacks layers.

    Rules and `axes` take it in the place of a mesh axis. Device i of p has stages i, i + p and so
    on. So arrays on the mesh have the order of devices, as `jaxpar.pipeline` takes them. What
    `Layout.place` takes, `gather` returns and files hold is in the model's order.

    Args:
      axes: mesh axes.
      virtual_stages: each device's stages, or the schedule. With one, the order is the model's.

    Raises:
      ValueError: fewer than one stage.

    Example:
      >>> rules = LayoutMap({"layers": (Interleaved("pp", 2),)})
      >>> mesh = make_mesh("pp=2", devices=jax.devices()[:2])
      >>> layout = rules.layout({"layers": jnp.arange(8)}, mesh)
      >>> layout.place({"layers": jnp.arange(8)})["layers"]
      Array([0, 1, 4, 5, 2, 3, 6, 7], dtype=int32)
    """

    axes: AxisLike
    virtual_stages: Any

    def __post_init__(self) -> None:
        with naming("Interleaved"):
            object.__setattr__(self, "axes", axis_names(self.axes, "axes"))
            stages: Any = getattr(self.virtual_stages, "virtual_stages", self.virtual_stages)
            object.__setattr__(self, "virtual_stages", check_whole("virtual_stages", stages, 1))

    def blocks(self, size: int, count: int) -> PaddedDim:
        stages = count * self.virtual_stages
        if rest := size % stages:
            fitting = [n for n in range(1, size // count + 1) if not size % (count * n)]
            others = (
                f"virtual_stages={' or '.join(map(str, fitting))}" if fitting else "fewer devices"
            )
            with naming("Interleaved"):
                raise value_error(
                    f"{count} devices x {self.virtual_stages} virtual stages do not divide {size} "
                    f"layers: {size} = {size // stages} x {stages} + {rest}; use "
                    f"{size - rest + stages} layers, or {others}"
                )
        return PaddedDim.at_the_end(size, count, size // count, (count, self.virtual_stages))


def _as_array(array: Any) -> AnyArray:
    if isinstance(array, (np.ndarray, Array)):
        return array
    if not hasattr(array, "__array__") and not isinstance(array, (bool, int, float, complex)):
        raise type_error(f"this must be an array, got {array!r} of type {type(array).__name__}")
    return jnp.asarray(array)
