"""`ragged_all_to_all`: JAX's collective, also on CPU, with correct derivatives."""

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
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import as_array
from jaxpar.axis.vma import vary_alike
from jaxpar.compiler import control_flow

# With n devices and m slices for each pair, arrays of slices have shape [n m] or [n, m].
Operand = Shaped[Array, "rows *row"]
Output = Shaped[Array, "out_rows *row"]


class Slices(NamedTuple):
    """The rows that are sent and received, m slices for each device."""

    input_offsets: Int32[Array, " *slices"]
    send_sizes: Int32[Array, " *slices"]
    output_offsets: Int32[Array, " *slices"]  # on the receiving device
    recv_sizes: Int32[Array, " *slices"]

    def per_device(self, ring: Ring) -> Slices:
        return Slices(*(x.reshape(ring.size, -1) for x in self))


def swap(x: Shaped[Array, " blocks *block"], ring: Ring) -> Shaped[Array, " blocks *block"]:
    """Sends block d of dimension 0 to device d."""
    return lax.all_to_all(x, ring.names, 0, 0, tiled=True)


def exchange_rows(operand: Operand, output: Output, slices: Slices, ring: Ring) -> Output:
    """Writes all received slices to `output`; has no derivative."""
    if not operand.size or not output.size:
        return output
    if output.dtype == bool:
        as_bytes = exchange_rows(operand.astype("uint8"), output.astype("uint8"), slices, ring)
        return as_bytes.astype(bool)

    # CPUs have no such collective. One traced program may be lowered for any platform, so choose
    # during lowering.
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

    # JAX has no rule for batched operands with unbatched offsets. With batched offsets, each loop
    # would take as many steps as the longest. So turn a batch into more slices.
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
            # Batches follow each other in the rows, so offsets move by a batch's rows.
            input_offsets=slices.input_offsets + row * operand.shape[1],
            output_offsets=slices.output_offsets + row * output.shape[1],
        )
        flat: list[Array] = [x.reshape(-1, *x.shape[2:]) for x in (operand, output)]
        # From [size, n m] to [n, size m]: each device gets the slices of all batches.
        together = Slices(
            *(x.reshape(size, ring.size, -1).swapaxes(0, 1).reshape(-1) for x in slices)
        )
        operand, output_rows, together = vary_alike(ring.names, *flat, together)
        return exchange_rows(operand, output_rows, together, ring).reshape(output.shape), True

    return exchange(operand, output, slices)


def _native(ring: Ring) -> Any:
    """Returns JAX's own collective, with its axes in mesh order."""
    names, order = ring.in_mesh_order()
    at = np.argsort(order)

    def native(operand: Operand, output: Output, slices: Slices) -> Output:
        if names != ring.names:
            slices = Slices(*(x[at].reshape(-1) for x in slices.per_device(ring)))
        return lax.ragged_all_to_all(operand, output, *slices, axis_name=names)

    return native


def _apart(native: Any) -> Any:
    """Separates the TPU exchange's layout, in halves, from other work's."""

    def apart(operand: Operand, output: Output, slices: Slices) -> Output:
        return lax.optimization_barrier(native(lax.optimization_barrier(operand), output, slices))

    return apart


