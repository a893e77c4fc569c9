"""Each token's experts and their weights, and a bias that evens out loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Num
from jaxtyping import Integer as Integers

from jaxpar.arguments.calls import check_among, public, readable, type_error, value_error
from jaxpar.arguments.dtypes import sum_dtype
from jaxpar.arguments.lazy_names import open_types
from jaxpar.arguments.types import Integer, Number, Scoring, Values
from jaxpar.axis.checks import as_array, check_whole
from jaxpar.axis.checks_of_layers import as_integers, check_number
from jaxpar.axis.vma import varying_axes

SCORINGS = ("softmax", "selected_softmax", "sigmoid")
# Logarithms of scores, but for what is equal for all experts. They do not underflow.
LOGS = {"softmax": lambda logits: logits, "sigmoid": jax.nn.log_sigmoid}


@readable
class Routing(NamedTuple):
    """Each token's `top_k` experts, as from `route`.

    Your own router may make a `Routing`. A token's experts must be distinct, or -1 for none.

    Attributes:
      experts: int32 `[t, k]`, -1 for none. `route` puts the best first.
      weights: float32 (or float64) `[t, k]`, factors of the experts' results.
      kept: bool `[t, k]`, False for masked and dropped choices.
      scores: `[t, E]`, softmax or sigmoid of the logits, without bias, in the weights' dtype.
      logits: `[t, E]`, in the weights' dtype.
      mask: as in `route`.

    Example:
      >>> routing = route(jnp.log(jnp.array([[0.1, 0.6, 0.3]])), 2)
      >>> routing.experts, routing.kept
      (Array([[1, 2]], dtype=int32), Array([[ True,  True]], dtype=bool))
    """

    experts: Array
    weights: Array
    kept: Array
    scores: Array
    logits: Array
    mask: Array | None = None


if TYPE_CHECKING:
    RoutingLike = Routing
else:
    globals().update(open_types(__name__))


def as_routing(routing: Any, tokens: Array | None = None) -> Routing:
    """Returns int32 experts, and arrays that fit each other and the tokens."""
    if not isinstance(routing, Routing):
        raise type_error(
            f"routing must be a Routing, got {type(routing).__name__}; make one by route, or call "
            "routed_moe_layer, which routes by a matrix"
        )
    fields = routing._asdict().items()
    arrays: Any = [None if x is None else as_array(f"routing.{name}", x) for name, x in fields]
    routing = Routing(*arrays)
    rows = routing.experts.shape[:1] if tokens is None else (prod(tokens.shape[:-1]),)
    of = "" if tokens is None else f" of local shape {tokens.shape}"
    k, known = routing.experts.shape[-1:], routing.logits.shape[-1:]
    shapes = (*rows, *k), (*rows, *k), (*rows, *k), (*rows, *known), (*rows, *known), rows
    kinds = (jnp.integer, jnp.floating, jnp.bool_, jnp.floating, jnp.floating, jnp.bool_)
    for (name, x), shape, kind in zip(routing._asdict().items(), shapes, kinds, strict=True):
        if x is None:  # no mask
            continue
        if x.shape != shape or len(shape) != (1 if name == "mask" else 2):
            raise value_error(
                f"routing.{name} has local shape {x.shape}, but must have {rows[0] if rows else 1} "
                f"rows, one for each of the tokens{of}, of as many choices or experts as the others"
            )
        if not jnp.issubdtype(x.dtype, kind):
            raise type_error(f"routing.{name} is {x.dtype}, but must be {kind.__name__}")
    return routing._replace(experts=routing.experts.astype("int32"))


@public
def route(
    logits: Array,
    top_k: Integer,
    *,
    scoring: Scoring = "softmax",
    bias: Values | None = None,
    groups: Integer = 1,
    top_groups: Integer | None = None,
    scores_per_group: Integer | None = None,
    normalize: bool = False,
    scale: Number = 1.0,
    mask: Values | None = None,
) -> Routing:
    """Chooses each token's `top_k` best experts and their weights.

    Args:
      logits: local floats `[t, E]`, for all experts.
      top_k: experts per token.
      scoring: how logits become scores. The scores of chosen experts are the weights. `"softmax"`:
        the softmax over all experts. `"selected_softmax"`: the same, but weights are the softmax
        over chosen logits. `"sigmoid"`: the sigmoid of each logit.
      bias: `[E]`, added to scores (for `"selected_softmax"` to logits) for the choice, not to
        weights; see `update_router_bias`. Not differentiated.
      groups: the number of groups of neighbouring experts.
      top_groups: experts are chosen only from this many best groups.
      scores_per_group: a group's score is the sum of so many best scores of its experts, with their
        bias (of `"selected_softmax"`: logits). None: 1, as in DeepSeek-V2, or with a bias 2, as in
        DeepSeek-V3 (1 for groups of one expert).
      normalize: whether to divide each token's weights by their sum. With `top_k=1`, weights are
        then constant, as with `"selected_softmax"`, so that only router losses train the router.
      scale: a factor of the weights, after `normalize`.
      mask: bool `[t]`, False for padding tokens, whose logits may be anything.

    Returns:
      A `Routing`, in float32 for 16-bit logits. Of equally good experts the lower index is chosen.
      A NaN logit makes a token's weights NaN. Masked tokens have experts -1, and logits, scores and
      weights 0.

    Raises:
      ValueError: shapes do not fit, there are too few experts to choose from, `groups` does not
        divide E or lacks `top_groups`, a group has fewer experts than `scores_per_group`, or
        `scoring` is unknown.

    Cost: nothing is sent.

    Example:
      >>> routing = route(jnp.array([[0.0, 4.0, 2.0, 4.0]]), 3, scoring="selected_softmax")
      >>> routing.experts
      Array([[1, 3, 2]], dtype=int32)
      >>> routing.weights.round(2)
      Array([[0.47, 0.47, 0.06]], dtype=float32)

    Source: Shazeer et al., "Outrageously large neural networks" (2017); Jiang et al., "Mixtral of
    experts" (2024), for the selected softmax; DeepSeek-V2 (2024), for groups; DeepSeek-V3 (2024),
    for sigmoids and bias.
    """
    logits = _floats("logits", logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise value_error(
            f"logits has local shape {logits.shape}, and must be [tokens, experts]; reshape "
            "it to two dimensions"
        )
    k = check_whole("top_k", top_k, 1, logits.shape[1], "the number of experts")
    check_among("scoring", scoring, SCORINGS)
    factor = check_number("scale", scale)
    logits = logits.astype(sum_dtype(logits.dtype))
    real = None if mask is None else as_mask(mask, logits.shape[:1], "tokens")
    if real is not None:
        logits = jnp.where(real[:, None], logits, 0)
    scores = jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)

    choice = lax.stop_gradient(logits)  # ordered like scores, which round and underflow
    if bias is not None:
        choice = lax.stop_gradient(logits if scoring == "selected_softmax" else scores)
        bias = as_bias("bias", bias, logits.shape[1]).astype(choice.dtype)
        choice = choice + lax.stop_gradient(bias)[None, :]
    # Sorts and maxima skip some NaN, which would hide it. This factor makes the token's weights
    # NaN.
    doubt = 1 + jnp.sum(jnp.where(jnp.isnan(choice), choice, 0), axis=1, keepdims=True)
    logs = None if bias is not None else LOGS.get(scoring)
    usual = 1 if bias is None else 2
    choice = _in_best_groups(choice, groups, top_groups, k, scores_per_group, usual, logs)
    experts = lax.top_k(choice, k)[1].astype("int32")  # [tokens, k]

    if scoring == "selected_softmax" or (normalize and scoring == "softmax"):
        weights = jax.nn.softmax(of_chosen(logits, experts), axis=-1)
    elif normalize:  # the same by a softmax, which is right where scores underflow
        chosen = of_chosen(logits, experts)
        weights = jax.nn.softmax(jax.nn.log_sigmoid(chosen), axis=-1)
    else:
        weights = of_chosen(scores, experts)
    weights = weights * (factor * doubt).astype(weights.dtype)

    kept = jnp.ones_like(experts, bool)
    if real is not None:
        kept = kept & real[:, None]
        experts = jnp.where(kept, experts, -1)
        weights = jnp.where(kept, weights, 0)
        scores = jnp.where(real[:, None], scores, 0)
    return Routing(experts, weights, kept, scores, logits, real)


def _in_best_groups(
    choice: Float[Array, "tokens experts"],
    groups: Any,
    top_groups: Any,
    k: int,
    scores_per_group: Any,
    usual: int,
    logs: Callable[[Array], Array] | None,
) -> Float[Array, "tokens experts"]:
    """Returns `choice`, -inf in other groups. Groups' scores are sums of `choice`, or of scores.

    The scores have the logarithms `logs(choice)`.
    """
    tokens, count = choice.shape
    groups = check_whole("groups", groups, 1)
    if count % groups:
        raise value_error(
            f"groups={groups} does not divide the {count} experts: {count} = "
            f"{count // groups} x {groups} + {count % groups}; choose a divisor of {count}"
        )
    if top_groups is None:
        if groups == 1 and scores_per_group is None:
            return choice
        option = f"groups={groups}" if groups > 1 else f"scores_per_group={scores_per_group!r}"
        raise value_error(
            f"{option} without top_groups restricts nothing; say of how many groups "
            "experts can be chosen"
        )
    size = count // groups
    top = check_whole("top_groups", top_groups, 1, groups, "the number of groups")
    each = min(usual, size) if scores_per_group is None else scores_per_group
    each = check_whole("scores_per_group", each, 1, size, "the experts of a group")
    if k > top * size:
        raise value_error(
            f"top_k={k} is more than the experts of top_groups={top} groups: {top} x {size} "
            f"= {top * size}; choose at least {-(-k // size)} groups"
        )
    if top == groups:
        return choice
    # A logit of -inf must still be better than experts that cannot be chosen.
    choice = jnp.maximum(choice, jnp.finfo(choice.dtype).min)
    grouped = choice.reshape(tokens, groups, size)
    best = _largest_of(grouped, each)  # [each, t, groups]
    if each == 1:  # not by `logs`, which round
        merit = best[0]
    else:
        merit = jnp.sum(best, 0) if logs is None else jax.nn.logsumexp(logs(best), 0)
    chosen = lax.top_k(merit, top)[1]
    allowed = jnp.any(_matches(chosen, groups), axis=1)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(tokens, count)


def _largest_of(x: Float[Array, "*groups size"], count: int) -> Float[Array, "{count} *groups"]:
    places = lax.broadcasted_iota("int32", x.shape, x.ndim - 1)
    largest: list[Array] = []
    for _ in range(count):
        largest.append(jnp.max(x, axis=-1))
        first = jnp.argmax(x, axis=-1, keepdims=True).astype("int32")
        x = jnp.where(places == first, -jnp.inf, x)
    return jnp.stack(largest)


def as_bias(argument: str, bias: Values, experts: int) -> Float[Array, " {experts}"]:
    bias = _floats(argument, bias)
    if bias.shape != (experts,):
        raise value_error(
            f"{argument} has local shape {bias.shape}, but needs one entry for each of the "
            f"{experts} experts; give all of them on every device"
        )
    return bias


def _floats(argument: str, x: Values) -> Float[Array, "..."]:
    x = as_array(argument, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise type_error(f"{argument} must be floats, got {x.dtype}; cast it")
    return x


def as_mask(mask: Values, shape: tuple[int, ...], of: str) -> Bool[Array, "*shape"]:
    mask = as_array("mask", mask)
    if mask.dtype != bool:
        raise type_error(f"mask must be bool, got {mask.dtype}{list(mask.shape)}; compare it first")
    if mask.shape != shape:
        raise value_error(
            f"mask has local shape {mask.shape}, but {of} need {shape}, one entry for each; "
            "reshape it, or repeat it by jnp.broadcast_to"
        )
    return mask


@public
def update_router_bias(
    bias: Values, tokens_per_expert: Values, rate: Number | Array = 1e-3
) -> Array:
    """Raises biases of experts with fewer tokens than the mean, and lowers those with more.

    Call it after each training step. It balances loads without a loss.

    Args:
      bias: the bias of `route`, floats `[E]`, or of several layers, `[layers, E]`. Use float32, so
        that small steps are not lost.
      tokens_per_expert: integers like `bias`, as in `Statistics`, summed over all devices that
        shard tokens, and over microbatches.
      rate: the step, a number or a scalar array.

    Returns:
      `bias + rate * sign(mean(tokens_per_expert) - tokens_per_expert)`, in the dtype of the bias,
      with each layer's own mean.

    Raises:
      ValueError: shapes differ, `rate` is no scalar, or `tokens_per_expert` varies over a mesh axis
        and the bias not.

    Cost: nothing is sent.

    Example:
      >>> update_router_bias(jnp.zeros((2, 3)), jnp.array([[5, 1, 3], [2, 2, 2]]), 0.5)
      Array([[-0.5,  0.5,  0. ],
             [ 0. ,  0. ,  0. ]], dtype=float32)

    Source: Wang et al., "Auxiliary-loss-free load balancing" (2024).
    """
    bias = _floats("bias", bias)
    tokens_per_expert = as_integers("tokens_per_expert", tokens_per_expert)
    if not bias.ndim or bias.shape != tokens_per_expert.shape:
        raise value_error(
            f"bias has local shape {bias.shape} and tokens_per_expert {tokens_per_expert.shape}; "
            "both must be [experts], or [layers, experts], with one entry for each of all experts"
        )
    if apart := sorted(varying_axes(tokens_per_expert) - varying_axes(bias)):
        raise value_error(
            f"tokens_per_expert of local shape {tokens_per_expert.shape} varies over {apart}, and "
            f"bias does not: devices would choose by different biases; sum it by jax.lax.psum(..., "
            f"{tuple(apart)})"
        )
    step = as_array("rate", rate)
    if step.ndim:
        raise value_error(f"rate has local shape {step.shape}, not (); call once for each rate")
    # In integers. A mean that is no integer is between `floor` and the next. Quotients and
    # remainders are summed apart, because the sum of the counts may not fit.
    counts = tokens_per_expert
    counts = counts.astype("int32") if counts.dtype.itemsize < 4 else counts
    experts = jnp.asarray(bias.shape[-1], counts.dtype)
    total = partial(jnp.sum, axis=-1, dtype=counts.dtype, keepdims=True)
    quotients, rests = jnp.divmod(counts, experts)
    more, rest = jnp.divmod(total(rests), experts)
    floor = total(quotients) + more
    below = (counts < floor) | ((counts == floor) & (rest > 0))
    above = counts > floor
    sign = below.astype(bias.dtype) - above.astype(bias.dtype)
    return bias + step.astype(bias.dtype) * sign


# These convert between values of chosen experts and of all experts. They compare every choice with
# every expert, which fuses into neighbouring operations. Gathers of such short rows are slow on
# TPU, and the scatters of their derivatives even more.


@partial(jax.checkpoint, prevent_cse=False)  # or [tokens, k, experts] is a residual
def of_chosen(
    values: Num[Array, "tokens experts"], experts: Integers[Array, "tokens k"]
) -> Num[Array, "tokens k"]:
    """Returns `values` of chosen experts, 0 for none."""
    matches = _matches(experts, values.shape[-1])
    return jnp.sum(jnp.where(matches, values[:, None, :], 0), axis=2, dtype=values.dtype)


def of_experts(
    values: Num[Array, "tokens k"], experts: Integers[Array, "tokens k"], count: int
) -> Num[Array, "tokens {count}"]:
    """Returns `values` at their experts, 0 elsewhere."""
    matches = _matches(experts, count)
    return jnp.sum(jnp.where(matches, values[..., None], 0), axis=1, dtype=values.dtype)


def _matches(experts: Integers[Array, "tokens k"], count: int) -> Bool[Array, "tokens k {count}"]:
    return experts[..., None] == lax.broadcasted_iota(experts.dtype, (1, 1, count), 2)
