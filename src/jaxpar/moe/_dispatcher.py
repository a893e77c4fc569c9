"""`RaggedDispatcher`: dispatch to devices, and combine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Bool, Int32, Shaped

from jaxpar.arguments.calls import public, readable, type_error, value_error
from jaxpar.arguments.types import Integer, Leaf, Tree
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import check_whole
from jaxpar.axis.checks_of_layers import as_integers, as_signed
from jaxpar.axis.trees import as_arrays
from jaxpar.axis.vma import vary_alike, vary_over
from jaxpar.collectives._ragged import Slices
from jaxpar.moe._copies import Copies, copies_by_key
from jaxpar.moe._routing import as_mask
from jaxpar.moe._trip import Trip, bring_back, send


@readable
@partial(
    jax.tree_util.register_dataclass,
    data_fields=("_copies", "_devices", "_sizes"),
    meta_fields=("_ring", "_shape"),
)
@dataclass(frozen=True)
class RaggedDispatcher:
    """A plan that sends rows to given devices, and sums the returned results.

    `from_target_device_ids` makes it, inside `jax.shard_map`. A device receives at most `capacity`
    rows, sorted by sending device, in the order in which that device holds them. Rows that do not
    fit are not sent: the last of the receive buffer's order.

    A plan is a pytree, usable any number of times.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> def double_elsewhere(x, to):
      ...     dispatcher = RaggedDispatcher.from_target_device_ids(to, axis="ep")
      ...     received, valid = dispatcher.dispatch(x, capacity=16)
      ...     combined, made_it = dispatcher.combine(2 * received, capacity=16)
      ...     return combined
      >>> f = jaxpar.jit(jax.shard_map(double_elsewhere, mesh=mesh, in_specs=(P("ep"), P("ep")),
      ...     out_specs=P("ep")))
      >>> f(jnp.arange(8.0), jnp.array([[0, 5]] * 7 + [[3, 3]]))  # to two devices, or one
      Array([ 0.,  4.,  8., 12., 16., 20., 24., 14.], dtype=float32)

    Source: Gale et al., "MegaBlocks" (2022), for the sort; DeepSeek-V3 (2024), for one copy a
    device.
    """

    _copies: Copies
    _devices: Leaf  # int32[tokens, k]: the device of each entry, n for none
    _sizes: Leaf  # int32[n, n]: rows from each device to each
    _ring: Ring
    _shape: tuple[int, ...]  # of the ids

    @classmethod
    @public
    def from_target_device_ids(
        cls,
        target_device_ids: ArrayLike,
        *,
        axis: AxisLike,
        mask: ArrayLike | None = None,
    ) -> RaggedDispatcher:
        """Computes the plan that sends rows to their target devices.

        Args:
          target_device_ids: integers, local `[t]` or `[t, k]`, as `lax.axis_index(axis)` counts.
            Entries outside of 0 to n-1 send nothing. A device named twice for a row gets it once.
          axis: mesh axes, or an `Axis`, of which only an 8-bit `wire_dtype` has an effect.
          mask: bool, shaped like `target_device_ids`; False sends nothing.

        Returns:
          The plan, which has no derivative.

        Raises:
          ValueError: a shape is wrong.

        Cost: an all-gather of n integers, and sorts of `t k` integers.
        """
        ring = bind(axis, takes=())
        ids = as_integers("target_device_ids", target_device_ids)
        if ids.ndim not in (1, 2):
            raise value_error(
                f"target_device_ids has local shape {ids.shape}, but needs one dimension of rows, "
                "or a second one of the devices of each; reshape it"
            )
        (ids,) = vary_alike(ring.names, as_signed(ids))
        send_it = (ids >= 0) & (ids < ring.size)
        if mask is not None:
            what = f"target_device_ids of local shape {ids.shape}"
            send_it = send_it & as_mask(mask, ids.shape, what)
        devices = jnp.where(send_it, ids, ring.size).astype("int32")
        devices = _once_each(devices.reshape(ids.shape if ids.ndim == 2 else (*ids.shape, 1)), ring)
        rows, k = devices.shape
        copies, sizes = copies_by_key(devices, ring.size, rows * min(k, ring.size))
        sizes = lax.all_gather(vary_over(ring.names, sizes), ring.names)
        return cls(copies, devices, sizes, ring, ids.shape)

    @property
    def axis(self) -> tuple[str, ...]:
        """Returns the mesh axes over which rows travel."""
        return self._ring.names

    @property
    def send_sizes(self) -> Array:
        """Returns how many rows this device has for each, `int32[n]`, whatever the capacity."""
        return self._sizes[self._ring.index()]

    @property
    def recv_sizes(self) -> Array:
        """Returns how many rows each device has for this one, `int32[n]`, whatever the capacity."""
        return self._sizes[:, self._ring.index()]

    @property
    def input_offsets(self) -> Array:
        """Returns where each device's rows begin in the send buffer, `int32[n]`."""
        return _starts(self.send_sizes, 0)

    @property
    def output_offsets(self) -> Array:
        """Returns where this device's rows begin in each receive buffer, `int32[n]`."""
        return _starts(self._sizes, 0)[self._ring.index()]

    @property
    def dropless_capacity(self) -> int:
        """Returns the capacity that cannot overflow: all devices' rows."""
        return self._ring.size * self._devices.shape[0]

    @public
    def overflow(self, capacity: Integer) -> Array:
        """Counts the rows for this device that do not fit.

        Args:
          capacity: rows of the receive buffer.

        Returns:
          int32[], varying over the axis.

        Raises:
          ValueError: `capacity` is negative.

        Cost: nothing is sent.
        """
        rows = check_whole("capacity", capacity, 0)
        return jnp.maximum(jnp.sum(self.recv_sizes, dtype="int32") - rows, 0)

    @public
    def dispatch(self, data: Tree, capacity: Integer) -> tuple[Tree, Array]:
        """Sends each row to its devices.

        Args:
          data: pytree of local arrays `[t, ...]` of any dtypes.
          capacity: rows of each receive buffer.

        Returns:
          `(received, valid)`: arrays `[capacity, ...]`, and `bool[capacity]`, True for the first
          rows, which arrived. Others hold *anything*, NaN included: mask them by `jnp.where` before
          anything that sums over rows, such as the gradient of a weight. Their cotangents are not
          read.

        Raises:
          TypeError: an array is of keys.
          ValueError: `capacity` is negative, or an array has another number of rows.

        Cost: a row goes once to each of its devices, and its cotangent back. Small arrays share one
        exchange; each large array has its own. Memory: a send buffer of at most `t min(k, n)` rows,
        and the receive buffer.

        Example:
          >>> mesh = make_mesh("ep=8")
          >>> def arrived(x, to):
          ...     plan = RaggedDispatcher.from_target_device_ids(to, axis="ep")
          ...     received, valid = plan.dispatch(x, capacity=2)
          ...     return jnp.where(valid, received, -1)[None]
          >>> f = jax.shard_map(arrived, mesh=mesh, in_specs=(P("ep"), P("ep")),
          ...     out_specs=P("ep"))
          >>> jax.jit(f)(jnp.arange(8), jnp.array([0, 3, 3, 3, 7, 7, 7, 7]))[3]
          Array([1, 2], dtype=int32)
        """
        capacity = check_whole("capacity", capacity, 0)
        leaves, treedef = jax.tree.flatten(as_arrays("data", data))
        rows = self._devices.shape[0]
        remedy = f"the ids that the plan was made from have {rows}; give one row for each of them"
        leaves = [_check_leaf(leaf, rows, remedy) for leaf in leaves]
        trip, _, arrived = self._trip(capacity)
        received = send(trip, leaves, self._ring, capacity)
        return treedef.unflatten(received), arrived

    @public
    def combine(self, data: Tree, capacity: Integer) -> tuple[Tree, Array]:
        """Sends results back, and sums them for each row.

        Args:
          data: pytree of local arrays `[capacity, ...]`: results in the order of `dispatch`.
            Invalid rows are not read.
          capacity: as in `dispatch`.

        Returns:
          `(combined, valid)`: each row's sum over the devices that received it, `[t, ...]`, 0 if
          none; and a bool array in the shape of `target_device_ids`, True where the row fitted.
          Narrow floats are summed in float32, then cast back.

        Raises:
          TypeError: an array is of bools or keys.
          ValueError: `capacity` is negative, or an array has another number of rows.

        Cost: as `dispatch`.
        """
        capacity = check_whole("capacity", capacity, 0)
        leaves, treedef = jax.tree.flatten(as_arrays("data", data))
        remedy = f"capacity={capacity}; give a result for each row that dispatch returned"
        leaves = [_check_leaf(leaf, capacity, remedy, summed=True) for leaf in leaves]
        trip, fits, _ = self._trip(capacity)
        combined = bring_back(trip, leaves, self._ring)
        return treedef.unflatten(combined), fits.reshape(self._shape)

    def _trip(
        self, capacity: int
    ) -> tuple[Trip, Bool[Array, "tokens k"], Bool[Array, " {capacity}"]]:
        """Returns transfers, entries that fit, and arriving rows."""
        me, sizes = self._ring.index(), self._sizes
        # A device gets the room that devices before it leave in a buffer. All compute the same
        # cuts, so that both sides agree.
        places = jnp.minimum(_starts(sizes, 0), capacity)
        cut = jnp.minimum(sizes, capacity - places)
        starts = _starts(sizes, 1)
        there = Slices(starts[me], cut[me], places[me], cut[:, me])
        back = Slices(places[:, me], cut[:, me], starts[:, me], cut[me])

        # Copies are sorted by device, and each device's first ones fit.
        ends = jnp.pad(starts[me] + cut[me], (0, 1))  # entries n, for no device, fit nowhere
        fits = self._copies.places < ends[self._devices]
        count = self._copies.source.size
        copies = Copies(self._copies.source, jnp.where(fits, self._copies.places, count))
        rows, arrivals = vary_alike(
            (), jnp.arange(capacity, dtype="int32"), jnp.sum(cut[:, me], dtype="int32")
        )
        return Trip(copies, there, back), fits, rows < arrivals


