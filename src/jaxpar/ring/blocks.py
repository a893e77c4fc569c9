"""Gathers and scatters of arrays in blocks: each is the derivative of the other."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar.arguments.dtypes import LowBit, addition_dtype, bits_of, summed_as
from jaxpar.axis.quantized import Quantized
from jaxpar.axis.rounding import encoded
from jaxpar.axis.vma import checks_varying, spec_of, vary_over
from jaxpar.compiler.derivatives import linear_pair, with_derivative
from jaxpar.ring.cuts import Block, Whole
from jaxpar.ring.scales import Scales, gather_scales
from jaxpar.ring.ways import Arrivals, Positions, Use, Way

Leaves = list[Any]  # arrays
# Leaves of up to so many bytes travel in one collective, because latency dominates: the scales of
# norms, and biases. Weights are larger, and joining them would cost more passes over memory.
SMALL = 2**18


@dataclass(frozen=True)
class Group:
    """Leaves that travel joined, along a dimension that is not cut."""

    # Separate transfers would wait for the same links, and start too late.
    members: tuple[int, ...]
    dim: int  # along which they are cut
    joined: int = 0  # along which they are joined
    lengths: tuple[int, ...] = (0,)  # of the members along it
    # A bucket has blocks of any shapes, one in a row. These are the members' block shapes, and the
    # dimensions in which they are cut. None: members travel in their own shapes.
    flat: tuple[tuple[tuple[int, ...], int], ...] | None = None
    exact: bool = False  # members are not quantized: small ones, and scales
    # Dtypes of the members and of the gathered arrays. None: the dtype of the input, for both.
    dtypes: tuple[Any, Any] | None = None

    def laid_out(self, parts: list[Array]) -> list[Array]:
        """Returns members as they travel: in a bucket, [blocks, numbers]."""
        if self.flat is None:
            return parts
        rows: list[Array] = []
        for x, (shape, dim) in zip(parts, self.flat, strict=True):
            rows.append(jnp.moveaxis(x, dim, 0).reshape(x.shape[dim] // shape[dim], -1))
        return rows

    def as_they_were(self, rows: list[Array]) -> list[Array]:
        if self.flat is None:
            return rows
        parts: list[Array] = []
        for x, (shape, dim) in zip(rows, self.flat, strict=True):
            others = shape[:dim] + shape[dim + 1 :]
            parts.append(jnp.moveaxis(x.reshape(x.shape[0] * shape[dim], *others), 0, dim))
        return parts

    def join(self, parts: list[Array]) -> Array:
        return lax.concatenate(parts, self.joined) if len(parts) > 1 else parts[0]

    def split(self, x: Array) -> list[Array]:
        return list(lax.split(x, self.lengths, self.joined)) if len(self.lengths) > 1 else [x]


@dataclass(frozen=True)
class Blocks:
    """How leaves are cut into blocks, and how blocks travel."""

    stages: tuple[Way, ...]  # an algorithm per axis, for a scatter. A gather starts with the last.
    groups: tuple[Group, ...]  # leaves that are cut. Others are replicated and stay.
    derived_by_jax: bool = False  # if so, sums keep their dtypes
    low_bit: LowBit | None = None


def _gather(blocks: Blocks, _: None, leaves: Leaves) -> Leaves:
    whole = list(leaves)
    for group in blocks.groups:
        parts = [leaves[n] for n in group.members]
        if parts[0] is None:
            continue
        parts, scales = _encode(blocks, group, group.laid_out(parts))
        for way in reversed(blocks.stages):
            last = way is blocks.stages[0]
            parts = _gather_group(group, parts, way, scales if last else None)
        for number, part in zip(group.members, group.as_they_were(parts), strict=True):
            whole[number] = part
    return whole


def _scatter(blocks: Blocks, _: None, leaves: Leaves) -> Leaves:
    scattered = list(leaves)
    for group in blocks.groups:
        parts = [leaves[n] for n in group.members]
        if parts[0] is None:
            continue
        dtype = parts[0].dtype if group.dtypes is None else group.dtypes[0]
        wide = dtype if blocks.derived_by_jax else addition_dtype(dtype)
        wire = summed_as(blocks.stages[0].ring.wire_dtype, dtype) if blocks.stages else None
        between = wide if wire == wide else dtype  # with a wide wire, only the last stage rounds
        parts = group.laid_out(parts)
        for way in blocks.stages:
            out = dtype if way is blocks.stages[-1] else between
            parts = _scatter_group(group, parts, way, wide, out)
        parts = [x.astype(dtype) for x in parts]  # for one device, which has no stages
        for number, part in zip(group.members, group.as_they_were(parts), strict=True):
            scattered[number] = part
    return scattered


gather_blocks, scatter_sums = linear_pair(_gather, _scatter)


def _encode(
    blocks: Blocks, group: Group, parts: list[Array]
) -> tuple[list[Array], list[Scales] | None]:
    """Returns arrays that travel, and all devices' scales."""
    dtype = parts[0].dtype if group.dtypes is None else group.dtypes[1]
    as_they_are = [x.astype(dtype) for x in parts]
    if blocks.low_bit is None or group.exact or not blocks.stages:
        return as_they_are, None
    coded = [encoded(blocks.low_bit, x, group.dim) for x in parts]
    if not all(isinstance(x, Quantized) for x in coded):
        return as_they_are, None
    coded = [replace(x, dtype=dtype) for x in coded]
    names = tuple(name for way in blocks.stages for name in way.ring.names)
    return gather_scales(names, coded, group.dim)


