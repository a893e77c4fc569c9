"""One einsum of two local arrays, by its labels: what it computes, and in which dtypes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Num

from jaxpar.arguments.dtypes import common_dtype, sum_dtype
from jaxpar.axis.quantized import Quantized, spread

# Labels of an einsum, known while tracing, name the dimensions of its arrays; sizes of all but the
# label of the ring are the same in all arrays that have it. So annotations say only whose shape one
# is.
Left = Num[Array, "*left"]
Right = Num[Array, "*right"]
Out = Num[Array, "*out"]


@dataclass(frozen=True)
class Product:
    """The labels of one einsum, `left,right->out`, and the dtype of what it gives."""

    left: str
    right: str
    out: str
    dtype: Any


@dataclass(frozen=True)
class Arithmetic:
    """The numerical options of a matmul, the same in the forward pass and in every derivative."""

    preferred_element_type: Any  # dtype of partial sums and result; None: the package's contract
    precision: Any


def multiply(
    arithmetic: Arithmetic,
    product: Product,
    left: Left | Quantized,
    right: Right,
    dtype: Any = None,
) -> Out:
    """Computes one product of local arrays, rounded to `dtype`, or in that of partial sums."""
    if isinstance(left, Quantized):
        return _multiply_quantized(arithmetic, product, left, right, dtype)
    given = common_dtype(left.dtype, right.dtype)  # a cotangent may be wider than its partner
    sums = partial_dtype(arithmetic, left, right)
    dtype = sums if dtype is None else dtype
    # A matmul sums 16-bit numbers in float32 in any case. One that rounds by itself has a
    # derivative of narrow operands; behind a cast it would multiply float32, which GPUs do slowly.
    rounds = dtype == given and dtype.itemsize == 2
    out = jnp.einsum(
        f"{product.left},{product.right}->{product.out}",
        left.astype(given),
        right.astype(given),
        precision=arithmetic.precision,
        preferred_element_type=dtype if rounds else sums,
    )
    return out.astype(dtype)


def _multiply_quantized(
    arithmetic: Arithmetic, product: Product, left: Quantized, right: Right, dtype: Any
) -> Out:
    """Scales the sums, where there is a scale for each of them; otherwise what is summed.

    Both are part of the matmul. The values, of 8 bits, are exact in every dtype of the right one.
    """
    given = right.dtype
    sums = partial_dtype(arithmetic, right, right)  # of int8 values: the partner's
    scaled = [name for name, n in zip(product.left, left.scales.shape, strict=True) if n > 1]
    if sums.itemsize < 4 or not set(scaled) <= set(product.out):
        return multiply(arithmetic, product, left.dequantized(given), right, dtype)
    out = multiply(arithmetic, product, left.values.astype(given), right)  # not scaled yet
    kept = [name for name in product.left if name in product.out]
    within = tuple(
        n if name in scaled else 1 for name, n in zip(product.left, left.shape, strict=True)
    )
    others = [dim for dim, name in enumerate(product.left) if name not in kept]  # of one scale
    scales = lax.squeeze(spread(left.scales, within), others)
    scales = scales.transpose([kept.index(name) for name in product.out if name in kept])
    scales = lax.expand_dims(scales, [d for d, name in enumerate(product.out) if name not in kept])
    return (out * scales.astype(out.dtype)).astype(sums if dtype is None else dtype)


def gradients_of_gather(
    products: Sequence[Product], left: Any, rights: Sequence[Any]
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    """Returns the products of a gather's derivative: for the left operand, and for the others.

    The gradient of the left one sums, over products and devices, cotangents times right operands,
    and is scattered as it is. Those of each right one need all of the left one, which travels once
    more.

    Args:
      products: that share the left operand, which is gathered.
      left: its dtype.
      rights: the dtypes of the others.
    """
    for_left = tuple(Product(p.out, p.right, p.left, left) for p in products)
    for_rights = tuple(
        Product(p.left, p.out, p.right, right) for p, right in zip(products, rights, strict=True)
    )
    return for_left, for_rights


def gradients_of_scatter(
    products: Sequence[Product], dtypes: Sequence[tuple[Any, Any]]
) -> tuple[Product, ...]:
    """Returns the products of a scatter's derivative: two for each of its own, with these dtypes.

    The cotangent, on the left of all of them, is the one array that travels. Its partners are the
    right operand and the left one, for the gradient of the other.
    """
    return tuple(
        gradient
        for p, (left, right) in zip(products, dtypes, strict=True)
        for gradient in (
            Product(p.out, p.right, p.left, left),  # dx = dy w^T
            Product(p.out, p.left, p.right, right),  # dw = dy^T x, as labels say
        )
    )


def partial_dtype(arithmetic: Arithmetic, left: Left, right: Right) -> Any:
    """The dtype of partial sums."""
    sums = arithmetic.preferred_element_type
    return sum_dtype(common_dtype(left.dtype, right.dtype)) if sums is None else sums


def sizes_of(product: Product, left: Left | Quantized, right: Right) -> dict[str, int]:
    """The size of each label of two arrays."""
    return dict(zip(product.left + product.right, left.shape + right.shape, strict=True))


def flops_of(sizes: Iterable[dict[str, int]]) -> float:
    """The FLOPs of products whose labels have such sizes."""
    return sum(2.0 * prod(of.values()) for of in sizes)


def unused_label(*labels: str) -> str:
    """Returns a letter that is none of the labels."""
    return next(letter for letter in ascii_letters if letter not in "".join(labels))
