"""The user's `Axis`, and a `Ring`, which is bound to the traced program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike
from jaxtyping import Int

from jaxpar.arguments.calls import check_among, naming, readable, type_error, value_error
from jaxpar.arguments.dtypes import (
    LowBit,
    WireLike,
    as_dtype,
    as_wire,
    gathered_by,
    is_low_bit,
    is_wide_float,
    summed_as,
)
from jaxpar.arguments.lazy_names import open_types
from jaxpar.arguments.types import Flag, Mode
from jaxpar.axis.ring_order import Index, Walk, moved_on, traced_links
from jaxpar.axis.vma import vary_alike, vary_over

CHUNKED: dict[Mode, int] = {"chunked-2": 2, "chunked-4": 4, "chunked-8": 8}
IN_TURNS: tuple[Mode, ...] = ("unidirectional", "bidirectional", "multi-ring")
OF_MATMULS = "mode", "wire_dtype", "backward", "keep_gathered"
OF_FSDP = "mode", "wire_dtype", "gather_dtype"
OPTIONS = *OF_MATMULS, "gather_dtype"
MODES: tuple[Mode, ...] = ("naive", "stationary", *CHUNKED, *IN_TURNS, "auto")


if TYPE_CHECKING:
    AxisLike: TypeAlias = "str | tuple[str, ...] | list[str] | Axis"
    # Users give any of these. The attribute is a tuple.
    Names = Annotated[Any, "str | tuple[str, ...] | list[str]"]
else:
    globals().update(open_types(__name__))


@readable
@dataclass(frozen=True)
class Axis:
    """Mesh axes, and how data travel over them.

    Functions take a string, a tuple, a list or an `Axis`, and refuse options without effect. A
    function's own argument, such as `mode`, overrides that of the `Axis`.

    Args:
      names: a mesh axis, or several in any order. Logical indices count in this order, as in
        `jax.lax.axis_index`. Another `Axis` gives options that are not given here.
      mode: the algorithm.

        - `"naive"`: a collective of `jax.lax`, before or after a matmul
        - `"stationary"`: in matmuls, the other operand and the result travel; else as `"naive"`
        - `"chunked-2"`, `"chunked-4"`, `"chunked-8"`: as many chunks, with a collective each
        - `"unidirectional"`, `"bidirectional"`: a ring in one direction, or in both
        - `"multi-ring"`: a ring for each axis; an axis of a `make_mesh` mesh may have several. On
          a torus, rings share no link. Matmuls may use equally long axes in turn, if faster.
        - `"auto"`: in matmuls and ring attention, the mode predicted to be fastest for each pass
          (naive on CPUs and unknown chips); elsewhere as each function says

      backward: the mode of the backward pass of matmuls. None: `mode`.
      wire_dtype: dtype in which partial sums travel. None: that of the result. Rings add in float32
        or wider. `"int8"`, `"float8_e4m3fn"` or a `LowBit`: gathered floats travel in 8 bits with
        scales. Sums travel in the result's dtype, or in the `sums` of the `LowBit`. Derivatives
        ignore the rounding.
      keep_gathered: whether a matmul saves the gathered operand for its derivative.

        - True: all but chunked modes save it.
        - False: it is gathered again (`"stationary"` gathers nothing).
        - None: it is saved if both passes are `"naive"`, or by `"auto"` on TPUs unless it chooses
          chunks. Otherwise, and in FSDP, it is gathered again.

      gather_dtype: dtype, of 16 bits or more, in which sharded weights are gathered and used.
        Gradients are summed and returned in the shards' dtype, and sent in it unless there is a
        `wire_dtype`. None: the shards' dtype.

    Raises:
      ValueError: there is no name, a name is repeated, or a mode is unknown.

    Example:
      >>> Axis("tp", mode="bidirectional", wire_dtype="bfloat16")
      Axis(names=('tp',), mode='bidirectional', wire_dtype=dtype(bfloat16), backward=None,
           keep_gathered=None, gather_dtype=None)
    """

    names: Names
    mode: Mode = "auto"
    wire_dtype: WireLike = None
    backward: Mode | None = None
    keep_gathered: Flag | None = None
    gather_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        with naming("Axis"):
            if isinstance(self.names, Axis):
                inner: Any = self.names
                for option in OPTIONS:
                    if str(getattr(self, option)) in ("None", "auto"):
                        object.__setattr__(self, option, getattr(inner, option))
            names = getattr(self.names, "names", self.names)
            object.__setattr__(self, "names", axis_names(names))
            check_among("mode", self.mode, MODES)
            if self.backward is not None:
                check_among("backward", self.backward, MODES)
            object.__setattr__(self, "wire_dtype", as_wire("wire_dtype", self.wire_dtype))
            keep: Any = self.keep_gathered
            if not (keep is None or isinstance(keep, bool)):
                raise type_error(f"keep_gathered must be True, False or None, got {keep!r}")
            gathered = as_dtype("gather_dtype", self.gather_dtype)
            if gathered is not None and not is_wide_float(gathered):
                raise type_error(
                    f"gather_dtype={gathered} must be a float of 16 bits or more; for gathers in 8 "
                    "bits, which have scales, give wire_dtype"
                )
            object.__setattr__(self, "gather_dtype", gathered)


@dataclass(frozen=True)
class Ring(Axis):
    size: int = field(kw_only=True)
    # The path of the blocks. None: in the order of the logical index.
    walk: Walk | None = None

    def __post_init__(self) -> None:
        """Skips the checks of `Axis`. A ring over no axes is one device."""

    def __str__(self) -> str:
        name = self.names[0] if len(self.names) == 1 else self.names
        return f"axis {name!r} ({self.size})"

    def index(self) -> Index:
        return lax.axis_index(self.names[0] if len(self.names) == 1 else self.names)

    def behind(self, index: Index, distance: Any) -> Index:
        if self.walk is None:
            return moved_on(index, -distance, self.size)
        return self.walk.behind(index, distance)

    @property
    def around(self) -> int:
        """Returns the number of devices that a block visits."""
        return self.size if self.walk is None else self.walk.around

    @property
    def has_disjoint(self) -> bool:
        stages = self.stages()
        sizes = [ring.size for ring in stages]
        if len(sizes) == 1:
            return bool(traced_links().walks.get(stages[0].names[0]))
        return len(sizes) > 1 and (min(sizes) > 2 or (len(sizes) > 2 and max(sizes) == 2))

    @property
    def crosses_a_cube(self) -> bool:
        """Returns whether hops are exchanges along single dimensions."""
        return self.walk is not None and self.walk.exchanges

    def disjoint(self) -> tuple[Ring, ...]:
        """Returns rings that share no link, if each axis is closed."""
        sizes = {ring.names[0]: ring.size for ring in self.stages()}
        if len(sizes) > 1:
            from jaxpar.mesh.ring_orders import walks_over  # only tori need it

            walks = walks_over(sizes)
        else:
            walks = tuple(walk for name in sizes for walk in traced_links().walks.get(name, ()))
        return tuple(replace(self, walk=walk) for walk in walks) or (self,)

    def wire(self, dtype: Any) -> Any:
        return jnp.dtype(summed_as(self.wire_dtype, dtype) or dtype)

    def gathered_as(self, dtype: Any) -> Any:
        casts = self.gather_dtype is not None and is_wide_float(dtype)
        return self.gather_dtype if casts else dtype

    def describe_shard(self, w: jax.Array) -> str:
        used, text = self.gathered_as(w.dtype), f"{w.dtype}{list(w.shape)}"
        return text if used == w.dtype else f"{text}, gathered in {used} as gather_dtype says"

    def low_bit(self, dtype: Any) -> LowBit | None:
        """Returns how gathered blocks are quantized."""
        return gathered_by(self.wire_dtype, dtype) if self.size > 1 else None

    def low_bit_sums(self, dtype: Any) -> LowBit | None:
        low_bit = self.low_bit(dtype)
        return low_bit if low_bit is not None and is_low_bit(low_bit.sums) else None

    def low_bit_cotangents(self, dtype: Any) -> LowBit | None:
        low_bit = self.low_bit(dtype)
        return low_bit if low_bit is not None and low_bit.cotangents else None

    def in_mesh_order(self) -> tuple[tuple[str, ...], list[int]]:
        """Returns axes in mesh order, and logical indices' places there."""
        if len(self.names) < 2:
            return self.names, list(range(self.size))
        mesh = jax.sharding.get_abstract_mesh()
        names = tuple(name for name in mesh.axis_names if name in self.names)
        return names, ring_positions(mesh, self.names).tolist()

    def stages(self) -> list[Ring]:
        """Returns rings over single axes of several devices."""
        if len(self.names) == 1:
            return [self] if self.size > 1 else []
        return [ring for name in self.names if (ring := self.over((name,))).size > 1]

    def over(self, names: tuple[str, ...]) -> Ring:
        sizes = jax.sharding.get_abstract_mesh().shape
        return replace(self, names=names, size=prod(sizes[name] for name in names))

    def shift(self, tree: Any, offset: int) -> Any:
        tree = vary_over(self.names, tree)
        if offset % self.size == 0:
            return tree
        return self._permuted(tree, [(p, (p + offset) % self.size) for p in range(self.size)])

    def hop(self, tree: Any, direction: int, hops: Any) -> Any:
        """Moves leaves to the next device, after so many hops to this device.

        Against the walk, moves sums that are `hops + 1` away from their owner.
        """
        (tree,) = vary_alike(self.names, tree)
        if self.walk is None:
            return self.shift(tree, direction)
        walk = self.walk
        return self._permuted(tree, [(p, walk.next(p, direction, hops)) for p in range(self.size)])

    def _permuted(self, tree: Any, pairs: list[tuple[int, int]]) -> Any:
        # Up to jax 0.11.0, ppermute silently counts the indices of a tuple in mesh order.
        axes, order = self.in_mesh_order()
        ordered = [(order[source], order[to]) for source, to in pairs]
        return jax.tree.map(lambda x: lax.ppermute(x, axes, ordered), tree)


