"""One einsum of two local arrays, its dtypes, and its derivatives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Num

from jaxpar.arguments.dtypes import (
    NARROW,
    check_holds,
    check_wire,
    common_dtype,
    result_dtype,
    sum_dtype,
)
from jaxpar.axis.quantized import Quantized, read_as, spread

# Einsum labels, known while tracing, name the dimensions of arrays. A label has one size in all
# arrays, except the ring's label. So annotations only tell which array has which shape.
Left = Num[Array, "*left"]
Right = Num[Array, "*right"]
Out = Num[Array, "*out"]


@dataclass(frozen=True)
class Product:
    """The labels of an einsum, `left,right->out`, and the dtype of its result."""

    left: str
    right: str
    out: str
    dtype: Any


@dataclass(frozen=True)
class Arithmetic:
    preferred_element_type: Any  # dtype of partial sums and result; None: see arguments/dtypes.py
    precision: Any


def dtype_of_products(dtype: Any, preferred: Any, wire: Any) -> Any:
    if preferred is not None:
        check_holds("preferred_element_type", preferred, dtype, "products")
    check_wire(wire, sum_dtype(dtype) if preferred is None else preferred)
    return result_dtype(dtype) if preferred is None else preferred


def multiply(
    arithmetic: Arithmetic,
    product: Product,
    left: Left | Quantized,
    right: Right,
    dtype: Any = None,
) -> Out:
    """Multiplies in `dtype`, by default in that of partial sums."""
    if isinstance(left, Quantized):
        return _multiply_quantized(arithmetic, product, left, right, dtype)
    common = common_dtype(left.dtype, right.dtype)  # cotangents may be wider than their partners
    sums = partial_dtype(arithmetic, left, right)
    dtype = sums if dtype is None else dtype
    # A matmul always sums 16-bit numbers in float32. If the matmul itself rounds the result, its
    # derivative has 16-bit operands. With a cast, it would have float32 ones: slow on GPUs.
    rounds = dtype == common and dtype.itemsize == 2
    read = NARROW.get(common, (0, common))[1]  # for CPUs and GPUs; TPUs' compiler undoes the cast
    out = jnp.einsum(
        f"{product.left},{product.right}->{product.out}",
        left.astype(read),
        right.astype(read),
        precision=arithmetic.precision,
        preferred_element_type=dtype if rounds else sums,
    )
    return out.astype(dtype)


def _multiply_quantized(
    arithmetic: Arithmetic, product: Product, left: Quantized, right: Right, dtype: Any
) -> Out:
    """Scales the sums if each has one scale, otherwise the operand."""
    partner = right.dtype
    sums = partial_dtype(arithmetic, right, right)  # int8 values are summed in the partner's
    scaled = [name for name, n in zip(product.left, left.scales.shape, strict=True) if n > 1]
    if sums.itemsize < 4 or not set(scaled) <= set(product.out):
        return multiply(arithmetic, product, read_as(left, partner), right, dtype)
    out = multiply(arithmetic, product, left.values.astype(partner), right)  # unscaled
    kept = [name for name in product.left if name in product.out]
    within = tuple(
        n if name in scaled else 1 for name, n in zip(product.left, left.shape, strict=True)
    )
    others = [dim for dim, name in enumerate(product.left) if name not in kept]  # one scale each
    scales = lax.squeeze(spread(left.scales, within), others)
    scales = scales.transpose([kept.index(name) for name in product.out if name in kept])
    scales = lax.expand_dims(scales, [d for d, name in enumerate(product.out) if name not in kept])
    return (out * scales.astype(out.dtype)).astype(sums if dtype is None else dtype)


def gradients_of_gather(
    products: Sequence[Product], left: Any, rights: Sequence[Any]
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    """Returns products for `left`, and for `rights`, which are dtypes."""
    for_left = tuple(Product(p.out, p.right, p.left, left) for p in products)
    for_rights = tuple(
        Product(p.left, p.out, p.right, right) for p, right in zip(products, rights, strict=True)
    )
    return for_left, for_rights


def gradients_of_scatter(
    products: Sequence[Product], dtypes: Sequence[tuple[Any, Any]]
) -> tuple[Product, ...]:
    """Returns two products for each, with the cotangent on the left."""
    return tuple(
        gradient
        for p, (left, right) in zip(products, dtypes, strict=True)
        for gradient in (
            Product(p.out, p.right, p.left, left),  # dx = dy w^T
            Product(p.out, p.left, p.right, right),  # dw = dy^T x, as labels say
        )
    )


def partial_dtype(arithmetic: Arithmetic, left: Left, right: Right) -> Any:
    sums = arithmetic.preferred_element_type
    return sum_dtype(common_dtype(left.dtype, right.dtype)) if sums is None else sums


def sizes_of(product: Product, left: Left | Quantized, right: Right) -> dict[str, int]:
    return dict(zip(product.left + product.right, left.shape + right.shape, strict=True))


def flops_of(sizes: Iterable[dict[str, int]]) -> float:
    return sum(2.0 * prod(of.values()) for of in sizes)


def unused_label(*labels: str) -> str:
    return next(letter for letter in ascii_letters if letter not in "".join(labels))
