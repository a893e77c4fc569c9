"""How the experts' MLP runs: on whole buffers, or in blocks of rows; chosen when lowering.

What differs are the products: of all rows with their groups' weights, or of a block's rows with
the one weight of its group. Whole buffers suit a kernel for grouped products; in loops over blocks
the rows between the two projections live for a block's time only, and are computed again for the
gradients, so that nothing as wide as the hidden layer is as long as the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar._dtypes import sum_dtype
from jaxpar._varying import zeros_alike
from jaxpar.moe._blocks import Block, Totals, block_dot, fold_groups
from jaxpar.moe._grouped import Method, Product, group_products, in_groups, rows_product
from jaxpar.moe._mlp import Experts, Mlp, Operands


@dataclass(frozen=True)
class WholeProducts:
    """Products of whole buffers."""

    mlp: Mlp
    group_sizes: Array
    length: int

    def rows(self, x: Array, w: Array, contracted: int, dtype: Any) -> Array:
        product = Product(self.mlp.method, contracted, self.mlp.preferred, dtype, cleared=False)
        return rows_product(product, x, w, self.group_sizes)

    def outer(self, x: Array, ct: Array, dtype: Any) -> Array:
        product = Product(self.mlp.method, 1, self.mlp.preferred, dtype, cleared=False)
        return group_products(product, x, ct, self.group_sizes)

    def spread(self, bias: Array, dtype: Any) -> Array:
        return spread_rows(self.mlp.method, self.length, dtype, bias, self.group_sizes)

    def total(self, ct: Array, dtype: Any) -> Array:
        return sum_rows(self.mlp.method, ct, self.group_sizes, dtype)

    def within(self, x: Array) -> Array:
        return self.clear(x)

    def clear(self, x: Array) -> Array:
        return _clear(x, self.group_sizes)


@dataclass(frozen=True)
class BlockProducts:
    """Products of one block, with the weights of its group."""

    mlp: Mlp
    block: Block

    def rows(self, x: Array, w: Array, contracted: int, dtype: Any) -> Array:
        return self._dot(x, w, 1, contracted - 1).astype(dtype)

    def outer(self, x: Array, ct: Array, dtype: Any) -> Array:
        return self._dot(x, ct, 0, 0)  # not rounded before all blocks are summed

    def spread(self, bias: Array, dtype: Any) -> Array:
        return bias.astype(dtype)[None]

    def total(self, ct: Array, dtype: Any) -> Array:
        return jnp.sum(ct.astype(sum_dtype(ct.dtype)), axis=0)

    def within(self, x: Array) -> Array:
        return jnp.where(self.block.inside, x, 0)

    def clear(self, x: Array) -> Array:
        return x  # what is placed is the group's rows alone

    def _dot(self, left: Array, right: Array, left_dim: int, right_dim: int) -> Array:
        dims, precision = (left_dim, right_dim), self.mlp.method.precision
        return block_dot(left, right, dims, self.mlp.preferred, precision)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def spread_rows(method: Method, rows: int, dtype: Any, bias: Array, group_sizes: Array) -> Array:
    """Gives each row its group's bias: `[rows, f]`; rows past the last group hold anything."""
    ends = jnp.cumsum(group_sizes, dtype="int32")
    group = jnp.sum(lax.iota("int32", rows)[:, None] >= ends, axis=1, dtype="int32")
    return jnp.take(bias, group, axis=0, mode="clip").astype(dtype)


def sum_rows(method: Method, ct: Array, group_sizes: Array, dtype: Any) -> Array:
    """Sums each group's rows."""
    # In full precision, as a sum is, and not as a matmul may be.
    exact = Method(method.implementation, lax.Precision.HIGHEST)
    ones = jnp.ones_like(ct[:, :1])
    sums: Any = group_products(Product(exact, 1, None, dtype), ones, ct, group_sizes)
    return sums[:, 0]


def _spread_fwd(method: Method, rows: int, dtype: Any, bias: Array, group_sizes: Array) -> Any:
    return spread_rows(method, rows, dtype, bias, group_sizes), (bias, group_sizes)


def _spread_bwd(method: Method, rows: int, dtype: Any, residuals: Any, ct: Array) -> Any:
    bias, group_sizes = residuals
    return sum_rows(method, ct, group_sizes, bias.dtype), None


spread_rows.defvjp(_spread_fwd, _spread_bwd)


def clear_rows(operands: Operands, group_sizes: Array) -> Operands:
    """Makes rows 0 that have no expert, and so their gradients, whatever comes back."""
    weights = None if operands.weights is None else _clear(operands.weights, group_sizes)
    return operands._replace(x=_clear(operands.x, group_sizes), weights=weights)


