"""The all-reduced einsum, typed as replicated, and its derivative, which sends nothing.

Under `check_vma=True` the cotangent of a replicated result is replicated too, so the gradients of
`all_reduce_einsum` are products of local arrays. Those are `replicated_einsum`, whose own
derivative with respect to its replicated operand is an `all_reduce_einsum` again.

Under `check_vma=False` nothing says what is replicated: there an all-reduce is the scatter and the
gather one after the other, and JAX differentiates the two.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar._varying import checks_varying, vary_over
from jaxpar.collectives._primitive import gather_blocks
from jaxpar.matmul._primitive import Method, Product, multiply, scatter_einsum


def all_reduce_einsum(method: Method, product: Product, left: Array, right: Array) -> Array:
    """Sums the product over all devices and gives every device the whole."""
    if checks_varying(method.ring.axis_name):
        return _all_reduce_replicated(method, product, left, right)
    return _scatter_then_gather(method, product, left, right)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def replicated_einsum(method: Method, product: Product, left: Array, right: Array) -> Array:
    """Computes the product of a `left` that is the same on all devices of the ring with `right`."""
    left = vary_over(method.ring.axis_name, left)
    return multiply(method.arithmetic, product, left, right).astype(product.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_reduce_replicated(method: Method, product: Product, left: Array, right: Array) -> Array:
    return _scatter_then_gather(method, product, left, right)


def _scatter_then_gather(method: Method, product: Product, left: Array, right: Array) -> Array:
    ring = method.ring
    sizes = dict(zip(product.left + product.right, left.shape + right.shape, strict=True))
    shape = [sizes[label] for label in product.out]
    # Any dimension of the result may be the one that is scattered and gathered again.
    dim = next((d for d, n in enumerate(shape) if n % ring.size == 0), None)
    if dim is None:
        dim = max(range(len(shape)), key=shape.__getitem__)
        left = _pad(left, product.left, product.out[dim], -shape[dim] % ring.size)
        right = _pad(right, product.right, product.out[dim], -shape[dim] % ring.size)
    method = replace(method, label=product.out[dim])
    whole: Any
    block = scatter_einsum(method, (product,), ((left, right),))
    if checks_varying(ring.axis_name):
        whole = lax.all_gather(block, ring.axis_name, axis=dim, tiled=True, to="invarying")
    else:
        whole = gather_blocks(block, ring, method.plan, dim, method.arithmetic.wire_dtype)
    return lax.slice_in_dim(whole, 0, shape[dim], axis=dim)


def _pad(x: Array, labels: str, label: str, by: int) -> Array:
    return jnp.pad(x, [(0, by if name == label else 0) for name in labels])


def _all_reduce_bwd(method: Method, product: Product, residuals: Any, ct: Array) -> Any:
    left, right = residuals
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.out, product.left, product.right, right.dtype)
    return (
        replicated_einsum(method, for_left, ct, right),
        replicated_einsum(method, for_right, ct, left),
    )


def _replicated_bwd(method: Method, product: Product, residuals: Any, ct: Array) -> Any:
    left, right = residuals
    for_left = Product(product.out, product.right, product.left, left.dtype)
    for_right = Product(product.left, product.out, product.right, right.dtype)
    return (
        _all_reduce_replicated(method, for_left, ct, right),
        replicated_einsum(method, for_right, left, ct),
    )


_all_reduce_replicated.defvjp(
    lambda method, product, *xy: (_all_reduce_replicated(method, product, *xy), xy), _all_reduce_bwd
)
replicated_einsum.defvjp(
    lambda method, product, *xy: (replicated_einsum(method, product, *xy), xy), _replicated_bwd
)
