"""The mean loss of a pipeline, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.arguments.calls import naming, of_user, public, type_error, value_error
from jaxpar.arguments.trees import as_arrays, check_own_leaves
from jaxpar.axis.axis import AxisLike, Ring, axis_names, bind
from jaxpar.layers._gradients import cut_batch, mean_value_and_grad
from jaxpar.pipeline._pipeline_schedule import PipelineSchedule
from jaxpar.pipeline._pipelined import Pipeline, pipelined


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
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function, to call inside `jax.shard_map`, for a pipeline's mean loss and gradients.

    All devices run the same program, so functions may use collectives over other axes than `axis`.

    Args:
      stage_fn: `(layers, x, microbatch) -> x` of one stage, whose leaves of `layers` are
        `[layers of a stage, ...]`, such as for `jax.lax.scan`. The pytree x keeps its structure,
        shapes and dtypes, which are floats, and may hold a sum of auxiliary losses. To recompute
        activations, wrap the stage in `jax.checkpoint`. Values that it closes over, such as masks,
        get no gradient.
      first_fn: `(shared, microbatch) -> x`, what enters the first stage, such as embeddings. All
        devices run it, batched over microbatches.
      last_fn: `(shared, x, microbatch) -> (loss_sum, weight)`, local scalars of this device's part
        of x, as in `mean_loss`. It may use collectives over `axis`, but must not sum `loss_sum`.
      schedule: such as `interleaved_1f1b(devices, microbatches, virtual_stages)`.
      axis: the mesh axis of the pipeline.
      batch_axes: the mesh axes that split the batch, such as `"dp"`.
      specs: pytree prefix of `PartitionSpec`s for `(layers, shared)`, for `check_vma=False`.
      last_dim: dimension of a stage's result that is cut over `axis` for `last_fn`.

    Returns:
      `fn(layers, shared, batch) -> (loss, (d_layers, d_shared))`. Leaves of `layers` are local
      `[layers of the device, ...]`, one stage after the other: device i has stages i, i + devices,
      and so on. Those of `shared` are replicated over `axis`, or sharded. Dimension 0 of every
      batch leaf is cut into microbatches. The loss and the gradients are those of
      `mean_value_and_grad`.

    Raises:
      TypeError: `first_fn` returns no floats; a stage changes structure, shapes or dtypes of x.
      ValueError: the schedule is `gpipe`'s, or for another number of devices; `virtual_stages` does
        not divide the layers of a device; a leaf of `layers` is replicated over `axis`;
        `microbatches` does not divide a batch leaf; the devices do not divide dimension `last_dim`;
        a stage uses a collective over `axis`, or closes over parameters; as `mean_value_and_grad`.

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
      >>> loss, grads = step(jnp.ones((8, 4, 4)), jnp.eye(4), {"x": jnp.ones((32, 4))})
      >>> grads[0].shape
      (8, 4, 4)

    Source: as `interleaved_1f1b`.
    """

    def call(layers: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
        ring, given = bind(axis), {"layers": layers, "shared": shared}
        _check_schedule(schedule, ring)
        layers = as_arrays("layers", layers)
        check_own_leaves("layers", layers, ring, "layers", "shard dimension 0 in in_specs")
        batch = as_arrays("batch", batch)
        batch = jax.tree_util.tree_map_with_path(partial(cut_batch, schedule.microbatches), batch)

        def loss_fn(params: Any, microbatches: Any) -> tuple[Any, Any]:
            layers, shared = params
            with naming("value_and_grad"):
                stages = jax.tree_util.tree_map_with_path(partial(_stages, schedule), layers)
                return pipelined(how, stages, shared, microbatches)

        how = Pipeline(
            _checked(of_user(stage_fn, "stage_fn")),
            of_user(first_fn, "first_fn"),
            of_user(last_fn, "last_fn"),
            schedule,
            ring,
            last_dim,
            given,
        )
        axes = *ring.names, *(axis_names(batch_axes) if batch_axes else ())
        return mean_value_and_grad(loss_fn, axes, specs=specs)((layers, shared), batch)

    call.__qualname__ = "value_and_grad"
    return public(call, over=axis)


def _checked(stage_fn: Callable[..., Any]) -> Callable[..., Any]:
    def types(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.asarray(x).dtype}{list(jnp.shape(x))}", tree)

    def stage(params: Any, x: Any, microbatch: Any) -> Any:
        if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x)):
            raise type_error(f"first_fn must return floats, got {types(x)}; give others in batch")
        y = stage_fn(params, x, microbatch)
        if types(x) != types(y):
            raise type_error(
                f"stage_fn must return what the next stage is given: x is {types(x)}, and it "
                f"returned {types(y)}; return the same structure, shapes and dtypes"
            )
        return jax.tree.map(jnp.asarray, y)

    return stage


def _check_schedule(schedule: PipelineSchedule, ring: Ring) -> None:
    if schedule.devices != ring.size:
        raise value_error(
            f"schedule is for {schedule.devices} devices, and {ring} has {ring.size}; make it for "
            f"{ring.size}"
        )
    last = [end - schedule.stages + 1 for end in schedule.ends]  # backward passes of the last stage
    if any(trip != loss + 1 for trip, loss in zip(last, schedule.loss_trips, strict=True)):
        raise value_error(
            "schedule keeps cotangents of losses for later trips, as gpipe does; choose "
            "interleaved_1f1b, whose bubble is the same"
        )


def _stages(schedule: PipelineSchedule, path: Any, leaf: Any) -> Any:
    """Returns a device's layers `[layers, ...]` as `[virtual_stages, layers of a stage, ...]`."""
    count, rest = divmod(leaf.shape[0] if leaf.ndim else 0, schedule.virtual_stages)
    if rest or not count:
        raise value_error(
            f"layers{jax.tree_util.keystr(path)} has local shape {leaf.shape}, whose first "
            f"dimension must be a multiple of the {schedule.virtual_stages} virtual stages; stack "
            f"the layers of all {schedule.stages} stages, and shard dimension 0 over the axis"
        )
    return leaf.reshape(schedule.virtual_stages, count, *leaf.shape[1:])
