"""Embedding and cross-entropy for a sharded vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Int, Num

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import addition_dtype, check_wire, sum_dtype
from jaxpar.arguments.types import Integer, Number
from jaxpar.axis.axis import AxisLike, bind
from jaxpar.axis.checks import as_array, check_divides, check_own, check_whole
from jaxpar.axis.checks_of_layers import (
    as_integers,
    as_signed,
    check_number,
    check_replicated,
    check_sequence_dim,
    check_softcap,
)
from jaxpar.axis.padded_tables import check_no_padding, check_no_padding_between
from jaxpar.axis.vma import checks_varying, vary_alike, vary_over, vary_wide, varying_axes
from jaxpar.compiler.compat import psum_scatter
from jaxpar.layers._chunked_loss import ChunkedLoss, chunked_losses
from jaxpar.layers._projections import SHARDED_SEQUENCE
from jaxpar.layers._regions import reduce_region


@public
def vocab_parallel_embedding(
    tokens: Array, table: Array, axis: AxisLike, *, sequence_dim: Integer | None = -2
) -> Array:
    """Looks tokens up in a table whose rows are sharded.

    Args:
      tokens: local integers `[..., s]`, replicated over `axis`.
      table: local `[v/n, d]`, rows in logical order. The last rows may be padding that no token
        names.
      axis: mesh axes, without options. Sums are `lax.psum` or `lax.psum_scatter`, in the table's
        dtype.
      sequence_dim: as in `row_parallel_linear`.

    Returns:
      Local `[..., s/n, d]`, varying over `axis`. With `sequence_dim=None`, `[..., s, d]`, typed as
      replicated under `check_vma=True`. Tokens outside `[0, v)` give zeros and no gradient.

    Raises:
      ValueError: the table has another rank, is typed as replicated over `axis`, or has the shape
        of one that a layout pads between rows (`Split`); tokens vary over `axis`; the size of
        `axis` does not divide the sequence.

    Cost: a reduce-scatter of the result, or an all-reduce with `sequence_dim=None`. The sum is
    exact in any dtype, since only one device has a nonzero row. The derivative all-gathers a
    scattered cotangent, and adds in float32 or wider.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> embed = jaxpar.jit(jax.shard_map(
      ...     lambda tokens, table: vocab_parallel_embedding(tokens, table, "tp"),
      ...     mesh=mesh, in_specs=(P(), P("tp")), out_specs=P("tp")))
      >>> embed(jnp.array([2, 15, -1, 0, 7, 7, 3, 1]), jnp.arange(16.0)[:, None]).ravel()
      Array([ 2., 15.,  0.,  0.,  7.,  7.,  3.,  1.], dtype=float32)
    """
    ring = bind(axis, takes=())
    tokens, table = as_integers("tokens", tokens), as_array("table", table, "sum")
    check_replicated("tokens", tokens, ring)
    if table.ndim != 2:
        raise value_error(f"table must be [v/n, d], got local shape {table.shape}")
    shape = (*tokens.shape, table.shape[1])
    dim = check_sequence_dim("the result", sequence_dim, shape)
    if dim is not None:
        check_divides("the result", shape, dim, ring)
    check_own("table", table, ring, "rows")
    check_no_padding_between(table.shape[1], table.shape[0] * ring.size)

    tokens, table = vary_alike(ring.names, tokens, table)
    first = ring.index() * table.shape[0]
    places = as_signed(tokens) - first.astype(as_signed(tokens).dtype)
    rows: Any = _lookup(table.shape[0], table.dtype, places, table)
    if dim is None:
        return _sum_of_one(ring.names, rows)
    if not rows.size:  # XLA does not scatter empty arrays
        return lax.slice_in_dim(rows, 0, shape[dim] // ring.size, axis=dim)
    return psum_scatter(rows, ring.names, dim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(
    rows: int, dtype: Any, places: Int[Array, "*tokens"], table: Num[Array, "{rows} d"]
) -> Num[Array, "*tokens d"]:
    """Returns `table`'s rows at `places`, zeros outside."""
    inside = (places >= 0) & (places < rows)
    return jnp.where(inside[..., None], jnp.take(table, places, axis=0, mode="clip"), 0)


def _lookup_fwd(
    rows: int, dtype: Any, places: Int[Array, "*tokens"], table: Num[Array, "{rows} d"]
) -> tuple[Num[Array, "*tokens d"], Int[Array, "*tokens"]]:
    return _lookup(rows, dtype, places, table), places


