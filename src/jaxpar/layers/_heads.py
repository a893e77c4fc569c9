"""Which attention heads each device has, where heads need not divide among devices."""

from dataclasses import dataclass
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpar._calls import public, value_error
from jaxpar._checks import check_dim, check_whole
from jaxpar._types import Integer


@dataclass(frozen=True)
class HeadLayout:
    """Query heads in blocks of equal size, one for each shard, and the key and value heads of each.

    Query head `j` uses key and value head `j // (heads // kv_heads)`. Heads beyond `heads` are
    padding, which `parallel_attention` masks.

    Attributes:
      heads: query heads.
      kv_heads: key and value heads; they divide `heads`.
      shards: over how many devices heads are sharded.

    Example:
      >>> layout = head_layout(6, 2, 4)
      >>> layout.padded_heads, layout.local_heads, layout.kv_sharded
      (8, 2, False)
      >>> layout.kv_heads_of(1)  # query heads 2 and 3 use these
      Array([0, 1], dtype=int32)
    """

    heads: int
    kv_heads: int
    shards: int

    @property
    def padded_heads(self) -> int:
        """The smallest multiple of `shards` that holds all query heads."""
        return self.local_heads * self.shards

    @property
    def local_heads(self) -> int:
        """Query heads of one shard, padding included."""
        return -(-self.heads // self.shards)

    @property
    def kv_sharded(self) -> bool:
        """Whether key and value heads divide among shards; else every shard has all of them."""
        return self.kv_heads % self.shards == 0

    @property
    def local_kv_heads(self) -> int:
        """Key and value heads that one shard attends with; they divide `local_heads`."""
        return self.local_heads // self._run

    @property
    def _run(self) -> int:
        # So many consecutive query heads share a head on every shard: blocks begin at multiples of
        # local_heads, groups at multiples of heads / kv_heads.
        return gcd(self.local_heads, self.heads // self.kv_heads)

    def query_heads_of(self, shard: Any) -> Array:
        """The query heads of a shard, `int32[local_heads]`; those from `heads` on are padding."""
        return shard * self.local_heads + jnp.arange(self.local_heads, dtype="int32")

    def kv_heads_of(self, shard: Any) -> Array:
        """The key and value heads that a shard attends with, `int32[local_kv_heads]`.

        One may be there more than once, where blocks of query heads cut a group in unequal parts.
        """
        heads = jnp.minimum(self.query_heads_of(shard)[:: self._run], self.heads - 1)
        return heads // (self.heads // self.kv_heads)

    @public
    def pad_query(self, w: Array, dim: Integer = -1) -> Array:
        """Pads `heads * e` columns of an unsharded query weight, or bias, to `padded_heads * e`."""
        return self._pad(w, dim)

    @public
    def pad_output(self, w: Array, dim: Integer = 0) -> Array:
        """Pads `heads * e` rows of an unsharded output weight to `padded_heads * e`."""
        return self._pad(w, dim)

    @public
    def unpad_query(self, w: Array, dim: Integer = -1) -> Array:
        """Returns what `pad_query` was given."""
        return self._unpad(w, dim)

    @public
    def unpad_output(self, w: Array, dim: Integer = 0) -> Array:
        """Returns what `pad_output` was given."""
        return self._unpad(w, dim)

    def _pad(self, w: Array, dim: int) -> Array:
        dim = check_dim("dim", dim, w.shape)
        size = self._head_size(w, dim, self.heads)
        widths = [(0, 0)] * w.ndim
        widths[dim] = (0, (self.padded_heads - self.heads) * size)
        return jnp.pad(w, widths)

    def _unpad(self, w: Array, dim: int) -> Array:
        dim = check_dim("dim", dim, w.shape)
        size = self._head_size(w, dim, self.padded_heads)
        return jnp.take(w, jnp.arange(self.heads * size), axis=dim)

    def _head_size(self, w: Array, dim: int, heads: int) -> int:
        if w.shape[dim] % heads:
            raise value_error(
                f"w has shape {w.shape}, whose dimension {dim} is not a whole number "
                f"of {heads} heads: {w.shape[dim]} = {w.shape[dim] // heads} x {heads} + "
                f"{w.shape[dim] % heads}; pass the unsharded array, and the dimension of its heads"
            )
        return w.shape[dim] // heads


@public
def head_layout(heads: Integer, kv_heads: Integer, shards: Integer) -> HeadLayout:
    """Returns which heads each of `shards` devices has.

    Args:
      heads: query heads.
      kv_heads: key and value heads, which divide `heads`: as many for plain attention, fewer for
        grouped queries, 1 for multi-query attention.
      shards: the size of the axis over which heads are sharded.

    Returns:
      The layout. Query heads are padded to a multiple of `shards`; key and value heads are sharded
      where `shards` divides them, and else replicated.

    Raises:
      TypeError: a number that is no integer.
      ValueError: `kv_heads` does not divide `heads`, or a number is not positive.

    Cost: padding computes `padded_heads / heads` of the attention; what is replicated is projected
    by every device for its own query heads alone.

    Example:
      >>> layout = head_layout(heads=5, kv_heads=5, shards=4)
      >>> layout.padded_heads, layout.pad_query(jnp.ones((3, 5 * 2))).shape
      (8, (3, 16))
    """
    heads = check_whole("heads", heads, 1)
    kv_heads = check_whole("kv_heads", kv_heads, 1)
    shards = check_whole("shards", shards, 1)
    if heads % kv_heads:
        raise value_error(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}: {heads} = "
            f"{heads // kv_heads} x {kv_heads} + {heads % kv_heads}; every key and value head "
            "serves as many query heads"
        )
    return HeadLayout(heads, kv_heads, shards)