def bind(
    axis: AxisLike,
    argument: str = "axis",
    *,
    mode: Any = None,
    wire_dtype: Any = None,
    takes: Sequence[str] = ("mode", "wire_dtype"),
) -> Ring:
    """Returns the ring over `axis`, the user's `argument`.

    A `mode` is for both passes. An `Axis` must have no options but those that the caller `takes`.
    """
    if isinstance(axis, Ring):  # bound already
        return axis
    options = axis if isinstance(axis, Axis) else Axis(axis_names(axis, argument))
    _check_options(options, takes, argument)
    if mode is not None:
        check_among("mode", mode, MODES)
    mode, backward = (options.mode, options.backward) if mode is None else (mode, None)
    wire = options.wire_dtype if wire_dtype is None else as_wire("wire_dtype", wire_dtype)
    rest = options.names, mode, wire, backward, options.keep_gathered, options.gather_dtype
    return Ring(*rest, size=prod(_axis_size(argument, name) for name in options.names))


def _axis_size(argument: str, name: str) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    remedy = f"Call it inside jax.shard_map over a mesh with an axis {name!r}"
    try:
        size = lax.axis_size(name)
    except NameError:
        bound = {axis: mesh.shape[axis] for axis in mesh.manual_axes}
        if bound and name in mesh.axis_names:
            remedy = f"Add {name!r} to axis_names= of jax.shard_map"
        bound = f"the axes bound here are {bound}" if bound else "no mesh axis is bound here"
        raise value_error(f"{argument} {name!r} is not bound: {bound}. {remedy}") from None
    if name not in mesh.manual_axes:
        raise value_error(
            f"{argument} {name!r} is an axis of jax.vmap, which has no devices for data to travel "
            f"between. {remedy}"
        )
    return size


