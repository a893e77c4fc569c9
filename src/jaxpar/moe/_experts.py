"""Experts: MLPs of equal shape, each applied to its own rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jaxpar._calls import public, type_error, value_error
from jaxpar._dtypes import result_dtype
from jaxpar._types import Implementation, Integer, Values
from jaxpar._varying import vary_alike, zeros_alike
from jaxpar.layers._checks import check_whole
from jaxpar.moe._expert_mlp import clear_rows, expert_mlp, forward_whole
from jaxpar.moe._grouped import bind_method, bind_preferred, check_sizes, fitting_sizes
from jaxpar.moe._mlp import Experts, ExpertsLike, Mlp, Operands


@public
def apply_experts(
    x: Array,
    experts: ExpertsLike,
    group_sizes: Values,
    *,
    activation: Callable[[Array], Array] = jax.nn.silu,
    weights: Values | None = None,
    implementation: Implementation = "auto",
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Applies to each row the MLP of its expert, rows being sorted by expert.

    Args:
      x: `[a, d]`: the rows of expert 0 first, then those of expert 1, and so on. Rows past the sum
        of `group_sizes` belong to no expert and may hold anything, NaN included.
      experts: `Experts`, or a mapping with such keys, in the dtype of x but for biases.
      group_sizes: integers `[e]`, how many rows each expert has.
      activation: a function of `[rows, f]` that treats each row alone.
      weights: `[a]`, floats to multiply each row of the result by, or None. Those past the sum of
        `group_sizes` may hold anything.
      implementation: as in `grouped_matmul`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: as in `grouped_matmul`, for all products and the result.

    Returns:
      `[a, d]`, varying over all mesh axes that the operands vary over; 0 in rows past the sum of
      `group_sizes`, as are the gradients of such rows and weights.

    Raises:
      TypeError: operands of different dtypes, or bools; biases that x cannot hold; unknown keys; an
        option of the wrong type.
      ValueError: wrong ranks or sizes, a gate_bias without a gate, an unknown implementation.

    Cost: nothing is sent. 4 d f FLOPs (with a gate 6 d f) for each row that has an expert, in
    blocks as `grouped_matmul` has them.

    Example:
      >>> experts = Experts(up=jnp.ones((2, 4, 6)), down=jnp.ones((2, 6, 4)))
      >>> apply_experts(jnp.ones((3, 4)), experts, jnp.array([1, 1]), activation=jax.nn.relu)[:, 0]
      Array([24., 24.,  0.], dtype=float32)

    Source: Shazeer, "GLU variants improve transformer" (2020), for the gate.
    """
    experts = as_experts(experts)
    sizes = jnp.asarray(group_sizes)
    check_experts(x, experts, sizes)
    factors = None if weights is None else jnp.asarray(weights)
    if factors is not None:
        check_weights(factors, x)
    method = bind_method(implementation, precision)
    preferred = bind_preferred(preferred_element_type, x.dtype)
    dtype = result_dtype(x.dtype) if preferred is None else preferred
    sizes = fitting_sizes(sizes, len(x))
    operands, sizes = vary_alike((), Operands(x, experts, factors), sizes)
    mlp = Mlp(method, activation, preferred, dtype)
    if closes_over_arrays(activation, experts.up, dtype):
        return forward_whole(mlp, clear_rows(operands, sizes), sizes)[0]
    out: Any = expert_mlp(mlp, operands, sizes)
    return out[0]


def closes_over_arrays(activation: Any, up: Array, dtype: Any) -> bool:
    """Whether `activation` has arrays of its own, which gradients may be taken of.

    Raises unless it takes hidden rows to as many features.
    """
    rows = zeros_alike((1, up.shape[2]), dtype, up)
    out = jax.eval_shape(activation, rows)
    if getattr(out, "shape", None) != rows.shape:
        raise value_error(
            f"activation must return as many features as it is given, {rows.shape}, "
            f"but returned {getattr(out, 'shape', type(out).__name__)}"
        )
    return bool(jax.closure_convert(activation, rows)[1])


@public
def pad_experts(experts: ExpertsLike, shards: Integer) -> Experts:
    """Appends experts of zeros, so that `shards` divides their number.

    Args:
      experts: `Experts` of global arrays, or a mapping with such keys.
      shards: over how many devices experts will be sharded.

    Returns:
      `Experts`, as given if `shards` divides their number already.

    Raises:
      TypeError: unknown keys, or shards that is no integer.
      ValueError: arrays that do not go together, or shards below 1.

    Cost: a copy of all arrays where they are padded.

    Example:
      >>> experts = Experts(up=jnp.ones((6, 4, 6)), down=jnp.ones((6, 6, 4)))
      >>> pad_experts(experts, 4).up.shape
      (8, 4, 6)
    """
    experts = as_experts(experts)
    check_shapes(experts)
    shards = check_whole("shards", shards, 1)
    missing = -len(experts.up) % shards
    if not missing:
        return experts

    def pad(w: Any) -> Array:
        return jnp.pad(w, [(0, missing)] + [(0, 0)] * (w.ndim - 1))

    padded: Experts = jax.tree.map(pad, experts)
    return padded


