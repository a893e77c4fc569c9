"""The mean loss of a pipeline, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.arguments.calls import naming, of_user, public, type_error, value_error
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import check_whole
from jaxpar.axis.trees import as_arrays
from jaxpar.axis.vma import vary_over
from jaxpar.layers._gradients import (
    check_flag,
    check_parameters,
    cut_batch,
    mean_loss,
    mean_value_and_grad,
)
from jaxpar.layers._reduction import check_own_shards, sharded_axes
from jaxpar.pipeline._pipeline_schedule import PipelineSchedule
from jaxpar.pipeline._pipelined import Pipeline, evaluated, pipelined


@public
def value_and_grad(
    stage_fn: Callable[[Any, Any, Any], Any],
    first_fn: Callable[[Any, Any], Any],
    last_fn: Callable[[Any, Any, Any], Any],
    schedule: PipelineSchedule,
    axis: AxisLike,
    *,
    batch_axes: AxisLike = (),
    specs: Any = None,
    last_dim: int = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function, to call inside `jax.shard_map`, for a pipeline's mean loss and gradients.

    All devices run the same program, so functions may use collectives over other axes than `axis`.

    Args:
      stage_fn: `(layers, x, microbatch) -> x` of a stage, whose leaves of `layers` are
        `[layers of a stage, ...]`, such as for `jax.lax.scan`. The pytree x keeps its structure,
        shapes and dtypes, which are floats. To recompute activations, wrap the stage in
        `jax.checkpoint`. Values that functions close over, such as masks, get no gradient.
      first_fn: `(shared, microbatch) -> x`, what enters the first stage, such as embeddings. All
        devices run it, batched over microbatches; what device 0 computes enters.
      last_fn: `(shared, x, microbatch) -> (loss_sum, weight)`, local scalars of this device's part
        of x, as in `mean_loss`. It may use collectives over `axis`, but must sum neither.
        A scalar in x arrives divided by the devices of `axis`: let only sums of losses be scalars.
      schedule: such as `interleaved_1f1b(devices, microbatches, virtual_stages)`.
      axis: the mesh axis of the pipeline.
      batch_axes: the mesh axes that split the batch, such as `"dp"`. Gradients are summed over
        `axis` and `batch_axes` at once, in the `wire_dtype` that both have.
      specs: pair of pytree prefixes of `PartitionSpec`s for `(layers, shared)`, or one for both;
        for `check_vma=False`.
      last_dim: dimension of a stage's result that is cut over `axis` for `last_fn`.
      has_aux: whether `stage_fn` returns `(x, aux)` and `last_fn` `((loss_sum, weight), aux)`,
        each aux a pytree of arrays. That of a stage is `[layers of a stage, ...]`, or a scalar.

    Returns:
      `fn(layers, shared, batch) -> (loss, (d_layers, d_shared))`. Leaves of `layers` are local
      `[layers of the device, ...]`, stage after stage: device i has stages i, i + devices,
      and so on. Those of `shared` are replicated over `axis`, or sharded. Dimension 0 of every
      batch leaf is cut into microbatches; what `first_fn` reads is replicated over `axis`. The loss
      and the gradients are those of `mean_value_and_grad`. With `has_aux`, `((loss, (of_stages,
      of_last)), gradients)`: this device's, `[microbatches, layers of the device, ...]` in the
      order of `layers`, and `[microbatches, ...]` of its parts of the losses.

    Raises:
      TypeError: `first_fn` returns no floats; a stage changes structure, shapes or dtypes of x;
        parameters are no floats; `schedule` is none; `last_fn` returns something else.
      ValueError: the schedule is `gpipe`'s, or for another number of devices; `virtual_stages` does
        not divide the layers of a device; a leaf of `layers` is not sharded over `axis`, or by
        specs along another dimension than 0; `first_fn` reads a leaf of the batch or of `shared`
        that varies over `axis`, and gathers none; rows that a stage reads, or that are cut along
        `last_dim`, vary over `axis`; `microbatches` does not divide a batch leaf; the devices do
        not divide dimension `last_dim`; a stage uses a collective over `axis`; a function closes
        over parameters; an aux has another number of layers; an `Axis` has another option than
        `wire_dtype`, or the two have different `wire_dtype`s; as `mean_value_and_grad`.

    Cost: a device is idle for `schedule.bubble()` of its time. In each trip it sends x and its
    cotangent to a neighbour, and to others `2 (p - 1) / p` of x for the loss. It holds the
    residuals of `schedule.peak_activations()` microbatches, what enters the first stage of all
    microbatches, and all gradients in float32 or wider.

    Example:
      >>> mesh = make_mesh("pp=8")
      >>> schedule = interleaved_1f1b(8, microbatches=4)
      >>> fn = value_and_grad(
      ...     lambda w, x, batch: jnp.tanh(x @ w[0]),
      ...     lambda shared, batch: batch["x"] @ shared,
      ...     lambda shared, x, batch: (jnp.sum((x @ shared.T) ** 2), x.size),
      ...     schedule, "pp")
      >>> step = jaxpar.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P("pp"), P(), P()),
      ...     out_specs=(P(), (P("pp"), P()))))
      >>> layers, x = jax.random.normal(jax.random.key(0), (8, 4, 4)), jnp.eye(32, 4)
      >>> loss, grads = step(layers, jnp.eye(4), {"x": x})
      >>> grads[0].shape, bool(jnp.allclose(loss, jnp.mean(jax.lax.scan(
      ...     lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0] ** 2)))
      ((8, 4, 4), True)

    Source: as `interleaved_1f1b`.
    """
    functions = stage_fn, first_fn, last_fn

    def gradients(call: _Given, layers: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
        pipeline = call.pipeline(functions, schedule, last_dim, has_aux)

        def loss_fn(params: Any, microbatches: Any) -> tuple[Any, Any]:
            layers, shared = params
            with naming("value_and_grad"):
                sums: Any = pipelined(pipeline, _stages(schedule, layers), shared, microbatches)
            loss, weight, aux = sums
            return (loss, weight), aux

        fn: Any = mean_value_and_grad(loss_fn, call.over, specs=call.specs, has_aux=True)
        (loss, aux), grads = fn((layers, shared), batch)
        aux = jax.tree.map(lambda x: x[0], aux)  # of all microbatches, in a microbatch of `fn`
        return ((loss, aux) if has_aux else loss), grads

    return _callable("value_and_grad", gradients, schedule, axis, batch_axes, specs)


@public
def value(
    stage_fn: Callable[[Any, Any, Any], Any],
    first_fn: Callable[[Any, Any], Any],
    last_fn: Callable[[Any, Any, Any], Any],
    schedule: PipelineSchedule,
    axis: AxisLike,
    *,
    batch_axes: AxisLike = (),
    specs: Any = None,
    last_dim: int = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function, to call inside `jax.shard_map`, for a pipeline's mean loss alone.

    Args:
      stage_fn: as in `value_and_grad`.
      first_fn: as in `value_and_grad`.
      last_fn: as in `value_and_grad`.
      schedule: any, also `gpipe`'s; only its forward passes count.
      axis: the mesh axis of the pipeline.
      batch_axes: as in `value_and_grad`.
      specs: as in `value_and_grad`.
      last_dim: as in `value_and_grad`.
      has_aux: as in `value_and_grad`.

    Returns:
      `fn(layers, shared, batch) -> loss`, or `(loss, (of_stages, of_last))` with `has_aux`, as
      `value_and_grad` returns them.

    Raises:
      TypeError: as `value_and_grad`, except that parameters may be no floats.
      ValueError: as `value_and_grad`, except that functions may close over parameters.

    Cost: `microbatches * virtual_stages + devices` trips, each with a forward pass and half of what
    `value_and_grad` sends. No residuals are kept.

    Example:
      >>> mesh = make_mesh("pp=8")
      >>> fn = value(
      ...     lambda w, x, batch: (x * w[0], jnp.max(x)),
      ...     lambda shared, batch: batch + shared,
      ...     lambda shared, x, batch: ((jnp.sum(x), x.size), jnp.max(x)[None]),
      ...     gpipe(8, microbatches=2), "pp", has_aux=True)
      >>> evaluate = jaxpar.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P("pp"), P(), P()),
      ...     out_specs=(P(), (P(None, "pp"), P(None, "pp")))))
      >>> rows = jnp.arange(64.0).reshape(16, 4)
      >>> loss, (of_stages, of_last) = evaluate(jnp.arange(8.0) + 1, 1.0, rows)
      >>> float(loss), of_stages[0].tolist()
      (1310400.0, [32.0, 32.0, 64.0, 192.0, 768.0, 3840.0, 23040.0, 161280.0])
    """
    functions = stage_fn, first_fn, last_fn

    def mean(call: _Given, layers: Any, shared: Any, batch: Any) -> Any:
        pipeline = call.pipeline(functions, schedule, last_dim, has_aux)
        layers, shared = vary_over(call.over.names, (layers, shared))  # as of `value_and_grad`
        loss, weight, aux = evaluated(pipeline, _stages(schedule, layers), shared, batch)
        loss = mean_loss(loss, weight, call.over)
        return (loss, aux) if has_aux else loss

    return _callable("value", mean, schedule, axis, batch_axes, specs)


@dataclass(frozen=True, eq=False)
class _Given:
    """What a call gets beside arrays.

    Attributes:
      params: as the user has them, which functions must not close over.
      over: as in `Pipeline`.
      sharded: as in `Pipeline`.
    """

    params: dict[str, Any]
    ring: Ring
    over: Ring
    specs: Any
    sharded: list[set[str]]

    def pipeline(
        self,
        functions: tuple[Callable[..., Any], ...],
        schedule: PipelineSchedule,
        last_dim: int,
        has_aux: bool,
    ) -> Pipeline:
        names = "stage_fn", "first_fn", "last_fn"
        stage, first, last = map(of_user, functions, names)
        stage = _checked(stage, check_flag("has_aux", has_aux))
        check_whole("last_dim", last_dim)
        rest = schedule, self.ring, last_dim, has_aux, self.params, self.over, self.sharded
        return Pipeline(stage, first, last, *rest)


def _callable(
    name: str,
    compute: Callable[..., Any],
    schedule: PipelineSchedule,
    axis: AxisLike,
    batch_axes: AxisLike,
    specs: Any,
) -> Callable[..., Any]:
    differentiates = name == "value_and_grad"

    def call(params: dict[str, Any], layers: Any, shared: Any, batch: Any) -> Any:
        ring, over = _rings(axis, batch_axes)
        _check_schedule(schedule, ring, differentiates)
        layers, shared = as_arrays("layers", layers), as_arrays("shared", shared)
        if differentiates:
            remedy = "give numbers of layers as floats, and keys as a leaf of the batch, by rows"
            check_parameters("layers", layers, remedy)
            check_parameters("shared", shared, "give it as a leaf of the batch, by rows")
        of_layers, of_shared = pair = _pair_of(specs)
        remedy = "shard dimension 0 in in_specs"
        check_own_shards("layers", layers, of_layers, ring, "layers", remedy)
        sharded_axes("layers", layers, of_layers)
        sharded = sharded_axes("shared", shared, of_shared)
        _check_stacks(of_layers, ring)
        batch = as_arrays("batch", batch)
        cut = partial(cut_batch, schedule.microbatches, "functions")
        batch = jax.tree_util.tree_map_with_path(cut, batch)
        closed = params if differentiates else {}
        pair = None if any(spec is None for spec in pair) else pair  # which types say as well
        return compute(_Given(closed, ring, over, pair, sharded), layers, shared, batch)

    def fn(layers: Any, shared: Any, batch: Any) -> Any:
        # Before an eager call becomes a program, whose arguments are others.
        params = {"layers": layers, "shared": shared}

        def with_params(layers: Any, shared: Any, batch: Any) -> Any:
            return call(params, layers, shared, batch)

        with_params.__qualname__ = name
        return public(with_params, over=axis)(layers, shared, batch)

    fn.__qualname__ = name
    return fn


def _rings(axis: AxisLike, batch_axes: AxisLike) -> tuple[Ring, Ring]:
    """Returns the pipeline's ring, and that of all axes over which losses are spread."""
    ring = bind(axis, takes=("wire_dtype",))
    if batch_axes in ((), []):
        return ring, ring
    more = bind(batch_axes, "batch_axes", takes=("wire_dtype",))
    if twice := sorted(set(ring.names) & set(more.names)):
        raise value_error(
            f"axis and batch_axes both have {twice}; leave it out of batch_axes: microbatches are "
            "the same on all devices of a pipeline"
        )
    if ring.wire_dtype != more.wire_dtype:
        raise value_error(
            f"axis has wire_dtype={ring.wire_dtype}, and batch_axes {more.wire_dtype}, but "
            "gradients are summed over both at once; give the same to both"
        )
    return ring, ring.over((*ring.names, *more.names))


