"""The sharding of experts: axes, local shapes, and padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxpar.arguments.calls import check_among, public, type_error, value_error
from jaxpar.arguments.types import Integer
from jaxpar.axis.axis import OF_FSDP, AxisLike, Ring, bind, bind_any
from jaxpar.axis.checks import as_array, check_own, check_whole
from jaxpar.axis.checks_of_layers import check_number, check_replicated
from jaxpar.axis.padding import PaddedDim
from jaxpar.axis.trees import check_own_leaves
from jaxpar.axis.vma import vary_over, varying_axes
from jaxpar.choose.sites import AUTO, DISPATCHES
from jaxpar.layers import fsdp_gather
from jaxpar.layers._projections import SHARDED_SEQUENCE
from jaxpar.moe._experts import check_shapes
from jaxpar.moe._mlp import Experts, ExpertsLike, as_experts, expert_arrays, present

GATHERED = "gathered experts"  # names arrays that are not saved for the backward pass


@dataclass(frozen=True)
class Axes:
    """The rings over experts, hidden features, and weight shards."""

    expert: Ring
    data: tuple[str, ...]
    tensor: Ring | None
    sharded: bool  # tokens are sharded over `tensor` too
    fsdp: Ring | None

    @property
    def gathered_tensor(self) -> Ring | None:
        """Returns the ring that gathers tokens, if any."""
        return self.tensor if self.sharded else None

    @property
    def summed_tensor(self) -> Ring | None:
        """Returns the ring that sums results, if any."""
        return None if self.sharded else self.tensor

    @property
    def counted(self) -> tuple[str, ...]:
        """Returns all axes that shard tokens."""
        tensor = self.gathered_tensor
        return self.expert.names + self.data + (tensor.names if tensor else ())


def bind_axes(
    axis: AxisLike,
    data_axis: AxisLike | None,
    tp_axis: AxisLike | None,
    sequence_dim: Any,
    fsdp_axis: AxisLike | None,
    dispatch: str,
) -> Axes:
    data = bind_any(() if data_axis is None else data_axis, "data_axis", takes=())
    takes = ("wire_dtype",) if dispatch == "ragged" else ("mode", "wire_dtype")
    rings = {"axis": bind(axis, takes=takes), "data_axis": data}
    if tp_axis is not None and tp_axis not in ((), []):
        takes = ("wire_dtype",) if sequence_dim is None else ("mode", "wire_dtype")
        rings["tp_axis"] = bind(tp_axis, "tp_axis", takes=takes)
    if fsdp_axis is not None:
        rings["fsdp_axis"] = bind(fsdp_axis, "fsdp_axis", takes=OF_FSDP)
    for (key, ring), (other, following) in combinations(rings.items(), 2):
        twice = [name for name in ring.names if name in following.names]
        # The axes of fsdp may be data axes too, because they often shard tokens.
        if twice and (key, other) != ("data_axis", "fsdp_axis"):
            raise value_error(
                f"{key} and {other} both have the axis {twice[0]!r}; each "
                "divides something else, so name different axes"
            )
    if sequence_dim is not None:
        check_whole("sequence_dim", sequence_dim)
    tensor, fsdp = rings.get("tp_axis"), rings.get("fsdp_axis")
    return Axes(rings["axis"], data.names, tensor, sequence_dim is not None, fsdp)


def check_own_rows(tokens: Array, axes: Axes) -> None:
    check_rows(tokens)
    check_own("tokens", tokens, axes.expert, "rows")
    if axes.data:
        remedy = "shard them in in_specs, or leave that axis out of data_axis"
        check_own("tokens", tokens, axes.expert.over(axes.data), "rows", remedy)
    if axes.gathered_tensor is not None:
        check_own("tokens", tokens, axes.gathered_tensor, "rows", SHARDED_SEQUENCE)
    if axes.summed_tensor is not None:
        check_replicated("tokens", tokens, axes.summed_tensor)


def check_rows(tokens: Array) -> None:
    if tokens.ndim < 2:
        raise value_error(
            f"tokens must be [..., d], got local shape {tokens.shape}; give a single "
            "token as tokens[None]"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.floating):
        raise type_error(f"tokens must be floats, got {tokens.dtype}; embed them first")


def as_router(
    argument: str, router: Any, tokens: Array, columns: int | None = None
) -> Float[Array, "d columns"]:
    """Returns a matrix of so many columns; None: a column for each expert."""
    check_rows(tokens)
    w, d = as_array(argument, router), tokens.shape[-1]
    if w.ndim != 2 or w.shape[0] != d or w.shape[1] != (columns or w.shape[1] or 1):
        of = "a column for each expert of all devices" if columns is None else "one column"
        raise value_error(
            f"{argument} has local shape {w.shape}, but must be [d, {columns or 'E'}] = "
            f"[{d}, {columns or 'E'}] for tokens of local shape {tokens.shape}: a row for each "
            f"feature, {of}"
        )
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise type_error(f"{argument} must be floats, got {w.dtype}; cast it")
    return w


def check_experts(
    tokens: Array,
    known: int,
    experts: Experts,
    shared: Experts | None,
    gate: Array | None,
    axes: Axes,
) -> None:
    ring = axes.expert
    share = -(-known // ring.size)
    for name, w in present(experts).items():
        rank = 2 if name.endswith("bias") else 3
        if w.ndim != rank or w.shape[0] != share:
            raise value_error(
                f"experts.{name} has local shape {w.shape}, but needs {rank} "
                f"dimensions, the first of {share}: {known} experts of the routing over "
                f"{ring} are ceil({known} / {ring.size}) = {share} a device; append missing ones "
                f"with pad_experts(experts, {ring.size}), and shard along the first dimension"
            )
        check_own(f"experts.{name}", w, ring, "experts")
    if gate is not None and shared is None:
        raise value_error(
            f"shared_gate of local shape {gate.shape} is given without shared, whose results it "
            "scales; give both or neither"
        )
    for name, w in present(shared).items():
        rank = 1 if name.endswith("bias") else 2
        if w.ndim != rank:
            raise value_error(
                f"shared.{name} has local shape {w.shape}, but must have {rank} "
                "dimensions; shared experts are one wider expert: join them along their hidden "
                "features"
            )
    for kind, tree in (("experts", experts), ("shared", shared)):
        for name, w in present(tree).items():
            if axes.tensor is not None and name != "down_bias":
                remedy = "shard its hidden features over tp_axis"
                check_own(f"{kind}.{name}", w, axes.tensor, "features", remedy)
            over = ring if axes.fsdp is None else axes.fsdp
            if over.gathered_as(w.dtype) != tokens.dtype:
                raise type_error(
                    f"tokens are {tokens.dtype}{list(tokens.shape)} and {kind}.{name} "
                    f"{over.describe_shard(w)}; cast one of them with .astype"
                )


def check_options(
    tokens: int, dispatch: Any, chunks: Any, capacity: Any, buffer_factor: Any
) -> tuple[int, int | None, float | None]:
    check_among("dispatch", dispatch, (*DISPATCHES, AUTO))
    chunks = check_whole("chunks", chunks, 1, max(1, tokens), "the number of local tokens")
    if capacity is not None:
        capacity = check_whole("capacity", capacity, 0)
    if buffer_factor is not None:
        finite = "None is for buffers that hold the worst case"
        buffer_factor = check_number("buffer_factor", buffer_factor, finite=finite)
    return chunks, capacity, buffer_factor


def fsdp_dims(experts: Experts, dim: Any) -> Experts:
    """Returns gathered dimensions. `dim` counts the experts' dimension."""
    if dim not in (1, 2):
        raise value_error(f"fsdp_dim={dim!r} must be 1 or 2, of matrices [e, d, f]")
    matrix = dim - 3

    def of(name: str, w: Array | None) -> int | None:
        return None if w is None else w.ndim - 1 if name.endswith("bias") else w.ndim + matrix

    return Experts(**{name: of(name, w) for name, w in experts._asdict().items()})  # type: ignore


