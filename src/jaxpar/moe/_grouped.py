"""Grouped matmuls: rows sorted by group, each multiplied by the weight of its group.

Two products are closed under differentiation: of rows and weights into rows, and of rows and rows
into a weight for each group. Each runs on one of two paths, chosen when lowering: a ragged dot,
which TPUs have a kernel for, or loops over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Bool, Int32, Integer, Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.checks import as_array, check_precision
from jaxpar.arguments.checks_of_layers import as_integers
from jaxpar.arguments.dtypes import as_dtype, check_holds, common_dtype, result_dtype, sum_dtype
from jaxpar.arguments.types import Implementation, Values
from jaxpar.axis.varying import vary_alike
from jaxpar.compiler import control_flow
from jaxpar.moe._group_blocks import (
    CPU_LENGTHS,
    GPU_LENGTHS,
    block_dot,
    blocks_group_products,
    blocks_rows_product,
)

IMPLEMENTATIONS = ("auto", "ragged_dot", "blocks")


@public
def grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Values,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    implementation: Implementation = "auto",
) -> Array:
    """Multiplies rows that are sorted by group by the weight of their group.

    Args:
      lhs: `[m, k]`: the rows of group 0 first, then those of group 1, and so on. Rows past the sum
        of `group_sizes` belong to no group and may hold anything, NaN included.
      rhs: `[g, k, n]`, a weight for each group, in the dtype of `lhs`.
      group_sizes: integers `[g]`, how many rows each group has. None may be negative. Where they
        sum to more than `m`, the last rows in excess are left out.
      preferred_element_type: the dtype of partial sums and of the result. None: partial sums in
        float32 (int32) for operands of 16 bits or fewer, and the result in the dtype of operands.
      precision: as in `jax.lax.dot_general`, one value for both operands.
      implementation: "ragged_dot" is `jax.lax.ragged_dot_general`, for which TPUs have a kernel
        and other platforms compute every group's product with all rows. "blocks" is loops over
        blocks of rows, whose numbers are known at run time only. "auto" chooses when the program
        is lowered: a ragged dot for TPUs, blocks for anything else.

    Returns:
      `[m, n]`, varying over all mesh axes that the operands vary over. Rows past the sum of
      `group_sizes` are 0, and so are the gradients of such rows of `lhs` and of weights of empty
      groups, whatever the cotangent holds there.

    Raises:
      TypeError: operands of different dtypes, or bools; sizes that are not integers; a preferred
        dtype that cannot hold the products; an option of the wrong type.
      ValueError: wrong ranks or sizes, an unknown implementation.

    Cost: nothing is sent. 2 k n FLOPs for each row that has a group, and as much again for each
    operand's gradient. Blocks round the rows of each group up to a multiple of 16 (on GPUs 128) or,
    of large groups, a little more. `jax.lax.ragged_dot_general` where there is no kernel: 2 m g k n
    FLOPs, and on GPUs g copies of `lhs`.

    Example:
      >>> rows, weights = jnp.ones((6, 4)), jnp.stack([jnp.ones((4, 2)), jnp.full((4, 2), 2.0)])
      >>> grouped_matmul(rows, weights, jnp.array([2, 3]))[:, 0]
      Array([4., 4., 8., 8., 8., 0.], dtype=float32)

    Source: Gale et al., "MegaBlocks: Efficient sparse training with mixture-of-experts" (2022), for
    products of groups of any size in place of padded ones.
    """
    sizes = as_integers("group_sizes", group_sizes)
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    check_grouped(lhs, rhs, sizes)
    kernels = bind_kernels(implementation, precision)
    preferred = bind_preferred(preferred_element_type, lhs.dtype)
    dtype = result_dtype(lhs.dtype) if preferred is None else preferred
    lhs, rhs, sizes = vary_alike((), lhs, rhs, fitting_sizes(sizes, len(lhs)))
    return rows_product(GroupedProduct(kernels, 1, preferred, dtype), lhs, rhs, sizes)


@dataclass(frozen=True)
class Kernels:
    """How grouped products run, the same in the forward pass and in every derivative."""

    implementation: str
    precision: Any

    def choose(self, rows: int, kernel: Any, masked: Any, blocks: Any, *operands: Any) -> Any:
        """Runs one of three functions: TPU's kernel, a ragged dot elsewhere, loops over blocks.

        The last is given the lengths of blocks before the operands.
        """
        branches = {"default": partial(blocks, CPU_LENGTHS)}
        if rows >= GPU_LENGTHS[-1]:  # a shorter buffer has none of these
            branches["cuda"] = branches["rocm"] = partial(blocks, GPU_LENGTHS)
        if self.implementation != "blocks":
            branches["tpu"] = kernel
        if self.implementation == "ragged_dot":
            branches = {"tpu": kernel, "default": masked}

        # One after the other under vmap: loops over batches of groups would run as long as the
        # longest does, and ragged dots have no rule for some batches.
        @sequential_vmap
        def chosen(*operands: Any) -> Any:
            return control_flow.platform_dependent(*operands, **branches)

        return chosen(*operands)


@dataclass(frozen=True)
class GroupedProduct:
    """A grouped product, apart from its operands."""

    kernels: Kernels
    contracted: int  # the dimension of weights along which rows are multiplied: 1 or 2
    preferred: Any  # the dtype of partial sums; None: the package's contract
    dtype: Any  # of the result
    cleared: bool = True  # whether rows past the last group are 0; otherwise they hold anything

    def sums(self, operands: Any) -> Any:
        """The dtype of partial sums."""
        return sum_dtype(operands) if self.preferred is None else self.preferred

    def ragged_dot(
        self,
        dims: Any,
        sums: Any,
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, " ..."],  # [groups, _, _], or [rows, out]
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, " ..."]:
        """JAX's, with partial sums of dtype `sums`."""
        common = common_dtype(lhs.dtype, rhs.dtype)  # a cotangent may be wider than its partner
        return lax.ragged_dot_general(
            lhs.astype(common),
            rhs.astype(common),
            group_sizes,
            dims,
            precision=self.kernels.precision,
            preferred_element_type=sums,
        ).astype(self.dtype)

    def derivative(self, contracted: int, dtype: Any) -> GroupedProduct:
        """A product of the derivative."""
        return replace(self, contracted=contracted, dtype=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_product(
    product: GroupedProduct,
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "groups _ _"],
    group_sizes: Int32[Array, " groups"],
) -> Num[Array, "rows out"]:
    """Multiplies each row of `lhs` by its group's weight.

    All operands vary alike.
    """
    kernels, inner = product.kernels, product.contracted
    sums = product.sums(common_dtype(lhs.dtype, rhs.dtype))

    def ragged_dot(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "groups _ _"],
        group_sizes: Int32[Array, " groups"],
        sums: Any = sums,
    ) -> Num[Array, "rows out"]:
        dims = lax.RaggedDotDimensionNumbers((([1], [inner]), ([], [])), [0], [0])
        out = product.ragged_dot(dims, sums, lhs, rhs, group_sizes)
        return jnp.where(in_groups(group_sizes, len(lhs)), out, 0) if product.cleared else out

    # The kernel sums in float32 whatever it is asked for, and rounds once: a wider result would
    # cost a pass of its own to narrow.
    kernel = partial(ragged_dot, sums=product.dtype)

    def masked(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "groups _ _"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "rows out"]:
        return ragged_dot(jnp.where(in_groups(group_sizes, len(lhs)), lhs, 0), rhs, group_sizes)

    def blocks(
        lengths: tuple[int, ...],
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "groups _ _"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "rows out"]:
        def multiply(
            block: Num[Array, "length into"], weight: Num[Array, "_ _"]
        ) -> Num[Array, "length out"]:
            return block_dot(block, weight, (1, inner - 1), product.preferred, kernels.precision)

        columns = rhs.shape[3 - inner]
        return blocks_rows_product(lengths, multiply, lhs, rhs, group_sizes, columns, product.dtype)

    return kernels.choose(len(lhs), kernel, masked, blocks, lhs, rhs, group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def group_products(
    product: GroupedProduct,
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "rows out"],
    group_sizes: Int32[Array, " groups"],
) -> Num[Array, "groups into out"]:
    """Sums, for each group, the outer products of its rows of `lhs` and `rhs`; 0 for empty groups.

    All operands vary alike.
    """
    kernels = product.kernels
    sums = product.sums(common_dtype(lhs.dtype, rhs.dtype))

    def ragged_dot(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "rows out"],
        group_sizes: Int32[Array, " groups"],
        sums: Any = sums,
    ) -> Num[Array, "groups into out"]:
        dims = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
        return product.ragged_dot(dims, sums, lhs, rhs, group_sizes)

    # The kernel itself replaces by 0, in both operands, what is not the group's.
    kernel = partial(ragged_dot, sums=product.dtype)

    def masked(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "rows out"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "groups into out"]:
        inside = in_groups(group_sizes, len(lhs))
        return ragged_dot(jnp.where(inside, lhs, 0), jnp.where(inside, rhs, 0), group_sizes)

    def blocks(
        lengths: tuple[int, ...],
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "rows out"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "groups into out"]:
        def multiply(
            left: Num[Array, "length into"], right: Num[Array, "length out"]
        ) -> Num[Array, "into out"]:
            return block_dot(left, right, (0, 0), product.preferred, kernels.precision)

        return blocks_group_products(lengths, multiply, lhs, rhs, group_sizes, product.dtype)

    return kernels.choose(len(lhs), kernel, masked, blocks, lhs, rhs, group_sizes)


