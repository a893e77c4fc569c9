"""Grouped matmuls: rows sorted by group, each multiplied by its group's weight.

Two products are closed under differentiation: rows by weights, and each group's sum of outer
products. Lowering chooses a ragged dot, for which TPUs have a kernel, or blocks.
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
from jaxtyping import Int32, Integer, Num

from jaxpar.arguments.calls import check_among, public, type_error, value_error
from jaxpar.arguments.dtypes import as_dtype, check_holds, common_dtype, result_dtype, sum_dtype
from jaxpar.arguments.types import Implementation, Values
from jaxpar.axis.checks import as_array, check_precision
from jaxpar.axis.checks_of_layers import as_integers
from jaxpar.axis.vma import vary_alike
from jaxpar.compiler import control_flow
from jaxpar.moe._copies import where_rows
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
    """Multiplies each row by the weight matrix of its group, for rows sorted by group.

    Args:
      lhs: `[m, k]`: rows of group 0, then 1, and so on. Rows past the sum of `group_sizes` have no
        group and may hold anything, NaN included.
      rhs: `[g, k, n]`, in the dtype of `lhs`.
      group_sizes: integers `[g]`, not negative. If they sum to more than `m`, the last groups lose
        rows.
      preferred_element_type: the dtype of partial sums and result. None: the operands' dtype, with
        narrow floats summed in float32; 32 bits for narrow integers.
      precision: as in `jax.lax.dot_general`.
      implementation: `"ragged_dot"` is `jax.lax.ragged_dot_general`. TPUs have a kernel for it.
        `"blocks"` loops over blocks of rows. `"auto"` is a ragged dot on TPUs, blocks elsewhere.

    Returns:
      `[m, n]`, varying over all mesh axes of the operands. Rows without a group are zero. Their
      gradients, and those of empty groups' weights, are zero whatever the cotangent.

    Raises:
      TypeError: dtypes differ, operands are bool, or a preferred dtype cannot hold the products.
      ValueError: shapes do not fit, or the implementation is unknown.

    Cost: nothing is sent. 2 k n FLOPs for each row with a group, as many for each operand's
    gradient. Blocks round a group's rows up to a multiple of 16 (on GPUs 256) or a little more. A
    ragged dot without a kernel costs 2 m g k n FLOPs, and on GPUs the memory of g copies of `lhs`.

    Example:
      >>> rows, weights = jnp.arange(6.0)[:, None], jnp.array([[[10.0, 1.0]], [[100.0, 2.0]]])
      >>> grouped_matmul(rows, weights, jnp.array([2, 3]))[:, 0]
      Array([  0.,  10., 200., 300., 400.,   0.], dtype=float32)

    Source: Gale et al., "MegaBlocks" (2022).
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
    implementation: str
    precision: Any

    def choose(self, rows: int, kernel: Any, masked: Any, blocks: Any, *operands: Any) -> Any:
        """Runs a TPU kernel, a ragged dot, or blocks.

        `blocks` gets the lengths of blocks before the operands.
        """
        branches = {"default": partial(blocks, CPU_LENGTHS)}
        if rows >= GPU_LENGTHS[-1]:  # a shorter buffer has no such block
            branches["cuda"] = branches["rocm"] = partial(blocks, GPU_LENGTHS)
        if self.implementation != "blocks":
            branches["tpu"] = kernel
        if self.implementation == "ragged_dot":
            branches = {"tpu": kernel, "default": masked}

        # Under vmap, a batch after the other. Batched loops would all run as long as the longest,
        # and ragged dots have no rule for some batches.
        @sequential_vmap
        def chosen(*operands: Any) -> Any:
            return control_flow.platform_dependent(*operands, **branches)

        return chosen(*operands)


