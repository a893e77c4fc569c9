"""Experts: MLPs of equal shape, each for its rows, in full buffers or in blocks.

Lowering chooses. Full buffers suit a kernel for grouped products. Blocks recompute hidden rows for
gradients, so that no array is as long as the buffer and as wide as the hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Int, Int32, Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import loses_parts, result_dtype
from jaxpar.arguments.types import Implementation, Values
from jaxpar.axis.checks import as_array
from jaxpar.axis.checks_of_layers import as_integers
from jaxpar.axis.vma import vary_alike, zeros_alike
from jaxpar.layers._activation import Activation, activate
from jaxpar.moe._group_blocks import Block, Totals, fold_groups
from jaxpar.moe._grouped import bind_kernels, bind_preferred, check_sizes, clear, fitting_sizes
from jaxpar.moe._mlp import (
    BlockProducts,
    Experts,
    ExpertsLike,
    Mlp,
    Operands,
    Projected,
    WholeProducts,
    expert_arrays,
    present,
)


@public
def apply_experts(
    x: Array,
    experts: ExpertsLike,
    group_sizes: Values,
    *,
    activation: Activation = jax.nn.silu,
    weights: Values | None = None,
    implementation: Implementation = "auto",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Computes the MLP of each row's expert, for rows sorted by expert.

    Args:
      x: `[a, d]`, as `lhs` of `grouped_matmul`.
      experts: `Experts`, or a mapping with the same keys; all but biases in `x`'s dtype.
      group_sizes: integers `[e]`, the rows of each expert.
      activation: elementwise, or of each row of `[rows, f]` alone; or a
        `jaxpar.layers.GatedActivation`.
      weights: factors of the result's rows, floats `[a]`, or None. Those of rows without an expert
        may be anything.
      implementation: as in `grouped_matmul`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: as in `grouped_matmul`, for all products.

    Returns:
      `[a, d]`, varying over all mesh axes of the operands. Rows without an expert are zero, as are
      their gradients and those of their weights.

    Raises:
      TypeError: dtypes differ or are no floats, or biases are complex for real `x`.
      ValueError: shapes do not fit, a gate_bias has no gate, or the implementation is unknown.

    Cost: nothing is sent. 4 d f FLOPs for each row with an expert, or 6 d f with a gate.

    Example:
      >>> w = jnp.arange(48.0).reshape(2, 4, 6)
      >>> experts, x = Experts(up=w, down=w.mT), jnp.arange(12.0).reshape(3, 4)
      >>> y = apply_experts(x, experts, jnp.array([1, 1]), activation=jax.nn.relu)
      >>> y[0, 0] == x[0] @ w[0] @ w[0, 0], y[1, 0] == x[1] @ w[1] @ w[1, 0], y[2, 0].item()
      (Array(True, dtype=bool), Array(True, dtype=bool), 0.0)

    Source: Shazeer, "GLU variants improve transformer" (2020).
    """
    experts, x = expert_arrays(experts), as_array("x", x)
    sizes = as_integers("group_sizes", group_sizes)
    check_experts(x, experts, sizes)
    factors = None if weights is None else as_array("weights", weights)
    if factors is not None:
        check_weights(factors, x)
    kernels = bind_kernels(implementation, precision)
    preferred = bind_preferred(preferred_element_type, x.dtype)
    dtype = result_dtype(x.dtype) if preferred is None else preferred
    sizes = fitting_sizes(sizes, len(x))
    operands, sizes = vary_alike((), Operands(x, experts, factors), sizes)
    mlp = Mlp(kernels, activation, preferred, dtype)
    if closes_over_arrays(activation, experts, dtype):
        return forward_whole(mlp, clear_rows(operands, sizes), sizes)[0]
    out: Any = expert_mlp(mlp, operands, sizes)
    return out[0]


def closes_over_arrays(activation: Activation, experts: Experts, dtype: Any) -> bool:
    """Returns whether `activation` holds arrays, which may have gradients."""
    up = zeros_alike((1, experts.up.shape[2]), dtype, experts.up)
    gate = None if experts.gate is None else up
    return bool(jax.closure_convert(partial(activate, activation), up, gate)[1])