def gather_whole(
    axes: Axes, rows: Float[Array, "tokens d"], experts: Experts, kind: str, dim: int
) -> Experts:
    """Gathers weights, and checks that they fit rows."""
    if axes.fsdp is not None:
        dims = fsdp_dims(experts, dim)
        check_own_leaves(kind, experts, axes.fsdp, "a shard")
        experts = fsdp_gather(experts, axes.fsdp, dim=dims)
        # Weights are named last, after the cast that their uses need. A result after the name would
        # be saved.
        experts = vary_over(varying_axes(rows, experts), experts)
        experts = jax.tree.map(lambda w: checkpoint_name(w, GATHERED), experts)
    check_shapes(experts, kind)
    if experts.up.shape[-2] != rows.shape[1]:
        raise value_error(
            f"{kind}.up has local shape {experts.up.shape} (gathered over fsdp_axis), but must "
            f"end in [d, f] with d = {rows.shape[1]}, the width of the tokens"
        )
    return experts


def bias_once(ring: Ring, experts: Experts) -> Experts:
    """Leaves the last bias to one device, because results are summed."""
    if experts.down_bias is None:
        return experts
    (bias,) = vary_over(ring.names, (experts.down_bias,))
    once = jnp.where(ring.index() == 0, bias, jnp.zeros_like(bias))
    return experts._replace(down_bias=once)


@public
def pad_experts(experts: ExpertsLike, shards: Integer) -> Experts:
    """Appends experts of zeros, until `shards` divides their number.

    Args:
      experts: global `Experts`, or a mapping with the same keys.
      shards: devices that will shard the experts.

    Returns:
      `Experts`, unchanged if `shards` divides their number.

    Raises:
      ValueError: shapes do not fit, or `shards` is below 1.

    Example:
      >>> numbers = jnp.arange(1.0, 7.0)[:, None, None]
      >>> experts = Experts(up=numbers + jnp.zeros((4, 6)), down=numbers + jnp.zeros((6, 4)))
      >>> pad_experts(experts, 4).up[:, 0, 0].tolist()
      [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]
    """
    unpadded = as_experts(experts)
    experts = expert_arrays(unpadded)
    check_shapes(experts)
    shards = check_whole("shards", shards, 1)
    count = len(experts.up)
    blocks = PaddedDim.at_the_end(count, shards, -(-count // shards))
    if blocks.padded == count:
        return unpadded
    padded: Experts = jax.tree.map(lambda w: blocks.pad(w, 0), experts)
    return padded
