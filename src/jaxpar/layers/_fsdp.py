"""Fully sharded data parallelism: shards of parameters, gathered where they are used."""

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
from jaxpar.arguments.checks import as_array, check_dim, check_own
from jaxpar.arguments.dtypes import check_wire, loses_parts
from jaxpar.arguments.shapes import with_rank
from jaxpar.arguments.trees import as_arrays, check_own_leaves
from jaxpar.arguments.types import Integer, Tree, TreeDim
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.quantized import MaybeQuantized, as_operand
from jaxpar.axis.rounding import scales_among
from jaxpar.axis.varying import checks_varying, vary_over, vary_wide, varying_axes
from jaxpar.choose.problem import Problem
from jaxpar.choose.stages import choose_stages
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import matmul_labels
from jaxpar.ring.blocks import Blocks, Group, gather_blocks, group_leaves, scatter_sums

Leaves = list[Any]  # arrays

OR_WHOLE = "shard it in in_specs, or say that it is whole by dim=None"


@dataclass(frozen=True)
class Shards(Blocks):
    """How the leaves of a pytree are sharded over one or several mesh axes.

    Attributes:
      dims: for each leaf the dimension along which it is cut, None for a leaf that is whole.
    """

    dims: tuple[int | None, ...] = ()


def gather_shards(shards: Shards, leaves: Leaves) -> Leaves:
    """Returns the whole leaves; None stays None."""
    return gather_blocks(shards, None, leaves)


def scatter_gradients(shards: Shards, gradients: Leaves) -> Leaves:
    """Returns the shards of the sums over the devices of the gradients of whole leaves.

    None stands for those of a leaf of integers, which has none.
    """
    return scatter_sums(shards, None, gradients)


def bind_shards(
    leaves: list[Any], dims: list[Any], ring: Ring, scales: list[bool] | None = None
) -> Shards:
    """Checks the arguments that describe how `leaves` are sharded; a dim counts within its leaf.

    `scales` tells which leaves are those of quantized values; None: none is.
    """
    counted: list[int | None] = []
    for x, dim in zip(leaves, dims, strict=True):
        counted.append(None if dim is None else check_dim("dim", dim, x.shape))
        if dim is not None and jnp.issubdtype(x.dtype, jnp.inexact):
            check_wire(ring.wire_dtype, x.dtype)
    cut = [x for x, dim in zip(leaves, counted, strict=True) if dim is not None]
    shapes, what = tuple(x.shape for x in cut), " and ".join(sorted({str(x.dtype) for x in cut}))
    stages = choose_stages(Problem("weights", ring, shapes, what=what))
    join = all(way.relays for way in stages)
    scales = [False] * len(leaves) if scales is None else scales
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
    """Returns the entry for each leaf of `tree` in `dim`: an int, None, or a prefix of those."""
    # None is an entry of dim, but in the tree it is a place without a leaf.
    marked = jax.tree.map(
        lambda entry: _WHOLE if entry is None else entry, dim, is_leaf=lambda entry: entry is None
    )
    try:
        dims = jax.tree.broadcast(marked, tree)
    except ValueError as reason:
        raise value_error(
            f"dim={dim!r} is no prefix of the pytree {jax.tree.structure(tree)}: {reason}; give "
            "an integer, None, or a pytree of them that is one"
        ) from None
    return [None if entry is _WHOLE else entry for entry in jax.tree.leaves(dims)]


def vary_sharded(shards: Shards, leaves: list[Array]) -> list[Array]:
    """Types the leaves that are cut as varying over the axes that they are cut over."""
    axes = [name for way in shards.stages for name in way.ring.names]
    return [
        x if dim is None else vary_over(axes, x) for x, dim in zip(leaves, shards.dims, strict=True)
    ]