def check_experts(x: Array, experts: Experts, group_sizes: Array) -> None:
    if x.ndim != 2:
        raise value_error(
            f"x must be [a, d], got local shape {x.shape}; reshape it to two dimensions"
        )
    check_shapes(experts)
    if x.shape[1] != experts.up.shape[1]:
        raise value_error(
            f"x of local shape {x.shape} has {x.shape[1]} features, but "
            f"experts.up of local shape {experts.up.shape} takes {experts.up.shape[1]}; they are "
            "multiplied and must be as many"
        )
    check_sizes(group_sizes, "experts.up", experts.up.shape)
    for field, w in present(experts).items():
        if not field.endswith("bias") and w.dtype != x.dtype:
            raise type_error(
                f"x is {x.dtype} and experts.{field} {w.dtype}; cast one to the other's dtype"
            )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise type_error(
            f"x and experts are {x.dtype}, but hidden features are fractions; cast them to floats, "
            "or multiply integers by grouped_matmul"
        )
    for field, w in present(experts).items():
        if loses_parts(w.dtype, x.dtype):
            raise type_error(
                f"x is {x.dtype} and experts.{field} {w.dtype}, which it cannot hold; cast one of "
                "them"
            )


def check_shapes(experts: Experts, kind: str = "experts") -> None:
    up = experts.up
    if kind == "experts" and up.ndim != 3:
        raise value_error(
            f"experts.up must be [e, d, f], got local shape {up.shape}; stack the experts' matrices"
        )
    if experts.gate_bias is not None and experts.gate is None:
        raise value_error(
            f"{kind}.gate_bias of local shape {experts.gate_bias.shape} is given "
            f"without {kind}.gate; give both or neither"
        )
    *e, d, f = up.shape
    shapes = (*e, d, f), (*e, f, d), (*e, d, f), (*e, f), (*e, f), (*e, d)
    for (field, w), wanted in zip(experts._asdict().items(), shapes, strict=True):
        if w is not None and w.shape != wanted:
            raise value_error(
                f"{kind}.{field} has local shape {w.shape}, but with {kind}.up of "
                f"local shape {up.shape} it must have {wanted}"
            )


def check_weights(weights: Array, x: Array) -> None:
    if weights.shape != x.shape[:1]:
        raise value_error(
            f"weights have local shape {weights.shape}, but x of local shape {x.shape} "
            f"has {len(x)} rows; give one weight for each"
        )
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise type_error(f"weights must be floats, got {weights.dtype}; cast them")


def clear_rows(operands: Operands, group_sizes: Int32[Array, " groups"]) -> Operands:
    """Clears rows without an expert, and their gradients."""
    weights = None if operands.weights is None else clear(operands.weights, group_sizes)
    return operands._replace(x=clear(operands.x, group_sizes), weights=weights)


def forward_whole(
    mlp: Mlp, operands: Operands, group_sizes: Int32[Array, " groups"]
) -> tuple[Num[Array, "rows d"], Projected]:
    return mlp.forward(WholeProducts(mlp, group_sizes, len(operands.x)), operands)


def gradients_whole(
    mlp: Mlp,
    operands: Operands,
    group_sizes: Int32[Array, " groups"],
    projected: Projected,
    ct: Num[Array, "rows d"],
) -> Operands:
    return mlp.gradients(WholeProducts(mlp, group_sizes, len(operands.x)), operands, projected, ct)


def forward_blocks(
    mlp: Mlp, lengths: tuple[int, ...], operands: Operands, group_sizes: Int32[Array, " groups"]
) -> Num[Array, "rows d"]:
    x, experts, weights = operands

    def one_group(
        out: Num[Array, "rows d"], group: Int[Array, ""], fold: Callable[..., Array]
    ) -> Num[Array, "rows d"]:
        expert = of_group(experts, group)

        def step(out: Num[Array, "rows d"], block: Block) -> Num[Array, "rows d"]:
            cut = Operands(block.cut(x), expert, None if weights is None else block.cut(weights))
            part, _ = mlp.forward(BlockProducts(mlp, block), cut)
            return block.place(out, part)

        return fold(step, out)

    out = zeros_alike(x.shape, mlp.dtype, operands, group_sizes)
    return fold_groups(lengths, group_sizes, len(x), out, one_group)


