"""`ragged_all_to_all`: JAX's, in blocks on CPU, with derivatives that are right."""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike
from jaxtyping import Bool, Int32, Shaped

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.checks import as_array
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.varying import vary_alike
from jaxpar.compiler import control_flow

# Of n devices, with m slices for each pair of them, slices are n m; or where they are cut, [n, m].
Operand = Shaped[Array, "rows *row"]
Output = Shaped[Array, "out_rows *row"]


class Slices(NamedTuple):
    """Which rows go where, m slices of each device in turn."""

    input_offsets: Int32[Array, " *slices"]
    send_sizes: Int32[Array, " *slices"]
    output_offsets: Int32[Array, " *slices"]  # on the device that receives
    recv_sizes: Int32[Array, " *slices"]

    def per_device(self, ring: Ring) -> Slices:
        """All of them, each as `[n, m]`."""
        return Slices(*(x.reshape(ring.size, -1) for x in self))


def swap(x: Shaped[Array, " blocks *block"], ring: Ring) -> Shaped[Array, " blocks *block"]:
    """Gives device d block d of dimension 0, and returns what all devices gave this one."""
    return lax.all_to_all(x, ring.names, 0, 0, tiled=True)


def exchange_rows(operand: Operand, output: Output, slices: Slices, ring: Ring) -> Output:
    """Returns `output` with all slices written that were sent here; it has no derivative."""
    if not operand.size or not output.size:
        return output
    if output.dtype == bool:
        as_bytes = exchange_rows(operand.astype("uint8"), output.astype("uint8"), slices, ring)
        return as_bytes.astype(bool)

    # The compiler for CPU has no such collective, and one traced program may be lowered for any
    # platform: the choice is made then.
    @custom_vmap
    def exchange(operand: Operand, output: Output, slices: Slices) -> Output:
        native = _native(ring)
        return control_flow.platform_dependent(
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
            # Batches lie one after the other in the rows of both, so that offsets move by as many.
            input_offsets=slices.input_offsets + row * operand.shape[1],
            output_offsets=slices.output_offsets + row * output.shape[1],
        )
        flat: list[Array] = [x.reshape(-1, *x.shape[2:]) for x in (operand, output)]
        # From [size, n m] to [n, size m]: for each device the slices of one batch after the other.
        together = Slices(
            *(x.reshape(size, ring.size, -1).swapaxes(0, 1).reshape(-1) for x in slices)
        )
        operand, output_rows, together = vary_alike(ring.names, *flat, together)
        return exchange_rows(operand, output_rows, together, ring).reshape(output.shape), True

    return exchange(operand, output, slices)


def _native(ring: Ring) -> Any:
    """JAX's own collective, its axes in mesh order."""
    names, order = ring.in_mesh_order()
    at = np.argsort(order)

    def native(operand: Operand, output: Output, slices: Slices) -> Output:
        if names != ring.names:
            slices = Slices(*(x[at].reshape(-1) for x in slices.per_device(ring)))
        return lax.ragged_all_to_all(operand, output, *slices, axis_name=names)

    return native


def _apart(native: Any) -> Any:
    """Keeps the layout that the TPU compiler gives an exchange from what is around it.

    It takes rows in two halves, and would otherwise gather and add them so, a copy for each.
    """

    def apart(operand: Operand, output: Output, slices: Slices) -> Output:
        return lax.optimization_barrier(native(lax.optimization_barrier(operand), output, slices))

    return apart


def _emulated(ring: Ring) -> Any:
    """All-to-alls of blocks, as many as the longest slice on the axis needs.

    A step moves one block of each of n slices, together about 1/m of the buffer. Where slices are
    alike that is one all-to-all of the buffer in all, and n of them where each device sends all of
    its rows to one.
    """

    def emulated(operand: Operand, output: Output, slices: Slices) -> Output:
        rows = min(operand.shape[0], output.shape[0])
        length = ceil(rows / slices.send_sizes.size)
        grouped = slices.per_device(ring)
        places = swap(grouped.output_offsets, ring)
        # Over the whole axis, so that its devices take the same steps; others may take fewer.
        longest = lax.pmax(jnp.max(grouped.send_sizes, axis=0), ring.names)
        steps = (longest + jnp.int32(length - 1)) // jnp.int32(length)  # [m]
        ends = jnp.cumsum(steps, dtype="int32")

        def step(i: Int32[Array, ""], output: Output) -> Output:
            number = jnp.sum(i >= ends, dtype="int32")  # of m
            first = (i - ends[number] + steps[number]) * length
            row = first + jnp.arange(length, dtype="int32")[None, :]  # of a slice
            block = jnp.take(operand, grouped.input_offsets[:, number, None] + row, 0, mode="clip")
            block = swap(block, ring)  # [n, length, *row]
            arrives = row < grouped.recv_sizes[:, number, None]
            place = jnp.where(arrives, places[:, number, None] + row, output.shape[0])
            return output.at[place].set(block, mode="drop")

        _, output = control_flow.while_loop(
            lambda carry: carry[0] < ends[-1],
            lambda carry: (carry[0] + 1, step(*carry)),
            (jnp.zeros_like(ends[-1]), output),
        )
        return output

    return emulated


