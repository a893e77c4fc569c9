"""Attention with sharded heads, in any number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Int, Num

from jaxpar.arguments.calls import public, readable, value_error
from jaxpar.arguments.shapes import with_rank
from jaxpar.arguments.types import Integer
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.checks import as_array, check_dim, check_whole
from jaxpar.axis.padding import PaddedDim
from jaxpar.axis.vma import vary_wide, varying_axes
from jaxpar.layers._projections import Projection, as_biases, as_weights, bind_projection, fsdp_pair


@readable
@dataclass(frozen=True)
class HeadLayout:
    """A layout of attention heads over devices, made by `head_layout`.

    Query head `j` uses key and value head `j // (heads // kv_heads)`. Query heads from `heads` on
    are padding; `parallel_attention` masks them.

    Attributes:
      heads: query heads.
      kv_heads: key and value heads; divides `heads`.
      shards: devices.

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
        """Returns `heads`, rounded up to a multiple of `shards`."""
        return self.local_heads * self.shards

    @property
    def local_heads(self) -> int:
        """Returns a shard's number of query heads, padding included."""
        return -(-self.heads // self.shards)

    @property
    def kv_sharded(self) -> bool:
        """Returns whether key and value heads are sharded, not replicated."""
        return self.kv_heads % self.shards == 0

    @property
    def local_kv_heads(self) -> int:
        """Returns a shard's number of key and value heads, a divisor of `local_heads`."""
        return self.local_heads // self._run

    @property
    def _run(self) -> int:
        # The number of adjacent query heads that share a key and value head on every shard. Blocks
        # begin at multiples of local_heads, and groups at multiples of heads / kv_heads.
        return gcd(self.local_heads, self.heads // self.kv_heads)

    def query_heads_of(self, shard: Any) -> Array:
        """Returns a shard's query heads, `int32[local_heads]`, padding included."""
        return shard * self.local_heads + jnp.arange(self.local_heads, dtype="int32")

    def kv_heads_of(self, shard: Any) -> Array:
        """Returns a shard's key and value heads, `int32[local_kv_heads]`.

        Each entry serves `local_heads / local_kv_heads` query heads, so a head may be repeated.
        """
        heads = jnp.minimum(self.query_heads_of(shard)[:: self._run], self.heads - 1)
        return heads // (self.heads // self.kv_heads)

    @public
    def pad_query(self, w: Array, dim: Integer = -1) -> Array:
        """Pads an unsharded query weight, or its bias, to `padded_heads`.

        Args:
          w: `[..., heads * e]`.
          dim: the dimension of heads.

        Returns:
          `[..., padded_heads * e]`, with zeros at the end.

        Raises:
          ValueError: the dimension is out of range, or `heads` does not divide its size.

        Example:
          >>> head_layout(3, 1, 2).pad_query(jnp.arange(3.0)).tolist()
          [0.0, 1.0, 2.0, 0.0]
        """
        return self._pad(w, dim)

    @public
    def pad_output(self, w: Array, dim: Integer = 0) -> Array:
        """Pads an unsharded output weight's rows to `padded_heads`.

        Args:
          w: `[heads * e, ...]`.
          dim: the dimension of heads.

        Returns:
          `[padded_heads * e, ...]`.
        """
        return self._pad(w, dim)

    @public
    def unpad_query(self, w: Array, dim: Integer = -1) -> Array:
        """Removes the padding of `pad_query`.

        Args:
          w: `[..., padded_heads * e]`.
          dim: the dimension of heads.

        Returns:
          `[..., heads * e]`.
        """
        return self._unpad(w, dim)

    @public
    def unpad_output(self, w: Array, dim: Integer = 0) -> Array:
        """Removes the padding of `pad_output`.

        Args:
          w: `[padded_heads * e, ...]`.
          dim: the dimension of heads.

        Returns:
          `[heads * e, ...]`.
        """
        return self._unpad(w, dim)

    def _pad(self, w: Array, dim: int) -> Array:
        dim = check_dim("dim", dim, w.shape)
        size = self._head_size(w, dim, self.heads)
        padded: Any = self._blocks(size).pad(w, dim)
        return padded

    def _unpad(self, w: Array, dim: int) -> Array:
        dim = check_dim("dim", dim, w.shape)
        size = self._head_size(w, dim, self.padded_heads)
        whole: Any = self._blocks(size).unpad(w, dim)
        return whole

    def _blocks(self, size: int) -> PaddedDim:
        return PaddedDim.at_the_end(self.heads * size, self.shards, self.local_heads * size)

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
    """Returns a `HeadLayout`: the heads of each device.

    Args:
      heads: query heads.
      kv_heads: key and value heads, 1 for multi-query attention.
      shards: devices that share the heads.

    Returns:
      Query heads are padded to a multiple of `shards`. Key and value heads are sharded if `shards`
      divides them, else replicated.

    Raises:
      ValueError: `kv_heads` does not divide `heads`, or a number is not positive.

    Cost: padding multiplies attention's work by `padded_heads / heads`.

    Example:
      >>> layout = head_layout(heads=5, kv_heads=5, shards=4)
      >>> layout.padded_heads, layout.pad_query(jnp.arange(1.0, 6.0)).tolist()
      (8, [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0])
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


@public
def parallel_attention(
    x: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    w_o: Array,
    axis: AxisLike,
    attend: Callable[[Array, Array, Array], Array],
    *,
    heads: Integer,
    kv_heads: Integer,
    biases: tuple[Array | None, ...] | None = None,
    sequence_dim: Integer | None = -2,
    fsdp_axis: AxisLike | None = None,
    fsdp_dim: Integer | tuple[Integer, Integer] = 0,
    fsdp_first: bool = False,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes multi-head attention and its projections, with heads sharded over `axis`.

    `layout` below is `head_layout(heads, kv_heads, n)`, or with `fsdp_first`
    `head_layout(heads, kv_heads, n * f)`.

    Args:
      x: as in `column_parallel_linear`.
      w_q: local `[k, padded_heads * e / n]`, padded by `layout.pad_query`.
      w_k: local `[k, kv_heads * e / n]` if `layout.kv_sharded`, else full `[k, kv_heads * e]`.
      w_v: like w_k, with its own head size u.
      w_o: local `[padded_heads * u / n, m]`, padded by `layout.pad_output`.
      axis: as in `column_parallel_linear` and `row_parallel_linear`.
      attend: `(q, k, v) -> o` on local heads: q `[..., s, h, e]`, k `[..., s, g, e]`, v
        `[..., s, g, u]`, o `[..., s, h, u]`. Query head `j` uses key and value head
        `j // (h // g)`. `attend` must apply masks and positions, and handle other axes that shard
        the sequence. Arrays with an entry for each query head, such as sinks, must be padded and
        sharded like w_q.
      heads: query heads, without padding.
      kv_heads: key and value heads.
      biases: a tuple for q, k, v and o: arrays or None, sharded like the columns of their weights.
      sequence_dim: as in `column_parallel_linear`.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: as in `column_parallel_linear`, or a pair: for q, k and v, and for o.
      fsdp_first: True if `fsdp_axis` precedes `axis` where both shard heads:
        `P(None, ("fsdp", "tp"))` for w_q, `P(("fsdp", "tp"))` for w_o. Needs `fsdp_dim=(1, 0)`.
      preferred_element_type: as in `all_gather_matmul`; `attend`'s result is cast to w_o's dtype.
      precision: as in `jax.lax.dot_general`.

    Returns:
      As `row_parallel_linear`. Padding heads are zeros in q and in `attend`'s result; their weights
      get zero gradients.

    Raises:
      TypeError, ValueError: as in `column_parallel_linear`; also if heads do not fit, or `attend`
        returns another shape.

    Cost: one gather of x, one reduce-scatter of the result. With replicated w_k and w_v, a device
    computes only the heads that it needs; gradients are summed over `axis`.

    Example:
      >>> mesh, layout = make_mesh("tp=8"), head_layout(heads=6, kv_heads=2, shards=8)
      >>> def attend(q, k, v):  # one query head a device, two of them padding
      ...     return jax.nn.dot_product_attention(q, k, v, is_causal=True)
      >>> def layer(x, *weights):
      ...     return parallel_attention(x, *weights, "tp", attend, heads=6, kv_heads=2)
      >>> f = jaxpar.jit(jax.shard_map(layer, mesh=mesh, out_specs=P(None, "tp"),
      ...     in_specs=(P(None, "tp"), P(None, "tp"), P(), P(), P("tp"))))
      >>> sizes = (3, 24, 16), (16, 6 * 8), (16, 2 * 8), (16, 2 * 8), (6 * 8, 16)
      >>> x, q, k, v, o = [jax.random.normal(jax.random.key(n), s) for n, s in enumerate(sizes)]
      >>> f(x, layout.pad_query(q), k, v, layout.pad_output(o)).shape
      (3, 24, 16)

    Source: Shoeybi et al., "Megatron-LM" (2019); Ainslie et al., "GQA" (2023).
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    into, out = fsdp_pair(fsdp_dim)
    local = _OwnHeads(layer, *_layout(layer, heads, kv_heads, fsdp_first, (into, out)))
    *b_qkv, b_o = as_biases("biases", biases, ("w_q", "w_k", "w_v", "w_o"))
    weights = as_weights({"w_q": w_q, "w_k": w_k, "w_v": w_v})
    w_o = as_array("w_o", w_o)
    for argument, w in weights.items():
        local.check(argument, w, into)
    shared = () if local.layout.kv_sharded else ("w_k", "w_v")
    results = layer.columns(as_array("x", x), weights, tuple(b_qkv), into, local.select, shared)
    q, k, v = (
        y.reshape(*y.shape[:-1], count, y.shape[-1] // count)
        for y, count in zip(results, (local.count, local.kv_count, local.kv_count), strict=True)
    )
    if q.shape[-1] != k.shape[-1]:
        raise value_error(
            f"w_q has local shape {w_q.shape}, {q.shape[-1]} columns a head, and w_k "
            f"{w_k.shape}, {k.shape[-1]}; they must have as many"
        )
    attended: Any = attend(local.mask(q), k, v)
    if attended.shape[:-1] != q.shape[:-1]:
        raise value_error(
            f"attend returned local shape {attended.shape} for q {q.shape}, k {k.shape} "
            f"and v {v.shape}; it must be {q.shape[:-1]} and the size of a head"
        )
    o = local.mask(attended).astype(layer.used_as(w_o))
    o = o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1])
    return layer.rows(o, {"w_o": w_o}, b_o, out)


@dataclass(frozen=True)
class _OwnHeads:
    """This device's heads: `blocks` shards of the layout."""

    layer: Projection
    layout: HeadLayout
    blocks: int

    @property
    def count(self) -> int:
        return self.layout.local_heads * self.blocks

    @property
    def kv_count(self) -> int:
        return self.layout.local_kv_heads * self.blocks

    def select(self, name: str, whole: Num[Array, "*into columns"]) -> Num[Array, "*into own"]:
        if name == "w_q" or self.layout.kv_sharded:
            return whole
        index = self._of_blocks(self.layout.kv_heads_of)
        # Several query heads or devices may use a head. Their gradients are summed in float32.
        wide = vary_wide(varying_axes(whole, index), whole)
        heads = self.layout.kv_heads
        size = whole.shape[-1] // heads
        wide = wide.reshape(*whole.shape[:-1], heads, size)
        chosen = jnp.take(wide, index, axis=-2, mode="clip").astype(whole.dtype)
        return chosen.reshape(*whole.shape[:-1], self.kv_count * size)

    def mask(self, x: Num[Array, "*tokens heads size"]) -> Num[Array, "*tokens heads size"]:
        if self.layout.padded_heads == self.layout.heads:
            return x
        real = self._of_blocks(self.layout.query_heads_of) < self.layout.heads
        return jnp.where(with_rank(x.ndim, real[:, None]), x, jnp.zeros_like(x))

    def check(self, name: str, w: Array, along: Integer) -> None:
        layout, fsdp = self.layout, self.layer.fsdp
        heads, what = self.count, f"{layout.padded_heads} query heads over {layout.shards} devices"
        if name != "w_q":
            sharded = layout.kv_sharded
            heads = self.kv_count if sharded else layout.kv_heads
            over = f"over {layout.shards} devices" if sharded else "replicated"
            what = f"{layout.kv_heads} key and value heads {over}"
        columns = w.shape[-1] * (fsdp.size if fsdp is not None and along in (1, -1) else 1)
        if w.ndim == 2 and columns % heads:
            raise value_error(
                f"{name} has local shape {w.shape}, {columns} columns here, "
                f"which are no {heads} heads: {columns} = {columns // heads} x {heads} + "
                f"{columns % heads}; head_layout({layout.heads}, {layout.kv_heads}, "
                f"{layout.shards}) has {what}"
            )

    def _of_blocks(self, heads_of: Callable[[Any], Array]) -> Int[Array, " heads"]:
        index = self.layer.ring.index()
        # If fsdp shards first, a gather over it joins shards that are ring.size apart.
        stride = self.layer.ring.size
        return jnp.concatenate([heads_of(index + block * stride) for block in range(self.blocks)])


def _layout(
    layer: Projection, heads: int, kv_heads: int, fsdp_first: bool, dims: tuple[int, int]
) -> tuple[HeadLayout, int]:
    if not fsdp_first:
        return head_layout(heads, kv_heads, layer.ring.size), 1
    if layer.fsdp is None or dims != (1, 0):
        raise value_error(
            "fsdp_first=True means that heads are sharded over fsdp_axis and axis in this order, "
            f"but fsdp_dim is {dims} and fsdp_axis "
            f"{None if layer.fsdp is None else layer.fsdp.names}; give fsdp_dim=(1, 0) and "
            "the axis, or leave it out"
        )
    blocks = layer.fsdp.size
    return head_layout(heads, kv_heads, layer.ring.size * blocks), blocks
