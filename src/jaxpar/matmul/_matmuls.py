"""The public overlapped matmuls: names for a collective einsum."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.checks import as_array, check_dim
from jaxpar.arguments.dtypes import WireLike
from jaxpar.arguments.types import Integer, Label, Mode, Operand, Subscripts, Weights
from jaxpar.axis.axis import AxisLike, bind
from jaxpar.axis.quantized import MaybeQuantized, as_operand
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import matmul_labels, parse_labels


@public
def all_gather_matmul(
    lhs: MaybeQuantized,
    rhs: Weights,
    axis: AxisLike,
    *,
    gather: Operand = "lhs",
    dim: Integer = -2,
    mode: Mode | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    wire_dtype: WireLike = None,
) -> Weights:
    """Computes `all_gather(lhs) @ rhs`, or `lhs @ all_gather(rhs)`, as the blocks arrive.

    Args:
      lhs: local `[..., k]`.
      rhs: local `[k, n]`, or a tuple of such weights (their `n` may differ) that share one gather
        of lhs.
      axis: one mesh axis, a tuple or list of them in any order, or an `Axis`.
      gather: the operand that is sharded over `axis`, `"lhs"` or `"rhs"`. A `Quantized` one travels
        as it is, and has no derivative. With a `gather_dtype` of an `Axis`, such as bfloat16 for
        float32 weights, it travels in this dtype, which the other operand must have. Its gradient
        has its own dtype.
      dim: the dimension of that operand along which it is sharded: by default the last but one, the
        sequence of activations `[b, s, k]`; any other one, the contracting dimension too.
      mode: of both passes; None: those of `axis`, `"auto"` for a name. `"naive"`
        (`lax.all_gather`, then one matmul), `"stationary"` (the operand stays, the other one and
        the result travel), `"unidirectional"` and `"bidirectional"` (a ring), `"multi-ring"`
        (one for each of several axes, all at once: on a torus they share no link), `"chunked-2"`,
        `"chunked-4"` and `"chunked-8"` (a collective for each chunk), or `"auto"`: what a cost
        model of the static shapes, the ring's size, the chip and its compiler options predicts to
        be fastest, for forward and backward apart; naive on CPU devices and unknown chips.
        `Axis(axis, backward=...)` names that of the backward pass.
      preferred_element_type: the dtype of partial sums and of the result. None: sums in float32 for
        16-bit floats, the result in the dtype of the operands; int32 for both with int8 operands.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: the dtype in which the partial sums of the backward reduce-scatter travel. None:
        that of `axis`, or that of the gradient. Or `"int8"`, `"float8_e4m3fn"` or a
        `LowBit`: then what is gathered, forward and backward, travels in 8 bits with a scale for
        each row, and is rounded once. The derivative is as if it were not. An operand that stays
        (`"stationary"`) is not rounded.

    Operands may vary over any axes; one that is replicated over an axis over which another varies
    gets its gradient summed there.

    Returns:
      The local product with the gathered dimension whole (all rows, say), varying over `axis`
      and over all that lhs and rhs vary over; a tuple of products for a tuple of weights.

    Raises:
      TypeError: operands of different dtypes, or an option of the wrong type.
      ValueError: a gathered operand that is typed as replicated over `axis`; wrong ranks or sizes,
        an unknown mode or axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of the gathered operand, and computes the local product in one
    piece, in as many as there are chunks, or around a ring in n. One way takes n-1 transfers,
    towards higher logical indices; both ways takes n/2, with half the bytes on each link (on an
    even ring whose matmuls cover it, half a block more on one and less on the other). The
    derivative reduce-scatters once, overlapped alike. What was gathered (or travelled in its place)
    is kept for it by `"naive"` and `"stationary"`, and on TPUs by `"auto"`; rings and chunks that
    are named keep the operands as they came in, and gather once more. `Axis(axis,
    keep_gathered=...)` says which.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> f(jnp.ones((16, 4)), jnp.ones((4, 24))).shape
      (16, 24)

    Source: Wang et al., "Overlap communication with dependent computation via decomposition in
    large deep learning models" (ASPLOS 2023).
    """
    if gather not in ("lhs", "rhs"):
        raise value_error(f"gather must be 'lhs' or 'rhs', got {gather!r}")
    if isinstance(rhs, tuple) and gather == "rhs":
        raise value_error(_no_shared_gather("gather='rhs' gathers each weight"))
    lhs, weights = as_operand("lhs", lhs), _as_operands(rhs)
    labels = matmul_labels(lhs, *weights)
    letters, operand = (labels.lhs, lhs) if gather == "lhs" else (labels.rhs, weights[0])
    label = letters[check_dim("dim", dim, operand.shape)]
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype, gathers=True)
    call = _einsum.make_call(labels, ring, preferred_element_type, precision)
    results: Any = _einsum.gather(call, gather, label, lhs, weights)
    return results if isinstance(rhs, tuple) else results[0]


@public
def matmul_reduce_scatter(
    lhs: Array,
    rhs: Array,
    axis: AxisLike,
    *,
    dim: Integer = -2,
    mode: Mode | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    wire_dtype: WireLike = None,
) -> Array:
    """Computes `psum_scatter(lhs @ rhs)`, producing each block while the sums of others travel.

    Args:
      lhs: local `[..., k]`, this device's part of the contracting dimension.
      rhs: local `[k, n]`.
      axis: one mesh axis, a tuple or list of them in any order, or an `Axis`.
      dim: the dimension of the result that is scattered, in logical order; the last but one by
        default.
      mode: None: that of `axis`, `"auto"` for a name. `"naive"` (one matmul, then
        `lax.psum_scatter`), or another one, as in `all_gather_matmul`.
      preferred_element_type: the dtype of partial sums and of the result. None: sums in float32 for
        16-bit floats, the result in the dtype of the operands; int32 for both with int8 operands.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: the dtype in which partial sums travel. None: that of `axis`, or that of the
        result, as `lax.psum_scatter` of a matmul sends it: 16 bits round once a hop, and float32
        costs twice the bytes. Of 8 bits, as in `all_gather_matmul`, it is that of the cotangent,
        which the derivative gathers; sums travel as with None.

    Returns:
      This device's block, along `dim`, of the sum over the ring of `lhs @ rhs`, varying over
      `axis` and over all that lhs and rhs vary over.

    Raises:
      TypeError: operands of different dtypes, or an option of the wrong type.
      ValueError: operands both typed as replicated over `axis`; a dimension that the ring does not
        divide, wrong ranks or sizes, an unknown mode or axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of the whole result in the wire's dtype, and computes the local
    product in one piece, in as many as there are chunks, or around a ring in n; one way sends
    towards lower logical indices. The derivative gathers the cotangent once, overlapped alike, for
    the gradients of both operands, and keeps the operands as they came in.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: matmul_reduce_scatter(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp")))
      >>> f(jnp.ones((16, 8)), jnp.ones((8, 24)))[0, 0]
      Array(8., dtype=float32)

    Source: as `all_gather_matmul`.
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    labels = matmul_labels(lhs, rhs)
    result_shape = (*lhs.shape[:-1], *rhs.shape[1:])
    label = labels.out[check_dim("dim", dim, result_shape)]
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype)
    call = _einsum.make_call(labels, ring, preferred_element_type, precision)
    return _einsum.scatter(call, label, lhs, rhs)