def fitting_sizes(group_sizes: Integer[Array, " groups"], rows: int) -> Int32[Array, " groups"]:
    """The sizes, cut to what `rows` hold: more would lead a kernel out of bounds.

    Each is cut first, so that their sum does not wrap around.
    """
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype("int32")  # in which rows can be counted
    sizes = jnp.minimum(group_sizes, rows).astype("int32")
    if len(sizes) * rows < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype="int32"), rows)
    else:  # a sum of two stays below 2**32
        wide = sizes.astype("uint32")
        ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), wide).astype("int32")
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))


def in_groups(group_sizes: Int32[Array, " groups"], rows: int) -> Bool[Array, "{rows} 1"]:
    """Which rows belong to any group."""
    return lax.broadcasted_iota("int32", (rows, 1), 0) < jnp.sum(group_sizes, dtype="int32")


def _rows_fwd(
    product: GroupedProduct,
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "groups _ _"],
    group_sizes: Int32[Array, " groups"],
) -> Any:
    return rows_product(product, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _rows_bwd(product: GroupedProduct, residuals: Any, ct: Num[Array, "rows out"]) -> Any:
    lhs, rhs, sizes = residuals
    # Rows go back along the weight's other dimension, 1 and 2 adding up to 3. A weight's gradient
    # has the dimensions in the weight's own order: the one that rows were multiplied along is that
    # of `lhs`, wherever it stands.
    to_lhs = product.derivative(3 - product.contracted, lhs.dtype)
    pair = (lhs, ct) if product.contracted == 1 else (ct, lhs)
    to_rhs = product.derivative(1, rhs.dtype)
    return rows_product(to_lhs, ct, rhs, sizes), group_products(to_rhs, *pair, sizes), None


def _groups_fwd(
    product: GroupedProduct,
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "rows out"],
    group_sizes: Int32[Array, " groups"],
) -> Any:
    return group_products(product, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _groups_bwd(product: GroupedProduct, residuals: Any, ct: Num[Array, "groups into out"]) -> Any:
    lhs, rhs, sizes = residuals
    to_lhs, to_rhs = product.derivative(2, lhs.dtype), product.derivative(1, rhs.dtype)
    return rows_product(to_lhs, rhs, ct, sizes), rows_product(to_rhs, lhs, ct, sizes), None


rows_product.defvjp(_rows_fwd, _rows_bwd)
group_products.defvjp(_groups_fwd, _groups_bwd)


def bind_kernels(implementation: Any, precision: Any) -> Kernels:
    """Returns the kernels, or raises for options that name none."""
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise value_error(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    check_precision(precision)
    return Kernels(implementation, precision)


def bind_preferred(given: Any, operands: Any) -> Any:
    """Returns the dtype that a user prefers, or raises where it cannot hold the products."""
    preferred = as_dtype("preferred_element_type", given)
    if preferred is not None:
        check_holds("preferred_element_type", preferred, operands, "products")
    return preferred


def check_grouped(lhs: Array, rhs: Array, group_sizes: Array) -> None:
    """Raises unless rows, weights and sizes of groups go together."""
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise value_error(
            f"lhs must be [m, k] and rhs [g, k, n], got local shapes {lhs.shape} and "
            f"{rhs.shape}; reshape them"
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise value_error(
            f"lhs of local shape {lhs.shape} has {lhs.shape[1]} columns, but each "
            f"weight of rhs, local shape {rhs.shape}, has {rhs.shape[1]} rows; they are "
            "multiplied and must be as many"
        )
    check_sizes(group_sizes, "rhs", rhs.shape)
    if lhs.dtype != rhs.dtype:
        raise type_error(f"lhs is {lhs.dtype} and rhs {rhs.dtype}; cast one to the other's dtype")
    if lhs.dtype == jnp.bool_:
        raise type_error("lhs and rhs are bool, which has no products; cast them to int8")


def check_sizes(group_sizes: Array, argument: str, shape: tuple[int, ...]) -> None:
    """Raises unless there are as many `group_sizes` as weights."""
    if group_sizes.shape != shape[:1]:
        raise value_error(
            f"group_sizes has local shape {group_sizes.shape}, but {argument} of local "
            f"shape {shape} has {shape[0]} groups; give one size for each"
        )
