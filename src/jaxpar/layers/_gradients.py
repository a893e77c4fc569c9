"""Gradients inside `jax.shard_map`, equal to those of one device, in one reduction."""

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
from jaxpar.arguments.checks import as_array, check_own, check_uncast, check_whole
from jaxpar.arguments.dtypes import addition_dtype, sum_dtype
from jaxpar.arguments.trees import as_arrays, check_own_leaves
from jaxpar.arguments.types import Integer
from jaxpar.axis.axis import AxisLike, Ring, bind, bind_any
from jaxpar.axis.varying import checks_varying, vary_over, varying_axes
from jaxpar.compiler.jaxprs import named_axes
from jaxpar.layers._reduction import check_bucket, manual_axes, sharded_axes, sum_leaves

# Of parameters and a batch to (loss, (weight, aux)), of this device.
Local = Callable[[Any, Any], tuple[Array, tuple[Array, Any]]]
SHARE = "leave out an earlier sum over axis, or leave out of axis the axes that share one loss"


@public
def mean_loss(loss_sum: Any, weight: Any, axis: AxisLike) -> Array:
    """Divides the sum of all devices' losses by the sum of their weights.

    This is the mean over all tokens, say, even if devices have different numbers of them. A mean of
    means would differ.

    Args:
      loss_sum: a local float scalar, the sum of this device's losses.
      weight: a local scalar, their number or total weight; not differentiated.
      axis: mesh axes that losses are shared over: a name, a tuple or list of them in any order, or
        an `Axis`, which says how data travel: here always by `lax.psum`.

    Returns:
      `psum(loss_sum) / psum(weight)`, float32 or wider, replicated over `axis`. If the total weight
      is 0, it is 0 with zero gradients, or NaN if the loss is not finite.

    Raises:
      TypeError: a loss that is no float.
      ValueError: arguments that are no scalars, a loss that is typed as replicated over `axis`, an
        unknown axis name, a call outside shard_map.

    Cost: psums of two scalars.

    Example:
      >>> mesh = make_mesh("dp=8")
      >>> mean = jaxpar.jit(jax.shard_map(lambda x: mean_loss(jnp.sum(x), x.size, "dp"),
      ...     mesh=mesh, in_specs=P("dp"), out_specs=P()))
      >>> mean(jnp.arange(16.0))
      Array(7.5, dtype=float32)
    """
    ring = bind(axis)
    loss, weight = _check_scalars(loss_sum, weight)
    check_own("loss_sum", loss, ring, "a share", SHARE, operand=False)
    total = lax.stop_gradient(_total(_widened(weight), ring))
    return _quotient(_total(_widened(loss), ring), total)


