"""Fully sharded data parallelism: weights gathered where they are used, gradients scattered."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar._types import AxisName, Integer, Mode, Tree, TreeAxis
from jaxpar.collectives._checks import check_dim
from jaxpar.collectives._ring import bind_ring
from jaxpar.layers._shards import bind_shards, broadcast_axis, gather_shards, vary_sharded
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import matmul_labels


def fsdp_linear(
    x: Array,
    w: Array,
    axis_name: AxisName,
    *,
    bias: Array | None = None,
    axis: Integer = 0,
    mode: Mode = "auto",
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    wire_dtype: DTypeLike | None = None,
) -> Array:
    """Computes `x @ all_gather(w) + bias`, the weight's blocks arriving while it multiplies.

    Args:
      x: local `[..., k]`, this device's share of the batch.
      w: local `[k/n, m]` (`axis=0`) or `[k, m/n]` (`axis=1`).
      axis_name: the mesh axis, or a tuple of them in any order, over which weights are sharded.
      bias: local `[m]`, replicated over `axis_name`, or `[m/n]`, sharded over it; its shape says
        which. Of the dtype of `x`.
      axis: the dimension along which `w` is sharded.
      mode: as in `all_gather_matmul`.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: the dtype in which the sums of the weight's gradient travel. None: their own.

    Returns:
      Local `[..., m]`, varying over `axis_name` and over all that the operands vary over.

    Raises:
      TypeError: operands of different dtypes, or an option of the wrong type.
      ValueError: wrong ranks or sizes, an unknown mode or axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of the whole weight forward, and again backward, where it is
    gathered once more rather than kept; the gradient of the weight is reduce-scattered, (n-1)/n of
    it in the wire's dtype. In the ring modes all of it overlaps with the matmuls, and nothing is
    ever gathered. A sharded bias is gathered by itself.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> f = jax.jit(jax.shard_map(lambda x, w, b: fsdp_linear(x, w, "fsdp", bias=b),
      ...     mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), P("fsdp")), out_specs=P("fsdp")))
      >>> f(jnp.ones((8, 16)), jnp.ones((16, 24)), jnp.ones(24)).shape
      (8, 24)

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models" (2020), stage 3; the overlap as in `all_gather_matmul`.
    """
    name = "fsdp_linear"
    x, w = jnp.asarray(x), jnp.asarray(w)
    labels = matmul_labels(name, x, w)
    label = labels.rhs[check_dim(name, "axis", axis, w.shape)]
    call = _einsum.make_call(
        name, labels, axis_name, mode, preferred_element_type, precision, wire_dtype
    )
    (y,) = _einsum.gather(replace(call, regather=True), "rhs", label, x, (w,))
    return y if bias is None else add_bias(name, y, bias, axis_name)


def fsdp_gather(
    tree: Tree,
    axis_name: AxisName,
    *,
    axis: TreeAxis = 0,
    mode: Mode = "auto",
    wire_dtype: DTypeLike | None = None,
) -> Tree:
    """All-gathers sharded parameters; the derivative reduce-scatters their gradients.

    Args:
      tree: pytree of local shards.
      axis_name: the mesh axis, or a tuple of them in any order, over which they are sharded.
      axis: the dimension along which a leaf is sharded, None for a leaf that is whole; one for all
        leaves, or a pytree of them that is a prefix of `tree`.
      mode: `"naive"` (`lax.all_gather`), `"unidirectional"` or `"bidirectional"` (rings, over one
        mesh axis of a tuple after the other), or `"auto"`: rings on TPU, whose compiler runs a
        chain of permutes beside other work but waits for an all-gather, as long as they are short
        enough to be unrolled; naive elsewhere.
      wire_dtype: the dtype in which sums of gradients travel. None: float32 for narrower floats.

    Returns:
      The whole parameters, varying over `axis_name` where they were gathered. Autodiff keeps them
      for the backward pass: gather and use them within `jax.checkpoint`, or use `fsdp_linear` or
      `fsdp_scan`, which gather again.

    Raises:
      TypeError: an option of the wrong type.
      ValueError: an axis out of range or no prefix, an unknown mode or axis name, a call outside
        shard_map.

    Cost: a device sends (n-1)/n of each whole leaf forward, and as much of its gradient, in the
    wire's dtype, backward.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> axis, specs = {"w": 0, "b": None}, {"w": P("fsdp"), "b": P()}
      >>> gather = jax.jit(jax.shard_map(lambda tree: fsdp_gather(tree, "fsdp", axis=axis),
      ...     mesh=mesh, in_specs=(specs,), out_specs=specs))
      >>> gather({"w": jnp.ones((16, 4)), "b": jnp.ones(4)})["w"].shape  # 8 wholes
      (128, 4)

    Source: as `fsdp_linear`.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    dims = broadcast_axis("fsdp_gather", axis, tree)
    shards = bind_shards("fsdp_gather", leaves, dims, axis_name, mode, wire_dtype)
    return treedef.unflatten(gather_shards(shards, vary_sharded(shards, leaves)))


def add_bias(function: str, y: Array, bias: Array, axis_name: AxisName | None) -> Array:
    """Returns `y + bias`, the bias gathered over `axis_name` first where it is sharded over it."""
    bias = jnp.asarray(bias)
    size = 1 if axis_name is None else bind_ring(function, axis_name).size
    features = y.shape[-1]
    if bias.ndim != 1 or bias.shape[0] not in (features, features / size):
        sharded = f", or [{features}/{size}] when sharded over {axis_name!r}" if size > 1 else ""
        raise ValueError(
            f"{function}: bias has local shape {bias.shape}, but the result has {features} "
            f"features: it must be [{features}]{sharded}"
        )
    if bias.dtype != y.dtype:
        raise TypeError(
            f"{function}: bias is {bias.dtype} and the result {y.dtype}; cast the bias with .astype"
        )
    if axis_name is not None and bias.shape[0] != features:
        bias = fsdp_gather(bias, axis_name, mode="naive")
    return y + bias
