"""Tensor-parallel linear layers: weights cut by columns, weights cut by rows, and both in an MLP.

The axis of the weights also shards activations along the sequence (sequence parallelism). With
`sequence_dim=None` they are replicated.
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
    """Computes `all_gather(x) @ w + bias` for weights cut by columns.

    Args:
      x: local `[..., s/n, k]`, or replicated `[..., s, k]` with `sequence_dim=None`.
      w: local `[k, m/n]` in x's dtype, or a tuple of these for one gather; m may differ. With an
        `fsdp_axis` of size f, `[k/f, m/n]` or `[k, m/(n f)]`.
      axis: mesh axes, or an `Axis` with a mode as in `all_gather_matmul`. Its `wire_dtype` is for
        the backward reduce-scatter's sums. None: the gradient's dtype.
      bias: local `[m/n]`, or `[m/(n f)]` over `fsdp_axis`. For a tuple of weights, a tuple of these
        or None.
      sequence_dim: the sharded dimension of x, any but the last, or None.
      fsdp_axis: further mesh axes that shard weights, or an `Axis` as in `fsdp_gather`. Weights are
        gathered in both passes. A `gather_dtype` must be the dtype of x.
      fsdp_dim: the dimension of weights that `fsdp_axis` shards, 0 or 1.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    Both axes may shard one dimension of w. In the order `P(None, ("fsdp", "tp"))`, a device's
    gathered columns are not adjacent: a bias, and rows of the next `row_parallel_linear`, need the
    same order, `P(("fsdp", "tp"))`.

    Returns:
      `[..., s, m/n]`, or a tuple of them, varying over `axis` and the operands' axes.

    Raises:
      TypeError: dtypes differ, or an option has the wrong type.
      ValueError: a sharded operand is typed as replicated over `axis`, ranks or sizes do not fit,
        or an axis is unknown or in both `axis` and `fsdp_axis`.

    Cost: a device sends (n-1)/n of the gathered x, overlapped as in `all_gather_matmul`. With
    `sequence_dim=None` it sends nothing forward, and sums x's gradient over the axis. `fsdp_axis`
    adds (f-1)/f of the gathered weights in each pass, and of their gradient; only shards are saved.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: column_parallel_linear(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None, "tp")))
      >>> f(jnp.ones((2, 16, 4)), jnp.ones((4, 24))).shape
      (2, 16, 24)

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing activation
    recomputation" (2022).
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
    """Computes `reduce_scatter(x @ w) + bias` for a weight cut by rows.

    Args:
      x: local `[..., s, k/n]`, as from `column_parallel_linear`.
      w: local `[k/n, m]` in x's dtype. With an `fsdp_axis` of size f, `[k/(n f), m]` or
        `[k/n, m/f]`.
      axis: mesh axes, or an `Axis` with a mode as in `matmul_reduce_scatter`. Its `wire_dtype` is
        for partial sums. None: the result's dtype.
      bias: `[m]`, replicated over `axis`, or `[m/f]` over `fsdp_axis`; added once, after the sum.
      sequence_dim: the scattered dimension of the result, any but the last, or None.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: as in `column_parallel_linear`.
      preferred_element_type: as in `matmul_reduce_scatter`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      `[..., s/n, m]`, varying over `axis`. With `sequence_dim=None`, `[..., s, m]`, typed as
      replicated under `check_vma=True`.

    Raises:
      TypeError: as in `column_parallel_linear`.
      ValueError: w is typed as replicated over `axis`, the axis does not divide the sequence, or as
        in `column_parallel_linear`.

    Cost: a device sends (n-1)/n of the full result, overlapped as in `matmul_reduce_scatter`, or
    twice that with `sequence_dim=None`. The derivative gathers the cotangent, or sends nothing.
    `fsdp_axis` costs as in `column_parallel_linear`.

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
    """Computes `(activation(x @ w_gate) * (x @ w_up)) @ w_down`, hidden columns sharded.

    Args:
      x: as in `column_parallel_linear`.
      w_gate: local `[k, h/n]`.
      w_up: local `[k, h/n]`.
      w_down: local `[h/n, m]`.
      axis: as in `column_parallel_linear` and `row_parallel_linear`.
      activation: elementwise, or a `GatedActivation`.
      biases: an array or None each for gate, up, down, as in the linear layers.
      sequence_dim: as in `column_parallel_linear`.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: as in `column_parallel_linear`; or a pair, for gate and up and for down.
      preferred_element_type: as in `all_gather_matmul`; activations are cast to w_down's dtype.
      precision: as in `jax.lax.dot_general`.

    If both axes shard the hidden dimension, all weights and biases need one order of axes, such as
    `P(None, ("fsdp", "tp"))` with `P(("fsdp", "tp"))`.

    Returns:
      As `row_parallel_linear`.

    Raises:
      TypeError, ValueError: as in `column_parallel_linear` and `row_parallel_linear`.

    Cost: three matmuls, one gather of x, one reduce-scatter of the result. With `mode="auto"` and
    asynchronous collectives, rows may run in two or four chunks: one chunk's transfers overlap with
    another's matmuls, but each reads all weights. The derivative computes six matmuls, gathers x
    and the cotangent, and reduce-scatters x's gradient. Residuals are x, the two products and the
    hidden activations. Naive passes save the gathered x instead of gathering again. The two
    products have the name "gated_mlp" for `jax.checkpoint` policies.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, *w: gated_mlp(x, *w, "tp"), mesh=mesh,
      ...     in_specs=(P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")),
      ...     out_specs=P(None, "tp")))
      >>> w = jnp.ones((4, 24))
      >>> f(jnp.ones((2, 16, 4)), w, w, w.T).shape
      (2, 16, 4)

    Source: Shazeer, "GLU variants improve transformer" (2020); as `column_parallel_linear`.
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    into, out = fsdp_pair(fsdp_dim)
    x, weights = as_array("x", x), as_weights({"w_gate": w_gate, "w_up": w_up, "w_down": w_down})
    w_gate, w_up, w_down = weights.values()
    b_gate, b_up, b_down = as_biases("biases", biases, ("w_gate", "w_up", "w_down"))

    # The residuals are gate, up and the hidden activations, without intermediate arrays.
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