@public
def mean_value_and_grad(
    loss_fn: Callable[..., Any],
    axis: AxisLike,
    *,
    specs: Any = None,
    groups: AxisLike = (),
    microbatches: Integer = 1,
    bucket_bytes: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that computes the mean loss and its gradient inside `jax.shard_map`.

    Unlike `jax.value_and_grad`, it gives the gradients of a single device under either setting of
    `check_vma`, and sums them over devices once, after all microbatches.

    Args:
      loss_fn: `loss_fn(params, *batch) -> (loss_sum, weight)`, local scalars: the sum of this
        device's losses and their number or total weight, which is not differentiated. Both are
        shares of the whole over `axis` (each device has its own), and replicated over all other
        axes of the shard_map.
      axis: all mesh axes that losses are shared over, such as those that shard the batch or the
        sequence: a name, a tuple or list of them in any order, or an `Axis`, which says how data
        travel: here always by `lax.psum`. `()` where every device has all of the loss.
      specs: pytree prefix of `PartitionSpec`s for params, those of `in_specs`. Needed under
        `check_vma=False`; under `check_vma=True` types say as much, and specs are checked.
      groups: mesh axes between groups of devices that have their own parameters and losses, such as
        the axes of an outer shard_map. Nothing is summed over them. Under `check_vma=False` an axis
        that `loss_fn` never names counts as one. `()`: none.
      microbatches: the number of parts into which dimension 0 of every batch leaf is cut. They run
        one after the other, and their gradients are added in float32 or wider.
      bucket_bytes: None for one psum a leaf; otherwise as in `reduce_gradients`.
      has_aux: `loss_fn` returns `((loss_sum, weight), aux)`: aux is a pytree of arrays, which are
        not differentiated.

    Returns:
      `fn(params, *batch) -> (loss, grads)`, or with `has_aux` `((loss, aux), grads)`. `loss` is the
      total loss over the total weight, float32 or wider, replicated over `axis`. `grads` are
      like params, in dtype and sharding: the gradient of that loss with respect to the global
      parameters. If the total weight is 0, both are 0, or NaN if they are not finite.
      `aux` is what this device's `loss_fn` returned, each leaf stacked over microbatches,
      [microbatches, ...].

    Raises:
      TypeError: an option, a parameter or a result of `loss_fn` of the wrong type.
      ValueError: `microbatches` that do not divide a batch leaf; results of `loss_fn` that are no
        scalars, or are typed as varying over an axis neither in `axis` nor in `groups`; a loss
        typed as replicated over `axis`; no specs under `check_vma=False`, or wrong ones; parameters
        that all groups share; replicated parameters that a function of jaxpar in `loss_fn` needs
        sharded; an unknown axis name; a call outside shard_map.

    Cost: gradients are summed where the parameter is replicated, 2 (n-1)/n of their bytes on the
    wire: over `axis` once. Over other axes JAX sums them under `check_vma=True` in the backward
    pass of each microbatch. Under `check_vma=False` all is summed at once, at the end; if there are
    other axes, `loss_fn` is traced once more to see which of them it names.
    Under `check_vma=True` it is traced once more if some parameters are replicated over an axis
    along which others are sharded, to find operands that are replicated by mistake.
    More than one microbatch keeps gradients of all parameters in float32 or wider.

    Example:
      >>> mesh = make_mesh("dp=2,tp=4")
      >>> def loss(w, x):
      ...     y = reduce_region(x @ w, "tp")  # columns of x and rows of w are sharded over tp
      ...     return jnp.sum(y**2), len(y)
      >>> local = mean_value_and_grad(loss, "dp", microbatches=2)
      >>> step = jaxpar.jit(jax.shard_map(local, mesh=mesh,
      ...     in_specs=(P("tp"), P("dp", "tp")), out_specs=(P(), P("tp"))))
      >>> mean, grads = step(jnp.ones(4), jnp.ones((8, 4)))
      >>> float(mean), grads
      (16.0, Array([8., 8., 8., 8.], dtype=float32))

    Source: one reduction for all microbatches is that of Li et al., as in `reduce_gradients`.
    """
    parts = check_whole("microbatches", microbatches, 1)
    limit = check_bucket(bucket_bytes)

    def value_and_gradient(params: Any, *batch: Any) -> tuple[Any, Any]:
        ring, apart = bind_any(axis), bind_any(groups, "groups")
        _check_apart(ring, apart)
        checked = checks_varying(manual_axes())
        params = as_arrays("params", params)
        jax.tree_util.tree_map_with_path(_check_parameter, params)
        if apart.names:
            check_own_leaves("params", params, apart, "parameters", "leave that axis out of groups")
        sharded = sharded_axes(params, specs, apart.names)
        # Where a parameter is replicated each device differentiates its own copy: otherwise JAX
        # would sum the gradient over devices in every microbatch.
        copies = vary_over(ring.names, params)
        batches = batch
        if parts > 1:
            batch = as_arrays("batch", batch)
            batches = jax.tree_util.tree_map_with_path(partial(_cut, parts), batch)
        local = _local_loss(of_user(loss_fn, "loss_fn"), has_aux, ring, apart)
        # Under check_vma=True JAX has summed over all other axes, and the loss counted once there.
        # Otherwise each device's loss has counted, and no gradient is summed yet.
        others = () if checked else _used(local, copies, batches, parts, ring.names + apart.names)
        axes, count = ring.names + others, prod(map(lax.axis_size, others))
        (loss, weight, aux), grads = _accumulate(local, parts, copies, batches)
        check_uncast(of_user(loss_fn, "loss_fn"), params, copies, *_first(parts, batches))

        total = _total(weight, ring)
        # Divided before they are summed: sums of many tokens' gradients would overflow float16.
        leaves, treedef = jax.tree.flatten(grads)
        leaves = [_quotient(leaf, total, count) for leaf in leaves]
        wires = [ring.wire(param.dtype) for param in jax.tree.leaves(params)]
        leaves = sum_leaves(leaves, [set(axes) - names for names in sharded], limit, wires)
        grads = treedef.unflatten(leaves)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)
        mean = _quotient(_total(loss, ring), total)
        return ((mean, aux) if has_aux else mean), grads

    value_and_gradient.__qualname__ = "mean_value_and_grad"  # its errors have this name
    return public(value_and_gradient, over=axis)


def _local_loss(loss_fn: Callable[..., Any], has_aux: bool, ring: Ring, apart: Ring) -> Local:
    """What `loss_fn` returns, checked, and typed as one share of each device."""

    def local(params: Any, batch: Any) -> tuple[Float[Array, ""], tuple[Num[Array, ""], Any]]:
        result = loss_fn(params, *batch)
        result, aux = _pair(result) if has_aux else (result, None)
        loss, weight = _check_result(result, ring, apart)
        return loss, (weight, as_arrays("aux", aux))

    return local


def _used(
    local: Local, params: Any, batches: Any, parts: int, known: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes, except the known ones, over which devices compute a loss together.

    Over an axis that the loss never names they do not. There each device has the whole gradient of
    what it computed, whether all compute the same or each group has a model of its own.
    """
    others = tuple(name for name in manual_axes() if name not in known)
    if prod(map(lax.axis_size, others)) == 1:
        return ()
    first = _first(parts, batches)
    named = named_axes(jax.make_jaxpr(lambda params: local(params, first)[0])(params).jaxpr)
    return tuple(name for name in others if name in named)


def _accumulate(
    local: Local, parts: int, params: Any, batches: Any
) -> tuple[tuple[Float[Array, ""], Num[Array, ""], Any], Any]:
    """This device's loss, weight, aux and wide gradients, over all microbatches."""

    def run(batch: Any) -> tuple[tuple[Float[Array, ""], Num[Array, ""], Any], Any]:
        (loss, (weight, aux)), grads = jax.value_and_grad(local, has_aux=True)(params, batch)
        return (loss, weight, aux), jax.tree.map(_widened, grads)

    if parts == 1:
        (loss, weight, aux), grads = run(batches)
        return (loss, weight, jax.tree.map(lambda x: x[None], aux)), grads

    def zero(param: Inexact[Array, "*shape"]) -> Inexact[Array, "*shape"]:
        return vary_over(varying_axes(param), jnp.zeros(param.shape, addition_dtype(param.dtype)))

    def step(sums: Any, batch: Any) -> tuple[Any, tuple[Float[Array, ""], Num[Array, ""], Any]]:
        found, grads = run(batch)
        return jax.tree.map(jnp.add, sums, grads), found

    grads, found = lax.scan(step, jax.tree.map(zero, params), batches, length=parts)
    losses, weights, aux = found
    return (jnp.sum(losses), jnp.sum(weights, dtype=weights.dtype), aux), grads


def _first(parts: int, batches: Any) -> Any:
    """The batch of the first microbatch."""
    return batches if parts == 1 else jax.tree.map(lambda x: x[0], batches)


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], tuple):
        raise type_error(
            f"with has_aux loss_fn must return ((loss_sum, weight), aux), got {_kind(result)}"
        )
    return result