def _lookup_bwd(
    rows: int, dtype: Any, places: Int[Array, "*tokens"], ct: Num[Array, "*tokens d"]
) -> tuple[None, Num[Array, "{rows} d"]]:
    wide = addition_dtype(dtype)
    zeros = vary_over(varying_axes(ct), jnp.zeros((rows, ct.shape[-1]), wide))
    # Missing places go past the end. Negative places would count from the end.
    places = jnp.where(places < 0, rows, places)
    return None, zeros.at[places].add(ct.astype(wide), mode="drop").astype(dtype)


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_one(names: tuple[str, ...], x: Num[Array, "*tokens d"]) -> Num[Array, "*tokens d"]:
    """Sums; at most one device's term is not zero."""
    return lax.psum(x, names)


def _sum_of_one_fwd(
    names: tuple[str, ...], x: Num[Array, "*tokens d"]
) -> tuple[Num[Array, "*tokens d"], None]:
    return _sum_of_one(names, x), None


def _sum_of_one_bwd(
    names: tuple[str, ...], _: None, ct: Num[Array, "*tokens d"]
) -> tuple[Num[Array, "*tokens d"]]:
    # Without types, the cotangents of all devices count, and each device has a term of the sum.
    return (vary_over(names, ct) if checks_varying(names) else reduce_region(ct, names),)


_sum_of_one.defvjp(_sum_of_one_fwd, _sum_of_one_bwd)


@public
def vocab_parallel_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    axis: AxisLike,
    *,
    bias: Array | None = None,
    softcap: Number | None = None,
    vocabulary: Integer | None = None,
    sequence_dim: Integer | None = -2,
    chunk: Integer = 1024,
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    ignore_label: Integer = -1,
    precision: PrecisionLike = None,
) -> Array:
    """Computes tokens' cross-entropy of logits `x @ w + bias`, without holding all logits at once.

    Args:
      x: local `[..., s/n, d]`, or replicated `[..., s, d]` with `sequence_dim=None`.
      w: local `[d, v/n]`, columns in logical order; `table.T` for tied embeddings. Under
        `check_vma=False` give `vocabulary` too, or a w replicated by mistake goes unnoticed.
      labels: local integers, shaped like `x` without its last dimension, sharded like it.
      axis: mesh axes, or an `Axis` with a mode and `wire_dtype` as in `all_gather`; `"auto"` is
        naive.
      bias: local floats `[v/n]`, or None.
      softcap: a bound c: logits become `c tanh((x @ w + bias) / c)`. None: no bound.
      vocabulary: the number of tokens if w is padded, such as `layout["embedding"].shape[0]`. Later
        columns may hold anything, with zero gradients. None: all columns are tokens.
      sequence_dim: as in `column_parallel_linear`.
      chunk: the most tokens whose logits exist at a time.
      label_smoothing: the part of the target spread evenly over the vocabulary.
      z_loss: the weight of z^2 below.
      ignore_label: tokens with this label have loss and gradients 0; their x may be NaN.
      precision: as in `jax.lax.dot_general`.

    Returns:
      Losses shaped like `labels`, float32 or wider, varying over `axis`, or replicated with
      `sequence_dim=None`. For logits `l`, label `y` and `z = logsumexp(l)`:
      `z - (1 - label_smoothing) l[y] - label_smoothing mean(l) + z_loss z^2`. Any other label
      outside `[0, vocabulary)` gives NaN in losses and gradients.

    Raises:
      TypeError: dtypes differ or are no floats.
      ValueError: shapes do not fit; an option is out of range; w, a bias, or sharded x or labels
        are typed as replicated over `axis`; labels vary over it with `sequence_dim=None`; w has the
        full `vocabulary`; w has the shape of a table that a layout pads, and `vocabulary` is
        missing or the padding is between rows (`Split`).

    Cost: a matmul of all tokens with `w`, three in the derivative. Devices all-reduce three float32
    numbers for each token. Each sends (n-1)/n of x in each pass, and of its gradient; with
    `sequence_dim=None`, x's gradient is all-reduced instead. Residuals are the operands, all labels
    and two numbers a token.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> losses = jaxpar.jit(jax.shard_map(
      ...     lambda x, w, y: vocab_parallel_cross_entropy(x, w, y, "tp", vocabulary=10),
      ...     mesh=mesh, in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp")))
      >>> x, w, labels = 4 * jnp.eye(8, 4), jnp.eye(4, 16), jnp.array([0, 9, -1, 1, 2, 3, 4, 5])
      >>> np.asarray(losses(x, w, labels)).round(3)[:3]
      array([0.153, 4.153, 0.   ], dtype=float32)

    Source: Shoeybi et al., "Megatron-LM" (2019); Wijmans et al., "Cut your losses" (2024), for
    chunks; Gemma 2 (2024) for the bound.
    """
    ring = bind(axis)
    x, w, labels = as_array("x", x), as_array("w", w), as_integers("labels", labels)
    _check_operands(x, w, labels)
    if bias is not None:
        bias = _as_bias(bias, w)
    dim = check_sequence_dim("x", sequence_dim, x.shape)
    if dim is None:
        check_replicated("labels", labels, ring)
    check_wire(ring.wire_dtype, sum_dtype(x.dtype))
    columns = w.shape[1] * ring.size
    if vocabulary is None:
        check_no_padding("vocabulary", w.shape[0], columns)
    elif vocabulary != columns:
        check_no_padding_between(w.shape[0], columns)
    tokens = columns if vocabulary is None else vocabulary
    loss = ChunkedLoss(
        ring=ring,
        dim=dim,
        vocabulary=check_whole("vocabulary", tokens, 1, columns, "the columns of w on all devices"),
        chunk=check_whole("chunk", chunk, 1),
        label_smoothing=check_number("label_smoothing", label_smoothing, 1.0),
        z_loss=check_number("z_loss", z_loss),
        ignore_label=check_whole("ignore_label", ignore_label),
        softcap=check_softcap(softcap, "None leaves logits as they are"),
        precision=precision,
    )
    _check_shards(loss, x, w, bias, labels)
    labels = as_signed(labels)
    if not labels.size:
        return jnp.zeros(labels.shape, sum_dtype(x.dtype))
    axes = varying_axes(x, w, bias, labels) | set(ring.names)
    w, bias = vary_over(axes, w), None if bias is None else vary_wide(axes, bias)
    x, labels = vary_over(axes - set(ring.names) if dim is None else axes, (x, labels))
    if dim is not None:
        labels = lax.all_gather(labels, ring.names, axis=dim, tiled=True)
    return chunked_losses(loss, x, w, bias, labels)


