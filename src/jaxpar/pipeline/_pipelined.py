"""Computes a pipelined loss and its gradients by scans over the trips of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.arguments.calls import value_error
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.axis import Ring
from jaxpar.axis.checks import check_dim, check_own
from jaxpar.axis.trees import as_arrays
from jaxpar.axis.vma import vary_over, varying_axes, zeros_alike
from jaxpar.compiler.control_flow import cond
from jaxpar.compiler.unwritten_memory import unwritten
from jaxpar.layers._gradients import check_axes, losses_of
from jaxpar.pipeline._pipeline_schedule import PipelineSchedule
from jaxpar.pipeline._stage_residuals import StageResiduals, residuals_of
from jaxpar.pipeline._traced_functions import check_entering, check_rows, traced
from jaxpar.pipeline._trip_numbers import trip_numbers


def at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def written(tree: Any, new: Any, index: Any) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new)


def chosen(condition: Any, this: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), this, other)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The functions of a model, its schedule, and the ring of its devices.

    Attributes:
      stage: `(params, x, microbatch) -> (x, aux)`.
      last_dim: dimension of a stage's result. For `last`, each device has its part along it.
      has_aux: whether `last` returns aux beside its pair.
      params: as the user has them.
      over: the axes over which losses are spread, with the wire's dtype.
      sharded: the axes that shard each leaf of shared parameters.
    """

    stage: Callable[..., Any]
    first: Callable[..., Any]
    last: Callable[..., Any]
    schedule: PipelineSchedule
    ring: Ring
    last_dim: int
    has_aux: bool
    params: dict[str, Any]
    over: Ring
    sharded: list[set[str]]

    def firsts(self, shared: Any, batch: Any) -> Any:
        """Returns what enters the first stage, of all microbatches."""
        first = traced("first_fn", self.first, self.params, shared, at(batch, 0))
        check_entering(first, shared, self.sharded, batch, self.ring)
        # All at once: in a loop, each microbatch would pass over all gradients of a table.
        return vary_over(self.ring.names, jax.vmap(partial(first, shared))(batch))

    def losses(self, microbatch: Any, shared: Any, part: Any) -> tuple[Any, Any]:
        """Returns the sum of this device's losses, and `(weight, aux)`."""

        def last(*args: Any) -> tuple[Any, Any]:
            (loss, weight), aux = losses_of("last_fn", self.last(*args), self.has_aux)
            return loss, (weight, as_arrays("aux", aux))

        args = shared, part, microbatch
        loss, beside = traced("last_fn", last, self.params, *args)(*args)
        check_axes(loss, beside[0], self.over.names, None)
        remedy = "leave out an earlier sum over it"
        check_own("loss_sum", loss, self.ring, "a share", remedy, operand=False)
        return vary_over(self.ring.names, (loss, beside))

    def shared_out(self, y: Any, index: Any) -> Any:
        """Returns this device's part of the last stage's result."""
        # One permute for each distance: compilers overlap permutes with a stage's work. Each device
        # sends its own result, and uses what comes from the last stage.
        size = self.ring.size
        from_last = (index - (size - 1)) % size  # the last stage is on the last device
        received = _part(y, index, size, self.last_dim)
        for distance in range(1, size):
            part = _part(y, (index + distance) % size, size, self.last_dim)
            received = chosen(from_last == distance, self.ring.shift(part, distance), received)
        return received

    def collected(self, whole: Any, part: Any, index: Any) -> Any:
        """Returns the parts of all devices to that of the last stage, in place of `whole`."""
        size = self.ring.size
        whole = jax.tree.map(jnp.zeros_like, whole)
        for distance in range(size):
            arrived = self.ring.shift(part, -distance)
            whole = _joined(whole, arrived, (index + distance) % size, size, self.last_dim)
        return whole


def _part(tree: Any, number: Any, size: int, dim: int) -> Any:
    """Cuts arrays along `dim`, and divides scalars, such as sums of auxiliary losses."""

    def cut(x: Any) -> Any:
        if not x.ndim:
            return x / size
        length, rest = divmod(x.shape[check_dim("last_dim", dim, x.shape)], size)
        if rest:
            raise value_error(
                f"last_dim={dim} of a stage's result, local shape {x.shape}, is cut over {size} "
                f"devices, which do not divide {x.shape[dim]}; choose another dimension or size"
            )
        return lax.dynamic_slice_in_dim(x, number * length, length, dim)

    return jax.tree.map(cut, tree)


