"""Tensor-parallel linear layers, and a gated MLP."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.types import Integer, Weights
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.checks import as_array
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
    """Computes `all_gather(x) @ w + bias` for weights sharded by columns.

    Args:
      x: local `[..., s/n, k]`, or replicated `[..., s, k]` with `sequence_dim=None`.
      w: local `[k, m/n]`, n the size of `axis`, or a tuple of weights with any m, which share one
        gather of x. With an `fsdp_axis` of size f, `[k/f, m/n]` or `[k, m/(n f)]`. Its dtype, or
        the `gather_dtype` of `fsdp_axis`, must be x's dtype.
      axis: mesh axes, or an `Axis` with a mode and `wire_dtype` as in `all_gather_matmul`.
      bias: local `[m/n]`, or `[m/(n f)]` over `fsdp_axis`. For a tuple of weights, a tuple of these
        or None.
      sequence_dim: the sharded dimension of x, any but the last, or None.
      fsdp_axis: further mesh axes that shard weights, or an `Axis` as in `fsdp_gather`.
      fsdp_dim: the dimension of weights that `fsdp_axis` shards, 0 or 1.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.

    If `axis` and `fsdp_axis` both shard m, all weights and biases need one order of axes: with
    `P(None, ("fsdp", "tp"))`, use `P(("fsdp", "tp"))` for the bias and for w of the next
    `row_parallel_linear`.

    Returns:
      `[..., s, m/n]`, or a tuple of them, varying over `axis` and the operands' axes.

    Raises:
      TypeError: dtypes differ.
      ValueError: a sharded operand is typed as replicated over `axis`, ranks or sizes do not fit,
        or `axis` and `fsdp_axis` have an axis in common.

    Cost: a device sends (n-1)/n of the gathered x, overlapped as in `all_gather_matmul`. With
    `sequence_dim=None` it sends nothing forward, and sums x's gradient as in `copy_region`. With
    `fsdp_axis` it also sends (f-1)/f of the gathered weights in each pass, and of their gradient.
    Only shards of weights are residuals.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: column_parallel_linear(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None, "tp")))
      >>> x, w = jnp.arange(128.0).reshape(2, 16, 4), jnp.arange(96.0).reshape(4, 24)
      >>> np.testing.assert_array_equal(f(x, w), x @ w)

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing activation
    recomputation" (2022).
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    argument: Any = w
    if isinstance(argument, list):
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
    """Computes `reduce_scatter(x @ w) + bias` for a weight sharded by rows.

    Args:
      x: local `[..., s, k/n]`, as from `column_parallel_linear`.
      w: local `[k/n, m]`, or with an `fsdp_axis` of size f, `[k/(n f), m]` or `[k/n, m/f]`. Dtype
        as in `column_parallel_linear`.
      axis: mesh axes, or an `Axis` with a mode and `wire_dtype` as in `matmul_reduce_scatter`.
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
      TypeError, ValueError: as in `column_parallel_linear`; also if the size of `axis` does not
        divide the sequence.

    Cost: a device sends (n-1)/n of the full result, overlapped as in `matmul_reduce_scatter`, and
    the derivative gathers the cotangent. `sequence_dim=None` costs as `matmul_all_reduce`, and
    `fsdp_axis` as in `column_parallel_linear`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: row_parallel_linear(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, None, "tp"), P("tp")), out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(768.0).reshape(2, 16, 24), jnp.arange(96.0).reshape(24, 4)
      >>> np.testing.assert_array_equal(f(x, w), x @ w)
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    (checked,) = as_biases("bias", (bias,), ("w",))
    return layer.rows(as_array("x", x), as_weights({"w": w}), checked, fsdp_dim)


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
    """Computes `(activation(x @ w_gate) * (x @ w_up)) @ w_down` with sharded hidden features.

    Args:
      x: as in `column_parallel_linear`.
      w_gate: local `[k, h/n]`.
      w_up: local `[k, h/n]`.
      w_down: local `[h/n, m]`.
      axis: as in `column_parallel_linear` and `row_parallel_linear`.
      activation: elementwise, or a `GatedActivation`.
      biases: a tuple for gate, up and down: arrays as in the linear layers, or None.
      sequence_dim: as in `column_parallel_linear`.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: as in `column_parallel_linear`, or a pair: for gate and up, and for down.
      preferred_element_type: as in `all_gather_matmul`; activations are cast to w_down's dtype.
      precision: as in `jax.lax.dot_general`.

    If `axis` and `fsdp_axis` both shard h, orders of axes are as in `column_parallel_linear`.

    Returns:
      As `row_parallel_linear`.

    Raises:
      TypeError, ValueError: as in `column_parallel_linear` and `row_parallel_linear`.

    Cost: three matmuls, one gather of x, one reduce-scatter of the result. With `mode="auto"` and
    asynchronous collectives, rows may run in two or four chunks, so that a chunk's transfers
    overlap with another's matmuls. Every chunk reads all weights. The derivative computes six
    matmuls, gathers x and the cotangent, and reduce-scatters x's gradient. Residuals are x
    (gathered, if `keep_gathered` says so), the hidden activations, and two products named
    "gated_mlp" for `jax.checkpoint` policies: `x @ w_gate` and `x @ w_up`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, *w: gated_mlp(x, *w, "tp"), mesh=mesh,
      ...     in_specs=(P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")),
      ...     out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(128.0).reshape(2, 16, 4) / 128, jnp.arange(96.0).reshape(4, 24) / 96
      >>> wanted = jax.nn.silu(x @ w) * (x @ -w) @ w.T
      >>> np.testing.assert_allclose(f(x, w, -w, w.T), wanted, rtol=1e-5)

    Source: Shazeer, "GLU variants improve transformer" (2020).
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
