"""Sharded parameters gathered where they are used, their gradients scattered."""

import jax
import jax.numpy as jnp

from jaxpar._axis import bind
from jaxpar._calls import public
from jaxpar._types import AxisLike, Tree, TreeDim
from jaxpar.layers._shards import bind_shards, broadcast_dim, gather_shards, vary_sharded


@public
def fsdp_gather(tree: Tree, axis: AxisLike, *, dim: TreeDim = 0) -> Tree:
    """All-gathers sharded parameters; the derivative reduce-scatters their gradients.

    Args:
      tree: pytree of local shards.
      axis: mesh axes, over which they are sharded: a name, a tuple or list of them in any order, or
        an `Axis`, which says how data travel. Its mode is `"naive"` (`lax.all_gather`),
        `"unidirectional"` or `"bidirectional"` (rings, over one mesh axis of several after the
        other), or `"auto"`: rings on TPU, whose compiler runs a chain of permutes beside other work
        but waits for an all-gather, as long as they are short enough to be unrolled; naive
        elsewhere. Its `wire_dtype` is that in which sums of gradients travel; None: float32 for
        narrower floats.
      dim: the dimension along which a leaf is sharded, None for a leaf that is whole; one for all
        leaves, or a pytree of them that is a prefix of `tree`.

    Returns:
      The whole parameters, varying over `axis` where they were gathered. Autodiff keeps them for
      the backward pass: gather and use them within `jax.checkpoint`, or use `fsdp_linear` or
      `fsdp_scan`, which gather again.

    Raises:
      TypeError: an option or wire dtype of the wrong type.
      ValueError: a dim out of range or no prefix, an unknown axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of each whole leaf forward, and as much of its gradient, in the
    wire's dtype, backward.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> dim, specs = {"w": 0, "b": None}, {"w": P("fsdp"), "b": P()}
      >>> gather = jax.jit(jax.shard_map(lambda tree: fsdp_gather(tree, "fsdp", dim=dim),
      ...     mesh=mesh, in_specs=(specs,), out_specs=specs))
      >>> gather({"w": jnp.ones((16, 4)), "b": jnp.ones(4)})["w"].shape  # 8 wholes
      (128, 4)

    Source: as `fsdp_linear`.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    dims = broadcast_dim(dim, tree)
    shards = bind_shards(leaves, dims, bind(axis))
    return treedef.unflatten(gather_shards(shards, vary_sharded(shards, leaves)))
