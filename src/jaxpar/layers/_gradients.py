"""Losses and gradients in `jax.shard_map` that equal those of a single device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Inexact, Num, Shaped

from jaxpar.arguments.calls import of_user, public, type_error, value_error
from jaxpar.arguments.dtypes import addition_dtype, sum_dtype
from jaxpar.arguments.types import Flag, Integer
from jaxpar.axis.axis import AxisLike, Ring, bind, bind_any
from jaxpar.axis.checks import as_array, check_own, check_uncast, check_whole
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import checks_varying, vary_over, varying_axes
from jaxpar.compiler.jaxprs import named_axes
from jaxpar.layers._reduction import OF_GROUPS, check_bucket, manual_axes, sharded_axes, sum_leaves

# From parameters and a batch to this device's (loss, (weight, aux)).
Local = Callable[[Any, Any], tuple[Array, tuple[Array, Any]]]
SHARE = "leave out an earlier sum over axis, or leave out of axis the axes that share one loss"


@public
def mean_loss(loss_sum: Any, weight: Any, axis: AxisLike) -> Array:
    """Returns the sum of all devices' losses, divided by the sum of their weights.

    Args:
      loss_sum: local float scalar, this device's sum of losses.
      weight: local scalar, the number of losses or their total weight; not differentiated.
      axis: mesh axes that losses are spread over.

    Returns:
      `psum(loss_sum) / psum(weight)`, float32 or wider, replicated over `axis`. For a total weight
      of 0 it is 0 with zero gradients, or NaN if the loss is not finite.

    Raises:
      ValueError: an argument is no scalar, or the loss is typed as replicated over `axis`.

    Cost: two psums of scalars.

    Example:
      >>> mesh = make_mesh("dp=8")
      >>> mean = jaxpar.jit(jax.shard_map(lambda x: mean_loss(jnp.sum(x), x.size, "dp"),
      ...     mesh=mesh, in_specs=P("dp"), out_specs=P()))
      >>> mean(jnp.arange(16.0))
      Array(7.5, dtype=float32)
    """
    ring = bind(axis, takes=())
    loss, weight = _check_scalars(loss_sum, weight)
    check_own("loss_sum", loss, ring, "a share", SHARE, operand=False)
    total = lax.stop_gradient(_total(widened(weight), ring))
    return _quotient(_total(widened(loss), ring), total)


@public
def mean_value_and_grad(
    loss_fn: Callable[..., Any],
    axis: AxisLike,
    *,
    specs: Any = None,
    groups: AxisLike = (),
    microbatches: Integer = 1,
    bucket_bytes: Any = None,
    has_aux: Flag = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that computes the mean loss and its gradient inside `jax.shard_map`.

    Gradients equal those on one device. They are summed over `axis` once, after all microbatches.

    Args:
      loss_fn: `loss_fn(params, *batch) -> (loss_sum, weight)`, local scalars as in `mean_loss`.
        They may differ along `axis` and `groups`, and are equal along other axes.
      axis: all mesh axes that losses are spread over. Sums are `lax.psum`s; those of gradients use
        the `wire_dtype` of an `Axis`. `()`: each device has the full loss.
      specs: pytree prefix of `PartitionSpec`s for params. Needed under `check_vma=False`, only
        checked otherwise.
      groups: mesh axes along which each index has its own parameters and loss; nothing is summed
        over them. Under `check_vma=False`, axes that `loss_fn` never names are treated so, too.
      microbatches: the number of parts of dimension 0 of every batch leaf.
      bucket_bytes: as in `reduce_gradients`.
      has_aux: whether `loss_fn` returns `((loss_sum, weight), aux)`, aux a pytree of arrays.

    Returns:
      `fn(params, *batch) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. `loss` is as
      `mean_loss` returns it. `grads` is its gradient for the global parameters, in the dtypes and
      sharding of params. For a total weight of 0 both are 0, or NaN where sums are not finite.
      `aux` is this device's, stacked along a new first dimension of size `microbatches`, also if 1.

    Raises:
      ValueError: `microbatches` does not divide a batch leaf; a result of `loss_fn` is no scalar,
        or varies over an axis neither in `axis` nor `groups`; the loss is typed as replicated over
        `axis`, or parameters over `groups`; specs are wrong, or missing under `check_vma=False`; a
        layer in `loss_fn` got a replicated parameter that must be sharded.

    Cost: sums of replicated parameters' gradients, 2 (n-1)/n of their bytes. Over other axes
    gradients are summed in each microbatch under `check_vma=True`, else once at the end. `loss_fn`
    may be traced twice. With microbatches, all gradients are accumulated in float32 or wider.

    Example:
      >>> mesh = make_mesh("dp=2,tp=4")
      >>> def loss(w, x):
      ...     y = reduce_region(x @ w, "tp")  # columns of x and rows of w are sharded over tp
      ...     return jnp.sum(y**2), len(y)
      >>> local = mean_value_and_grad(loss, "dp", microbatches=2)
      >>> step = jaxpar.jit(jax.shard_map(local, mesh=mesh,
      ...     in_specs=(P("tp"), P("dp", "tp")), out_specs=(P(), P("tp"))))
      >>> mean, grads = step(jnp.arange(4.0), jnp.eye(8, 4))
      >>> float(mean), grads
      (1.75, Array([0.  , 0.25, 0.5 , 0.75], dtype=float32))
    """
    parts = check_whole("microbatches", microbatches, 1)
    limit, has_aux = check_bucket(bucket_bytes), check_flag("has_aux", has_aux)

    def value_and_gradient(params: Any, *batch: Any) -> tuple[Any, Any]:
        ring = bind_any(axis, takes=("wire_dtype",))
        apart = bind_any(groups, "groups", takes=())
        _check_apart(ring, apart)
        checked = checks_varying(manual_axes())
        params = as_arrays("params", params)
        check_parameters("params", params, "pass it to loss_fn apart from params")
        if apart.names:
            check_own_leaves("params", params, apart, "parameters", "leave that axis out of groups")
        sharded = sharded_axes("params", params, specs, apart.names)
        # Each device differentiates its copy of a replicated parameter. Otherwise JAX would
        # sum the gradient over devices in every microbatch.
        copies = vary_over(ring.names, params)
        batches = batch
        if parts > 1:
            batch = as_arrays("batch", batch)
            batches = jax.tree_util.tree_map_with_path(partial(cut_batch, parts, "loss_fn"), batch)
        local = _local_loss(of_user(loss_fn, "loss_fn"), has_aux, ring, apart)
        # Under check_vma=True, JAX has summed over all other axes, and the loss counts once there.
        # Otherwise each device's loss counts, and no gradient is summed yet.
        others = () if checked else _used(local, copies, batches, parts, ring.names + apart.names)
        axes, count = ring.names + others, prod(map(lax.axis_size, others))
        (loss, weight, aux), grads = _accumulate(local, parts, copies, batches)
        check_uncast(of_user(loss_fn, "loss_fn"), params, copies, *_first(parts, batches))

        total = _total(weight, ring)
        # Divide before the sum: sums of many tokens' gradients would overflow float16.
        leaves, treedef = jax.tree.flatten(grads)
        leaves = [_quotient(leaf, total, count) for leaf in leaves]
        wires = [ring.wire(param.dtype) for param in jax.tree.leaves(params)]
        leaves = sum_leaves(leaves, [set(axes) - names for names in sharded], limit, wires)
        grads = treedef.unflatten(leaves)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)
        mean = _quotient(_total(loss, ring), total)
        return ((mean, aux) if has_aux else mean), grads

    value_and_gradient.__qualname__ = "mean_value_and_grad"  # the name in its errors
    return public(value_and_gradient, over=axis)


