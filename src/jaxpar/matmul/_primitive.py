"""The two ring einsums, each the other's derivative: gather an operand, or scatter the result.

Both take several products at once. A gather feeds one travelling operand to every product; a
scatter sums all products into one travelling result. The derivative of a gather is one scatter (for
the travelling operand, over all its products) and one gather (for all the others); the derivative
of a scatter is one gather of the cotangent, which feeds the gradients of all operands. So one pair
of custom_vjp functions is closed under differentiation, and residuals are the operands as they
came in: shards.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar._dtypes import common_dtype, sum_dtype
from jaxpar.collectives._fold import Arrivals, gather_fold, place_block, scatter_fold, take_block
from jaxpar.collectives._plan import Plan
from jaxpar.collectives._ring import Ring


@dataclass(frozen=True)
class Arithmetic:
    """The numerical options of a matmul, the same in the forward pass and in every derivative."""

    preferred_element_type: Any  # dtype of partial sums and result; None: the package's contract
    wire_dtype: Any  # dtype of partial sums that travel; None: that of partial sums
    precision: Any


@dataclass(frozen=True)
class Method:
    """How a ring einsum runs, the same in the forward pass and in every derivative."""

    ring: Ring
    plan: Plan
    label: str  # the einsum label that is sharded over the ring
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Product:
    """The labels of one einsum, `left,right->out`, and the dtype of what it gives."""

    left: str
    right: str
    out: str
    dtype: Any


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_einsum(
    method: Method, products: tuple[Product, ...], left: Array, rights: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Computes `product(all-gathered left, right)` for each product and its right operand.

    `left` is this device's block along `method.label`; the right operands and the results have that
    label whole where they have it. All operands vary over the same axes, the ring's among them.
    """

    def consume(results: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        results = [None] * len(products) if results is None else results
        for block, (source, taken) in arrivals:
            results = [
                _use_block(method, product, result, block, right, source)
                for product, result, right in zip(products, results, taken, strict=True)
            ]
        return results

    def take(source: Array) -> tuple[Array, list[Array]]:
        return source, [
            _block_of(method, right, p.right, source)
            for p, right in zip(products, rights, strict=True)
        ]

    def sums(results: list[Array]) -> list[Array]:
        return [r for r, p in zip(results, products, strict=True) if method.label not in p.out]

    results = gather_fold(left, consume, method.ring, method.plan, sums, take)
    return tuple(r.astype(p.dtype) for r, p in zip(results, products, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scatter_einsum(
    method: Method, products: tuple[Product, ...], pairs: tuple[tuple[Array, Array], ...]
) -> Array:
    """Sums all products over all devices, and keeps this device's block of the sum.

    Operands have `method.label` whole where they have it; the result is the block along it. All
    operands vary over the same axes, the ring's among them.
    """

    def take(owner: Array) -> list[tuple[Array, Array]]:
        return [
            (_block_of(method, left, p.left, owner), _block_of(method, right, p.right, owner))
            for p, (left, right) in zip(products, pairs, strict=True)
        ]

    def produce(taken: list[tuple[Array, Array]]) -> Array:
        parts = [
            multiply(method.arithmetic, p, left, right)
            for p, (left, right) in zip(products, taken, strict=True)
        ]
        return sum(parts[1:], start=parts[0])

    wire = method.arithmetic.wire_dtype
    total = scatter_fold(produce, method.ring, method.plan, wire, take)
    return total.astype(products[0].dtype)


def _gather_fwd(method: Method, products: Any, left: Array, rights: Any) -> Any:
    return gather_einsum(method, products, left, rights), (left, rights)


def _gather_bwd(method: Method, products: tuple[Product, ...], residuals: Any, cts: Any) -> Any:
    left, rights = residuals
    for_left = tuple(Product(p.out, p.right, p.left, left.dtype) for p in products)
    for_rights = tuple(
        Product(p.left, p.out, p.right, right.dtype)
        for p, right in zip(products, rights, strict=True)
    )
    return (
        scatter_einsum(method, for_left, tuple(zip(cts, rights, strict=True))),
        gather_einsum(method, for_rights, left, tuple(cts)),
    )


def _scatter_fwd(method: Method, products: Any, pairs: Any) -> Any:
    return scatter_einsum(method, products, pairs), pairs


def _scatter_bwd(method: Method, products: tuple[Product, ...], pairs: Any, ct: Array) -> Any:
    gradients: list[Product] = []
    partners: list[Array] = []
    for p, (left, right) in zip(products, pairs, strict=True):
        gradients += [
            Product(p.out, p.right, p.left, left.dtype),
            Product(p.out, p.left, p.right, right.dtype),
        ]
        partners += [right, left]
    grads: Any = gather_einsum(method, tuple(gradients), ct, tuple(partners))
    return (tuple(zip(grads[::2], grads[1::2], strict=True)),)


gather_einsum.defvjp(_gather_fwd, _gather_bwd)
scatter_einsum.defvjp(_scatter_fwd, _scatter_bwd)


def multiply(arithmetic: Arithmetic, product: Product, left: Array, right: Array) -> Array:
    """Computes one product of local arrays, in the dtype of partial sums."""
    dtype = common_dtype(left.dtype, right.dtype)  # a cotangent may be wider than its partner
    sums = arithmetic.preferred_element_type
    return jnp.einsum(
        f"{product.left},{product.right}->{product.out}",
        left.astype(dtype),
        right.astype(dtype),
        precision=arithmetic.precision,
        preferred_element_type=sum_dtype(dtype) if sums is None else sums,
    )


def _block_of(method: Method, x: Array, labels: str, position: Array) -> Array:
    """Returns block `position` of an operand that has the ring's label whole, all of any other."""
    if method.label not in labels:
        return x
    dim = labels.index(method.label)
    return take_block(x, dim, x.shape[dim] // method.ring.size, position)


def _use_block(
    method: Method,
    product: Product,
    result: Array | None,
    block: Array,
    right: Array,
    source: Array,
) -> Array:
    label = method.label
    part = multiply(method.arithmetic, product, block, right)
    if label in product.out:
        part = part.astype(product.dtype)
        return place_block(result, part, product.out.index(label), source, method.ring.size)
    return part if result is None else result + part
