"""The all-reduced einsum, and its derivative.

Under `check_vma=True` the result and its cotangent are typed as replicated, and the derivative
sends nothing. Under `check_vma=False` JAX derives a scatter and a gather.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Num

from jaxpar.axis.vma import checks_varying, vary_over
from jaxpar.compiler.derivatives import as_residuals, with_derivative
from jaxpar.matmul._product import Left, Out, Product, Right, multiply, sizes_of
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.matmul._ring_vjp import scatter_einsum
from jaxpar.ring.blocks import gather_replicated


def all_reduce_einsum(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    way = method.way
    if way.derived_by_jax or not all(_shape(product, left, right)):
        with jax.named_scope(way.mode):
            wire = way.ring.wire(product.dtype)
            sums = multiply(method.arithmetic, product, left, right, wire)
            total = lax.psum(sums, way.ring.names)
    else:  # under check_vma=False, types do not tell what is replicated
        add = _replicated_sum if checks_varying(way.ring.names) else _sum
        total = add(method, product, left, right)
    return total.astype(product.dtype)


def _shape(product: Product, left: Left, right: Right) -> list[int]:
    sizes = sizes_of(product, left, right)
    return [sizes[label] for label in product.out]


def _multiply_replicated(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    left = vary_over(method.way.ring.names, left)
    return multiply(method.arithmetic, product, left, right, product.dtype)


def _sum(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    size, shape = method.way.ring.size, _shape(product, left, right)
    # Any dimension of the result can be scattered and gathered again.
    dim = next((d for d, n in enumerate(shape) if n % size == 0), None)
    if dim is None:  # the longest dimension needs the least padding, relative to its size
        dim = max(range(len(shape)), key=shape.__getitem__)
        left = _pad(left, product.left, product.out[dim], -shape[dim] % size)
        right = _pad(right, product.right, product.out[dim], -shape[dim] % size)
    method = replace(method, label=product.out[dim])
    block = scatter_einsum(method, (product,), ((left, right),))
    whole = gather_replicated(method.way, block, dim)
    return lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def _pad(x: Num[Array, "*left"], labels: str, label: str, by: int) -> Num[Array, "*padded"]:
    return jnp.pad(x, [(0, by if name == label else 0) for name in labels])


def _sum_bwd(method: RingEinsum, product: Product, residuals: Any, ct: Out) -> Any:
    left, right = residuals
    # The cotangent of a replicated result is replicated: local products suffice.
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.out, product.left, product.right, right.dtype)
    return (
        _replicated_product(method, for_left, ct, right),
        _replicated_product(method, for_right, ct, left),
    )


def _product_bwd(method: RingEinsum, product: Product, residuals: Any, ct: Out) -> Any:
    left, right = residuals
    # All devices used the same `left`: its gradient is the sum of their gradients.
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.left, product.out, product.right, right.dtype)
    return (
        _replicated_sum(method, for_left, ct, right),
        _replicated_product(method, for_right, left, ct),
    )


def _sum_fwd(method: RingEinsum, product: Product, *operands: Array) -> Any:
    return _replicated_sum(method, product, *operands), as_residuals(operands)


def _product_fwd(method: RingEinsum, product: Product, *operands: Array) -> Any:
    return _replicated_product(method, product, *operands), as_residuals(operands)


_replicated_sum = with_derivative(_sum, _sum_fwd, _sum_bwd, statics=2)
_replicated_product = with_derivative(_multiply_replicated, _product_fwd, _product_bwd, statics=2)