def _pair_of(specs: Any) -> tuple[Any, Any]:
    """Returns the specs of layers and of shared parameters."""
    if specs is None or isinstance(specs, PartitionSpec):
        return specs, specs
    if not isinstance(specs, (tuple, list)) or len(specs) != 2:
        raise type_error(
            f"specs must be a pair, of the specs of layers and of shared, got {specs!r}; give the "
            "in_specs of both"
        )
    return specs[0], specs[1]


def _check_stacks(specs: Any, ring: Ring) -> None:
    """Refuses layers that the axis shards along another dimension, or in another order."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        named = {name for entry in entries for name in entry}
        wanted = [name for name in ring.names if name in named]
        if wanted and [name for name in entries[0] if name in wanted] != wanted:
            raise value_error(
                f"the spec of layers{jax.tree_util.keystr(path)} is {spec}, but {ring} must shard "
                f"dimension 0, which stacks layers, and over {wanted} in this order"
            )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _checked(stage_fn: Callable[..., Any], has_aux: bool) -> Callable[..., tuple[Any, Any]]:
    def types(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.asarray(x).dtype}{list(jnp.shape(x))}", tree)

    def stage(params: Any, x: Any, microbatch: Any) -> tuple[Any, Any]:
        if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x)):
            raise type_error(f"first_fn must return floats, got {types(x)}; give others in batch")
        result: Any = stage_fn(params, x, microbatch)
        if has_aux and (not isinstance(result, tuple) or len(result) != 2):
            raise type_error(
                f"with has_aux stage_fn must return (x, aux), got {types(result)}; return what the "
                "next stage is given, and arrays of this stage's layers"
            )
        y, aux = result if has_aux else (result, None)
        aux = as_arrays("aux", aux)
        counts = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
            if leaf.ndim and counts and leaf.shape[0] not in counts:
                raise value_error(
                    f"aux{jax.tree_util.keystr(path)} of stage_fn has local shape {leaf.shape}, "
                    f"whose dimension 0 must be that of a stage's layers, {min(counts)}; stack "
                    "arrays of layers, such as by jax.lax.scan, or add a dimension"
                )
        if types(x) != types(y):
            raise type_error(
                f"stage_fn must return what the next stage is given: x is {types(x)}, and it "
                f"returned {types(y)}; return the same structure, shapes and dtypes"
            )
        return jax.tree.map(jnp.asarray, y), aux

    return stage


def _check_schedule(schedule: Any, ring: Ring, differentiates: bool) -> None:
    if not isinstance(schedule, PipelineSchedule):
        raise type_error(
            f"schedule must be a PipelineSchedule, got {schedule!r}; make one with "
            f"interleaved_1f1b({ring.size}, microbatches)"
        )
    if schedule.devices != ring.size:
        raise value_error(
            f"schedule is for {schedule.devices} devices, and {ring} has {ring.size}; make it for "
            f"{ring.size}"
        )
    last = [end - schedule.stages + 1 for end in schedule.ends]  # backward passes of the last stage
    late = any(trip != loss + 1 for trip, loss in zip(last, schedule.loss_trips, strict=True))
    if differentiates and late:
        raise value_error(
            "schedule keeps cotangents of losses for later trips, as gpipe does; choose "
            "interleaved_1f1b, whose bubble is the same"
        )


def _stages(schedule: PipelineSchedule, layers: Any) -> Any:
    """Returns a device's layers `[layers, ...]` as `[virtual_stages, layers of a stage, ...]`."""

    def cut(path: Any, leaf: Any) -> Any:
        count, rest = divmod(leaf.shape[0] if leaf.ndim else 0, schedule.virtual_stages)
        if rest or not count:
            raise value_error(
                f"layers{jax.tree_util.keystr(path)} has local shape {leaf.shape}, whose first "
                f"dimension must be a multiple of the {schedule.virtual_stages} virtual stages; "
                f"stack the layers of all {schedule.stages} stages, and shard dimension 0 over the "
                "axis"
            )
        return leaf.reshape(schedule.virtual_stages, count, *leaf.shape[1:])

    return jax.tree_util.tree_map_with_path(cut, layers)
