"""Exact attention over a sequence that is sharded over a ring."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float, Int, Int32
from jaxtyping import Integer as Integers

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import check_wire, sum_dtype
from jaxpar.arguments.shapes import with_rank
from jaxpar.arguments.types import Flag, Integer, Number, SequenceOrder, Values
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import as_array, check_own, check_precision, check_whole
from jaxpar.axis.checks_of_layers import as_integers, check_replicated, check_softcap
from jaxpar.axis.vma import vary_alike, zeros_alike
from jaxpar.choose.choice import choose_way
from jaxpar.choose.problem import Problem
from jaxpar.layers._attention_block import Keys, Scores
from jaxpar.layers._attention_passes import attention
from jaxpar.layers._attention_tiles import RingAttention
from jaxpar.ring.seconds import Flow
from jaxpar.ring.ways import Way


@public
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    axis: AxisLike,
    *,
    segments: Values | None = None,
    lengths: Values | None = None,
    causal: Flag = True,
    order: SequenceOrder = "zigzag",
    window: Integer | tuple[Integer, Integer] | None = None,
    softcap: Number | None = None,
    sinks: Values | None = None,
    scale: Number | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes attention to all devices' keys and values, block by block as they arrive.

    Args:
      q: local floats `[..., s/n, h, e]`.
      k: local `[..., s/n, g, e]` in q's dtype. Query head `j` uses kv head `j // (h // g)`.
      v: local `[..., s/n, g, f]` in q's dtype. g divides h.
      axis: mesh axes that shard the sequence, or an `Axis`. Its `wire_dtype` is only for sums of
        the gradients of k and v. Chunked modes and `"stationary"` are as `"naive"`.
      segments: local integers `[..., s/n]`, each position's document. A query sees only keys of its
        own segment. Negative segments see, and are seen by, nothing.
      lengths: integers `[...]`, replicated over `axis`: how many positions of each full sequence
        count. Later keys are not seen, later results are 0.
      causal: whether a query sees no later keys.
      order: the positions of device `i`, ascending. It only matters with `causal`, `window` or
        `lengths`. `"zigzag"`: chunks `i` and `2n-1-i` of 2n, as from `zigzag_order`, for equal
        causal work. `"contiguous"`: block `i` of n.
      window: `(left, right)`, or an integer for both. A query at position i sees only keys from
        i-left to i+right, both included, and with `causal` none after i. Positions count from the
        start of the sequence, not of a document.
      softcap: a number above 0. Scaled scores become `softcap * tanh(scores / softcap)`.
      sinks: local floats `[h]`, a score for each query head, only in the softmax's denominator; not
        scaled, capped or masked.
      scale: a factor of scores. None: `1/sqrt(e)`.
      precision: as in `jax.lax.dot_general`.

    Returns:
      Local `[..., s/n, h, f]` in q's dtype, varying over `axis` and the operands' axes. A query
      that sees nothing gets 0. Scores and sums are float32 or wider, weights in v's dtype.

    Raises:
      TypeError: dtypes differ or are no floats.
      ValueError: k, v, or with `causal` or a window also q, is typed as replicated over `axis`;
        shapes do not fit; the local length is odd in zigzag order; an option is out of range.

    Cost: a device sends (n-1)/n of all keys and values, while it computes with the previous block.
    A step computes two matmuls of `(s/n)^2 h e` multiplications, or half if causal and zigzag. The
    backward pass sends keys and values again, and their gradients in the wire's dtype; its steps
    compute five matmuls. Residuals are q, k, v, the result and two float32 numbers a query and
    head. At most `(s/n)^2 h` scores exist at a time.

    With a window, a device computes only scores of keys within reach. In unidirectional and
    bidirectional modes, it receives blocks only from the r nearest devices: on the sides that the
    window reaches, in zigzag order on both. r is the window's longer side over s/n, in zigzag order
    over s/(2n), rounded up. Windows of n-1 blocks or more bring all blocks.

    The result and the two float32 numbers have the name "attention". A `jax.checkpoint` whose
    policy saves this name does not repeat the forward pass.

    Example:
      >>> mesh = make_mesh("cp=8")
      >>> attend = jaxpar.jit(jax.shard_map(lambda q, k, v: ring_attention(q, k, v, "cp"),
      ...     mesh=mesh, in_specs=(P(None, "cp"),) * 3, out_specs=P(None, "cp")))
      >>> q, places = jax.random.normal(jax.random.key(0), (2, 32, 4, 8)), zigzag_order(32, 8)
      >>> k, v = q[:, :, :2], q[:, :, 2:]
      >>> wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, places]
      >>> found = attend(q[:, places], k[:, places], v[:, places])
      >>> np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)

    Source: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers" (2023). Balanced
    orders: Brandon et al., "Striped attention" (2023), here by chunks.
    """
    ring = bind(axis)
    flag: Any = causal
    if not isinstance(flag, bool):
        raise type_error(f"causal must be True or False, got {causal!r}")
    name: Any = order
    if name not in ("zigzag", "contiguous"):
        raise value_error(f"order must be 'zigzag' or 'contiguous', got {order!r}")
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    _check_shapes(q, k, v)
    _check_dtypes(q, k, v)
    check_wire(ring.wire_dtype, sum_dtype(q.dtype))
    check_precision(precision)
    *batch, length, heads, size = q.shape
    seen = _seen(window, causal, length * ring.size)
    # If every query sees all positions, devices may have the same queries.
    for argument, x in {"k": k, "v": v, **({} if seen == (None, None) else {"q": q})}.items():
        check_own(argument, x, ring, "a part of the sequence")
    zigzag = order == "zigzag" and ring.size > 1  # one device has all positions in either order
    if zigzag and (seen != (None, None) or lengths is not None):
        _check_even(q.shape, ring)
    ids = _segments(segments, lengths, k, ring, zigzag)
    sinks = _sinks(sinks, q, k)
    # Positions that do not count may hold NaN, and 0 times NaN is NaN.
    counted = None if ids is None else ids[..., 0, :, :, None] >= 0  # [*batch, positions, 1, 1]
    if counted is not None:
        q, k, v = (jnp.where(counted, x, jnp.zeros_like(x)) for x in (q, k, v))
    softcap = check_softcap(softcap, "leave it out for scores as they are")
    q, k, v, ids, sinks = vary_alike(ring.names, q, k, v, ids, sinks)
    result = (*batch, length, heads, v.shape[-1])
    if 0 in result:
        return zeros_alike(result, q.dtype, q)
    zigzag = zigzag and seen != (None, None)
    way = _way(ring, q, k, v, seen, 2 if zigzag else 1)
    method = RingAttention(way, seen, zigzag, Scores(_scale(scale, size), precision, softcap))
    grouped = q.reshape(*batch, length, k.shape[-2], heads // k.shape[-2], size)
    keys = Keys(jnp.swapaxes(k, -3, -2), jnp.swapaxes(v, -3, -2), ids)
    out: Any = attention(method, jnp.moveaxis(grouped, -4, -2), keys, sinks)
    out = jnp.moveaxis(out, -2, -4).reshape(result)
    # The result is already 0 there, but its cotangent may be NaN.
    return out if counted is None else jnp.where(counted, out, jnp.zeros_like(out))


@public
def zigzag_order(length: Integer, shards: Integer) -> Int[np.ndarray, " length"]:
    """Returns a sequence's positions in zigzag order, device by device.

    Args:
      length: length of the full sequence, a multiple of 2n unless n is 1.
      shards: n, the number of devices.

    Returns:
      Positions such that `x[zigzag_order(length, shards)]`, sharded contiguously, gives device `i`
      chunks `i` and `2n-1-i` of 2n. `np.argsort` of the positions undoes the order.

    Raises:
      ValueError: `length` is no such multiple, or a number is too small.

    Example:
      >>> zigzag_order(16, 4)
      array([ 0,  1, 14, 15,  2,  3, 12, 13,  4,  5, 10, 11,  6,  7,  8,  9])
    """
    length, shards = check_whole("length", length, 0), check_whole("shards", shards, 1)
    chunks = 2 * shards
    if shards == 1:
        return np.arange(length)
    if length % chunks:
        raise value_error(
            f"length={length} must be a multiple of 2 x shards = {chunks}, two chunks a "
            f"device: {length} = {length // chunks} x {chunks} + {length % chunks}; pad it to "
            f"{length + -length % chunks}, or use the contiguous order"
        )
    early = np.arange(length).reshape(chunks, -1)
    return np.stack([early[:shards], early[: shards - 1 : -1]], axis=1).reshape(-1)


def _seen(window: Any, causal: bool, length: int) -> tuple[int | None, int | None]:
    """Returns how far a query sees, None for all."""
    if window is None:
        return None, 0 if causal else None
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    sides = [None if side is None else check_whole("window", side) for side in pair]
    left, right = sides if len(sides) == 2 else (None, None)
    if left is None or right is None or min(left, right) < 0:
        raise value_error(
            f"window must be an integer or two, (left, right), of 0 or more, got {window!r}; give "
            "how many positions before its own a query sees, and how many after it; for a side "
            "without bound give the length of the sequence"
        )
    if causal:
        right = 0
    return left if left < length - 1 else None, right if right < length - 1 or causal else None


def _way(
    ring: Ring,
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys groups size"],
    v: Float[Array, "*batch keys groups of_value"],
    seen: tuple[int | None, int | None],
    chunks: int,
) -> Way:
    (left, right), length = seen, q.shape[-3]
    causal, near = right == 0, None
    scores = length * ring.size * (0.5 if causal else 1.0)  # computed for a query
    what = f"{'causal ' if causal else ''}{q.dtype}"
    if left is not None and right is not None:
        chunk = length // chunks
        near = _near(-(-left // chunk), -(-right // chunk), zigzag=chunks == 2)
        if len(near[0]) * near[1] >= ring.size - 1:
            near = None
        scores = min(scores, left + right + chunk)
        what += f", window {left} and {right} in chunks of {chunk}"
    flops = 2.0 * q.size * (1 + v.shape[-1] / q.shape[-1]) * scores
    flows = (Flow("gather", flops, (k.size + v.size) * k.dtype.itemsize),)
    shapes = (q.shape, k.shape, v.shape)
    return choose_way(Problem("attention", ring, shapes, flows, what=what, near=near))


def _near(behind: int, ahead: int, *, zigzag: bool) -> tuple[tuple[int, ...], int]:
    """Returns directions of blocks, and how many hops."""
    # A zigzag block has a chunk with neighbours behind, and a chunk with neighbours ahead.
    if zigzag or (behind and ahead):
        return (1, -1), max(behind, ahead)
    return ((-1,), ahead) if ahead else ((1,), behind)


def _segments(
    segments: Any,
    lengths: Any,
    k: Float[Array, "*batch keys groups size"],
    ring: Ring,
    zigzag: bool,
) -> Int32[Array, "*batch 1 keys 1"] | None:
    """Returns each local position's segment, negative if uncounted."""
    *batch, length, _, _ = k.shape
    ids: Array | None = None
    if segments is not None:
        ids = _check_integers("segments", segments, (*batch, length), "one for each local position")
        if not jnp.can_cast(ids.dtype, "int32"):
            raise type_error(
                f"segments are {ids.dtype}, which int32 does not hold; number the documents anew, "
                "and cast them"
            )
        ids = ids.astype("int32")
    if lengths is not None:
        counts = _check_integers("lengths", lengths, tuple(batch), "one for each sequence")
        check_replicated("lengths", counts, ring)
        most = min(length * ring.size, int(jnp.iinfo(counts.dtype).max))
        counts = jnp.clip(counts, 0, most).astype("int32")
        here = with_rank(counts.ndim + 1, _positions(length, ring, zigzag))
        counted = here < counts[..., None]  # [*batch, keys]
        ids = jnp.where(counted, 0 if ids is None else ids, -1)
    return None if ids is None else ids[..., None, :, None]


def _positions(length: int, ring: Ring, zigzag: bool) -> Int32[Array, " {length}"]:
    index, places = ring.index().astype("int32"), jnp.arange(length, dtype="int32")
    if not zigzag:
        return index * length + places
    half = length // 2
    late = (2 * ring.size - 1 - index) * half - half  # added to places in the second half
    return jnp.where(places < half, index * half + places, late + places)


def _check_integers(
    argument: str, numbers: Any, shape: tuple[int, ...], what: str
) -> Integers[Array, " ..."]:
    x = as_integers(argument, numbers)
    if x.shape != shape:
        raise value_error(f"{argument} has local shape {x.shape}, but must be {shape}, {what} of k")
    return x


def _sinks(
    values: Any, q: Float[Array, "*batch queries heads size"], k: Float[Array, "*shape groups size"]
) -> Float[Array, "groups repeats"] | None:
    if values is None:
        return None
    sinks, heads, kv_heads = as_array("sinks", values), q.shape[-2], k.shape[-2]
    if sinks.shape != (heads,):
        raise value_error(
            f"sinks have local shape {sinks.shape}, but must be ({heads},), one for each head of q "
            f"of local shape {q.shape}"
        )
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise type_error(f"sinks are {sinks.dtype}, but must be floats; cast them")
    # Widened before they vary, so that devices sum their gradients in float32.
    return sinks.astype(sum_dtype(q.dtype)).reshape(kv_heads, heads // kv_heads)


def _scale(number: Any, size: int) -> float:
    if number is None:
        return size**-0.5
    if isinstance(number, bool) or not isinstance(number, (int, float, np.number)):
        raise type_error(
            f"scale must be a number known while tracing, got {number!r} of type "
            f"{type(number).__name__}; multiply q by one that depends on data, and pass scale=1.0"
        )
    return float(number)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    shapes = f"q has local shape {q.shape}, k {k.shape} and v {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise value_error(
            f"{shapes}; each needs 3 dimensions at least, [..., s, heads, e]; add one of "
            "size 1 for a single head"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise value_error(
            f"{shapes}; k and v must agree in all dimensions but the last: [..., s, g, e] and "
            "[..., s, g, f]"
        )
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise value_error(
            f"{shapes}; all dimensions of q and k but the heads (the last but one) must agree: q "
            "is [..., s, h, e], k is [..., s, g, e]. Broadcast batch dimensions first, and shard "
            "keys like queries"
        )
    if v.shape[-1] and not q.shape[-1]:
        raise value_error(f"{shapes}; heads of q and k must have a size of 1 at least")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise value_error(
            f"{shapes}; the {kv_heads} kv heads do not divide the {heads} query heads; "
            "choose a number of kv heads that does"
        )


def _check_dtypes(q: Array, k: Array, v: Array) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise type_error(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}, but all must be of one dtype; "
            "cast them first"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise type_error(f"q, k and v are {q.dtype}, but must be floats; cast them first")


def _check_even(shape: tuple[int, ...], ring: Ring) -> None:
    length = shape[-3]
    if length % 2:
        raise value_error(
            f"q has local shape {shape}, whose local length {length} over {ring} is odd: "
            f"zigzag order needs two chunks of one size a device, {length} = {length // 2} x 2 + "
            f"1; pad the whole sequence from {length * ring.size} to {(length + 1) * ring.size} "
            "before it is laid out, or pass order='contiguous'"
        )