def _gather_group(
    group: Group, parts: list[Array], way: Way, scales: list[Scales] | None
) -> list[Array]:
    sizes = [part.shape[group.dim] * way.ring.size for part in parts]
    read: list[Scales | None] = [None] * len(parts) if scales is None else [*scales]

    def take(positions: Positions) -> list[Any]:
        return [None if of is None else of.at(positions) for of in read]

    def place(wholes: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        wholes = [None] * len(parts) if wholes is None else wholes
        for block, positions, taken in arrivals:
            members = [
                part if of is None else of.read(part, at)
                for part, of, at in zip(group.split(block), read, taken, strict=True)
            ]
            wholes = [
                positions.place(whole, part, group.dim, size)
                for whole, part, size in zip(wholes, members, sizes, strict=True)
            ]
        return wholes

    return way.gather(group.join(parts), Use(place, take), dim=group.dim)


def _scatter_group(
    group: Group, parts: list[Array], way: Way, wide: Any, dtype: Any
) -> list[Array]:
    def take(positions: Positions) -> Array:
        return group.join([positions.cut(part, group.dim) for part in parts])

    sums, _ = way.scatter(
        lambda block: block.astype(wide),
        take,
        dim=group.dim,
        length=parts[0].shape[group.dim] // way.ring.size,
        dtype=dtype,
    )
    return group.split(sums)


def gather_along(way: Way, x: Block, dim: int) -> Whole:
    low_bit = way.ring.low_bit(x.dtype)
    by_jax = way.derived_by_jax and low_bit is None
    return gather_blocks(_one(way, dim, by_jax, low_bit), None, [x])[0]


def scatter_along(way: Way, x: Whole, dim: int) -> Block:
    ring = way.ring
    low_bit = ring.low_bit_cotangents(x.dtype)
    by_jax = way.derived_by_jax and not (low_bit or ring.low_bit_sums(x.dtype))
    return scatter_sums(_one(way, dim, by_jax, low_bit), None, [x])[0]


def all_reduce(way: Way, x: Whole) -> Whole:
    """Sums over the devices, typed as replicated."""
    if way.derived_by_jax or not x.size:
        with jax.named_scope(way.mode):
            return lax.psum(x.astype(way.ring.wire(x.dtype)), way.ring.names).astype(x.dtype)
    for dim, size in enumerate(x.shape):
        if size % way.ring.size == 0:
            return scatter_and_gather(_one(way, dim), x)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % way.ring.size))
    return scatter_and_gather(_one(way, 0), flat)[: x.size].reshape(x.shape)


