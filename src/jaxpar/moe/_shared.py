"""Experts that every token has: one plain MLP."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax
from jax.lax import PrecisionLike

from jaxpar._axis import Ring
from jaxpar._dtypes import sum_dtype
from jaxpar._varying import vary_wide, varying_axes
from jaxpar.layers import column_parallel_linear, gated_mlp, row_parallel_linear
from jaxpar.moe._arguments import Axes
from jaxpar.moe._mlp import Experts

Activation = Callable[[Array], Array]


def apply_shared(
    axes: Axes,
    rows: Array,
    experts: Experts,
    activation: Activation,
    precision: PrecisionLike,
) -> Array:
    """Applies experts to all rows, by the layers of tensor parallelism where that is an axis."""
    if axes.tensor is None:
        return _apply_whole(rows, experts, activation, precision)
    sequence_dim = 0 if axes.sharded else None
    options = {"sequence_dim": sequence_dim, "precision": precision}
    return _apply_sharded(axes.tensor, rows, experts, activation, options)


def _apply_whole(
    rows: Array, experts: Experts, activation: Activation, precision: PrecisionLike
) -> Array:
    axes = varying_axes(rows, experts)

    def linear(x: Array, w: Array, bias: Array | None) -> Array:
        w = vary_wide(axes, w).astype(w.dtype)  # its gradient is summed over devices in float32
        wide = sum_dtype(x.dtype)
        y = lax.dot(x, w, precision=precision, preferred_element_type=wide)
        return (y if bias is None else y + vary_wide(axes, bias).astype(wide)).astype(x.dtype)

    hidden = linear(rows, experts.up, experts.up_bias)
    if experts.gate is None:
        hidden = activation(hidden)
    else:
        hidden = activation(linear(rows, experts.gate, experts.gate_bias)) * hidden
    return linear(hidden, experts.down, experts.down_bias)


def _apply_sharded(
    ring: Ring,
    rows: Array,
    experts: Experts,
    activation: Activation,
    options: dict[str, Any],
) -> Array:
    up, down = experts.up, experts.down
    if experts.gate is not None:
        biases = experts.gate_bias, experts.up_bias, experts.down_bias
        weights = experts.gate, up, down
        return gated_mlp(rows, *weights, ring, activation=activation, biases=biases, **options)
    hidden = column_parallel_linear(rows, up, ring, bias=experts.up_bias, **options)
    return row_parallel_linear(activation(hidden), down, ring, bias=experts.down_bias, **options)
