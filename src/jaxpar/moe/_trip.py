"""Rows sent to other devices, and results sent back and summed: each the other's derivative.

A carrier is an exchanged array with the rows of several leaves. Small leaves join the largest's
carrier as unsigned integers, which preserve bits of NaN, or share another if it is very large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Shaped, UInt

from jaxpar.arguments.dtypes import LowBit
from jaxpar.axis.axis import Ring
from jaxpar.axis.quantized import read_as
from jaxpar.axis.rounding import encoded, is_quantized
from jaxpar.axis.vma import vary_alike, zeros_alike
from jaxpar.collectives._ragged import Slices, exchange_rows
from jaxpar.compiler.derivatives import linear_pair
from jaxpar.compiler.unwritten_memory import unwritten
from jaxpar.moe._copies import Copies, collect, spread, where_rows

_TILE = 8 * 128  # elements of a TPU register
_LANES_OF_PAIRS = 2 * 128  # numbers of 16 bits lie in pairs
_WIDE = 8 * _LANES_OF_PAIRS  # rows of so many words or more are padded to whole pairs
_LARGE = 2**23  # bytes; passes over more take longer than the start of an exchange
_SMALL = 8  # an array of at most 1/8 of the largest's bytes joins its carrier


@dataclass(frozen=True)
class Packing:
    carriers: tuple[tuple[int, ...], ...]
    row_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


def plan_packing(leaves: Sequence[Any], rows: int) -> Packing:
    """Groups leaves into carriers; `rows` rows may travel."""
    shapes = tuple(leaf.shape[1:] for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    sizes = [_width(s, d) * _plain(d).itemsize for s, d in zip(shapes, dtypes, strict=True)]
    by_size = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i])
    if not by_size:
        return Packing((), shapes, dtypes)
    first = by_size[0]
    riders = [i for i in by_size[1:] if sizes[i] * _SMALL <= sizes[first]]
    alone = [(i,) for i in by_size[1:] if i not in riders]
    if riders and rows * sizes[first] > _LARGE:
        return Packing(((first,), *alone, tuple(riders)), shapes, dtypes)
    return Packing(((first, *riders), *alone), shapes, dtypes)


def pack(
    packing: Packing, leaves: list[Shaped[Array, "rows ..."]]
) -> list[Shaped[Array, "rows ..."]]:
    """Returns carriers, rows in blocks that suit TPUs."""

    def carrier(members: tuple[int, ...]) -> Shaped[Array, "rows ..."]:
        flat = [_flat(leaves[i]) for i in members]
        word = flat[0].dtype.itemsize
        if len(flat) == 1 and word > 1:
            return _in_blocks(flat[0])
        # Floats of a byte travel as bits too, because not every compiler sends them.
        parts = [_as_words(x, word) for x in flat]
        width = sum(part.shape[1] for part in parts)
        if width >= _WIDE and width % _LANES_OF_PAIRS:
            spare = (parts[0].shape[0], -width % _LANES_OF_PAIRS)
            parts.append(zeros_alike(spare, parts[0].dtype, parts[0]))
        words = jnp.concatenate(parts, axis=1)
        return _in_blocks(words)

    return [carrier(members) for members in packing.carriers]


def unpack(
    packing: Packing,
    carriers: list[Shaped[Array, "copies ..."]],
    rows: int,
    each: Callable[[Array], Array] = lambda x: x,
) -> list[Shaped[Array, "{rows} ..."]]:
    """Returns leaves after `each` has made `rows` rows of carriers."""
    count = len(packing.dtypes)
    flat: dict[int, Array] = {}
    for members, carrier in zip(packing.carriers, carriers, strict=True):
        word, start = carrier.dtype.itemsize, 0
        if len(members) == 1 and word > 1:
            flat[members[0]] = each(carrier)  # still in blocks: other shapes have other layouts
            continue
        carrier = lax.collapse(carrier, 1)
        for i in members:
            dtype = _plain(packing.dtypes[i])
            width = _width(packing.row_shapes[i], packing.dtypes[i])
            words = -(-width * dtype.itemsize // word)
            part = lax.slice_in_dim(carrier, start, start + words, axis=1)
            flat[i] = each(_from_words(part, dtype)[:, :width])
            start += words

    def restored(i: int) -> Array:
        shape, dtype = (rows, *packing.row_shapes[i]), packing.dtypes[i]
        if i not in flat:
            return jnp.zeros(shape, dtype)  # the leaf has no elements
        return _restored(lax.collapse(flat[i], 1), dtype).reshape(shape)

    return [restored(i) for i in range(count)]


def _in_blocks(x: Shaped[Array, "rows width"]) -> Shaped[Array, "rows *blocks"]:
    """Cuts rows into tiles, or TPUs copy all rows."""
    width = x.shape[1]
    if width % _TILE == 0:
        return x.reshape(x.shape[0], width // 128, 128)
    if width % _LANES_OF_PAIRS == 0 and x.dtype.itemsize == 2:
        return x.reshape(x.shape[0], 2, width // 2)
    return x


def _width(row_shape: tuple[int, ...], dtype: Any) -> int:
    return prod(row_shape) * (2 if _is_complex(dtype) else 1)


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _plain(dtype: Any) -> Any:
    """Returns a real dtype of whole bytes, without loss."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.dtype("uint8")
    if _is_complex(dtype):
        return jnp.finfo(dtype).dtype
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return dtype if info.bits >= 8 else jnp.dtype("int8" if info.min else "uint8")
    return dtype if jnp.finfo(dtype).bits >= 8 else jnp.dtype("bfloat16")


