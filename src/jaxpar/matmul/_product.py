"""One einsum of two local arrays, by its labels: what it computes, and in which dtypes."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Num

from jaxpar._dtypes import common_dtype, sum_dtype

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
    arithmetic: Arithmetic, product: Product, left: Left, right: Right, dtype: Any = None
) -> Out:
    """Computes one product of local arrays, rounded to `dtype`, or in that of partial sums."""
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


def partial_dtype(arithmetic: Arithmetic, left: Left, right: Right) -> Any:
    """The dtype of partial sums."""
    sums = arithmetic.preferred_element_type
    return sum_dtype(common_dtype(left.dtype, right.dtype)) if sums is None else sums


def sizes_of(product: Product, left: Left, right: Right) -> dict[str, int]:
    """The size of each label of two arrays."""
    return dict(zip(product.left + product.right, left.shape + right.shape, strict=True))