def _check_operands(x: Array, w: Array, labels: Array) -> None:
    if not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise value_error(
            f"x has local shape {x.shape} and w {w.shape}, but they must be [..., d] "
            "and [d, v/n]; if w is sharded over another axis, gather it there first"
        )
    if labels.shape != x.shape[:-1]:
        raise value_error(
            f"labels have local shape {labels.shape} and x {x.shape}, but each token "
            f"needs one; give labels of shape {x.shape[:-1]}, sharded like x"
        )
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(
            f"x is {x.dtype}{list(x.shape)} and w is {w.dtype}{list(w.shape)}, but "
            "they must be floats of one dtype; cast one of them with .astype"
        )


def _check_shards(loss: ChunkedLoss, x: Array, w: Array, bias: Array | None, labels: Array) -> None:
    ring = loss.ring
    check_own("w", w, ring, "columns")
    if not checks_varying(ring.names) and w.shape[1] >= loss.vocabulary and ring.size > 1:
        raise value_error(
            f"w has local shape {w.shape}, columns of all vocabulary={loss.vocabulary} tokens on "
            f"every device of {ring}; shard it in in_specs, {-(-loss.vocabulary // ring.size)} "
            "columns a device"
        )
    if bias is not None:
        check_own("bias", bias, ring, "numbers")
    if loss.dim is not None:
        for argument, tokens in {"x": x, "labels": labels}.items():
            check_own(argument, tokens, ring, "a part of the sequence", SHARDED_SEQUENCE)


def _as_bias(bias: Any, w: Array) -> Array:
    bias = as_array("bias", bias)
    if bias.shape != w.shape[1:]:
        raise value_error(
            f"bias has local shape {bias.shape}, but w of local shape {w.shape} has {w.shape[1]} "
            "columns here; give one number a column, sharded like the columns"
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise type_error(f"bias must be floats, got {bias.dtype}; cast it")
    return bias