@public
def fsdp_gather(tree: Tree, axis: AxisLike, *, dim: TreeDim = 0) -> Tree:
    """All-gathers sharded parameters; the derivative reduce-scatters their gradients.

    Args:
      tree: pytree of local shards.
      axis: mesh axes, over which they are sharded: a name, a tuple or list of them in any order, or
        an `Axis`, which says how data travel. Its mode is `"naive"` (`lax.all_gather`),
        `"unidirectional"` or `"bidirectional"` (rings, over one mesh axis of several after the
        other), `"multi-ring"` (over all of them at once), or `"auto"`: rings on a TPU whose
        compiler waits for an all-gather, which it does without the options of
        `jaxpar.compiler_options`, as long as they are short enough to be unrolled; naive elsewhere.
        Its `wire_dtype` is that in which sums of gradients travel; None: their own. An 8-bit one is
        for the gather: leaves of 256 KiB and more travel with a scale a row, rounded once, and
        their gradients are as if they were not rounded. With `gather_dtype="bfloat16"` float32
        leaves travel and arrive in bfloat16. Their gradients, bfloat16 on each device, are summed
        and returned in float32.
      dim: the dimension along which a leaf is sharded, None for a leaf that is whole; one for all
        leaves, or a pytree of them that is a prefix of `tree`.

    A `Quantized` in the tree, which is two leaves, stays one: its values travel as they are.

    Returns:
      The whole parameters, varying over `axis` where they were gathered. Autodiff keeps them for
      the backward pass: gather and use them within `jax.checkpoint`, or use `fsdp_linear` or
      `fsdp_scan`, which gather again.

    Raises:
      TypeError: an option or wire dtype of the wrong type.
      ValueError: a leaf to gather that is typed as replicated over `axis`; a dim out of range or no
        prefix, an unknown axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of each whole leaf forward, and as much of its gradient, in the
    wire's dtype, backward.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> dim, specs = {"w": 0, "b": None}, {"w": P("fsdp"), "b": P()}
      >>> gather = jaxpar.jit(jax.shard_map(lambda tree: fsdp_gather(tree, "fsdp", dim=dim),
      ...     mesh=mesh, in_specs=(specs,), out_specs=specs))
      >>> gather({"w": jnp.ones((16, 4)), "b": jnp.ones(4)})["w"].shape  # 8 wholes
      (128, 4)

    Source: as `fsdp_linear`.
    """
    tree = as_arrays("tree", tree)
    leaves, treedef = jax.tree.flatten(tree)
    dims, ring = broadcast_dim(dim, tree), bind(axis, gathers=True)
    shards = bind_shards(leaves, dims, ring, scales_among(tree))
    check_own_leaves("tree", tree, ring, "a shard", OR_WHOLE, dims)
    return treedef.unflatten(gather_shards(shards, vary_sharded(shards, leaves)))


def whole_bias(
    weight: str, bias: Array, columns: int, fsdp: Ring | None
) -> Num[Array, " {columns}"]:
    """Returns the whole bias of a weight, gathered over `fsdp` if it is sharded over it."""
    if bias.shape == (columns,):
        return bias
    if fsdp is not None and checks_varying(fsdp.names):
        # It may be sharded over fewer axes than its weight is: types say which.
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
    """Returns y + bias in the dtype of y; the gradient of the bias is summed in that of sums."""
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
    """Computes `x @ all_gather(w) + bias`, the weight's blocks arriving while it multiplies.

    Args:
      x: local `[..., k]`, this device's share of the batch.
      w: local `[k/n, m]` (`dim=0`) or `[k, m/n]` (`dim=1`), or a `Quantized` one. After a cast to
        the `gather_dtype` of `axis`, if any, it has the dtype of x.
      axis: mesh axes, over which weights are sharded: a name, a tuple or list of them in any order,
        or an `Axis`, which says how data travel: its mode as in `all_gather_matmul`, and of a
        sharded bias as in `fsdp_gather`; its `wire_dtype` for the sums of the weight's gradient, or
        of 8 bits for the weight itself, as in `all_gather_matmul`; None: their own. With a
        `gather_dtype` the weight's gradient is summed, and returned, in the dtype of `w`.
      bias: local `[m]`, replicated over `axis`, or `[m/n]`, sharded over it; its shape says which.
      dim: the dimension along which `w` is sharded.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      Local `[..., m]`, varying over `axis` and over all that the operands vary over.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: a weight that is typed as replicated over `axis`; wrong ranks or sizes, an unknown
        axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of the whole weight forward, and again backward, where it is
    gathered once more rather than kept, unless `axis` has `keep_gathered=True`; the gradient of
    the weight is reduce-scattered, (n-1)/n of it in the wire's dtype. In the ring modes all of it
    overlaps with the matmuls, and nothing is ever gathered. A sharded bias is gathered by itself.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w, b: fsdp_linear(x, w, "fsdp", bias=b),
      ...     mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), P("fsdp")), out_specs=P("fsdp")))
      >>> f(jnp.ones((8, 16)), jnp.ones((16, 24)), jnp.ones(24)).shape
      (8, 24)

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models" (2020), stage 3; the overlap as in `all_gather_matmul`.
    """
    x, weight = as_array("x", x), as_operand("w", w)
    labels = matmul_labels(x, weight)
    label = labels.rhs[check_dim("dim", dim, weight.shape)]
    call = _einsum.make_call(labels, bind(axis, gathers=True), preferred_element_type, precision)
    call = replace(call, regather=True, names=("x", "w"))
    (y,) = _einsum.gather(call, "rhs", label, x, (weight,))
    if bias is None:
        return y
    bias = as_array("the bias of w", bias)
    return add_bias(y, whole_bias("w", bias, y.shape[-1], call.ring))