def bind_any(axes: AxisLike, argument: str = "axis", **options: Any) -> Ring:
    return Ring((), size=1) if axes in ((), []) else bind(axes, argument, **options)


def _check_options(axis: Axis, takes: Sequence[str], argument: str) -> Axis:
    """Refuses options that would have no effect on the user's `argument`."""
    for option in OPTIONS:
        idle = ("None", "auto", "naive") if option == "mode" else ("None",)
        if str(value := getattr(axis, option)) not in idle and option not in takes:
            use = ", and cast the operand" if option == "gather_dtype" else ""
            use = f"has no effect here; give its names alone, {axis.names}{use}"
            raise value_error(f"{argument} has {option}={value}, which {use}")
    return axis


def axis_names(axis: Any, argument: str = "axis") -> tuple[str, ...]:
    names = _check_options(axis, (), argument).names if isinstance(axis, Axis) else axis
    names = (names,) if isinstance(names, str) else names
    names = tuple(names) if isinstance(names, list) else names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        dim = "; give a dimension of an array as dim" if isinstance(axis, int) else ""
        raise type_error(
            f"{argument} must be a mesh axis name, a tuple or list of them, or an Axis, "
            f"got {axis!r}{dim}"
        )
    if len(set(names)) != len(names) or not names or "" in names:
        raise value_error(f"{argument} {axis!r} must name at least one mesh axis, and each once")
    return names


def ring_positions(mesh: Mesh | AbstractMesh, names: tuple[str, ...]) -> Int[np.ndarray, " size"]:
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise value_error(
            f"axis {missing[0]!r} is not an axis of the mesh, which has {dict(mesh.shape)}"
        )
    in_mesh_order = [name for name in mesh.axis_names if name in names]
    sizes = [mesh.shape[name] for name in in_mesh_order]
    positions = np.arange(prod(sizes)).reshape(sizes)
    return positions.transpose([in_mesh_order.index(name) for name in names]).reshape(-1)