@public
def ragged_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    axis: AxisLike,
) -> Array:
    """Sends each device of an axis slices of rows, of any sizes, and writes those that arrive.

    What `jax.lax.ragged_all_to_all` computes, and the same program on any platform: the native
    collective on TPU and GPU, and on CPU, where there is none, all-to-alls of blocks. Which one is
    chosen when the program is lowered, so that one export holds both (`jax.export` wants to be told
    that the native one is meant: `DisabledSafetyCheck.custom_call("ragged_all_to_all")`).

    With m slices for each pair of devices, slice `i` of the `n m` goes to device `i // m` of the
    axis, in the order of the tuple if `axis` is one, as in `lax.axis_index`.

    Args:
      operand: local `[rows, ...]`, in which slices to be sent are.
      output: local `[out_rows, ...]`, of the dtype and row shape of operand: what the result holds
        where nothing arrives.
      input_offsets: integers `[n m]`, the first row in operand of each slice.
      send_sizes: integers `[n m]`, the rows of each. None is allowed; what lies outside of operand
        or output is not defined.
      output_offsets: integers `[n m]`, the first row in the output *of the device that receives*.
      recv_sizes: integers `[n m]`, the rows that arrive, slice by slice: the `send_sizes` of the
        devices that send, `lax.all_to_all(send_sizes, axis, 0, 0, tiled=True)`.
      axis: one mesh axis, a tuple or list of them in any order, or an `Axis`.

    Slices that are sent may overlap: the gradient of a row is the sum over those that it is in.
    Slices that arrive must not.

    Returns:
      `[out_rows, ...]`, varying over `axis` and over all that arguments vary over.

    Raises:
      TypeError: offsets or sizes that are no integers; operand and output of different dtypes.
      ValueError: row shapes that differ; offsets or sizes whose length n does not divide, or
        of different lengths; an axis name that is unknown or not of the mesh; a call outside
        shard_map.

    Cost: a device sends the rows of its slices. The derivative sends as many back, and offsets;
    only where slices that are sent overlap it takes as many exchanges as there are slices. On CPU
    blocks of `rows / (n m)` rows are exchanged until the longest slice is done: about one
    all-to-all of the buffer where slices are alike, and n where one device gets everything; the
    memory is that of one buffer.

    Example:
      >>> mesh = make_mesh("ep=2", devices=jax.devices()[:2])
      >>> def exchange(x, starts, sizes, places, arriving):
      ...     return ragged_all_to_all(x, jnp.zeros(4), starts, sizes, places, arriving, "ep")
      >>> f = jaxpar.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> f(jnp.array([1.0, 2.0, 2.0, 3.0, 4.0, 0.0]), jnp.array([0, 1, 0, 1]),
      ...   jnp.array([1, 2, 1, 1]), jnp.array([0, 0, 1, 2]), jnp.array([1, 1, 2, 1]))
      Array([1., 3., 0., 0., 2., 2., 4., 0.], dtype=float32)

    Source: `jax.lax.ragged_all_to_all`, whose derivative with respect to `output` is wrong where
    slices are empty, and which the compiler for CPU refuses.
    """
    ring = bind(axis)
    operand, output = as_array("operand", operand, ""), as_array("output", output, "")
    given = (input_offsets, send_sizes, output_offsets, recv_sizes)
    named = zip(Slices._fields, given, strict=True)
    slices = _check_slices(Slices(*(as_array(name, x, "") for name, x in named)), ring)
    _check_rows(operand, output)
    operand, output, slices = vary_alike(ring.names, operand, output, slices)
    if not jnp.issubdtype(operand.dtype, jnp.inexact):
        return exchange_rows(operand, output, slices, ring)
    return _exchange(operand, output, slices, ring, operand.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _exchange(operand: Operand, output: Output, slices: Slices, ring: Ring, rows: int) -> Output:
    return exchange_rows(operand, output, slices, ring)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange_back(
    ct: Output, slices: Slices, ring: Ring, rows: int
) -> Shaped[Array, " {rows} *row"]:
    """The sum, for each of the operand's rows, of `ct` wherever `exchange_rows` put it."""
    count = slices.send_sizes.size
    slices_per_pair = count // ring.size
    back = Slices(
        input_offsets=swap(slices.output_offsets, ring),
        send_sizes=slices.recv_sizes,
        output_offsets=swap(slices.input_offsets, ring),
        recv_sizes=slices.send_sizes,
    )
    # Slices that overlap come back one by one: in a step each device gets one from one device.
    apart = lax.pmax(_overlap(slices), ring.names)
    device = jnp.arange(count, dtype="int32") // slices_per_pair
    number = jnp.arange(count, dtype="int32") % slices_per_pair

    def step(i: Int32[Array, ""], total: Operand) -> Operand:
        distance = i // slices_per_pair
        these = number == i % slices_per_pair
        to = these & (device == (ring.index() - distance) % ring.size)
        origin = these & (device == (ring.index() + distance) % ring.size)
        some = back._replace(
            send_sizes=jnp.where(apart & ~to, 0, back.send_sizes),
            recv_sizes=jnp.where(apart & ~origin, 0, back.recv_sizes),
        )
        return total + exchange_rows(ct, jnp.zeros_like(zeros), some, ring).astype(total.dtype)

    zeros = jnp.zeros((rows, *ct.shape[1:]), ct.dtype)
    start, zeros = vary_alike(ring.names, jnp.int32(0), zeros, ct, slices)[:2]
    total = zeros.astype(addition_dtype(ct.dtype))
    _, total = control_flow.while_loop(
        lambda carry: carry[0] < jnp.where(apart, count, 1),
        lambda carry: (carry[0] + 1, step(*carry)),
        (start, total),
    )
    return total.astype(ct.dtype)


def _exchange_fwd(
    operand: Operand, output: Output, slices: Slices, *how: Any
) -> tuple[Output, Slices]:
    return _exchange(operand, output, slices, *how), slices


def _exchange_bwd(
    ring: Ring, rows: int, slices: Slices, ct: Output
) -> tuple[Shaped[Array, " {rows} *row"], Output, None]:
    # What arrived replaced rows of `output`, which so have no part in the result.
    arrived = _arrived(slices, ring, ct)
    return _exchange_back(ct, slices, ring, rows), jnp.where(arrived, jnp.zeros_like(ct), ct), None


def _back_fwd(
    ct: Output, slices: Slices, ring: Ring, rows: int
) -> tuple[Shaped[Array, " {rows} *row"], Any]:
    return _exchange_back(ct, slices, ring, rows), (slices, jnp.zeros_like(ct))


def _back_bwd(
    ring: Ring, rows: int, residuals: Any, ct: Shaped[Array, " {rows} *row"]
) -> tuple[Output, None]:
    slices, zeros = residuals
    return _exchange(ct, zeros, slices, ring, rows), None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
_exchange_back.defvjp(_back_fwd, _back_bwd)


def _overlap(slices: Slices) -> Bool[Array, ""]:
    """Whether any two slices that this device sends share a row."""
    starts, sizes = slices.input_offsets, slices.send_sizes
    # Empty slices are sorted behind all others, where they are between no two of them.
    far = jnp.iinfo("int32").max
    starts, sizes = lax.sort((jnp.where(sizes > 0, starts, far), sizes), num_keys=1)
    return jnp.any(starts[1:] - starts[:-1] < sizes[:-1])


def _arrived(slices: Slices, ring: Ring, ct: Output) -> Bool[Array, " out_rows *ones"]:
    """Which rows of the output were written, with dimensions of size 1 to be compared with rows."""
    starts = swap(slices.output_offsets, ring)
    steps = jnp.zeros(ct.shape[0] + 1, "int32")
    (steps, starts, sizes) = vary_alike((), steps, starts, slices.recv_sizes)
    # Added, not set: an empty slice takes back at once what it starts, wherever that is.
    steps = steps.at[starts].add(1, mode="drop").at[starts + sizes].add(-1, mode="drop")
    arrived = jnp.cumsum(steps, dtype="int32")[:-1] > 0
    return arrived.reshape(-1, *[1] * (ct.ndim - 1))


def _check_slices(slices: Slices, ring: Ring) -> Slices:
    for argument, x in slices._asdict().items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise type_error(
                f"{argument} must be integers, got {x.dtype}{list(x.shape)}; cast them to int32"
            )
        if x.ndim != 1 or not x.size or x.size % ring.size:
            found = f": {x.size} = {x.size // ring.size} x {ring.size} + {x.size % ring.size}"
            raise value_error(
                f"{argument} has local shape {x.shape}, but needs one dimension, whose "
                f"size is that of {ring} or a multiple of it{found if x.ndim == 1 else ''}; give "
                "each device as many entries as any other, with size 0 for what is not sent"
            )
        if x.size != slices.input_offsets.size:
            raise value_error(
                f"{argument} has local shape {x.shape}, and input_offsets "
                f"{slices.input_offsets.shape}; all four describe the same slices, and need one "
                "entry for each"
            )
    return Slices(*(x.astype("int32") for x in slices))


def _check_rows(operand: Array, output: Array) -> None:
    if not operand.ndim or not output.ndim:
        which, x = ("operand", operand) if not operand.ndim else ("output", output)
        raise value_error(
            f"{which} has local shape {x.shape}, but needs a dimension 0 of rows; reshape it"
        )
    if operand.shape[1:] != output.shape[1:]:
        raise value_error(
            f"operand has local shape {operand.shape} and output {output.shape}; rows "
            f"are of shape {operand.shape[1:]} and {output.shape[1:]}, but must be alike: reshape "
            "one, or make output for the operand's rows"
        )
    if operand.dtype != output.dtype:
        raise type_error(f"operand is {operand.dtype} and output {output.dtype}; cast one of them")
