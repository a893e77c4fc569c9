"""A gathered operand that stays where it is, while the other operands and the results travel.

Few rows that meet a large weight, whose blocks are sharded, are the smaller message: every device
multiplies all devices' rows by its own block, and reads no more of the weight than that.
"""

from string import ascii_letters
from typing import Any

from jax import Array, lax
from jaxtyping import Num

from jaxpar._axis import Ring


def unused_label(*labels: str) -> str:
    """Returns a letter that is none of the labels."""
    return next(letter for letter in ascii_letters if letter not in "".join(labels))


def send_partner(
    ring: Ring, x: Num[Array, "*right"], dim: int | None
) -> Num[Array, "devices *part"]:
    """Returns what this device's block meets of all devices' `x`, in logical order.

    That is all of it, or the block's own positions where the ring's label is dimension `dim` of x.
    """
    if dim is None:
        return lax.all_gather(x, ring.names)
    return lax.all_to_all(x[None], ring.names, dim + 1, 0, tiled=True)


def return_result(
    ring: Ring, y: Num[Array, "devices *part"], dim: int | None, wire: Any
) -> Num[Array, "*out"]:
    """Sends every device what was computed for it, `y[i]` to device i.

    Blocks make a whole along `dim`; without one, they are addends, which travel in `wire`.
    """
    if dim is None:
        return lax.psum_scatter(y.astype(wire), ring.names)
    return lax.all_to_all(y, ring.names, 0, dim + 1, tiled=True)[0]
