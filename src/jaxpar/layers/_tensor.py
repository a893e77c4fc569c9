"""Tensor-parallel linear layers: weights cut by columns, weights cut by rows, and the two in turn.

Activations between layers are sharded along the sequence over the same axis as the weights
(sequence parallelism), or, with `sequence_dim=None`, replicated over it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.checks import as_array
from jaxpar.arguments.types import Integer, Weights
from jaxpar.axis.axis import AxisLike
from jaxpar.layers._activation import Activation, activate
from jaxpar.layers._projections import Projection, as_biases, as_weights, bind_projection, fsdp_pair


@public
def column_parallel_linear(
    x: Array,
    w: Weights,
    axis: AxisLike,
    *,
    bias: Array | tuple[Array | None, ...] | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer = 0,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
) -> Weights:
    """Multiplies activations, their sequence gathered on the way, by weights cut by columns.

    Args:
      x: local `[..., s/n, k]`, sharded over `axis` along `sequence_dim`; or, with
        `sequence_dim=None`, `[..., s, k]`, replicated over `axis`.
      w: local `[k, m/n]`, in the dtype of x, or a tuple of such weights (their `m` may differ) that
        share the one gather. With `fsdp_axis`, of size f, `[k/f, m/n]` or `[k, m/(n f)]`.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: its mode as in `all_gather_matmul`, its `wire_dtype` for the sums of the
        backward reduce-scatter; None: that of the gradient.
      bias: local `[m/n]`, sharded as the columns of `w` are; with `fsdp_axis` also
        `[m/(n f)]`, which is gathered. For a tuple of weights a tuple of these, or of None.
      sequence_dim: the dimension of x that is sharded, any but the last, or None.
      fsdp_axis: further mesh axes, named in the same ways, over which weights are sharded, as in
        fully sharded data parallelism: they are gathered before the product, and again for the
        backward pass. An `Axis` says how they travel, as in `fsdp_gather`; nothing is taken from
        `axis`. Its `gather_dtype` must be the dtype of x: weights are used in it.
      fsdp_dim: the dimension of weights along which they are, 0 or 1.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    One dimension of `w` may be sharded over both axes in either order. With
    `P(None, ("fsdp", "tp"))` a device has, once gathered, f blocks of columns that are not
    neighbours: `row_parallel_linear` with `P(("fsdp", "tp"), None)` takes its rows in that same
    order, and a bias must have it too. With `P(None, ("tp", "fsdp"))` it has neighbours.

    Returns:
      `[..., s, m/n]`, or a tuple of them, varying over `axis` and all that x and w vary over.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: a sharded operand that is typed as replicated over `axis`; wrong ranks or sizes,
        an unknown axis name, mesh axes that are in both `axis` and `fsdp_axis`, a call outside
        shard_map.

    Cost: a device sends (n-1)/n of the gathered x, overlapped with the product, as
    `all_gather_matmul` does; with `sequence_dim=None` nothing forward, and the gradient of x is
    summed over the axis. With `fsdp_axis` it also sends (f-1)/f of what weights gather to,
    forward and backward, and reduce-scatters their gradient; of weights the shards alone are kept.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: column_parallel_linear(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None, "tp")))
      >>> f(jnp.ones((2, 16, 4)), jnp.ones((4, 24))).shape
      (2, 16, 24)

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing activation
    recomputation in large transformer models" (2022), for the sharded sequence.
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    given: Any = w
    if isinstance(given, list):
        raise type_error("w is a list; pass one array, or a tuple of weights")
    if isinstance(w, tuple):
        weights = {f"w[{i}]": weight for i, weight in enumerate(w)}
        biases = as_biases("bias", bias, tuple(weights))
    else:
        weights, biases = {"w": w}, as_biases("bias", (bias,), ("w",))
    if not weights:
        raise value_error("w is an empty tuple; give at least one weight")
    results: Any = layer.columns(as_array("x", x), as_weights(weights), biases, fsdp_dim)
    return results if isinstance(w, tuple) else results[0]


