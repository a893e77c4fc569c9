"""The public overlapped matmuls, all special cases of `collective_einsum`."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import WireLike
from jaxpar.arguments.types import Integer, Label, Mode, Operand, Subscripts, Weights
from jaxpar.axis.axis import OF_MATMULS, OPTIONS, AxisLike, bind
from jaxpar.axis.checks import as_array, check_dim
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
    """Computes `all_gather(lhs) @ rhs` or `lhs @ all_gather(rhs)`, block by block as blocks arrive.

    Args:
      lhs: local `[..., k]`.
      rhs: local `[k, m]`, or a tuple of such weights with any `m`, which share one gather of lhs.
      axis: mesh axes, or an `Axis`.
      gather: the sharded operand, `"lhs"` or `"rhs"`. It may be a `Quantized`, which has no
        gradient. If the `Axis` has a `gather_dtype`, it must equal the other operand's dtype.
      dim: the sharded dimension, by default the second to last.
      mode: the mode of both passes. None: the modes of the `Axis`.
      preferred_element_type: dtype of sums and result. None: the operands' dtype, with 16-bit
        floats summed in float32; int32 for int8.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: as in `Axis`; the backward pass sends partial sums in it. `mode="stationary"`
        rounds no operand to 8 bits.

    Returns:
      `[..., m]` with the full gathered dimension, varying over `axis` and all axes of the operands.
      A tuple gives a tuple. An operand's gradient is summed over axes over which only the other
      operand varies.

    Raises:
      TypeError: dtypes differ.
      ValueError: the sharded operand is typed as replicated over `axis`, ranks or sizes do not fit,
        the mode or axis is unknown, or the call is outside shard_map.

    Cost: each of n devices sends (n-1)/n of the full operand. A unidirectional ring takes n-1 hops,
    to higher logical indices. A bidirectional ring takes n/2, with half the bytes on each link. The
    derivative overlaps a reduce-scatter with its matmuls, and gathers again unless the operand
    was saved (`keep_gathered` of `Axis`).

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(64.0).reshape(16, 4), jnp.arange(96.0).reshape(4, 24)
      >>> np.testing.assert_array_equal(f(x, w), x @ w)

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
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype, takes=OPTIONS)
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
    """Computes `psum_scatter(lhs @ rhs)`, sending partial sums of a block while computing the next.

    Args:
      lhs: local `[..., k]`, this device's part of the contracting dimension.
      rhs: local `[k, m]`.
      axis: mesh axes, or an `Axis`.
      dim: the scattered dimension of the result, by default the second to last.
      mode: as in `all_gather_matmul`.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: as in `Axis`; each hop of a ring rounds partial sums to it. 8-bit dtypes apply
        only to the cotangent, which the backward pass gathers; a `LowBit` has options for both.

    Returns:
      This device's block of the sum, `[..., m]` with 1/n of the scattered dimension, varying over
      `axis` and all axes of the operands.

    Raises:
      TypeError, ValueError: as `all_gather_matmul`. Also if the ring's size does not divide the
        scattered dimension, or both operands are typed as replicated.

    Cost: each of n devices sends (n-1)/n of the full result in the wire's dtype. A unidirectional
    ring sends to lower logical indices. Residuals are lhs and rhs. The derivative overlaps one
    gather of the cotangent with its matmuls.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: matmul_reduce_scatter(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp")))
      >>> x, w = jnp.arange(128.0).reshape(16, 8), jnp.arange(192.0).reshape(8, 24)
      >>> np.testing.assert_array_equal(f(x, w), x @ w)
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    labels = matmul_labels(lhs, rhs)
    result_shape = (*lhs.shape[:-1], *rhs.shape[1:])
    label = labels.out[check_dim("dim", dim, result_shape)]
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype, takes=OF_MATMULS)
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
    """Computes `psum(lhs @ rhs)` by an overlapped reduce-scatter and an all-gather.

    Args:
      lhs: local `[..., k]`, this device's part of the contracting dimension.
      rhs: local `[k, m]`.
      axis: mesh axes, or an `Axis`.
      mode: as in `all_gather_matmul`.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: as in `Axis`. `"int8"` and `"float8_e4m3fn"` have no effect.

    Returns:
      The sum over the ring, `[..., m]`. Under `check_vma=True` it is typed as replicated over
      `axis`.

    Raises:
      TypeError, ValueError: as `matmul_reduce_scatter`, but any size is allowed; transfers may be
        padded.

    Cost: each of n devices sends 2 (n-1)/n of the result. Only the reduce-scatter, in the wire's
    dtype, is overlapped. The gather and the derivative are as in `all_reduce`. Sums of second
    derivatives are overlapped.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, w: matmul_all_reduce(x, w, "tp"),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P()))
      >>> x, w = jnp.arange(24.0).reshape(3, 8), jnp.arange(40.0).reshape(8, 5)
      >>> np.testing.assert_array_equal(f(x, w), x @ w)
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    labels = matmul_labels(lhs, rhs)
    ring = bind(axis, mode=mode, wire_dtype=wire_dtype, takes=OF_MATMULS)
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
    """Computes an einsum over a ring that gathers an operand or scatters the result.

    Args:
      subscripts: such as `"bmk,kn->bmn"`. Each letter occurs in two or three of lhs, rhs and
        result, at most once in each.
      lhs: local operand.
      rhs: local operand, or a tuple, which shares one gather of lhs.
      axis: mesh axes, or an `Axis`.
      gather: the label along which an operand is sharded. If both have it, the operand that is
        shorter along it is sharded.
      scatter: the label along which the sum over the ring is scattered. Give either `gather` or
        `scatter`.
      mode: as in `all_gather_matmul`.
      preferred_element_type: as in `all_gather_matmul`.
      precision: as in `jax.lax.dot_general`.
      wire_dtype: as in `Axis`.

    Returns:
      The local result, with the full gathered label or this device's block of the scattered label,
      varying over `axis` and all axes of the operands. A tuple gives a tuple.

    Raises:
      TypeError, ValueError: as `all_gather_matmul` or `matmul_reduce_scatter`, or labels do not
        fit.

    Cost: as `all_gather_matmul` or `matmul_reduce_scatter`.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> def heads(x, w):  # gathers the sequence s; heads h are local
      ...     return collective_einsum("bsd,dhe->bhse", x, w, "tp", gather="s")
      >>> f = jaxpar.jit(jax.shard_map(heads, mesh=mesh,
      ...     in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(128.0).reshape(2, 16, 4), jnp.arange(96.0).reshape(4, 8, 3)
      >>> np.testing.assert_array_equal(f(x, w), jnp.einsum("bsd,dhe->bhse", x, w))
    """
    for argument, text in (("subscripts", subscripts), ("gather", gather), ("scatter", scatter)):
        _check_text(argument, text)
    labels = parse_labels(subscripts)
    ring = bind(
        axis, mode=mode, wire_dtype=wire_dtype, takes=OPTIONS if scatter is None else OF_MATMULS
    )
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
    passed: Any = rhs
    if isinstance(passed, list):
        raise type_error("rhs is a list; pass one array, or a tuple of weights")
    if isinstance(rhs, tuple) and not rhs:
        raise value_error("rhs is an empty tuple; give at least one weight")
    weights: Any = rhs if isinstance(rhs, tuple) else (rhs,)
    return tuple(as_operand("rhs", weight) for weight in weights)


def _no_shared_gather(why: str) -> str:
    return (
        f"a tuple of weights as rhs shares one gather of lhs, but {why}; call once for each weight"
    )


def _check_text(argument: str, text: Any) -> None:
    if text is not None and not isinstance(text, str):
        raise type_error(
            f"{argument} must be a string of labels, got {text!r} of type {type(text).__name__}"
        )