def _clear(rows: Array, group_sizes: Array) -> Array:
    inside = in_groups(group_sizes, len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(inside, rows, 0)


def forward_whole(mlp: Mlp, operands: Operands, group_sizes: Array) -> tuple[Array, Any]:
    """`Mlp.forward` of whole buffers."""
    return mlp.forward(WholeProducts(mlp, group_sizes, len(operands.x)), operands)


def gradients_whole(
    mlp: Mlp, operands: Operands, group_sizes: Array, projected: Any, ct: Array
) -> Operands:
    """`Mlp.gradients` of whole buffers."""
    return mlp.gradients(WholeProducts(mlp, group_sizes, len(operands.x)), operands, projected, ct)


def forward_blocks(
    mlp: Mlp, lengths: tuple[int, ...], operands: Operands, group_sizes: Array
) -> Array:
    """The result of `Mlp.forward` block by block; nothing of the projections is kept."""
    x, experts, weights = operands

    def one_group(out: Array, group: Array, fold: Callable[..., Array]) -> Array:
        own = _of_group(experts, group)

        def step(out: Array, block: Block) -> Array:
            cut = Operands(block.cut(x), own, None if weights is None else block.cut(weights))
            part, _ = mlp.forward(BlockProducts(mlp, block), cut)
            return block.place(out, part)

        return fold(step, out)

    out = zeros_alike(x.shape, mlp.dtype, operands, group_sizes)
    return fold_groups(lengths, group_sizes, len(x), out, one_group)


def gradients_blocks(
    mlp: Mlp,
    lengths: tuple[int, ...],
    operands: Operands,
    group_sizes: Array,
    projected: Any,
    ct: Array,
) -> Operands:
    """`Mlp.gradients` block by block, which projects again."""
    x, experts, weights = operands

    def one_group(grads: Operands, group: Array, fold: Callable[..., Any]) -> Operands:
        own, totals = _of_group(experts, group), Totals(group)

        def step(state: Any, block: Block) -> Any:
            placed, sums = state
            cut = Operands(
                block.masked(x),
                own,
                None if weights is None else block.masked(weights[:, None])[:, 0],
            )
            on = BlockProducts(mlp, block)
            _, projected = mlp.forward(on, cut)
            d = mlp.gradients(on, cut, projected, block.masked(ct))
            parts = (d.x, None if d.weights is None else d.weights[:, None])
            placed = jax.tree.map(block.place, placed, parts)
            return placed, totals.add(sums, d.experts)

        placed = grads.x, None if grads.weights is None else grads.weights[:, None]
        (d_x, d_weights), sums = fold(step, (placed, totals.open(grads.experts)))
        d_weights = None if d_weights is None else d_weights[:, 0]
        return Operands(d_x, totals.close(grads.experts, sums), d_weights)

    like = operands, group_sizes, ct
    zeros: Operands = jax.tree.map(lambda a: zeros_alike(a.shape, a.dtype, *like), operands)
    return fold_groups(lengths, group_sizes, len(x), zeros, one_group)


def _of_group(experts: Experts, group: Array) -> Experts:
    own: Experts = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, group, keepdims=False), experts
    )
    return own


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def expert_mlp(mlp: Mlp, operands: Operands, group_sizes: Array) -> tuple[Array, Any]:
    """The result and what its gradients may read: the projections, or as many zeros.

    All operands vary alike. The second result has no cotangent.
    """
    whole = partial(forward_whole, mlp)

    def blocks(
        lengths: tuple[int, ...], operands: Operands, group_sizes: Array
    ) -> tuple[Array, Any]:
        out = forward_blocks(mlp, lengths, operands, group_sizes)
        if mlp.method.implementation == "blocks":
            return out, (None, None)
        # Nobody reads them here, but a program for several platforms has one type.
        shape = len(operands.x), operands.experts.up.shape[2]
        zeros = zeros_alike(shape, mlp.dtype, operands, group_sizes)
        return out, (zeros, None if operands.experts.gate is None else zeros)

    return mlp.method.choose(len(operands.x), whole, whole, blocks, operands, group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp_gradients(
    mlp: Mlp, operands: Operands, group_sizes: Array, projected: Any, ct: Array
) -> Operands:
    given = operands, group_sizes, projected, ct
    whole, blocks = partial(gradients_whole, mlp), partial(gradients_blocks, mlp)
    return mlp.method.choose(len(operands.x), whole, whole, blocks, *given)


def _mlp_fwd(mlp: Mlp, operands: Operands, group_sizes: Array) -> Any:
    out: Any = expert_mlp(mlp, operands, group_sizes)
    return out, (operands, group_sizes, out[1])


def _mlp_bwd(mlp: Mlp, residuals: Any, cts: Any) -> Any:
    return _mlp_gradients(mlp, *residuals, cts[0]), None


def _gradients_fwd(
    mlp: Mlp, operands: Operands, group_sizes: Array, projected: Any, ct: Array
) -> Any:
    out = _mlp_gradients(mlp, operands, group_sizes, projected, ct)
    return out, (operands, group_sizes, projected, ct)


def _gradients_bwd(mlp: Mlp, residuals: Any, cts: Operands) -> Any:
    operands, group_sizes, projected, ct = residuals

    # Through whole buffers, whose products can be differentiated again.
    def gradients(operands: Operands, ct: Array) -> Operands:
        operands, ct = clear_rows(operands, group_sizes), _clear(ct, group_sizes)
        _, projected = forward_whole(mlp, operands, group_sizes)
        return gradients_whole(mlp, operands, group_sizes, projected, ct)

    d_operands, d_ct = jax.vjp(gradients, operands, ct)[1](cts)
    return d_operands, None, jax.tree.map(jnp.zeros_like, projected), d_ct


expert_mlp.defvjp(_mlp_fwd, _mlp_bwd)
_mlp_gradients.defvjp(_gradients_fwd, _gradients_bwd)
