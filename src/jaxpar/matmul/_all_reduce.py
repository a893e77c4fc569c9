"""The all-reduced einsum, and its derivative.

It is typed as replicated, and its derivative sends nothing: under `check_vma=True` the cotangent of
a replicated result is replicated too, so that the gradients of `_replicated_sum` are products of
local arrays. Those are `_replicated_product`, whose own derivative with respect to its replicated
operand is a `_replicated_sum` again.

Under `check_vma=False` nothing says what is replicated: there an all-reduce is the scatter and the
gather one after the other, and JAX differentiates the two.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Num

from jaxpar.axis.varying import checks_varying, vary_over
from jaxpar.compiler.derivatives import as_residuals, with_derivative
from jaxpar.matmul._primitive import scatter_einsum
from jaxpar.matmul._product import Left, Out, Product, Right, multiply, sizes_of
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.blocks import gather_replicated


def all_reduce_einsum(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    """Sums the product over all devices and gives every device the whole."""
    way = method.way
    if way.derived_by_jax or not all(_shape(product, left, right)):
        with jax.named_scope(way.mode):
            wire = way.ring.wire(product.dtype)
            sums = multiply(method.arithmetic, product, left, right, wire)
            total = lax.psum(sums, way.ring.names)
    else:  # under check_vma=False nothing says what is replicated
        add = _replicated_sum if checks_varying(way.ring.names) else _sum
        total = add(method, product, left, right)
    return total.astype(product.dtype)


def _shape(product: Product, left: Left, right: Right) -> list[int]:
    """The shape of the product."""
    sizes = sizes_of(product, left, right)
    return [sizes[label] for label in product.out]


def _multiply_replicated(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    """Computes the product of a `left` that is the same on all devices of the ring with `right`."""
    left = vary_over(method.way.ring.names, left)
    return multiply(method.arithmetic, product, left, right, product.dtype)


def _sum(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    """The sum of the product over all devices, scattered and gathered again."""
    size, shape = method.way.ring.size, _shape(product, left, right)
    # Any dimension of the result may be the one that is scattered and gathered again.
    dim = next((d for d, n in enumerate(shape) if n % size == 0), None)
    if dim is None:  # the longest one, of which padding is the smallest part
        dim = max(range(len(shape)), key=shape.__getitem__)
        left = _pad(left, product.left, product.out[dim], -shape[dim] % size)
        right = _pad(right, product.right, product.out[dim], -shape[dim] % size)
    method = replace(method, label=product.out[dim])
    block = scatter_einsum(method, (product,), ((left, right),))
    whole = gather_replicated(method.way, block, dim)
    return lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def _pad(x: Num[Array, "*left"], labels: str, label: str, by: int) -> Num[Array, "*padded"]:
    """Appends zeros along the dimension of a label, if x has it."""
    return jnp.pad(x, [(0, by if name == label else 0) for name in labels])


def _sum_bwd(method: RingEinsum, product: Product, residuals: Any, ct: Out) -> Any:
    left, right = residuals
    # The cotangent of a replicated result is replicated: local products, with nothing to send.
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.out, product.left, product.right, right.dtype)
    return (
        _replicated_product(method, for_left, ct, right),
        _replicated_product(method, for_right, ct, left),
    )


def _product_bwd(method: RingEinsum, product: Product, residuals: Any, ct: Out) -> Any:
    left, right = residuals
    # `left` is one array that every device used: its gradient is the sum of theirs.
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
