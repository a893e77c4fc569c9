"""A stationary operand: the other operands and the results travel instead.

This saves bytes for few rows and a large sharded weight.
"""

from jax import Array, lax
from jaxtyping import Num

from jaxpar.axis.axis import Ring
from jaxpar.compiler.compat import all_gather, psum_scatter
from jaxpar.matmul._product import Left, Out, Product, Right, multiply, unused_label
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.cuts import join_dims, split_dim


def stay(
    method: RingEinsum,
    products: tuple[Product, ...],
    left: Left,
    rights: tuple[Num[Array, "..."], ...],
) -> tuple[Num[Array, "..."], ...] | None:
    """Computes products with a stationary `left`; None if an operand is empty."""
    if not all(x.size for x in (left, *rights)):
        return None
    pairs = zip(products, rights, strict=True)
    return tuple(_stay(method, product, left, right) for product, right in pairs)


def _stay(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    ring, label = method.way.ring, method.label
    dims = [x.index(label) if label in x else None for x in (product.right, product.out)]
    device = unused_label(product.left, product.right)
    right_apart, out_apart = (_with_devices(x, label, device) for x in (product.right, product.out))
    apart = Product(product.left, right_apart, out_apart, product.dtype)
    # Results with the ring's label travel in their own dtype, partial sums in the wire's.
    wire = product.dtype if dims[1] is not None else ring.wire(product.dtype)
    # Four devices compute y = x w, with w [k/4, c] and x [m/4, k] on each. Device 0 receives the
    # first k/4 columns of all rows, [4, m/4, k/4]. It multiplies them by its w, and sends partial
    # sums [4, m/4, c] back, which the rows' owners add. No part of w moves.
    y = multiply(method.arithmetic, apart, left, _send_partner(ring, right, dims[0]), wire)
    return _return_result(ring, y, dims[1]).astype(product.dtype)


def _with_devices(labels: str, label: str, devices: str) -> str:
    """Adds a devices' label, before the ring's, or first."""
    return labels.replace(label, devices + label) if label in labels else devices + labels


def _send_partner(ring: Ring, x: Num[Array, "*right"], dim: int | None) -> Num[Array, "*apart"]:
    """Returns the parts of all devices' `x` that meet this device's block."""
    # Devices are a dimension before the ring's label, or first.
    if dim is None:
        return all_gather(x, ring.names)
    # Split and join along one dimension: this is its own derivative, without a transpose.
    return split_dim(lax.all_to_all(x, ring.names, dim, dim, tiled=True), dim, ring.size)


def _return_result(ring: Ring, y: Num[Array, "*apart"], dim: int | None) -> Num[Array, "*out"]:
    """Sends every device its part of y: a block along `dim`, or partial sums."""
    if dim is None:
        return psum_scatter(y, ring.names)
    return lax.all_to_all(join_dims(y, dim), ring.names, dim, dim, tiled=True)