def _emulated(ring: Ring) -> Any:
    """Returns as many all-to-alls of blocks as the longest slice needs."""

    def emulated(operand: Operand, output: Output, slices: Slices) -> Output:
        rows = min(operand.shape[0], output.shape[0])
        length = ceil(rows / slices.send_sizes.size)
        grouped = slices.per_device(ring)
        places = swap(grouped.output_offsets, ring)
        # A maximum over the axis: its devices must take the same steps.
        longest = lax.pmax(jnp.max(grouped.send_sizes, axis=0), ring.names)
        steps = (longest + jnp.int32(length - 1)) // jnp.int32(length)  # [m]
        ends = jnp.cumsum(steps, dtype="int32")

        def step(i: Int32[Array, ""], output: Output) -> Output:
            number = jnp.sum(i >= ends, dtype="int32")  # which of m
            first = (i - ends[number] + steps[number]) * length
            row = first + jnp.arange(length, dtype="int32")[None, :]  # in a slice
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
    """Sends slices of rows, of any sizes, to devices, and writes received slices into `output`.

    Like `jax.lax.ragged_all_to_all`, but also for CPUs. With n devices and m slices for each pair,
    slice `i` goes to device `i // m` of the axis. `jax.export` needs
    `DisabledSafetyCheck.custom_call("ragged_all_to_all")`.

    Args:
      operand: local `[rows, ...]`, whose slices are sent.
      output: local `[out_rows, ...]`, of operand's dtype and row shape. Rows that receive nothing
        keep its values.
      input_offsets: integers `[n m]`, each slice's first row in operand.
      send_sizes: integers `[n m]`, the rows of each slice, 0 or more. Rows outside of operand or
        output are undefined.
      output_offsets: integers `[n m]`, each slice's first row in the output *of the receiving
        device*.
      recv_sizes: integers `[n m]`, the rows of each received slice: pass
        `lax.all_to_all(send_sizes, axis, 0, 0, tiled=True)`.
      axis: mesh axes, or an `Axis`.

    Sent slices may overlap, received slices must not. Gradients of shared rows are summed.

    Returns:
      `[out_rows, ...]`, varying over `axis` and all axes of the arguments.

    Raises:
      ValueError: row shapes or lengths differ, n does not divide a length, the axis is unknown, or
        the call is outside shard_map.

    Cost: a device sends the rows of its slices. The derivative sends as many back, and the offsets.
    For overlapping slices, the derivative makes an exchange for each slice. On CPUs, equal slices
    cost about one all-to-all of the smaller of operand and output. If one device receives all, they
    cost n.

    Example:
      >>> mesh = make_mesh("ep=2", devices=jax.devices()[:2])
      >>> def exchange(x, starts, sizes, places, arriving):
      ...     return ragged_all_to_all(x, jnp.zeros(4), starts, sizes, places, arriving, "ep")
      >>> f = jaxpar.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> f(jnp.array([1.0, 2.0, 2.0, 3.0, 4.0, 0.0]), jnp.array([0, 1, 0, 1]),
      ...   jnp.array([1, 2, 1, 1]), jnp.array([0, 0, 1, 2]), jnp.array([1, 1, 2, 1]))
      Array([1., 3., 0., 0., 2., 2., 4., 0.], dtype=float32)

    Source: `jax.lax.ragged_all_to_all`, whose derivative with respect to `output` is wrong for
    empty slices.
    """
    ring = bind(axis, takes=())
    operand, output = as_array("operand", operand, ""), as_array("output", output, "")
    arrays = (input_offsets, send_sizes, output_offsets, recv_sizes)
    named = zip(Slices._fields, arrays, strict=True)
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
    """Sums `ct` for each operand row, where `exchange_rows` put the row."""
    count = slices.send_sizes.size
    slices_per_pair = count // ring.size
    back = Slices(
        input_offsets=swap(slices.output_offsets, ring),
        send_sizes=slices.recv_sizes,
        output_offsets=swap(slices.input_offsets, ring),
        recv_sizes=slices.send_sizes,
    )
    # Overlapping slices return in turn: in a step, each device receives one slice.
    apart = lax.pmax(_overlap(slices), ring.names)
    device = jnp.arange(count, dtype="int32") // slices_per_pair
    number = jnp.arange(count, dtype="int32") % slices_per_pair

    def step(i: Int32[Array, ""], total: Operand) -> Operand:
        distance = i // slices_per_pair
        these = number == i % slices_per_pair
        to = these & (device == (ring.index() - distance) % ring.size)
        origin = these & (device == (ring.index() + distance) % ring.size)
        sending = back._replace(
            send_sizes=jnp.where(apart & ~to, 0, back.send_sizes),
            recv_sizes=jnp.where(apart & ~origin, 0, back.recv_sizes),
        )
        return total + exchange_rows(ct, jnp.zeros_like(zeros), sending, ring).astype(total.dtype)

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
    operand: Operand, output: Output, slices: Slices, *static: Any
) -> tuple[Output, Slices]:
    return _exchange(operand, output, slices, *static), slices


def _exchange_bwd(
    ring: Ring, rows: int, slices: Slices, ct: Output
) -> tuple[Shaped[Array, " {rows} *row"], Output, None]:
    # Received rows replaced rows of `output`, whose gradient is then zero.
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
    starts, sizes = slices.input_offsets, slices.send_sizes
    # Sort empty slices behind all others, so that none is between two others.
    far = jnp.iinfo("int32").max
    starts, sizes = lax.sort((jnp.where(sizes > 0, starts, far), sizes), num_keys=1)
    return jnp.any(starts[1:] - starts[:-1] < sizes[:-1])


def _arrived(slices: Slices, ring: Ring, ct: Output) -> Bool[Array, " out_rows *ones"]:
    """Returns which output rows were written, `[out_rows, 1, ...]`."""
    starts = swap(slices.output_offsets, ring)
    steps = jnp.zeros(ct.shape[0] + 1, "int32")
    (steps, starts, sizes) = vary_alike((), steps, starts, slices.recv_sizes)
    # Add, do not set: an empty slice then subtracts its own start, wherever it is.
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
            parts = f": {x.size} = {x.size // ring.size} x {ring.size} + {x.size % ring.size}"
            raise value_error(
                f"{argument} has local shape {x.shape}, but needs one dimension, whose "
                f"size is that of {ring} or a multiple of it{parts if x.ndim == 1 else ''}; give "
                "every device the same number of entries, with size 0 for slices that are not sent"
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
