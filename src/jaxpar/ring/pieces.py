"""How blocks and sums are dealt out to transfers: shares of rings, pieces of a sum, two halves."""

from collections.abc import Sequence
from itertools import pairwise

from jax import Array, lax

from jaxpar.axis.varying import spec_of

TILE = 8  # rows of a TPU's; what begins or ends within one is shifted


def shares_of(length: int, shares: int) -> list[tuple[int, int]]:
    """Starts and sizes of parts of `length` as equal as can be, the longest first.

    None of them is empty. They are whole tiles where there are enough.
    """
    unit = TILE if length % TILE == 0 and length >= 5 * TILE * shares else 1
    units = length // unit
    shares = max(1, min(shares, units))
    ends = [-(-units * number // shares) * unit for number in range(shares + 1)]
    return [(start, end - start) for start, end in pairwise(ends)]


def equal_pieces(length: int, pieces: int) -> list[tuple[int, int]]:
    """Starts and sizes of pieces of one size that cover `length`: the last ones may overlap.

    The TPU compiler delays transfers of sums where they are of several sizes, and a matmul waits
    for them: 16392x8192x8192 over a ring of 8 v5p took 1694 us in pieces of 1025 and 1024 rows, and
    takes 1536 in two of 1032. They are whole tiles where that is at most a hundredth more.
    """
    size = -(-length // pieces)
    tiles = -(-size // TILE) * TILE
    if tiles * pieces <= 1.01 * length:
        size = min(tiles, length)  # of one piece it is all
    return [(min(number * size, length - size), size) for number in range(pieces)]


def half_of(block: Array, half: int) -> Array:
    """Returns the first or the second half of a block, along a dimension that has two if any has.

    Not along one that explicit mesh axes shard: a half of it would be resharded.
    """
    dim = _halved_dim(block)
    size = block.shape[dim]
    middle = -(-size // 2)
    start, stop = ((0, middle), (middle, size))[half]
    return lax.slice_in_dim(block, start, stop, axis=dim)


def join_halves(halves: Sequence[Array], like: Array) -> Array:
    """Returns the block, like another one, that was cut into these halves."""
    return lax.concatenate(halves, _halved_dim(like))


def _halved_dim(x: Array) -> int:
    spec = spec_of(x)
    whole = [dim for dim, axes in enumerate(spec) if axes is None] or list(range(x.ndim))
    even = [dim for dim in whole if x.shape[dim] % 2 == 0 and x.shape[dim]]
    return even[0] if even else max(whole, key=lambda dim: x.shape[dim])
