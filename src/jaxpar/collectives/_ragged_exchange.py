"""Slices of rows that change devices: natively where that exists, in blocks on CPU."""

from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from jaxpar._axis import Ring, ring_positions
from jaxpar._varying import vary_alike


class Slices(NamedTuple):
    """Which rows go where: int32[n m], for m slices a pair of devices, m of each device in turn."""

    input_offsets: Array
    send_sizes: Array
    output_offsets: Array  # on the device that receives
    recv_sizes: Array

    def per_device(self, ring: Ring) -> "Slices":
        """All as `[n, m]`."""
        return Slices(*(x.reshape(ring.size, -1) for x in self))


def swap(x: Array, ring: Ring) -> Array:
    """Gives device d block d of dimension 0, and returns what all devices gave this one."""
    return lax.all_to_all(x, ring.names, 0, 0, tiled=True)


def exchange_rows(operand: Array, output: Array, slices: Slices, ring: Ring) -> Array:
    """Returns `output` with all slices written that were sent here; it has no derivative."""
    if not operand.size or not output.size:
        return output
    if output.dtype == bool:
        as_bytes = exchange_rows(operand.astype("uint8"), output.astype("uint8"), slices, ring)
        return as_bytes.astype(bool)

    # The compiler for CPU has no such collective, and one traced program may be lowered for any
    # platform: the choice is made then.
    @custom_vmap
    def exchange(operand: Array, output: Array, slices: Slices) -> Array:
        native = _native(ring)
        return lax.platform_dependent(
            *(operand, output, slices),
            tpu=_apart(native),
            cuda=native,
            rocm=native,
            default=_emulated(ring),
        )

    # JAX has no rule for operands with a batch and offsets without, and where offsets have one a
    # loop would be run as often as its longest member: a batch is more slices instead.
    @exchange.def_vmap
    def exchange_batch(
        size: int, batched: Any, operand: Array, output: Array, slices: Slices
    ) -> tuple[Array, bool]:
        operand, output, slices = jax.tree.map(
            lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)),
            (operand, output, slices),
            tuple(batched),
        )
        row = jnp.arange(size, dtype="int32")[:, None]
        slices = slices._replace(
            input_offsets=slices.input_offsets + row * operand.shape[1],
            output_offsets=slices.output_offsets + row * output.shape[1],
        )
        flat: list[Array] = [x.reshape(-1, *x.shape[2:]) for x in (operand, output)]
        together = Slices(
            *(x.reshape(size, ring.size, -1).swapaxes(0, 1).reshape(-1) for x in slices)
        )
        operand, output_rows, together = vary_alike(ring.names, *flat, together)
        return exchange_rows(operand, output_rows, together, ring).reshape(output.shape), True

    return exchange(operand, output, slices)


def _native(ring: Ring) -> Any:
    """JAX's own collective, its axes in mesh order: there is only one reading of that order."""
    names, at = ring.names, np.arange(ring.size)
    if len(names) > 1:
        mesh = jax.sharding.get_abstract_mesh()
        names = tuple(name for name in mesh.axis_names if name in ring.names)
        at = np.argsort(ring_positions(mesh, ring.names))

    def native(operand: Array, output: Array, slices: Slices) -> Array:
        if names != ring.names:
            slices = Slices(*(x[at].reshape(-1) for x in slices.per_device(ring)))
        return lax.ragged_all_to_all(operand, output, *slices, axis_name=names)

    return native


def _apart(native: Any) -> Any:
    """Keeps the layout that the TPU compiler gives an exchange from what is around it.

    It takes rows in two halves, and would otherwise gather and add them so, a copy for each.
    """

    def apart(operand: Array, output: Array, slices: Slices) -> Array:
        return lax.optimization_barrier(native(lax.optimization_barrier(operand), output, slices))

    return apart


def _emulated(ring: Ring) -> Any:
    """All-to-alls of blocks, as many as the longest slice on the axis needs.

    A step moves one block of each of n slices, together about 1/m of the buffer. Where slices are
    alike that is one all-to-all of the buffer in all, and n of them where each device sends all of
    its rows to one.
    """

    def emulated(operand: Array, output: Array, slices: Slices) -> Array:
        rows = min(operand.shape[0], output.shape[0])
        length = ceil(rows / slices.send_sizes.size)
        grouped = slices.per_device(ring)
        places = swap(grouped.output_offsets, ring)
        # Over the whole axis, so that its devices take the same steps; others may take fewer.
        longest = lax.pmax(jnp.max(grouped.send_sizes, axis=0), ring.names)
        steps = (longest + jnp.int32(length - 1)) // jnp.int32(length)  # [m]
        ends = jnp.cumsum(steps, dtype="int32")

        def step(i: Array, output: Array) -> Array:
            number = jnp.sum(i >= ends, dtype="int32")  # of m
            first = (i - ends[number] + steps[number]) * length
            row = first + jnp.arange(length, dtype="int32")  # of a slice
            block = jnp.take(operand, grouped.input_offsets[:, number, None] + row, 0, mode="clip")
            block = swap(block, ring)  # [n, length, ...]
            arrives = row < grouped.recv_sizes[:, number, None]
            place = jnp.where(arrives, places[:, number, None] + row, output.shape[0])
            return output.at[place].set(block, mode="drop")

        _, output = lax.while_loop(
            lambda carry: carry[0] < ends[-1],
            lambda carry: (carry[0] + 1, step(*carry)),
            (jnp.zeros_like(ends[-1]), output),
        )
        return output

    return emulated
