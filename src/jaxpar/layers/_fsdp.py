"""Fully sharded data parallelism (FSDP): sharded parameters, gathered for each use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import check_wire, loses_parts
from jaxpar.arguments.shapes import with_rank
from jaxpar.arguments.types import Integer, Tree, TreeDim
from jaxpar.axis.axis import OF_FSDP, OPTIONS, AxisLike, Ring, bind
from jaxpar.axis.checks import as_array, check_dim, check_own
from jaxpar.axis.quantized import MaybeQuantized, as_operand
from jaxpar.axis.rounding import scales_among
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import checks_varying, vary_over, vary_wide, varying_axes
from jaxpar.choose.problem import Problem
from jaxpar.choose.stages import choose_stages
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import matmul_labels
from jaxpar.ring.blocks import Blocks, Group, gather_blocks, group_leaves, scatter_sums

Leaves = list[Any]  # arrays

OR_WHOLE = "shard it in in_specs, or pass dim=None if it is not sharded"


@dataclass(frozen=True)
class Shards(Blocks):
    """A sharding of leaves; `dims` is None if unsharded."""

    dims: tuple[int | None, ...] = ()


def gather_shards(shards: Shards, leaves: Leaves) -> Leaves:
    """Returns the full leaves. None stays None."""
    return gather_blocks(shards, None, leaves)


def scatter_gradients(shards: Shards, gradients: Leaves) -> Leaves:
    """Returns shards of summed gradients. None stays None."""
    return scatter_sums(shards, None, gradients)


def bind_shards(leaves: list[Any], dims: list[Any], ring: Ring, scales: list[bool]) -> Shards:
    """Binds leaves' sharding. `scales` marks quantized values' scales."""
    from jaxpar.axis.scale_blocks import are_whole

    counted: list[int | None] = []
    for x, dim, of_values in zip(leaves, dims, scales, strict=True):
        at = None if dim is None else check_dim("dim", dim, x.shape)
        counted.append(None if of_values and at is not None and are_whole(x, at, ring) else at)
        if dim is not None and jnp.issubdtype(x.dtype, jnp.inexact):
            check_wire(ring.wire_dtype, x.dtype)
    cut = [x for x, dim in zip(leaves, counted, strict=True) if dim is not None]
    shapes, what = tuple(x.shape for x in cut), " and ".join(sorted({str(x.dtype) for x in cut}))
    stages = choose_stages(Problem("weights", ring, shapes, what=what))
    join = all(way.relays for way in stages)
    groups = group_leaves(leaves, counted, scales, size=ring.size, join=join)
    groups = tuple(
        group if scales[group.members[0]] else _in_dtypes(group, leaves, ring) for group in groups
    )
    return Shards(stages, groups, low_bit=ring.low_bit("float32"), dims=tuple(counted))


def _in_dtypes(group: Group, leaves: list[Any], ring: Ring) -> Group:
    dtype = leaves[group.members[0]].dtype
    return replace(group, dtypes=(dtype, ring.gathered_as(dtype)))


_WHOLE = object()


def broadcast_dim(dim: Any, tree: Any) -> list[Any]:
    """Returns each leaf's entry of `dim`, a prefix."""
    from jaxpar.axis.scale_blocks import in_parts

    # In dim, None is an entry. In the tree, it is a place without a leaf.
    marked = jax.tree.map(
        lambda entry: _WHOLE if entry is None else entry, dim, is_leaf=lambda entry: entry is None
    )
    try:
        dims = jax.tree.broadcast(in_parts(marked), in_parts(tree))
    except ValueError as reason:
        raise value_error(
            f"dim={dim!r} is no prefix of the pytree {jax.tree.structure(tree)}: {reason}; give "
            "an integer, None, or a pytree of them that is one"
        ) from None
    return [None if entry is _WHOLE else entry for entry in jax.tree.leaves(dims)]


def vary_sharded(shards: Shards, leaves: list[Array]) -> list[Array]:
    axes = [name for way in shards.stages for name in way.ring.names]
    return [
        x if dim is None else vary_over(axes, x) for x, dim in zip(leaves, shards.dims, strict=True)
    ]