@public
def row_parallel_linear(
    x: Array,
    w: Array,
    axis: AxisLike,
    *,
    bias: Array | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer = 0,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Multiplies activations by a weight cut by rows, and sums over the axis.

    Args:
      x: local `[..., s, k/n]`, as `column_parallel_linear` returns it.
      w: local `[k/n, m]`, in the dtype of x. With `fsdp_axis`, of size f, `[k/(n f), m]` or
        `[k/n, m/f]`.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel: its mode as in `matmul_reduce_scatter`, its `wire_dtype` for partial sums;
        None: that of the result.
      bias: `[m]`, replicated over `axis`, and added once, after the sum; with `fsdp_axis` also
        `[m/f]`, which is gathered.
      sequence_dim: the dimension of the result that is scattered, any but the last, or None.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: the dimension of the weight along which it is sharded further, 0 or 1.
      preferred_element_type: as in `matmul_reduce_scatter`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      `[..., s/n, m]`, varying over `axis`; or, with `sequence_dim=None`, `[..., s, m]`, which
      under `check_vma=True` is typed as replicated over it.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: a weight that is typed as replicated over `axis`; a sequence that the axis does
        not divide, wrong ranks or sizes, an unknown axis name, mesh axes that are in both `axis`
        and `fsdp_axis`, a call outside shard_map.

    Cost: a device sends (n-1)/n of the whole result, overlapped with the product, as
    `matmul_reduce_scatter` does, or twice that for the whole of it, as `matmul_all_reduce`. The
    derivative gathers the cotangent once, or sends nothing. `fsdp_axis` costs what it does in
    `column_parallel_linear`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: row_parallel_linear(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, None, "tp"), P("tp")), out_specs=P(None, "tp")))
      >>> f(jnp.ones((2, 16, 24)), jnp.ones((24, 4)))[0, 0]
      Array([24., 24., 24., 24.], dtype=float32)

    Source: as `column_parallel_linear`.
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    (given,) = as_biases("bias", (bias,), ("w",))
    return layer.rows(as_array("x", x), as_weights({"w": w}), given, fsdp_dim)


@public
def gated_mlp(
    x: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    axis: AxisLike,
    *,
    activation: Activation = jax.nn.silu,
    biases: tuple[Array | None, ...] | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer | tuple[Integer, Integer] = 0,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes `(activation(x @ w_gate) * (x @ w_up)) @ w_down`, hidden columns over the axis.

    Args:
      x: local `[..., s/n, k]`, or `[..., s, k]` with `sequence_dim=None`, replicated.
      w_gate: local `[k, h/n]`.
      w_up: local `[k, h/n]`.
      w_down: local `[h/n, m]`.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel, as in `column_parallel_linear` and `row_parallel_linear`.
      activation: an elementwise function; or a `GatedActivation` of gate and up together, in place
        of `activation(gate) * up`.
      biases: of gate, up and down, each an array or None, as in `column_parallel_linear` and
        `row_parallel_linear`.
      sequence_dim: the dimension of x and of the result that is sharded, or None.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: the dimension along which weights are sharded further; or a pair, of `w_gate` and
        `w_up`, and of `w_down`.
      preferred_element_type: as in `all_gather_matmul`; the hidden activations are cast to the
        dtype of `w_down` again.
      precision: as in `jax.lax.dot_general`.

    The hidden dimension may be sharded over both axes in either order, the same one for all three:
    `P(None, ("fsdp", "tp"))` with `P(("fsdp", "tp"))`, and with biases `P(("fsdp", "tp"))`.

    Returns:
      `[..., s/n, m]`; with `sequence_dim=None` `[..., s, m]`, typed as replicated.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: as `column_parallel_linear` and `row_parallel_linear`.

    Cost: one gather of x, which both products share, and one reduce-scatter of the result; three
    matmuls. With `mode="auto"`, where the compiler makes collectives asynchronous, the rows may go
    through all of it in two or four chunks, so that those of one travel beside the matmuls of
    another: then weights are read, and their gradients added up, once a chunk. The derivative
    gathers x once more and the result's cotangent once, reduce-scatters the gradient of x, and
    computes six matmuls. Residuals are x, the two products and the hidden activations. Naive
    passes, such as chunks of rows, keep the gathered x in place of x, and do not gather it again.
    The two products have the name "gated_mlp" for policies of `jax.checkpoint`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, *w: gated_mlp(x, *w, "tp"), mesh=mesh,
      ...     in_specs=(P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")),
      ...     out_specs=P(None, "tp")))
      >>> w = jnp.ones((4, 24))
      >>> f(jnp.ones((2, 16, 4)), w, w, w.T).shape
      (2, 16, 4)

    Source: Shazeer, "GLU variants improve transformer" (2020); for the sharding, as
    `column_parallel_linear`.
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    into, out = fsdp_pair(fsdp_dim)
    x, weights = as_array("x", x), as_weights({"w_gate": w_gate, "w_up": w_up, "w_down": w_down})
    w_gate, w_up, w_down = weights.values()
    b_gate, b_up, b_down = as_biases("biases", biases, ("w_gate", "w_up", "w_down"))

    # Kept for the backward pass are gate, up and what they make, but not what is between.
    @jax.checkpoint
    def join(
        gate: Num[Array, "*tokens columns"], up: Num[Array, "*tokens columns"]
    ) -> Num[Array, "*tokens columns"]:
        return activate(activation, up, gate).astype(layer.used_as(w_down))

    def mlp(layer: Projection, x: Array) -> Array:
        gate, up = layer.columns(x, {"w_gate": w_gate, "w_up": w_up}, (b_gate, b_up), into)
        if gate.shape != up.shape:
            raise value_error(
                f"w_gate has local shape {w_gate.shape} and w_up {w_up.shape}; both need as "
                "many columns"
            )
        hidden: Any = join(*checkpoint_name((gate, up), "gated_mlp"))
        return layer.rows(hidden, {"w_down": w_down}, b_down, out)

    return layer.in_chunks(mlp, x, (w_gate, w_up, w_down))
