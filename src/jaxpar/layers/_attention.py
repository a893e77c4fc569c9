"""Attention whose heads are sharded: projections around any function of local heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar._calls import public, value_error
from jaxpar._types import AxisLike, Integer
from jaxpar._varying import vary_wide, varying_axes
from jaxpar.layers._heads import HeadLayout, head_layout
from jaxpar.layers._projections import Projection, as_biases, bind_projection, fsdp_pair


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
    """Projects to queries, keys and values, attends head by head, and projects back.

    `layout = head_layout(heads, kv_heads, n)` says which heads each of the n devices has: any
    number of heads works on any number of devices.

    Args:
      x: local `[..., s/n, k]`, or `[..., s, k]` with `sequence_dim=None`, replicated.
      w_q: local `[k, padded_heads * e / n]`, of what `layout.pad_query` returns.
      w_k: local `[k, kv_heads * e / n]` if `layout.kv_sharded`, and else whole,
        `[k, kv_heads * e]`, replicated over `axis`.
      w_v: as `w_k`; its e may differ.
      w_o: local `[padded_heads * e / n, m]`, of what `layout.pad_output` returns.
      axis: mesh axes: a name, a tuple or list of them in any order, or an `Axis`, which says how
        data travel, as in `column_parallel_linear` and `row_parallel_linear`.
      attend: `(q, k, v) -> o` on local heads, q and o `[..., s, h, e]`, k and v `[..., s, g, e]`;
        g divides h, and query head j uses key and value head `j // (h // g)`. Masks, positions and
        further axes over which the sequence is sharded are its own affair.
      heads: query heads in all, without padding.
      kv_heads: key and value heads in all.
      biases: of q, k, v and o, each an array or None, sharded as the columns of the weight are.
      sequence_dim: the dimension of x and of the result that is sharded, or None.
      fsdp_axis: as in `column_parallel_linear`.
      fsdp_dim: the dimension along which weights are sharded further; or a pair, of `w_q`, `w_k`
        and `w_v`, and of `w_o`.
      fsdp_first: whether heads are cut by `fsdp_axis` first: `P(None, ("fsdp", "tp"))` for
        w_q, `P(("fsdp", "tp"))` for w_o. The layout is then that of all n f devices,
        `head_layout(heads, kv_heads, n * f)`, and `fsdp_dim` is `(1, 0)`.
      preferred_element_type: as in `all_gather_matmul`; what `attend` returns is cast to the dtype
        of `w_o`.
      precision: as in `jax.lax.dot_general`.

    Heads that are padding are zeros before and after `attend`: their weights get zero gradients.

    Returns:
      `[..., s/n, m]`; with `sequence_dim=None` `[..., s, m]`, typed as replicated.

    Raises:
      TypeError: operands of different dtypes, or an option or wire dtype of the wrong type.
      ValueError: numbers of heads or columns that do not fit, `attend` returning another shape,
        and as `column_parallel_linear` and `row_parallel_linear`.

    Cost: one gather of x for all three projections, one reduce-scatter of the result. Of keys and
    values that are not sharded a device projects only what its query heads use, and the gradients
    of their weights are summed over the axis.

    Example:
      >>> mesh, layout = make_mesh("tp=8"), head_layout(heads=6, kv_heads=2, shards=8)
      >>> def attend(q, k, v):  # one query head a device, two of them padding
      ...     return jax.nn.dot_product_attention(q, k, v, is_causal=True)
      >>> def layer(x, *weights):
      ...     return parallel_attention(x, *weights, "tp", attend, heads=6, kv_heads=2)
      >>> f = jax.jit(jax.shard_map(layer, mesh=mesh, out_specs=P(None, "tp"),
      ...     in_specs=(P(None, "tp"), P(None, "tp"), P(), P(), P("tp"))))
      >>> q, kv, o = jnp.ones((16, 6 * 8)), jnp.ones((16, 2 * 8)), jnp.ones((6 * 8, 16))
      >>> f(jnp.ones((3, 24, 16)), layout.pad_query(q), kv, kv, layout.pad_output(o)).shape
      (3, 24, 16)

    Source: Shoeybi et al., "Megatron-LM" (2019); Ainslie et al., "GQA" (2023), for shared heads.
    """
    options = (preferred_element_type, precision)
    layer = bind_projection(axis, sequence_dim, fsdp_axis, options)
    into, out = fsdp_pair(fsdp_dim)
    own = _OwnHeads(layer, *_layout(layer, heads, kv_heads, fsdp_first, (into, out)))
    *b_qkv, b_o = as_biases("biases", biases, ("w_q", "w_k", "w_v", "w_o"))
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
    for argument, w in weights.items():
        own.check(argument, w, into)
    results = layer.columns(x, weights, tuple(b_qkv), into, own.select)
    q, k, v = (
        y.reshape(*y.shape[:-1], count, y.shape[-1] // count)
        for y, count in zip(results, (own.count, own.kv_count, own.kv_count), strict=True)
    )
    if q.shape[-1] != k.shape[-1]:
        raise value_error(
            f"w_q has local shape {w_q.shape}, {q.shape[-1]} columns a head, and w_k "
            f"{w_k.shape}, {k.shape[-1]}; they must have as many"
        )
    attended: Any = attend(own.mask(q), k, v)
    if attended.shape[:-1] != q.shape[:-1]:
        raise value_error(
            f"attend returned local shape {attended.shape} for q {q.shape}, k {k.shape} "
            f"and v {v.shape}; it must be {q.shape[:-1]} and the size of a head"
        )
    o = own.mask(attended).astype(w_o.dtype)
    o = o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1])
    return layer.rows(o, {"w_o": w_o}, b_o, out)


@dataclass(frozen=True)
class _OwnHeads:
    """The heads of the device that runs the program: those of `blocks` shards of the layout."""

    layer: Projection
    layout: HeadLayout
    blocks: int

    @property
    def count(self) -> int:
        return self.layout.local_heads * self.blocks

    @property
    def kv_count(self) -> int:
        return self.layout.local_kv_heads * self.blocks

    def select(self, name: str, whole: Array) -> Array:
        """Takes, of the last dimension of keys or values that all devices have, its own heads."""
        if name == "w_q" or self.layout.kv_sharded:
            return whole
        index = self._of_blocks(self.layout.kv_heads_of)
        # What several query heads or devices use gets the sum of their gradients, in float32.
        wide = vary_wide(varying_axes(whole, index), whole)
        heads = self.layout.kv_heads
        size = whole.shape[-1] // heads
        wide = wide.reshape(*whole.shape[:-1], heads, size)
        own = jnp.take(wide, index, axis=-2, mode="clip").astype(whole.dtype)
        return own.reshape(*whole.shape[:-1], self.kv_count * size)

    def mask(self, x: Array) -> Array:
        """Replaces heads that are padding, `[..., h, e]`, by zeros."""
        if self.layout.padded_heads == self.layout.heads:
            return x
        real = self._of_blocks(self.layout.query_heads_of) < self.layout.heads
        return jnp.where(real[:, None], x, jnp.zeros_like(x))

    def check(self, name: str, w: Array, along: Integer) -> None:
        """Raises unless the columns of a weight are those of whole heads."""
        layout, fsdp = self.layout, self.layer.fsdp
        heads, what = self.count, f"{layout.padded_heads} query heads over {layout.shards} devices"
        if name != "w_q":
            sharded = layout.kv_sharded
            heads = self.kv_count if sharded else layout.kv_heads
            over = f"over {layout.shards} devices" if sharded else "whole on every device"
            what = f"{layout.kv_heads} key and value heads {over}"
        columns = w.shape[-1] * (fsdp.size if fsdp is not None and along in (1, -1) else 1)
        if w.ndim == 2 and columns % heads:
            raise value_error(
                f"{name} has local shape {w.shape}, {columns} columns here, "
                f"which are no {heads} heads: {columns} = {columns // heads} x {heads} + "
                f"{columns % heads}; head_layout({layout.heads}, {layout.kv_heads}, "
                f"{layout.shards}) has {what}"
            )

    def _of_blocks(self, heads_of: Callable[[Any], Array]) -> Array:
        index = self.layer.ring.index()
        stride = self.layer.ring.size
        return jnp.concatenate([heads_of(index + block * stride) for block in range(self.blocks)])


def _layout(
    layer: Projection, heads: int, kv_heads: int, fsdp_first: bool, dims: tuple[int, int]
) -> tuple[HeadLayout, int]:
    """Returns the layout of heads, and how many of its shards a device has."""
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