def _check_result(result: Any, ring: Ring, apart: Ring) -> tuple[Float[Array, ""], Num[Array, ""]]:
    """Returns loss and weight as shares of each device."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise type_error(
            f"loss_fn must return (loss_sum, weight), got {_kind(result)}; return the "
            "sum of the losses and their number"
        )
    if isinstance(result[0], tuple):  # with has_aux it is a pair of pairs
        raise type_error(
            "loss_fn returned ((loss_sum, weight), aux); pass has_aux=True, or return "
            "(loss_sum, weight) alone"
        )
    loss, weight = _check_scalars(*result)
    for argument, x in (("loss_sum", loss), ("weight", weight)):
        others = sorted(varying_axes(x) - set(ring.names) - set(apart.names))
        if others:
            raise value_error(
                f"{argument} varies over {others}, which axis {ring.names} "
                "lacks; add them if devices have different shares of the loss there; name them in "
                "groups= if devices along them have models of their own; otherwise sum or gather "
                "before it with reduce_region or gather_region, whose results are replicated"
            )
    if ring.names:
        check_own("loss_sum", loss, ring, "a share", SHARE, operand=False)
    return vary_over(ring.names, (_widened(loss), _widened(weight)))


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


def _check_parameter(path: Any, leaf: Shaped[Array, " ..."]) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise type_error(
            f"params{jax.tree_util.keystr(path)} is "
            f"{leaf.dtype}{list(leaf.shape)}, which has no gradient; pass it to loss_fn apart "
            "from params"
        )


def _check_apart(ring: Ring, apart: Ring) -> None:
    shared = sorted(set(ring.names) & set(apart.names))
    if shared:
        raise value_error(
            f"axis and groups both have {shared}; name axes that share a loss in axis, and those "
            "with a loss of their own in groups"
        )


def _cut(parts: int, path: Any, leaf: Shaped[Array, " ..."]) -> Shaped[Array, "{parts} size ..."]:
    """Cuts a leaf of the batch into microbatches."""
    place = jax.tree_util.keystr(path)
    if not leaf.ndim:
        raise value_error(
            f"batch{place} is a scalar, which microbatches={parts} cannot cut; "
            "broadcast it over the batch, or let loss_fn close over it"
        )
    size = leaf.shape[0]
    if size % parts:
        raise value_error(
            f"batch{place} has local shape {leaf.shape}, whose dimension 0 "
            f"microbatches={parts} does not divide: {size} = {size // parts} x {parts} + "
            f"{size % parts}; choose a divisor of {size}, or pad it to {size + -size % parts}"
        )
    return leaf.reshape(parts, size // parts, *leaf.shape[1:])


def _widened(x: Shaped[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Returns x in the dtype of its sum: numbers of tokens as floats, which do not wrap around."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(sum_dtype(x.dtype))
    return x.astype("float64" if x.dtype.itemsize == 8 else "float32")


def _total(x: Num[Array, ""], ring: Ring) -> Num[Array, ""]:
    return lax.psum(vary_over(ring.names, x), ring.names) if ring.names else x


def _quotient(
    x: Inexact[Array, "*shape"], weight: Num[Array, ""], count: int = 1
) -> Inexact[Array, "*shape"]:
    """`x / (weight * count)`, and 0 where the weight is, unless x is not finite."""
    divisor = jnp.where(weight == 0, 1, weight).astype(x.dtype) * count
    nothing = x - x  # NaN of what is not finite
    return jnp.where(weight == 0, nothing, x / divisor)
