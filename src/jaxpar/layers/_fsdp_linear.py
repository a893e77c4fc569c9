"""Fully sharded data parallelism, one matmul at a time: the weight is gathered while it is used."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar._axis import bind
from jaxpar._calls import public
from jaxpar._checks import check_dim
from jaxpar._types import AxisLike, Integer
from jaxpar.layers._bias import add_bias, whole_bias
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import matmul_labels


@public
def fsdp_linear(
    x: Array,
    w: Array,
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
      w: local `[k/n, m]` (`dim=0`) or `[k, m/n]` (`dim=1`).
      axis: mesh axes, over which weights are sharded: a name, a tuple or list of them in any order,
        or an `Axis`, which says how data travel: its mode as in `all_gather_matmul`, and of a
        sharded bias as in `fsdp_gather`; its `wire_dtype` for the sums of the weight's gradient;
        None: their own.
      bias: local `[m]`, replicated over `axis`, or `[m/n]`, sharded over it; its shape says which.
      dim: the dimension along which `w` is sharded.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      Local `[..., m]`, varying over `axis` and over all that the operands vary over.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: wrong ranks or sizes, an unknown axis name, a call outside shard_map.

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
    x, w = jnp.asarray(x), jnp.asarray(w)
    labels = matmul_labels(x, w)
    label = labels.rhs[check_dim("dim", dim, w.shape)]
    call = _einsum.make_call(labels, bind(axis), preferred_element_type, precision)
    (y,) = _einsum.gather(replace(call, regather=True), "rhs", label, x, (w,))
    if bias is None:
        return y
    bias = jnp.asarray(bias)
    return add_bias(y, whole_bias("w", bias, y.shape[-1], call.ring))