@dataclass(frozen=True)
class GroupedProduct:
    kernels: Kernels
    contracted: int  # the dimension of weights that is summed over: 1 or 2
    preferred: Any  # the dtype of partial sums; None: the package's rule
    dtype: Any  # of the result
    cleared: bool = True  # whether rows past the last group are 0; otherwise they hold anything

    def sums(self, operands: Any) -> Any:
        return sum_dtype(operands) if self.preferred is None else self.preferred

    def ragged_dot(
        self,
        dims: Any,
        sums: Any,
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, " ..."],  # [groups, _, _], or [rows, out]
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, " ..."]:
        common = common_dtype(lhs.dtype, rhs.dtype)  # a cotangent may be wider
        return lax.ragged_dot_general(
            lhs.astype(common),
            rhs.astype(common),
            group_sizes,
            dims,
            precision=self.kernels.precision,
            preferred_element_type=sums,
        ).astype(self.dtype)

    def derivative(self, contracted: int, dtype: Any) -> GroupedProduct:
        return replace(self, contracted=contracted, dtype=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rows_product(
    product: GroupedProduct,
    lhs: Num[Array, "rows into"],
    rhs: Num[Array, "groups _ _"],
    group_sizes: Int32[Array, " groups"],
) -> Num[Array, "rows out"]:
    """Multiplies rows by group weights. Operands vary alike."""
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
        return clear(out, group_sizes) if product.cleared else out

    # The kernel always sums in float32 and rounds once. A wider result would need another pass to
    # narrow it.
    kernel = partial(ragged_dot, sums=product.dtype)

    def masked(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "groups _ _"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "rows out"]:
        return ragged_dot(clear(lhs, group_sizes), rhs, group_sizes)

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
    """Sums groups' outer products. Operands vary alike."""
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

    # The kernel itself sets other groups' rows to 0, in both operands.
    kernel = partial(ragged_dot, sums=product.dtype)

    def masked(
        lhs: Num[Array, "rows into"],
        rhs: Num[Array, "rows out"],
        group_sizes: Int32[Array, " groups"],
    ) -> Num[Array, "groups into out"]:
        return ragged_dot(clear(lhs, group_sizes), clear(rhs, group_sizes), group_sizes)

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
    """Cuts sizes to sum to `rows`, or kernels overrun."""
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype("int32")  # wide enough to count rows
    sizes = jnp.minimum(group_sizes, rows).astype("int32")
    if len(sizes) * rows < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, dtype="int32"), rows)
    else:  # a sum of two stays below 2**32
        wide = sizes.astype("uint32")
        ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), wide).astype("int32")
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))


def clear(
    rows: Num[Array, " rows *row"], group_sizes: Int32[Array, " groups"]
) -> Num[Array, " rows *row"]:
    return where_rows(lax.iota("int32", len(rows)) < jnp.sum(group_sizes, dtype="int32"), rows)


def _rows_fwd(product: GroupedProduct, *operands: Array) -> Any:
    return rows_product(product, *operands), operands


def _rows_bwd(product: GroupedProduct, residuals: Any, ct: Num[Array, "rows out"]) -> Any:
    lhs, rhs, sizes = residuals
    # Cotangents of rows are multiplied along the weight's other dimension: 1 and 2 add up to 3. A
    # weight's gradient has the weight's order of dimensions. `lhs` gives the dimension that it was
    # multiplied along, which may come second.
    to_lhs = product.derivative(3 - product.contracted, lhs.dtype)
    pair = (lhs, ct) if product.contracted == 1 else (ct, lhs)
    to_rhs = product.derivative(1, rhs.dtype)
    return rows_product(to_lhs, ct, rhs, sizes), group_products(to_rhs, *pair, sizes), None


def _groups_fwd(product: GroupedProduct, *operands: Array) -> Any:
    return group_products(product, *operands), operands


def _groups_bwd(product: GroupedProduct, residuals: Any, ct: Num[Array, "groups into out"]) -> Any:
    lhs, rhs, sizes = residuals
    to_lhs, to_rhs = product.derivative(2, lhs.dtype), product.derivative(1, rhs.dtype)
    return rows_product(to_lhs, rhs, ct, sizes), rows_product(to_rhs, lhs, ct, sizes), None


rows_product.defvjp(_rows_fwd, _rows_bwd)
group_products.defvjp(_groups_fwd, _groups_bwd)


def bind_kernels(implementation: Any, precision: Any) -> Kernels:
    check_among("implementation", implementation, IMPLEMENTATIONS)
    check_precision(precision)
    return Kernels(implementation, precision)


def bind_preferred(dtype: Any, operands: Any) -> Any:
    preferred = as_dtype("preferred_element_type", dtype)
    if preferred is not None:
        check_holds("preferred_element_type", preferred, operands, "products")
    return preferred


def check_grouped(lhs: Array, rhs: Array, group_sizes: Array) -> None:
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
    if group_sizes.shape != shape[:1]:
        raise value_error(
            f"group_sizes has local shape {group_sizes.shape}, but {argument} of local "
            f"shape {shape} has {shape[0]} groups; give one size for each"
        )