def gradients_blocks(
    mlp: Mlp,
    lengths: tuple[int, ...],
    operands: Operands,
    group_sizes: Int32[Array, " groups"],
    projected: Any,
    ct: Num[Array, "rows d"],
) -> Operands:
    x, experts, weights = operands

    def one_group(grads: Operands, group: Int[Array, ""], fold: Callable[..., Any]) -> Operands:
        expert, totals = of_group(experts, group), Totals(group)

        def step(state: Any, block: Block) -> Any:
            placed, sums = state
            # Masked, unlike in the forward pass. Otherwise other groups' rows in the block would
            # add to this group's gradients.
            cut = Operands(
                block.masked(x),
                expert,
                None if weights is None else block.masked(weights[:, None])[:, 0],
            )
            on = BlockProducts(mlp, block)
            _, projected = mlp.forward(on, cut)
            d = mlp.gradients(on, cut, projected, block.masked(ct))
            parts = (d.x, None if d.weights is None else d.weights[:, None])
            placed = jax.tree.map(block.place, placed, parts)
            return placed, totals.add(sums, d.experts)

        # Weights are placed as a column, [rows, 1], like `Block.inside`.
        placed = grads.x, None if grads.weights is None else grads.weights[:, None]
        (d_x, d_weights), sums = fold(step, (placed, totals.open(grads.experts)))
        d_weights = None if d_weights is None else d_weights[:, 0]
        return Operands(d_x, totals.close(grads.experts, sums), d_weights)

    like = operands, group_sizes, ct
    zeros: Operands = jax.tree.map(lambda a: zeros_alike(a.shape, a.dtype, *like), operands)
    return fold_groups(lengths, group_sizes, len(x), zeros, one_group)


def of_group(experts: Experts, group: Int[Array, ""]) -> Experts:
    expert: Experts = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, group, keepdims=False), experts
    )
    return expert


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(
    mlp: Mlp, operands: Operands, group_sizes: Int32[Array, " groups"]
) -> tuple[Num[Array, "rows d"], Projected]:
    """Returns the result, and projections or zeros.

    All operands vary alike. The second result has no cotangent.
    """
    whole = partial(forward_whole, mlp)

    def blocks(
        lengths: tuple[int, ...], operands: Operands, group_sizes: Int32[Array, " groups"]
    ) -> tuple[Num[Array, "rows d"], Projected]:
        out = forward_blocks(mlp, lengths, operands, group_sizes)
        if mlp.kernels.implementation == "blocks":
            return out, (None, None)
        # Zeros are not read here, but the branches of all platforms return the same type.
        shape = len(operands.x), operands.experts.up.shape[2]
        zeros = zeros_alike(shape, mlp.dtype, operands, group_sizes)
        return out, (zeros, None if operands.experts.gate is None else zeros)

    return mlp.kernels.choose(len(operands.x), whole, whole, blocks, operands, group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp_gradients(
    mlp: Mlp,
    operands: Operands,
    group_sizes: Int32[Array, " groups"],
    projected: Projected,
    ct: Num[Array, "rows d"],
) -> Operands:
    args = operands, group_sizes, projected, ct
    whole, blocks = partial(gradients_whole, mlp), partial(gradients_blocks, mlp)
    return mlp.kernels.choose(len(operands.x), whole, whole, blocks, *args)


def _mlp_fwd(mlp: Mlp, operands: Operands, group_sizes: Int32[Array, " groups"]) -> Any:
    out: Any = expert_mlp(mlp, operands, group_sizes)
    return out, (operands, group_sizes, out[1])


def _mlp_bwd(mlp: Mlp, residuals: Any, cts: Any) -> Any:
    return _mlp_gradients(mlp, *residuals, cts[0]), None


def _gradients_fwd(mlp: Mlp, *args: Any) -> Any:
    return _mlp_gradients(mlp, *args), args


def _gradients_bwd(mlp: Mlp, residuals: Any, cts: Operands) -> Any:
    operands, group_sizes, projected, ct = residuals

    # On full buffers, whose products can be differentiated again.
    def gradients(operands: Operands, ct: Num[Array, "rows d"]) -> Operands:
        operands, ct = clear_rows(operands, group_sizes), clear(ct, group_sizes)
        _, projected = forward_whole(mlp, operands, group_sizes)
        return gradients_whole(mlp, operands, group_sizes, projected, ct)

    d_operands, d_ct = jax.vjp(gradients, operands, ct)[1](cts)
    return d_operands, None, jax.tree.map(jnp.zeros_like, projected), d_ct


expert_mlp.defvjp(_mlp_fwd, _mlp_bwd)
_mlp_gradients.defvjp(_gradients_fwd, _gradients_bwd)
