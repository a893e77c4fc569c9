"""Mesh axes: as a user names them, and bound to the program that is being traced, a ring."""

from __future__ import annotations

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

from jaxpar.arguments.calls import naming, readable, type_error, value_error
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
from jaxpar.arguments.on_demand import open_types
from jaxpar.arguments.types import Flag, Mode
from jaxpar.axis.varying import vary_alike
from jaxpar.mesh.walk import Index, Walk, moved_on, traced_links

CHUNKED: dict[Mode, int] = {"chunked-2": 2, "chunked-4": 4, "chunked-8": 8}
IN_TURNS: tuple[Mode, ...] = ("unidirectional", "bidirectional", "multi-ring")
MODES: tuple[Mode, ...] = ("naive", "stationary", *CHUNKED, *IN_TURNS, "auto")


if TYPE_CHECKING:
    AxisLike: TypeAlias = "str | tuple[str, ...] | list[str] | Axis"
    # Given, any of these; kept, a tuple.
    Names = Annotated[Any, "str | tuple[str, ...] | list[str]"]
else:
    globals().update(open_types(__name__))


@readable
@dataclass(frozen=True)
class Axis:
    """Mesh axes, and how data travel over them.

    Wherever a mesh axis is named, a string, a tuple, a list or an `Axis` will do.

    Args:
      names: one mesh axis, or a tuple or list of them in any order. The logical index of a device
        counts in the order of the names, as in `jax.lax.axis_index`. Of an `Axis` the mode and
        the dtype hold where no other is given than the defaults.
      mode: of all that travels over them: `"naive"` (a collective of `jax.lax`), `"stationary"`
        (the same, but of a matmul the other operand and the result travel in the place of the
        gathered one), `"chunked-2"`, `"chunked-4"` or `"chunked-8"` (one for each of so many
        chunks), `"unidirectional"` or `"bidirectional"` (around a ring), `"multi-ring"` (both
        ways round as many rings as there are axes, which share no link on a torus; of one axis as
        many as its torus has, if `make_mesh` found one; blocks and sums of matmuls along one axis
        after the other, where axes are of one length and that is predicted to be faster), or
        `"auto"`: what is predicted to be the fastest.
      backward: the mode in the backward pass of matmuls. None: `mode`.
      wire_dtype: the dtype in which partial sums travel. None: that of the result, as `jax.lax`'s
        own collectives send them. What a device adds it adds in float32 at least. Or `"int8"`,
        `"float8_e4m3fn"` or a `LowBit`: then blocks of floats that are gathered travel in 8 bits
        with scales, and sums as with None.
      keep_gathered: whether a matmul keeps what it gathered for its derivative, which then does not
        gather it again, but has the whole of it in memory until then. None: where both passes turn
        out `"naive"`, or both `"stationary"`, and on TPUs where the forward pass is `"auto"`; one
        that is named keeps this device's block alone otherwise. Chunks never keep, stationary ones
        always; weights over `fsdp` are gathered again unless it is True, and in layers with an
        `fsdp_axis` in any case.
      gather_dtype: the dtype, of 16 bits or more, in which sharded weights are gathered and used.
        The functions of FSDP, an `fsdp_axis`, and matmuls that gather an operand take it; others
        refuse it. Gradients are summed, returned and, without a `wire_dtype`, sent in the dtype of
        the shards. None: that of the shards.

    Raises:
      TypeError: names that are no strings, what is no dtype, or no bool.
      ValueError: no name, or one twice; an unknown mode.

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
                if self.mode == "auto":
                    object.__setattr__(self, "mode", inner.mode)
                for option in ("wire_dtype", "backward", "keep_gathered", "gather_dtype"):
                    if getattr(self, option) is None:
                        object.__setattr__(self, option, getattr(inner, option))
            object.__setattr__(self, "names", axis_names(self.names))
            check_mode(self.mode)
            if self.backward is not None:
                check_mode(self.backward, "backward")
            object.__setattr__(self, "wire_dtype", as_wire("wire_dtype", self.wire_dtype))
            keep: Any = self.keep_gathered
            if not (keep is None or isinstance(keep, bool)):
                raise type_error(
                    f"keep_gathered must be True, False or None, got {keep!r} of type "
                    f"{type(keep).__name__}"
                )
            gathered = as_dtype("gather_dtype", self.gather_dtype)
            if gathered is not None and not is_wide_float(gathered):
                raise type_error(
                    f"gather_dtype={gathered} must be a float of 16 bits or more; for gathers in 8 "
                    "bits, which have scales, give wire_dtype"
                )
            object.__setattr__(self, "gather_dtype", gathered)


@dataclass(frozen=True)
class Ring(Axis):
    """Mesh axes bound to the program that is traced: `size` devices, in logical order."""

    size: int = field(kw_only=True)
    # By which blocks go round; None: in the order of the logical index.
    walk: Walk | None = None

    def __post_init__(self) -> None:
        """What an `Axis` checks was checked; the ring over no axes is one device."""

    def __str__(self) -> str:
        name = self.names[0] if len(self.names) == 1 else self.names
        return f"axis {name!r} ({self.size})"

    def index(self) -> Index:
        """The logical index of the device that runs the program."""
        return lax.axis_index(self.names[0] if len(self.names) == 1 else self.names)

    def behind(self, index: Index, distance: Any) -> Index:
        """The logical index of the device so many places behind that of an index."""
        if self.walk is None:
            return moved_on(index, -distance, self.size)
        return self.walk.behind(index, distance)

    @property
    def around(self) -> int:
        """How many devices a block comes past on its way round, its own among them."""
        return self.size if self.walk is None else self.walk.around

    @property
    def has_disjoint(self) -> bool:
        """Whether its axes can be those of a torus or a cube, with more links than one ring has."""
        stages = self.stages()
        sizes = [ring.size for ring in stages]
        if len(sizes) == 1:
            return bool(traced_links().walks.get(stages[0].names[0]))
        return len(sizes) > 1 and (min(sizes) > 2 or (len(sizes) > 2 and max(sizes) == 2))

    @property
    def crosses_a_cube(self) -> bool:
        """Whether hops are exchanges, which go both ways at once, over a dimension each."""
        return self.walk is not None and self.walk.exchanges

    def disjoint(self) -> tuple[Ring, ...]:
        """Rings over the same devices that share no link, if each axis is a ring of links."""
        sizes = {ring.names[0]: ring.size for ring in self.stages()}
        if len(sizes) > 1:
            walks = walks_over(sizes)
        else:
            walks = tuple(walk for name in sizes for walk in traced_links().walks.get(name, ()))
        return tuple(replace(self, walk=walk) for walk in walks) or (self,)

    def wire(self, dtype: Any) -> Any:
        """The dtype in which sums travel that are asked for in `dtype`."""
        return jnp.dtype(summed_as(self.wire_dtype, dtype) or dtype)

    def gathered_as(self, dtype: Any) -> Any:
        """The dtype in which shards of a dtype are gathered and used: floats in `gather_dtype`."""
        casts = self.gather_dtype is not None and is_wide_float(dtype)
        return jnp.dtype(self.gather_dtype if casts else dtype)

    def describe_shard(self, w: jax.Array) -> str:
        """The type of a weight's shard, and of the gathered weight, for errors."""
        used, text = self.gathered_as(w.dtype), f"{w.dtype}{list(w.shape)}"
        return text if used == w.dtype else f"{text}, gathered in {used} as gather_dtype says"

    def low_bit(self, dtype: Any) -> LowBit | None:
        """How blocks of a dtype are gathered, None where they travel as they are, or nowhere."""
        return gathered_by(self.wire_dtype, dtype) if self.size > 1 else None

    def low_bit_sums(self, dtype: Any) -> LowBit | None:
        """How sums of a dtype travel, None where they are not quantized."""
        how = self.low_bit(dtype)
        return how if how is not None and is_low_bit(how.sums) else None

    def low_bit_cotangents(self, dtype: Any) -> LowBit | None:
        """The same of cotangents, which are gathered where sums were scattered."""
        how = self.low_bit(dtype)
        return how if how is not None and how.cotangents else None

    def in_mesh_order(self) -> tuple[tuple[str, ...], list[int]]:
        """The axes in the mesh's order, of which there is only one reading.

        With them, for each logical index the one that the device has in that order.
        """
        if len(self.names) < 2:
            return self.names, list(range(self.size))
        mesh = jax.sharding.get_abstract_mesh()
        names = tuple(name for name in mesh.axis_names if name in self.names)
        return names, ring_positions(mesh, self.names).tolist()

    def stages(self) -> list[Ring]:
        """The rings over one axis each, those of one device left out."""
        if len(self.names) == 1:
            return [self] if self.size > 1 else []
        return [ring for name in self.names if (ring := self.over((name,))).size > 1]

    def over(self, names: tuple[str, ...]) -> Ring:
        """The ring over some of the axes, or others."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return replace(self, names=names, size=prod(sizes[name] for name in names))

    def shift(self, tree: Any, offset: int) -> Any:
        """Moves every leaf `offset` devices on: device `i` receives what `i - offset` held."""
        (tree,) = vary_alike(self.names, tree)
        if offset % self.size == 0:
            return tree
        return self._permuted(tree, [(p, (p + offset) % self.size) for p in range(self.size)])

    def hop(self, tree: Any, direction: int, hops: Any) -> Any:
        """Moves every leaf on to the next device, where so many hops have brought it to this one.

        Down a walk those of the way home count: of sums that are `hops + 1` away from their owner.
        """
        if self.walk is None:
            return self.shift(tree, direction)
        (tree,) = vary_alike(self.names, tree)
        walk = self.walk
        return self._permuted(tree, [(p, walk.next(p, direction, hops)) for p in range(self.size)])

    def _permuted(self, tree: Any, pairs: list[tuple[int, int]]) -> Any:
        # Given a tuple, ppermute has counted its indices in mesh order, not in the order of the
        # tuple (silently up to jax 0.11.0).
        axes, order = self.in_mesh_order()
        ordered = [(order[source], order[to]) for source, to in pairs]
        return jax.tree.map(lambda x: lax.ppermute(x, axes, ordered), tree)


def bind(
    axis: AxisLike,
    argument: str = "axis",
    *,
    mode: Any = None,
    wire_dtype: Any = None,
    gathers: bool = False,
) -> Ring:
    """Returns the ring over `axis`, the user's `argument`, or says why it cannot be had here.

    A mode and a wire's dtype that are given go before those of an `Axis`; a mode is that of both
    passes. A `gather_dtype` is refused unless the caller `gathers` weights.
    """
    if isinstance(axis, Ring):  # bound already
        return axis
    given = axis if isinstance(axis, Axis) else Axis(axis_names(axis, argument))
    if given.gather_dtype is not None and not gathers:
        raise value_error(
            f"{argument} has gather_dtype={given.gather_dtype}, which is for weights that are "
            "gathered: by fsdp_gather, fsdp_linear, fsdp_scan, an fsdp_axis or all_gather_matmul; "
            "leave it out here, and cast the operand with .astype"
        )
    if mode is not None:
        check_mode(mode)
    mode, backward = (given.mode, given.backward) if mode is None else (mode, None)
    wire = given.wire_dtype if wire_dtype is None else as_wire("wire_dtype", wire_dtype)
    names: tuple[str, ...] = given.names
    size = prod(_axis_size(argument, name) for name in names)
    how = names, mode, wire, backward, given.keep_gathered, given.gather_dtype
    return Ring(*how, size=size)


def _axis_size(argument: str, name: str) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    remedy = f"Call it inside jax.shard_map over a mesh with an axis {name!r}"
    try:
        size = lax.axis_size(name)
    except NameError:
        bound = {axis: mesh.shape[axis] for axis in mesh.manual_axes}
        if bound and name in mesh.axis_names:
            remedy = f"Add {name!r} to axis_names= of jax.shard_map"
        found = f"the axes bound here are {bound}" if bound else "no mesh axis is bound here"
        raise value_error(f"{argument} {name!r} is not bound: {found}. {remedy}") from None
    if name not in mesh.manual_axes:
        raise value_error(
            f"{argument} {name!r} is an axis of jax.vmap, which has no devices for data to travel "
            f"between. {remedy}"
        )
    return size


def bind_any(axes: AxisLike, argument: str = "axis") -> Ring:
    """Returns the ring over `axes`, of which there may be none: then it is one device."""
    return Ring((), size=1) if axes in ((), []) else bind(axes, argument)


def axis_names(axis: Any, argument: str = "axis") -> tuple[str, ...]:
    """Returns the distinct names of mesh axes in what names them."""
    names = axis.names if isinstance(axis, Axis) else axis
    names = (
        (names,) if isinstance(names, str) else tuple(names) if isinstance(names, list) else names
    )
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
    """Returns, for each logical index, the position counted over the axes in mesh order."""
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise value_error(
            f"axis {missing[0]!r} is not an axis of the mesh, which has {dict(mesh.shape)}"
        )
    in_mesh_order = [name for name in mesh.axis_names if name in names]
    sizes = [mesh.shape[name] for name in in_mesh_order]
    positions = np.arange(prod(sizes)).reshape(sizes)
    return positions.transpose([in_mesh_order.index(name) for name in names]).reshape(-1)


def check_mode(mode: Any, argument: str = "mode") -> None:
    """Raises unless `mode`, the user's `argument`, is one of those that there are."""
    if not isinstance(mode, str) or mode not in MODES:
        raise value_error(f"{argument} must be one of {', '.join(MODES)}, got {mode!r}")


def walks_over(sizes: dict[str, int]) -> tuple[Walk, ...]:
    """Returns the walks through all devices of axes of these sizes that share no link."""
    if min(sizes.values()) == 2 < max(sizes.values()):
        raise value_error(
            f"mode='multi-ring' over axes of sizes {sizes}: each must be 3 or more, as two "
            "devices have one link, or each be 2, a cube; leave out the axes of 2, or take "
            "mode='bidirectional'"
        )
    if len(sizes) > 4 and set(sizes.values()) == {2}:
        raise value_error(
            f"mode='multi-ring' over {len(sizes)} axes of 2: a cube has at most 4; leave some "
            "out, or take mode='bidirectional'"
        )
    from jaxpar.mesh.cycles import disjoint_walks  # on tori alone

    return disjoint_walks(tuple(sizes.values()))