def _local_loss(loss_fn: Callable[..., Any], has_aux: bool, ring: Ring, apart: Ring) -> Local:
    """Wraps `loss_fn`; types checked results as device shares."""

    def local(params: Any, batch: Any) -> tuple[Float[Array, ""], tuple[Num[Array, ""], Any]]:
        (loss, weight), aux = losses_of("loss_fn", loss_fn(params, *batch), has_aux)
        check_axes(loss, weight, ring.names, apart.names)
        if ring.names:
            check_own("loss_sum", loss, ring, "a share", SHARE, operand=False)
        return vary_over(ring.names, loss), (vary_over(ring.names, weight), as_arrays("aux", aux))

    return local


def _used(
    local: Local, params: Any, batches: Any, parts: int, known: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns axes, besides known ones, of shared losses."""
    # Devices do not compute together over an axis that the loss never names. Each device has the
    # full gradient there.
    others = tuple(name for name in manual_axes() if name not in known)
    if prod(map(lax.axis_size, others)) == 1:
        return ()
    first = _first(parts, batches)
    named = named_axes(jax.make_jaxpr(lambda params: local(params, first)[0])(params).jaxpr)
    return tuple(name for name in others if name in named)


def _accumulate(
    local: Local, parts: int, params: Any, batches: Any
) -> tuple[tuple[Float[Array, ""], Num[Array, ""], Any], Any]:
    """Returns local results and wide gradients, over microbatches."""

    def run(batch: Any) -> tuple[tuple[Float[Array, ""], Num[Array, ""], Any], Any]:
        (loss, (weight, aux)), grads = jax.value_and_grad(local, has_aux=True)(params, batch)
        return (loss, weight, aux), jax.tree.map(widened, grads)

    if parts == 1:
        (loss, weight, aux), grads = run(batches)
        return (loss, weight, jax.tree.map(lambda x: x[None], aux)), grads

    def zero(param: Inexact[Array, "*shape"]) -> Inexact[Array, "*shape"]:
        return vary_over(varying_axes(param), jnp.zeros(param.shape, addition_dtype(param.dtype)))

    def step(sums: Any, batch: Any) -> tuple[Any, tuple[Float[Array, ""], Num[Array, ""], Any]]:
        outputs, grads = run(batch)
        return jax.tree.map(jnp.add, sums, grads), outputs

    grads, outputs = lax.scan(step, jax.tree.map(zero, params), batches, length=parts)
    losses, weights, aux = outputs
    return (jnp.sum(losses), jnp.sum(weights, dtype=weights.dtype), aux), grads


def _first(parts: int, batches: Any) -> Any:
    return batches if parts == 1 else jax.tree.map(lambda x: x[0], batches)


def losses_of(function: str, result: Any, has_aux: bool) -> tuple[tuple[Any, Any], Any]:
    """Returns `((loss_sum, weight), aux)`, wide, of what a user's function returned."""
    if has_aux and (not _is_pair(result) or not isinstance(result[0], tuple)):
        raise type_error(
            f"with has_aux {function} must return ((loss_sum, weight), aux), got {_kind(result)}"
        )
    result, aux = result if has_aux else (result, None)
    if not _is_pair(result):
        raise type_error(
            f"{function} must return (loss_sum, weight), got {_kind(result)}; return the "
            "sum of the losses and their number"
        )
    if isinstance(result[0], tuple):  # a pair of pairs, as with has_aux
        raise type_error(
            f"{function} returned ((loss_sum, weight), aux); pass has_aux=True, or return "
            "(loss_sum, weight) alone"
        )
    loss, weight = map(widened, _check_scalars(*result))
    return (loss, weight), aux


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2


def check_axes(
    loss: Array, weight: Array, names: tuple[str, ...], groups: tuple[str, ...] | None
) -> None:
    """Refuses losses that vary over other axes; those of a pipeline, without `groups`."""
    where, apart = f"axis {names}", f"name them {OF_GROUPS}; "
    if groups is None:
        where, apart = "batch_axes", ""
    for argument, x in (("loss_sum", loss), ("weight", weight)):
        if others := sorted(varying_axes(x) - {*names, *(groups or ())}):
            raise value_error(
                f"{argument} varies over {others}, which {where} lacks; add them if devices have "
                f"different shares of the loss there; {apart}otherwise sum or gather before it "
                "with reduce_region or gather_region, whose results are replicated"
            )


def _kind(result: Any) -> str:
    if not isinstance(result, tuple):
        return "no tuple"
    inside = ", ".join("a tuple" if isinstance(x, tuple) else "no tuple" for x in result)
    return f"a tuple of {len(result)}" + (f" ({inside})" if result else "")


def _check_scalars(loss_sum: Any, weight: Any) -> tuple[Float[Array, ""], Shaped[Array, ""]]:
    loss, weight = as_array("loss_sum", loss_sum), as_array("weight", weight)
    for argument, x in (("loss_sum", loss), ("weight", weight)):
        if x.ndim:
            raise value_error(
                f"{argument} must be a scalar, got local shape {x.shape}; sum it with jnp.sum"
            )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise type_error(f"loss_sum must be a float, got {loss.dtype}; cast it")
    if jnp.iscomplexobj(weight):
        raise type_error(f"weight must be a real number, got {weight.dtype}; take its real part")
    return loss, weight


def check_flag(argument: str, flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise type_error(f"{argument} must be True or False, got {flag!r}")
    return flag


def check_parameters(argument: str, tree: Any, remedy: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise type_error(
                f"{argument}{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, "
                f"which has no gradient; {remedy}"
            )


def _check_apart(ring: Ring, apart: Ring) -> None:
    shared = sorted(set(ring.names) & set(apart.names))
    if shared:
        raise value_error(
            f"axis and groups both have {shared}; name axes that share a loss in axis, and those "
            "with a loss of their own in groups"
        )


def cut_batch(
    parts: int, function: str, path: Any, leaf: Shaped[Array, " ..."]
) -> Shaped[Array, "{parts} size ..."]:
    place = jax.tree_util.keystr(path)
    if not leaf.ndim:
        raise value_error(
            f"batch{place} is a scalar, which microbatches={parts} cannot cut; "
            f"broadcast it over the batch, or let {function} close over it"
        )
    size = leaf.shape[0]
    if size % parts:
        raise value_error(
            f"batch{place} has local shape {leaf.shape}, whose dimension 0 "
            f"microbatches={parts} does not divide: {size} = {size // parts} x {parts} + "
            f"{size % parts}; choose a divisor of {size}, or pad it to {size + -size % parts}"
        )
    return leaf.reshape(parts, size // parts, *leaf.shape[1:])


def widened(x: Shaped[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Widens to the sum's dtype; integers become floats, which never wrap."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(sum_dtype(x.dtype))
    return x.astype("float64" if x.dtype.itemsize == 8 else "float32")


def _total(x: Num[Array, ""], ring: Ring) -> Num[Array, ""]:
    return lax.psum(vary_over(ring.names, x), ring.names) if ring.names else x


def _quotient(
    x: Inexact[Array, "*shape"], weight: Num[Array, ""], count: int = 1
) -> Inexact[Array, "*shape"]:
    """Returns `x / (weight * count)`; for weight 0 it is 0, or NaN if x is not finite."""
    divisor = jnp.where(weight == 0, 1, weight).astype(x.dtype) * count
    nothing = x - x  # NaN if x is not finite
    return jnp.where(weight == 0, nothing, x / divisor)
