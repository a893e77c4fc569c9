"""Parts of arrays: blocks placed in a whole, the two pieces of a sum, the two halves of a block."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax

from jaxpar._compat import empty_like_blocks
from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._order import spec_of


def place_block(whole: Array | None, block: Array, dim: int, start: Any, size: int) -> Array:
    """Writes `block` at `start` of `dim`, which has `size`; None is a whole yet unwritten."""
    if block.shape[dim] == size:
        return block
    if whole is None:
        # Not zeros: filling what every turn overwrites would be one more pass over the result.
        whole = empty_like_blocks(block, dim, size // block.shape[dim])
    into: Array = vary_over(varying_axes(block), whole)
    return lax.dynamic_update_slice_in_dim(into, block, start, dim)


def empty_result(piece: Array, dim: int, length: int) -> Array:
    """Unwritten memory like two pieces, one of which may be shorter by one."""
    whole = vary_over(varying_axes(piece), empty_like_blocks(piece, dim, 2))
    return lax.slice_in_dim(whole, 0, length, axis=dim)


def pieces_of(length: int, pieces: int) -> list[tuple[int, int]]:
    """Starts and sizes of the one or two `pieces` of `length` that are not empty."""
    assert pieces in (1, 2), pieces
    middle = -(-length // 2)
    halves = [(0, middle), (middle, length - middle)]
    return halves if pieces == 2 and length > 1 else [(0, length)]


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


def of_types(types: Any, tree: Any) -> Any:
    """Returns a pytree in the dtypes of another one."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), types, tree)


def like_finished(finish: Callable[[Any], Any], carry: Any) -> Any:
    """Returns arrays of the types of `finish(carry)`, of any values."""

    def empty(x: Array, finished: Any) -> Array:
        if x.dtype == finished.dtype or not x.ndim:
            return x.astype(finished.dtype)
        return vary_over(varying_axes(x), empty_like_blocks(x, 0, 1, finished.dtype))

    return jax.tree.map(empty, carry, jax.eval_shape(finish, carry))


def _halved_dim(x: Array) -> int:
    spec = spec_of(x)
    whole = [dim for dim, axes in enumerate(spec) if axes is None] or list(range(x.ndim))
    even = [dim for dim in whole if x.shape[dim] % 2 == 0 and x.shape[dim]]
    return even[0] if even else max(whole, key=lambda dim: x.shape[dim])