def _flat(x: Shaped[Array, "rows ..."]) -> Shaped[Array, "rows width"]:
    if _is_complex(x.dtype):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return x.astype(_plain(x.dtype)).reshape(x.shape[0], prod(x.shape[1:]))


def _restored(x: Shaped[Array, "rows width"], dtype: Any) -> Shaped[Array, "rows numbers"]:
    """Inverts `_flat`, except for the shape of a row."""
    if _is_complex(dtype):
        parts = x.reshape(x.shape[0], x.shape[1] // 2, 2)
        return lax.complex(parts[..., 0], parts[..., 1])
    # Unwritten memory may hold any byte, but a bool is 0 or 1.
    return x != 0 if jnp.issubdtype(dtype, jnp.bool_) else x.astype(dtype)


def _unsigned(itemsize: int) -> Any:
    return jnp.dtype(f"uint{8 * itemsize}")


def _as_words(x: Shaped[Array, "rows width"], word: int) -> UInt[Array, "rows words"]:
    """Returns rows' bits as integers of `word` bytes, padded."""
    size = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, _unsigned(min(size, word)))
    if size >= word:
        return lax.collapse(bits, 1)
    group = word // size
    bits = jnp.pad(bits, ((0, 0), (0, -x.shape[1] % group)))
    grouped = bits.reshape(x.shape[0], bits.shape[1] // group, group)
    return lax.bitcast_convert_type(grouped, _unsigned(word))


def _from_words(x: UInt[Array, "rows words"], dtype: Any) -> Shaped[Array, "rows width"]:
    """Inverts `_as_words`, padding included."""
    word, size = x.dtype.itemsize, dtype.itemsize
    if size <= word:
        bits = lax.bitcast_convert_type(x, _unsigned(size))
        return lax.bitcast_convert_type(lax.collapse(bits, 1), dtype)
    group = size // word
    return lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // group, group), dtype)


class Trip(NamedTuple):
    """The copies to send, sorted by target device."""

    copies: Copies  # its places are only of copies that arrive
    there: Slices
    back: Slices


@dataclass(frozen=True)
class Receivers:
    ring: Ring
    capacity: int
    clean: bool  # rows where nothing arrives are 0; otherwise they hold anything
    low_bit: LowBit | None = None  # the format of float rows on the way there, not back
    derived_by_jax: ClassVar[bool] = False


def send(
    trip: Trip, leaves: list[Shaped[Array, "tokens ..."]], ring: Ring, capacity: int
) -> list[Shaped[Array, "{capacity} ..."]]:
    """Returns each leaf's arriving rows, then rows of anything."""
    trip, leaves = vary_alike(ring.names, trip, leaves)
    receivers = Receivers(ring, capacity, clean=False, low_bit=ring.low_bit("float32"))
    arrived: list[Array] = _send(receivers, trip, leaves)
    return arrived


def bring_back(
    trip: Trip, leaves: list[Shaped[Array, "capacity ..."]], ring: Ring
) -> list[Shaped[Array, "tokens ..."]]:
    """Returns each leaf's sums of results, by token."""
    trip, leaves = vary_alike(ring.names, trip, leaves)
    capacity = leaves[0].shape[0] if leaves else 0
    # Rows that send nothing back have the gradient 0, which must be written.
    low_bit = ring.low_bit_cotangents("float32")
    receivers = Receivers(ring, capacity, clean=True, low_bit=low_bit)
    sums: list[Array] = _bring_back(receivers, trip, leaves)
    return sums


def _there(receivers: Receivers, trip: Trip, tree: Any) -> Any:
    sent = jax.tree.map(lambda x: encoded(receivers.low_bit, x, 0), tree)
    leaves, treedef = jax.tree.flatten(sent)
    packing = plan_packing(leaves, trip.copies.source.size)

    def exchanged(carrier: Shaped[Array, "tokens *row"]) -> Shaped[Array, "capacity *row"]:
        shape = (receivers.capacity, *carrier.shape[1:])
        carrier = spread(trip.copies, carrier, fill=False)  # now [copies, *row]
        buffer, carrier = vary_alike((), unwritten(shape, carrier.dtype), carrier)
        return exchange_rows(carrier, buffer, trip.there, receivers.ring)

    arrived = unpack(packing, [exchanged(x) for x in pack(packing, leaves)], receivers.capacity)
    arrived = jax.tree.leaves(treedef.unflatten(arrived), is_leaf=is_quantized)
    arrived = [read_as(x, x.dtype) for x in arrived]
    if receivers.clean:  # here, not before the exchange: zeros in its layout are slow on TPU
        row = jnp.arange(receivers.capacity, dtype="int32")
        valid = row < jnp.sum(trip.there.recv_sizes, dtype="int32")
        arrived = [where_rows(valid, x) for x in arrived]
    return jax.tree.unflatten(jax.tree.structure(tree), arrived)


def _home(receivers: Receivers, trip: Trip, tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    count = trip.copies.source.size
    packing = plan_packing(leaves, count)

    def exchanged(carrier: Shaped[Array, "capacity *row"]) -> Shaped[Array, "copies *row"]:
        buffer = unwritten((count, *carrier.shape[1:]), carrier.dtype)
        buffer, carrier = vary_alike((), buffer, carrier)
        return exchange_rows(carrier, buffer, trip.back, receivers.ring)

    returned = [exchanged(x) for x in pack(packing, leaves)]
    rows = trip.copies.places.shape[0]
    # A leaf that has a carrier alone is summed in blocks, before it gets its own shape.
    sums = unpack(packing, returned, rows, lambda x: collect(trip.copies, x))
    return treedef.unflatten(sums)


_send, _bring_back = linear_pair(_there, _home)