def _joined(tree: Any, part: Any, number: Any, size: int, dim: int) -> Any:
    """Adds a part's cotangent to that of the full tree."""

    def join(x: Any, of_part: Any) -> Any:
        if not x.ndim:
            return x + of_part / size
        return lax.dynamic_update_slice_in_dim(x, of_part, number * of_part.shape[dim], dim)

    return jax.tree.map(join, tree, part)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pipelined(how: Pipeline, stages: Any, shared: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns this device's share of the loss and of its weight, and what is beside them."""
    return _forward(how, stages, shared, batch)[0]


def _forward(how: Pipeline, stages: Any, shared: Any, batch: Any) -> Any:
    entering, pull = jax.vjp(lambda shared: how.firsts(shared, batch), shared)
    run, like_x = _run(how, stages, shared, batch, entering)
    entered, pull_entered = jax.vjp(like_x, entering)
    state, out = run.through(entered)
    left = jax.tree.map(lambda x: x[:-1], state["ends"])
    of_entering = chosen(run.index == 0, left, jax.tree.map(jnp.zeros_like, left))
    d_shared = added(state["d_shared"], pull(*pull_entered(of_entering))[0])
    gradients = jax.tree.map(
        lambda g, p: g.astype(p.dtype), (state["d_stages"], d_shared), (stages, shared)
    )
    return out, gradients


def _backward(how: Pipeline, gradients: Any, cts: Any) -> Any:
    return *jax.tree.map(lambda g: g * cts[0].astype(g.dtype), gradients), None


pipelined.defvjp(_forward, _backward)


def evaluated(how: Pipeline, stages: Any, shared: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns the same as `pipelined`, by forward passes alone."""
    entering = how.firsts(shared, batch)
    run, like_x = _run(how, stages, shared, batch, entering, pulls=False)
    return run.through(like_x(entering))[1]


def _run(
    how: Pipeline, stages: Any, shared: Any, batch: Any, entering: Any, *, pulls: bool = True
) -> tuple[PipelineRun, Callable[[Any], Any]]:
    """Returns the trips, and a cast to the type of a stage's result."""
    params, x = at(stages, 0), jax.tree.map(jnp.zeros_like, at(entering, 0))
    first = vary_over(how.ring.names, at(batch, 0))  # as in a trip, where devices differ
    while True:
        kept = residuals_of(how.stage, how.ring, how.params, params, x, first, pulls=pulls)
        y, _, leaves = kept.forward(params, x, first)  # for their types
        wider = jax.tree.map(lambda x, y: vary_over(varying_axes(y), x), x, y)
        if jax.tree.map(varying_axes, wider) == jax.tree.map(varying_axes, x):
            break
        x = wider
    check_rows(kept.run, (params, x), how.last_dim, batch, how.ring)
    like_x = partial(jax.tree.map, lambda x, e: vary_over(varying_axes(x), e), x)
    return PipelineRun(how, kept, stages, shared, batch, how.ring.index(), x, leaves, pulls), like_x


def added(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, more)


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """The trips of a pipeline on a device.

    Attributes:
      zero: of the type of a stage's result.
      leaves: of the types of what a stage keeps.
      pulls: whether there are backward passes.
    """

    how: Pipeline
    kept: StageResiduals
    stages: Any
    shared: Any
    batch: Any
    index: Any
    zero: Any
    leaves: list[Any]
    pulls: bool

    def through(self, entering: Any) -> tuple[dict[str, Any], tuple[Any, Any, Any]]:
        """Makes all trips; returns the last state, and `(loss, weight, aux)`."""
        numbers = trip_numbers(self.how.schedule)
        state, beside = self._start(numbers.slots, entering), []
        for forward, backward, trips in numbers.stretches(self.pulls):
            step = partial(self._trip, forward, backward)
            state, aux = lax.scan(step, state, jax.tree.map(itemgetter(trips), numbers[:3]))
            if forward:
                beside.append(aux)
        loss, weight, of_last = state["sums"]
        return state, (loss, weight, (self._by_layer(beside), of_last))

    def _start(self, slots: int, entering: Any) -> dict[str, Any]:
        """Returns the state before the first trip."""
        how, zero = self.how, self.zero
        part = _part(zero, 0, how.ring.size, how.last_dim)
        loss, (weight, aux) = how.losses(at(self.batch, 0), self.shared, part)  # for their types

        def wide(p: Any) -> Any:
            return zeros_alike(p.shape, addition_dtype(p.dtype), p)

        def of_all(x: Any) -> Any:
            return jnp.zeros_like(jnp.broadcast_to(x, (how.schedule.microbatches, *x.shape)))

        sums = *jax.tree.map(jnp.zeros_like, (loss, weight)), jax.tree.map(of_all, aux)
        state = {
            **dict.fromkeys(("arrived", "y"), zero),  # from the stage before; the newest result
            # What enters the first stage and, once it was used, its cotangent. The last place is
            # for those of other stages.
            "ends": jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])]), entering),
            # Unwritten: no pass reads a slot before a forward pass has written it.
            "stash": [
                vary_over(varying_axes(x), unwritten((slots, *x.shape), x.dtype))
                for x in self.leaves
            ],
            "sums": sums,
        }
        if not self.pulls:
            return state
        return state | {
            **dict.fromkeys(("dx", "dy"), zero),  # to the stage before; of the last stage's result
            "d_stages": jax.tree.map(wide, self.stages),
            "d_shared": jax.tree.map(wide, self.shared),
        }

    def _by_layer(self, beside: list[Any]) -> Any:
        """Returns what stages returned in each trip, as `[microbatches, layers, ...]`."""
        schedule = self.how.schedule
        stages = np.arange(schedule.virtual_stages) * schedule.devices  # the stages of device 0
        trips = np.add.outer(schedule.starts, stages).astype(np.int32) + self.index

        def taken(*stretches: Any) -> Any:
            x = jnp.concatenate(stretches)[trips]  # [microbatches, stages, layers of a stage, ...]
            return x.reshape(len(trips), x.shape[1] * x.shape[2], *x.shape[3:])

        return jax.tree.map(taken, *beside)

    def _trip(self, forward: bool, backward: bool, state: dict[str, Any], numbers: Any) -> Any:
        (of_forward, of_backward), of_loss = at(numbers[:2], self.index), numbers[2]
        # Predictions read the share of idle passes from this name.
        passes = f"passes[bubble={self.how.schedule.bubble():.4f}]"
        aux = None
        # Sent first, so that they travel during the forward pass.
        arriving = self.how.ring.shift(state["dx"], -1) if backward else None
        part = self.how.shared_out(state["y"], self.index)
        if forward:
            with jax.named_scope(passes):
                state, aux = self._forward(state, of_forward)
        state, of_part = self._losses(state, part, of_loss)
        dy = state.get("dy")
        if self.pulls:
            state["dy"] = self.how.collected(self.zero, of_part, self.index)
        if backward:
            ct = chosen(of_backward.is_last > 0, dy, arriving)
            ct = chosen(of_backward.runs > 0, ct, jax.tree.map(jnp.zeros_like, ct))
            with jax.named_scope(passes):
                state = self._backward(state, of_backward, ct)
        # What was sent arrives within the trip. Otherwise compilers for GPUs send in the next trip,
        # right before its use, where nothing hides the hop.
        pairs = state["arrived"], state["dx" if self.pulls else "y"]
        state["arrived"] = jax.tree.map(lambda *pair: lax.optimization_barrier(pair)[0], *pairs)
        return state, aux

    def _forward(self, state: dict[str, Any], numbers: Any) -> tuple[dict[str, Any], Any]:
        entered = at(state["ends"], numbers.microbatch)
        x = chosen(numbers.enters > 0, entered, state["arrived"])
        params, microbatch = at(self.stages, numbers.virtual), at(self.batch, numbers.microbatch)
        y, aux, leaves = self.kept.forward(params, x, microbatch)
        stash = written(state["stash"], leaves, numbers.slot)
        aux = vary_over(self.how.ring.names, jax.tree.map(jnp.atleast_1d, aux))
        return {**state, "stash": stash, "y": y, "arrived": self.how.ring.shift(y, 1)}, aux

    def _losses(self, state: dict[str, Any], part: Any, number: Any) -> Any:
        """Adds the losses of a microbatch, if any left the last stage: all devices know."""

        def compute(carry: Any) -> Any:
            (*sums, of_last), d_shared, of_part = carry
            of = partial(self.how.losses, at(self.batch, number))
            if self.pulls:
                loss, pull, (weight, aux) = jax.vjp(of, self.shared, part, has_aux=True)
                of_shared, of_part = pull(jnp.ones_like(loss))
                d_shared = added(d_shared, of_shared)
            else:
                loss, (weight, aux) = of(self.shared, part)
            return (*added(sums, [loss, weight]), written(of_last, aux, number)), d_shared, of_part

        of_part = jax.tree.map(jnp.zeros_like, part) if self.pulls else None
        carry = state["sums"], state.get("d_shared"), of_part
        sums, d_shared, of_part = cond(number >= 0, compute, lambda carry: carry, carry)
        state = {**state, "sums": sums}
        return (state | {"d_shared": d_shared} if self.pulls else state), of_part

    def _backward(self, state: dict[str, Any], numbers: Any, ct: Any) -> dict[str, Any]:
        params, microbatch = at(self.stages, numbers.virtual), at(self.batch, numbers.microbatch)
        leaves = at(state["stash"], numbers.slot)
        of_params, dx = self.kept.pullback(params, self.zero, microbatch, leaves)(ct)
        sums = added(at(state["d_stages"], numbers.virtual), of_params)
        return {
            **state,
            "dx": dx,
            "d_stages": written(state["d_stages"], sums, numbers.virtual),
            "ends": written(state["ends"], dx, numbers.leaves),
        }