def scatter_and_gather(blocks: Blocks, x: Whole) -> Whole:
    if checks_varying(blocks.stages[0].ring.names):
        return _replicated_sum(blocks, x)
    return gather_blocks(blocks, None, scatter_sums(blocks, None, [x]))[0]


def gather_replicated(way: Way, block: Block, dim: int) -> Whole:
    """Gathers blocks of sums, typed as replicated under `check_vma=True`."""
    # Only `lax.all_gather` can be typed so.
    axes = way.ring.names
    if checks_varying(axes):
        whole: Any = lax.all_gather(block, axes, axis=dim, tiled=True, to="invarying")
        return whole
    return gather_blocks(_one(way, dim), None, [block])[0]


def _one(way: Way, dim: int, derived_by_jax: bool = False, low_bit: LowBit | None = None) -> Blocks:
    return Blocks((way,), (Group((0,), dim),), derived_by_jax, low_bit)


def _sum(blocks: Blocks, x: Whole) -> Whole:
    (block,), (way,), (group,) = scatter_sums(blocks, None, [x]), blocks.stages, blocks.groups
    return gather_replicated(way, block, group.dim)


def _sum_fwd(blocks: Blocks, x: Whole) -> tuple[Whole, None]:
    return _replicated_sum(blocks, x), None


def _sum_bwd(blocks: Blocks, _: None, ct: Whole) -> tuple[Whole]:
    # The cotangent is replicated: each device already has the gradient of its partial sum.
    return (vary_over(blocks.stages[0].ring.names, ct),)


_replicated_sum = with_derivative(_sum, _sum_fwd, _sum_bwd)


def group_leaves(
    leaves: Leaves, dims: list[int | None], scales: list[bool], *, size: int, join: bool
) -> tuple[Group, ...]:
    """Groups leaves that are cut along `dims`; None: replicated.

    Leaves `join` if they share a dtype, and differ in one dimension that is not cut.
    `scales` join only each other.
    """
    groups = _buckets(leaves, dims, scales, size)
    bucketed = {n for group in groups for n in group.members}
    # Query [d, 8, 64] and key [d, 2, 64], cut along d, travel as one array [d, 10, 64].
    left = [n for n, dim in enumerate(dims) if dim is not None and n not in bucketed]
    while left:
        first = left[0]
        x, dim = leaves[first], dims[first]
        assert dim is not None
        fitting: list[tuple[int, list[int]]] = [(0, [first])]
        for joined in range(x.ndim) if join else ():
            alike = [n for n in left if (dims[n], scales[n]) == (dim, scales[first])]
            same = [n for n in alike if _fits(leaves[n], x, joined)]
            if joined != dim:
                fitting.append((joined, same))
        joined, members = max(fitting, key=lambda fit: len(fit[1]))
        lengths = tuple(leaves[n].shape[joined] for n in members)
        exact = scales[first] or all(_is_small(leaves[n], size) for n in members)
        groups.append(Group(tuple(members), dim, joined, lengths, exact=exact))
        left = [n for n in left if n not in members]
    return tuple(groups)


def _buckets(leaves: Leaves, dims: list[int | None], scales: list[bool], size: int) -> list[Group]:
    alike: dict[Any, list[int]] = {}
    for number, (x, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is not None and x.size and _is_small(x, size) and not any(spec_of(x)):
            key = x.dtype, scales[number], jax.typeof(x).manual_axis_type.varying
            alike.setdefault(key, []).append(number)
    return [
        Group(
            tuple(members),
            dim=0,
            joined=1,
            lengths=tuple(leaves[n].size for n in members),
            flat=tuple((leaves[n].shape, dims[n] or 0) for n in members),
            exact=True,
        )
        for members in alike.values()
        if len(members) > 1
    ]


def _is_small(x: Any, size: int) -> bool:
    return x.size * bits_of(x.dtype) * size <= 8 * SMALL


def _fits(x: Any, other: Any, joined: int) -> bool:
    def rest(x: Any) -> tuple[Any, ...]:
        varying = jax.typeof(x).manual_axis_type.varying
        return x.dtype, x.ndim, x.shape[:joined], x.shape[joined + 1 :], varying

    return rest(x) == rest(other)