@public
def matmul_all_reduce(
    lhs: Array,
    rhs: Array,
    axis: AxisLike,
    *,
    mode: Mode | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    wire_dtype: WireLike = None,
) -> Array:
    """Computes `psum(lhs @ rhs)`: an overlapped reduce-scatter, then an all-gather.

    Args:
      lhs: local `[..., k]`, this device's part of the contracting dimension.
      rhs: local `[k, n]`.
      axis: one mesh axis, a tuple or list of them in any order, or an `Axis`.
      mode: None: that of `axis`, `"auto"` for a name. `"naive"` (one matmul, then `lax.psum`),
        or another one, as in `all_gather_matmul`.
      preferred_element_type: the dtype of partial sums and of the result. None: sums in float32 for
        16-bit floats, the result in the dtype of the operands; int32 for both with int8 operands.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: the dtype in which partial sums travel. None, or 8 bits: that of `axis`, or that
        of the result.

    Returns:
      The sum over the ring of `lhs @ rhs`. Under `check_vma=True` it is typed as replicated over
      `axis`, so that `out_specs=P()` holds. Sizes need not divide: a result without a
      dimension that the ring divides is padded on the way.

    Raises:
      TypeError: operands of different dtypes, or an option of the wrong type.
      ValueError: operands both typed as replicated over `axis`; wrong ranks or sizes, an unknown
        mode or axis name, a call outside shard_map.

    Cost: a device sends 2 (n-1)/n of the result, the half that is summed in the wire's dtype and
    overlapped, the half that is gathered (by `lax.all_gather` under `check_vma=True`, which alone
    can be typed as replicated) not. The derivative sends nothing under `check_vma=True`; under
    `check_vma=False`, as for `lax.psum`, it sums the cotangent over the ring, overlapped.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: matmul_all_reduce(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P()))
      >>> f(jnp.ones((3, 8)), jnp.ones((8, 5)))[0, 0]
      Array(8., dtype=float32)

    Source: as `all_gather_matmul`.
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    labels = matmul_labels(lhs, rhs)
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype)
    call = _einsum.make_call(labels, ring, preferred_element_type, precision)
    return _einsum.all_reduce(call, lhs, rhs)


@public
def collective_einsum(
    subscripts: Subscripts,
    lhs: MaybeQuantized,
    rhs: Weights,
    axis: AxisLike,
    *,
    gather: Label = None,
    scatter: Label = None,
    mode: Mode | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: PrecisionLike = None,
    wire_dtype: WireLike = None,
) -> Weights:
    """Computes an einsum of two operands of which one, or the result, is sharded over a ring.

    `all_gather_matmul` and `matmul_reduce_scatter` are names for this.

    Args:
      subscripts: `"bmk,kn->bmn"`: one letter a dimension, each in two at least of lhs, rhs and the
        result, none twice in one of them.
      lhs: local operand.
      rhs: local operand, or a tuple of operands of the same labels that share one gather of lhs.
      axis: one mesh axis, a tuple or list of them in any order, or an `Axis`.
      gather: the label along which an operand is sharded. If both operands have it, the sharded one
        is the one whose local size is 1/n of the other's.
      scatter: the label along which the result is scattered, after a sum over the ring. Exactly one
        of `gather` and `scatter` is given.
      mode: None: that of `axis`, `"auto"` for a name; as in `all_gather_matmul`.
      preferred_element_type: the dtype of partial sums and of the result, as in
        `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: the dtype in which partial sums travel, forward or backward. None: that of `axis`,
        or that of what they sum up to. Of 8 bits it is that of what is gathered, as in
        `all_gather_matmul`.

    Returns:
      The local result: with the gathered label whole, or this device's block along the scattered
      one; a tuple of results for a tuple of operands. It varies over `axis` and over all that
      the operands vary over.

    Raises:
      TypeError: operands of different dtypes, or an option of the wrong type.
      ValueError: a gathered operand, or both that make a sum, typed as replicated over `axis`;
        malformed subscripts, both or neither of `gather` and `scatter`, a label that is not there,
        wrong ranks or sizes, an unknown mode or axis name, a call outside shard_map.

    Cost: a device sends (n-1)/n of the gathered operand, or of the result before the scatter, and
    computes the local einsum in as many pieces as `all_gather_matmul` and `matmul_reduce_scatter`
    do. The derivative of a gather is a scatter, and a gather unless what was gathered is kept, as
    in `all_gather_matmul`; that of a scatter is a gather.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> def heads(x, w):  # gathers the sequence s; heads h are local
      ...     return collective_einsum("bsd,dhe->bhse", x, w, "tp", gather="s")
      >>> f = jaxpar.jit(jax.shard_map(heads, mesh=mesh,
      ...     in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> f(jnp.ones((2, 16, 4)), jnp.ones((4, 8, 3))).shape
      (2, 8, 16, 3)

    Source: as `all_gather_matmul`.
    """
    for argument, given in (("subscripts", subscripts), ("gather", gather), ("scatter", scatter)):
        _check_text(argument, given)
    labels = parse_labels(subscripts)
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype, gathers=scatter is None)
    call = _einsum.make_call(labels, ring, preferred_element_type, precision)
    lhs, weights = as_operand("lhs", lhs), _as_operands(rhs)
    if gather is not None and scatter is None:
        operand = _einsum.gathered_operand(call, gather, lhs, weights[0])
        if isinstance(rhs, tuple) and operand == "rhs":
            raise value_error(_no_shared_gather(f"gather={gather!r} gathers rhs"))
        results: Any = _einsum.gather(call, operand, gather, lhs, weights)
        return results if isinstance(rhs, tuple) else results[0]
    if scatter is not None and gather is None:
        if isinstance(rhs, tuple):
            raise value_error(_no_shared_gather(f"scatter={scatter!r} gathers nothing"))
        lhs, weights = as_array("lhs", lhs), (as_array("rhs", rhs),)
        if len(scatter) != 1 or scatter not in labels.out:
            raise value_error(
                f"scatter={scatter!r} is not a label of the result of '{labels}'; "
                f"choose one of {list(labels.out)}"
            )
        result: Any = _einsum.scatter(call, scatter, lhs, weights[0])
        return result
    raise value_error(
        f"give exactly one of gather= and scatter=, a label of '{labels}'; "
        f"got gather={gather!r} and scatter={scatter!r}"
    )


def _as_operands(rhs: Weights) -> tuple[MaybeQuantized, ...]:
    given: Any = rhs
    if isinstance(given, list):
        raise type_error("rhs is a list; pass one array, or a tuple of weights")
    if isinstance(rhs, tuple) and not rhs:
        raise value_error("rhs is an empty tuple; give at least one weight")
    weights: Any = rhs if isinstance(rhs, tuple) else (rhs,)
    return tuple(as_operand("rhs", weight) for weight in weights)


def _no_shared_gather(why: str) -> str:
    return (
        f"a tuple of weights as rhs shares one gather of lhs, but {why}; call once for each weight"
    )


def _check_text(argument: str, given: Any) -> None:
    if given is not None and not isinstance(given, str):
        raise type_error(
            f"{argument} must be a string of labels, got {given!r} of type {type(given).__name__}"
        )
