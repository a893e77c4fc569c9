"""The all-reduced einsum, typed as replicated, and its derivative, which sends nothing.

Under `check_vma=True` the cotangent of a replicated result is replicated too, so the gradients of
`all_reduce_einsum` are products of local arrays. Those are `replicated_einsum`, whose own
derivative with respect to its replicated operand is an `all_reduce_einsum` again.

Under `check_vma=False` nothing says what is replicated: there an all-reduce is the scatter and the
gather one after the other, and JAX differentiates the two.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxpar._derivatives import with_derivative
from jaxpar._varying import checks_varying, vary_over
from jaxpar.collectives._blocks import gather_replicated
from jaxpar.matmul._primitive import Method, Product, multiply, scatter_einsum


def all_reduce_einsum(method: Method, product: Product, left: Array, right: Array) -> Array:
    """Sums the product over all devices and gives every device the whole."""
    wire = method.way.ring.wire_dtype

    def addend() -> Array:
        sums = multiply(method.arithmetic, product, left, right)
        return sums if wire is None else sums.astype(wire)

    def in_blocks() -> Array:
        # Under check_vma=False nothing says what is replicated.
        checked = checks_varying(method.way.ring.names)
        return (_replicated_sum if checked else _sum)(method, product, left, right)

    empty = not all(_shape(product, left, right))
    return method.way.reduce(addend, None if empty else in_blocks).astype(product.dtype)


def _shape(product: Product, left: Array, right: Array) -> list[int]:
    sizes = dict(zip(product.left + product.right, left.shape + right.shape, strict=True))
    return [sizes[label] for label in product.out]


def _multiply_replicated(method: Method, product: Product, left: Array, right: Array) -> Array:
    """Computes the product of a `left` that is the same on all devices of the ring with `right`."""
    left = vary_over(method.way.ring.names, left)
    return multiply(method.arithmetic, product, left, right).astype(product.dtype)


def _sum(method: Method, product: Product, left: Array, right: Array) -> Array:
    size, shape = method.way.ring.size, _shape(product, left, right)
    # Any dimension of the result may be the one that is scattered and gathered again.
    dim = next((d for d, n in enumerate(shape) if n % size == 0), None)
    if dim is None:
        dim = max(range(len(shape)), key=shape.__getitem__)
        left = _pad(left, product.left, product.out[dim], -shape[dim] % size)
        right = _pad(right, product.right, product.out[dim], -shape[dim] % size)
    method = replace(method, label=product.out[dim])
    block = scatter_einsum(method, (product,), ((left, right),))
    whole = gather_replicated(method.way, block, dim)
    return lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def _pad(x: Array, labels: str, label: str, by: int) -> Array:
    return jnp.pad(x, [(0, by if name == label else 0) for name in labels])


def _sum_bwd(method: Method, product: Product, residuals: Any, ct: Array) -> Any:
    left, right = residuals
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.out, product.left, product.right, right.dtype)
    return (
        _replicated_product(method, for_left, ct, right),
        _replicated_product(method, for_right, ct, left),
    )


def _product_bwd(method: Method, product: Product, residuals: Any, ct: Array) -> Any:
    left, right = residuals
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.left, product.out, product.right, right.dtype)
    return (
        _replicated_sum(method, for_left, ct, right),
        _replicated_product(method, for_right, left, ct),
    )


def _sum_fwd(method: Method, product: Product, *operands: Array) -> Any:
    return _replicated_sum(method, product, *operands), operands


def _product_fwd(method: Method, product: Product, *operands: Array) -> Any:
    return _replicated_product(method, product, *operands), operands


_replicated_sum = with_derivative(_sum, _sum_fwd, _sum_bwd, statics=2)
_replicated_product = with_derivative(_multiply_replicated, _product_fwd, _product_bwd, statics=2)
