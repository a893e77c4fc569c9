"""A gathered operand that stays where it is, while the other operands and the results travel.

Few rows that meet a large weight, whose blocks are sharded, are the smaller message: every device
multiplies all devices' rows by its own block, and reads no more of the weight than that.
"""

from jax import Array, lax
from jaxtyping import Num

from jaxpar.axis.axis import Ring
from jaxpar.compiler.compat import all_gather, psum_scatter
from jaxpar.matmul._product import Left, Out, Product, Right, multiply, unused_label
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.parts import join_dims, split_dim


def stay(
    method: RingEinsum, products: tuple[Product, ...], left: Left, rights: tuple[Right, ...]
) -> tuple[Out, ...] | None:
    """Computes the products of a gather, `left` staying where it is; None: there is nothing."""
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
    # Results travel in their own dtype, and partial sums, which lack the label, in the wire's.
    wire = product.dtype if dims[1] is not None else ring.wire(product.dtype)
    # Four devices, y = x w with w [k/4, c] on each, x [m/4, k]: device 0 gets of all rows their
    # first k/4 columns, [4, m/4, k/4], multiplies them by its w, and sends [4, m/4, c] of partial
    # sums back, to be added where their rows are. Nothing of w moves.
    y = multiply(method.arithmetic, apart, left, _send_partner(ring, right, dims[0]), wire)
    return _return_result(ring, y, dims[1]).astype(product.dtype)


def _with_devices(labels: str, label: str, devices: str) -> str:
    """Returns labels with one more, of devices: in front of the ring's, or of all."""
    return labels.replace(label, devices + label) if label in labels else devices + labels


def _send_partner(ring: Ring, x: Num[Array, "*right"], dim: int | None) -> Num[Array, "*apart"]:
    """Returns what this device's block meets of all devices' `x`.

    That is all of it, with devices in front; or, where the ring's label is dimension `dim` of x,
    the block's own positions, with devices as a dimension in front of that.
    """
    if dim is None:
        return all_gather(x, ring.names)
    # Split and joined along one dimension: its derivative is itself, and nothing is transposed.
    return split_dim(lax.all_to_all(x, ring.names, dim, dim, tiled=True), dim, ring.size)


def _return_result(ring: Ring, y: Num[Array, "*apart"], dim: int | None) -> Num[Array, "*out"]:
    """Sends every device what was computed for it; devices are dimension `dim` of y, or the first.

    Blocks make a whole along `dim`; without one, they are partial sums.
    """
    if dim is None:
        return psum_scatter(y, ring.names)
    return lax.all_to_all(join_dims(y, dim), ring.names, dim, dim, tiled=True)