@public
def fsdp_gather(tree: Tree, axis: AxisLike, *, dim: TreeDim = 0) -> Tree:
    """Gathers sharded parameters; the derivative reduce-scatters gradients.

    Args:
      tree: pytree of local shards. A `Quantized` travels as it is, and stays `Quantized`.
      axis: mesh axes that shard the parameters, or an `Axis`. `"auto"` is naive unless
        `jaxpar.tuned` finds a faster mode. An 8-bit `wire_dtype` rounds only leaves of more than
        256 KiB (gathered size); gradients ignore this rounding.
      dim: each leaf's sharded dimension, or None if unsharded: one value for all leaves, or a
        pytree prefix. For whole scales of sharded values it is `Quantized(0, None)`.

    Returns:
      The full parameters, varying over `axis` where gathered. They are saved for the backward pass,
      unless `jax.checkpoint` gathers them again. `fsdp_linear` and `fsdp_scan` gather again by
      themselves.

    Raises:
      ValueError: a leaf to gather is typed as replicated over `axis`, or `dim` is out of range or
        no prefix.

    Cost: a device sends (n-1)/n of each full leaf, and of its gradient in the wire's dtype.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> dim, specs = {"w": 0, "b": None}, {"w": P("fsdp"), "b": P()}
      >>> gather = jaxpar.jit(jax.shard_map(lambda tree: fsdp_gather(tree, "fsdp", dim=dim),
      ...     mesh=mesh, in_specs=(specs,), out_specs=specs))
      >>> w = jnp.arange(64.0).reshape(16, 4)
      >>> whole = gather({"w": w, "b": w[0]})["w"]
      >>> np.testing.assert_array_equal(whole, jnp.tile(w, (8, 1)))  # 8 full copies
    """
    tree = as_arrays("tree", tree)
    leaves, treedef = jax.tree.flatten(tree)
    dims, ring = broadcast_dim(dim, tree), bind(axis, takes=OF_FSDP)
    shards = bind_shards(leaves, dims, ring, scales_among(tree))
    check_own_leaves("tree", tree, ring, "a shard", OR_WHOLE, dims)
    from jaxpar.axis.scale_blocks import told_blocks

    return told_blocks(tree, treedef.unflatten(gather_shards(shards, vary_sharded(shards, leaves))))


def whole_bias(
    weight: str, bias: Array, columns: int, fsdp: Ring | None
) -> Num[Array, " {columns}"]:
    if bias.shape == (columns,):
        return bias
    if fsdp is not None and checks_varying(fsdp.names):
        # A bias may be sharded over fewer axes than its weight. Types say which.
        over = tuple(name for name in fsdp.names if name in varying_axes(bias))
        if over and bias.shape == (columns // fsdp.over(over).size,):
            fsdp = fsdp.over(over)
    size = 1 if fsdp is None else fsdp.size
    if fsdp is None or columns % size or bias.shape != (columns // size,):
        further = f", or {columns // size} over {fsdp}" if size > 1 else ""
        raise value_error(
            f"the bias of {weight} has local shape {bias.shape}, but the result has "
            f"{columns} columns here; the bias needs as many{further}"
        )
    check_own(f"the bias of {weight}", bias, fsdp, "a shard")
    return fsdp_gather(bias, fsdp)


def add_bias(
    y: Num[Array, "*tokens columns"], bias: Num[Array, " columns"]
) -> Num[Array, "*tokens columns"]:
    """Adds a bias; its gradient is summed at least in float32."""
    if loses_parts(bias.dtype, y.dtype):
        raise type_error(f"the bias is {bias.dtype}, but the result {y.dtype}; cast one of them")
    wide = vary_wide(varying_axes(y), bias.astype(y.dtype))
    return (y.astype(wide.dtype) + with_rank(y.ndim, wide)).astype(y.dtype)


@public
def fsdp_linear(
    x: Array,
    w: MaybeQuantized,
    axis: AxisLike,
    *,
    bias: Array | None = None,
    dim: Integer = 0,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes `x @ all_gather(w) + bias`, block by block as w arrives.

    Args:
      x: local `[..., k]`.
      w: local `[k/n, m]` (`dim=0`) or `[k, m/n]` (`dim=1`), or a `Quantized`. Its dtype, or the
        `gather_dtype`, must be x's dtype.
      axis: mesh axes that shard w, or an `Axis` with a mode and `wire_dtype` as in
        `all_gather_matmul`.
      bias: local `[m]`, replicated over `axis`, or `[m/n]`, sharded.
      dim: the sharded dimension of w.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      Local `[..., m]`, varying over `axis` and the operands' axes.

    Raises:
      TypeError: dtypes differ.
      ValueError: w is typed as replicated over `axis`, or ranks or sizes do not fit.

    Cost: a device sends (n-1)/n of the full weight in each pass, and of its gradient in the wire's
    dtype. `keep_gathered=True` of the `Axis` saves the weight instead of gathering it again. In
    ring modes transfers overlap with matmuls, and the full weight exists only if saved.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w, b: fsdp_linear(x, w, "fsdp", bias=b),
      ...     mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), P("fsdp")), out_specs=P("fsdp")))
      >>> x, w = jnp.arange(128.0).reshape(8, 16), jnp.arange(384.0).reshape(16, 24)
      >>> np.testing.assert_array_equal(f(x, w, w[1]), x @ w + w[1])

    Source: Rajbhandari et al., "ZeRO" (2020), stage 3.
    """
    x, weight = as_array("x", x), as_operand("w", w)
    labels = matmul_labels(x, weight)
    label = labels.rhs[check_dim("dim", dim, weight.shape)]
    call = _einsum.make_call(labels, bind(axis, takes=OPTIONS), preferred_element_type, precision)
    call = replace(call, regather=True, names=("x", "w"))
    (y,) = _einsum.gather(call, "rhs", label, x, (weight,))
    if bias is None:
        return y
    bias = as_array("the bias of w", bias)
    return add_bias(y, whole_bias("w", bias, y.shape[-1], call.ring))
