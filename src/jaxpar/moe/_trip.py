"""Rows sent to other devices, and what comes back summed: each is the derivative of the other.

Of each array only the rows travel that somebody reads, and an array of what is not differentiated
beside others costs nothing on the way back.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar._axis import Ring
from jaxpar._unwritten import unwritten
from jaxpar._varying import vary_alike
from jaxpar.collectives._ragged_exchange import Slices, exchange_rows
from jaxpar.moe._copies import Copies, collect, spread
from jaxpar.moe._packing import pack, plan_packing, unpack

Leaves = tuple[Array, ...]


class Trip(NamedTuple):
    """The copies that are sent, sorted by the device that gets them, and their ways."""

    copies: Copies  # its places are of copies that arrive
    there: Slices
    back: Slices


def send(trip: Trip, leaves: list[Array], ring: Ring, capacity: int) -> list[Array]:
    """Returns `[capacity, ...]` of each leaf, `[t, ...]`: what arrives, then rows of anything."""
    trip, leaves = vary_alike(ring.names, trip, leaves)
    return _apart(leaves, lambda *parts: _send(*parts, trip, ring, capacity, False))


def bring_back(trip: Trip, leaves: list[Array], ring: Ring) -> list[Array]:
    """Returns `[t, ...]` of each leaf, `[capacity, ...]`: the sums of what comes back."""
    trip, leaves = vary_alike(ring.names, trip, leaves)
    capacity = leaves[0].shape[0] if leaves else 0
    return _apart(leaves, lambda *parts: _bring_back(*parts, trip, ring, capacity))


def _apart(leaves: list[Array], function: Any) -> list[Array]:
    """Calls a function with the leaves that have derivatives, and with the others."""
    has = [bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) for leaf in leaves]
    parts = [tuple(x for x, h in zip(leaves, has, strict=True) if h is w) for w in (True, False)]
    floats, others = (iter(part) for part in function(*parts))
    return [next(floats if h else others) for h in has]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _send(
    floats: Leaves, others: Leaves, trip: Trip, ring: Ring, capacity: int, clean: bool
) -> tuple[Leaves, Leaves]:
    leaves = [*floats, *others]
    packing = plan_packing(leaves, trip.copies.source.size)

    def exchanged(carrier: Array) -> Array:
        shape = (capacity, *carrier.shape[1:])
        carrier = spread(trip.copies, carrier, fill=False)  # [t, ...] to [copies, ...]
        buffer, carrier = vary_alike((), unwritten(shape, carrier.dtype), carrier)
        return exchange_rows(carrier, buffer, trip.there, ring)

    arrived = unpack(packing, [exchanged(x) for x in pack(packing, leaves)], capacity)
    if clean:  # here, not before the exchange: zeros in its layout are slow to write on TPU
        row = jnp.arange(capacity, dtype="int32")
        valid = row < jnp.sum(trip.there.recv_sizes, dtype="int32")
        arrived = [_where_valid(valid, x) for x in arrived]
    return _split(arrived, len(floats))


def _where_valid(valid: Array, x: Array) -> Array:
    """`x`, `[rows, ...]`, and 0 in rows that are not valid."""
    return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _bring_back(
    floats: Leaves, others: Leaves, trip: Trip, ring: Ring, capacity: int
) -> tuple[Leaves, Leaves]:
    leaves = [*floats, *others]
    count = trip.copies.source.size
    packing = plan_packing(leaves, count)

    def exchanged(carrier: Array) -> Array:
        buffer = unwritten((count, *carrier.shape[1:]), carrier.dtype)
        buffer, carrier = vary_alike((), buffer, carrier)
        return exchange_rows(carrier, buffer, trip.back, ring)

    returned = [exchanged(x) for x in pack(packing, leaves)]
    rows = trip.copies.places.shape[0]
    sums = unpack(packing, returned, rows, lambda x: collect(trip.copies, x))
    return _split(sums, len(floats))


def _split(leaves: list[Array], floats: int) -> tuple[Leaves, Leaves]:
    return tuple(leaves[:floats]), tuple(leaves[floats:])


def _send_fwd(floats: Leaves, others: Leaves, trip: Trip, *how: Any) -> tuple[Any, Trip]:
    return _send(floats, others, trip, *how), trip


def _send_bwd(ring: Ring, capacity: int, clean: bool, trip: Trip, cts: Any) -> Any:
    sums: Any = _bring_back(cts[0], (), trip, ring, capacity)
    return sums[0], None, None


def _back_fwd(floats: Leaves, others: Leaves, trip: Trip, *how: Any) -> tuple[Any, Trip]:
    return _bring_back(floats, others, trip, *how), trip


def _back_bwd(ring: Ring, capacity: int, trip: Trip, cts: Any) -> Any:
    # Rows that nothing was brought back from have the gradient 0, which is written.
    copies: Any = _send(cts[0], (), trip, ring, capacity, True)
    return copies[0], None, None


_send.defvjp(_send_fwd, _send_bwd)
_bring_back.defvjp(_back_fwd, _back_bwd)