def _starts(sizes: Int32[Array, "*n"], axis: int) -> Int32[Array, "*n"]:
    return jnp.cumsum(sizes, axis, dtype="int32") - sizes


def _once_each(devices: Int32[Array, "tokens k"], ring: Ring) -> Int32[Array, "tokens k"]:
    """Replaces repeated devices by n, for none."""
    k = devices.shape[1]
    left = np.tri(k, k=-1, dtype=bool)[None]
    # [tokens, k, k]: whether an entry names the same device as another to its left.
    again = jnp.any((devices[:, :, None] == devices[:, None, :]) & left, axis=2)
    return jnp.where(again, ring.size, devices)


def _check_leaf(
    x: Shaped[Array, " ..."], rows: int, remedy: str, *, summed: bool = False
) -> Shaped[Array, "{rows} ..."]:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise type_error(
            f"data has an array of {x.dtype}, which cannot travel; send jax.random.key_data of it"
        )
    if not x.ndim or x.shape[0] != rows:
        raise value_error(
            f"data has an array of local shape {x.shape}, with "
            f"{x.shape[0] if x.ndim else 'no'} rows, but {remedy}"
        )
    if summed and x.dtype == jnp.bool_:
        raise type_error(
            f"data has an array of bool{list(x.shape)}, which has no sum; cast it to int32"
        )
    return x