@public
def as_experts(given: ExpertsLike) -> Experts:
    """Returns `Experts` made of a mapping with their names as keys.

    Args:
      given: `Experts`, which are returned, or a mapping.

    Returns:
      `Experts`.

    Raises:
      TypeError: unknown or missing keys, or something that is not a mapping.

    Cost: none.

    Example:
      >>> as_experts({"up": jnp.ones((8, 4, 6)), "down": jnp.ones((8, 6, 4))}).up.shape
      (8, 4, 6)
    """
    if isinstance(given, Experts):
        return given
    given_: Any = given
    if not isinstance(given_, Mapping):
        raise type_error(f"experts must be Experts or a mapping, got {type(given).__name__}")
    known = ", ".join(Experts._fields)
    unknown = sorted(map(str, set(given) - set(Experts._fields)))
    if unknown:
        raise type_error(f"experts have no {', '.join(unknown)}; the keys are {known}")
    missing = [key for key in ("up", "down") if given.get(key) is None]
    if missing:
        raise type_error(f"experts lack {' and '.join(missing)}; the keys are {known}")
    return Experts(**given)


def check_experts(x: Array, experts: Experts, group_sizes: Array) -> None:
    """Raises unless rows, experts and sizes of groups go together."""
    if x.ndim != 2:
        raise value_error(
            f"x must be [a, d], got local shape {x.shape}; reshape it to two dimensions"
        )
    check_shapes(experts)
    if x.shape[1] != experts.up.shape[1]:
        raise value_error(
            f"x of local shape {x.shape} has {x.shape[1]} features, but "
            f"experts.up of local shape {experts.up.shape} takes {experts.up.shape[1]}; they are "
            "multiplied and must be as many"
        )
    check_sizes(group_sizes, "experts.up", experts.up.shape)
    for field in ("up", "gate", "down"):
        w = getattr(experts, field)
        if w is not None and w.dtype != x.dtype:
            raise type_error(
                f"x is {x.dtype} and experts.{field} {w.dtype}; cast one to the other's dtype"
            )
    if x.dtype == jnp.bool_:
        raise type_error("x and experts are bool, which has no products; cast them to floats")
    for field in ("up_bias", "gate_bias", "down_bias"):
        w = getattr(experts, field)
        if w is not None and not _can_hold(x.dtype, w.dtype):
            raise type_error(
                f"x is {x.dtype} and experts.{field} {w.dtype}, which it cannot hold; cast one of "
                "them"
            )


def _can_hold(dtype: Any, added: Any) -> bool:
    """Whether numbers of dtype `added` keep all their parts in sums of `dtype`."""
    if jnp.issubdtype(added, jnp.complexfloating):
        return bool(jnp.issubdtype(dtype, jnp.complexfloating))
    return added != jnp.bool_


def check_shapes(experts: Experts) -> None:
    """Raises unless the arrays are those of equally many experts of one shape."""
    if experts.up.ndim != 3:
        raise value_error(
            f"experts.up must be [e, d, f], got local shape {experts.up.shape}; stack "
            "the experts' matrices"
        )
    if experts.gate_bias is not None and experts.gate is None:
        raise value_error(
            f"experts.gate_bias of local shape {experts.gate_bias.shape} is given "
            "without experts.gate; give both or neither"
        )
    e, d, f = experts.up.shape
    shapes = (e, d, f), (e, f, d), (e, d, f), (e, f), (e, f), (e, d)
    for (field, w), wanted in zip(experts._asdict().items(), shapes, strict=True):
        if w is not None and w.shape != wanted:
            raise value_error(
                f"experts.{field} has local shape {w.shape}, but with experts.up of "
                f"local shape {experts.up.shape} it must have {wanted}"
            )


def check_weights(weights: Array, x: Array) -> None:
    """Raises unless `weights` are a float for each row."""
    if weights.shape != x.shape[:1]:
        raise value_error(
            f"weights have local shape {weights.shape}, but x of local shape {x.shape} "
            f"has {len(x)} rows; give one weight for each"
        )
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise type_error(f"weights must be floats, got {weights.dtype}; cast them")
