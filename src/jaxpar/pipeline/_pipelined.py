"""Computes a pipelined loss and its gradients by scans over the trips of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.arguments.calls import value_error
from jaxpar.arguments.checks import check_dim, check_own
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.axis.axis import Ring
from jaxpar.axis.varying import vary_over, varying_axes, zeros_alike
from jaxpar.compiler.control_flow import cond
from jaxpar.compiler.unwritten_memory import unwritten
from jaxpar.layers._gradients import SHARE, widened
from jaxpar.pipeline._pipeline_schedule import PipelineSchedule
from jaxpar.pipeline._stage_residuals import StageResiduals, check_closed_over, residuals_of
from jaxpar.pipeline._trip_numbers import trip_numbers


def at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def written(tree: Any, new: Any, index: Any) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new)


def chosen(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), one, other)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The functions of a model, its schedule, and the ring of its devices.

    Attributes:
      last_dim: dimension of a stage's result. For `last`, each device has its part along it.
      given: parameters as the user has them.
    """

    stage: Callable[..., Any]
    first: Callable[..., Any]
    last: Callable[..., Any]
    schedule: PipelineSchedule
    ring: Ring
    last_dim: int
    given: dict[str, Any]

    def firsts(self, shared: Any, batch: Any) -> Any:
        """Returns what enters the first stage, of all microbatches."""
        # All at once: in a loop, each microbatch would pass over all gradients of a table.
        return vary_over(self.ring.names, jax.vmap(partial(self.first, shared))(batch))

    def losses(self, microbatch: Any, shared: Any, part: Any) -> tuple[Any, Any]:
        """Returns the sum of this device's losses, and its weight."""
        loss, weight = (widened(jnp.asarray(x)) for x in self.last(shared, part, microbatch))
        check_own("loss_sum", loss, self.ring, "a share", SHARE, operand=False)
        return vary_over(self.ring.names, (loss, weight))

    def shared_out(self, y: Any, index: Any) -> Any:
        """Returns this device's part of the last stage's result."""
        # One permute for each distance: compilers overlap permutes with a stage's work. Each device
        # sends its own result, and uses what comes from the last stage.
        size = self.ring.size
        from_last = (index - (size - 1)) % size  # the last stage is on the last device
        found = _part(y, index, size, self.last_dim)
        for distance in range(1, size):
            part = _part(y, (index + distance) % size, size, self.last_dim)
            found = chosen(from_last == distance, self.ring.shift(part, distance), found)
        return found

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
def pipelined(how: Pipeline, stages: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
    """Returns this device's share of the loss and of its weight."""
    return _forward(how, stages, shared, batch)[0]


def _forward(how: Pipeline, stages: Any, shared: Any, batch: Any) -> Any:
    numbers = trip_numbers(how.schedule)
    entering, pull = jax.vjp(lambda shared: how.firsts(shared, batch), shared)
    one = vary_over(how.ring.names, at(batch, 0))  # as in a trip, where devices have different ones
    x, kept, leaves = _traced(how, at(stages, 0), at(entering, 0), one)
    like_x = partial(jax.tree.map, lambda x, e: vary_over(varying_axes(x), e), x)
    entered, pull_entered = jax.vjp(like_x, entering)
    run = PipelineRun(how, kept, stages, shared, batch, how.ring.index(), x)
    state = run.start(numbers.slots, entered, leaves)
    for forward, backward, trips in numbers.stretches():
        step = partial(run.trip, forward, backward)
        state, _ = lax.scan(step, state, jax.tree.map(itemgetter(trips), numbers[:3]))
    left = jax.tree.map(lambda x: x[:-1], state["ends"])
    of_entering = chosen(run.index == 0, left, jax.tree.map(jnp.zeros_like, left))
    d_shared = added(state["d_shared"], pull(*pull_entered(of_entering))[0])
    gradients = jax.tree.map(
        lambda g, p: g.astype(p.dtype), (state["d_stages"], d_shared), (stages, shared)
    )
    return state["sums"], gradients


def _backward(how: Pipeline, gradients: Any, cts: Any) -> Any:
    return *jax.tree.map(lambda g: g * cts[0].astype(g.dtype), gradients), None


pipelined.defvjp(_forward, _backward)


def _traced(how: Pipeline, params: Any, x: Any, microbatch: Any) -> Any:
    """Returns zeros of the type of a stage's result, and what it keeps: how, and the types."""
    x = jax.tree.map(jnp.zeros_like, x)
    while True:
        kept = residuals_of(how.stage, how.ring, params, x, microbatch)
        check_closed_over(kept.closed, how.given)
        y, leaves = kept.forward(params, x, microbatch)  # for their types
        wider = jax.tree.map(lambda x, y: vary_over(varying_axes(y), x), x, y)
        if jax.tree.map(varying_axes, wider) == jax.tree.map(varying_axes, x):
            return x, kept, leaves
        x = wider


def added(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, more)


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """The trips of a pipeline on one device; `zero` is of the type of a stage's result."""

    how: Pipeline
    kept: StageResiduals
    stages: Any
    shared: Any
    batch: Any
    index: Any
    zero: Any

    def start(self, slots: int, entering: Any, leaves: list[Any]) -> dict[str, Any]:
        """Returns the state before the first trip."""
        zero = self.zero
        part = _part(zero, 0, self.how.ring.size, self.how.last_dim)
        sums = self.how.losses(at(self.batch, 0), self.shared, part)  # for their types

        def wide(p: Any) -> Any:
            return zeros_alike(p.shape, addition_dtype(p.dtype), p)

        return {
            **dict.fromkeys(("arrived", "y"), zero),  # from the stage before; the newest result
            **dict.fromkeys(("dx", "dy"), zero),  # to the stage before; of the last stage's result
            # What enters the first stage and, once it was used, its cotangent. The last place is
            # for those of other stages.
            "ends": jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])]), entering),
            # Unwritten: no pass reads a slot before a forward pass has written it.
            "stash": [
                vary_over(varying_axes(x), unwritten((slots, *x.shape), x.dtype)) for x in leaves
            ],
            "d_stages": jax.tree.map(wide, self.stages),
            "d_shared": jax.tree.map(wide, self.shared),
            "sums": jax.tree.map(jnp.zeros_like, sums),
        }

    def trip(self, forward: bool, backward: bool, state: dict[str, Any], numbers: Any) -> Any:
        (of_forward, of_backward), of_loss = at(numbers[:2], self.index), numbers[2]
        # Predictions read the share of idle passes from this name.
        passes = f"passes[bubble={self.how.schedule.bubble():.4f}]"
        # Sent first, so that they travel during the forward pass.
        arriving = self.how.ring.shift(state["dx"], -1) if backward else None
        part = self.how.shared_out(state["y"], self.index)
        if forward:
            with jax.named_scope(passes):
                state = self._forward(state, of_forward)
        dy = state["dy"]
        state, of_part = self._losses(state, part, of_loss)
        state["dy"] = self.how.collected(dy, of_part, self.index)
        if backward:
            ct = chosen(of_backward.is_last > 0, dy, arriving)
            ct = chosen(of_backward.runs > 0, ct, jax.tree.map(jnp.zeros_like, ct))
            with jax.named_scope(passes):
                state = self._backward(state, of_backward, ct)
        # What was sent arrives within the trip. Otherwise compilers for GPUs send in the next trip,
        # right before its use, where nothing hides the hop.
        pairs = state["arrived"], state["dx"]
        state["arrived"] = jax.tree.map(lambda *pair: lax.optimization_barrier(pair)[0], *pairs)
        return state, None

    def _forward(self, state: dict[str, Any], own: Any) -> dict[str, Any]:
        entered = at(state["ends"], own.microbatch)
        x = chosen(own.enters > 0, entered, state["arrived"])
        params, microbatch = at(self.stages, own.virtual), at(self.batch, own.microbatch)
        y, leaves = self.kept.forward(params, x, microbatch)
        stash = written(state["stash"], leaves, own.slot)
        return {**state, "stash": stash, "y": y, "arrived": self.how.ring.shift(y, 1)}

    def _losses(self, state: dict[str, Any], part: Any, number: Any) -> Any:
        """Adds the losses of a microbatch, if one left the last stage: all devices know."""

        def compute(given: Any) -> Any:
            sums, d_shared, _ = given
            of = partial(self.how.losses, at(self.batch, number))
            loss, pull, weight = jax.vjp(of, self.shared, part, has_aux=True)
            of_shared, of_part = pull(jnp.ones_like(loss))
            return added(sums, (loss, weight)), added(d_shared, of_shared), of_part

        given = state["sums"], state["d_shared"], jax.tree.map(jnp.zeros_like, part)
        sums, d_shared, of_part = cond(number >= 0, compute, lambda given: given, given)
        return {**state, "sums": sums, "d_shared": d_shared}, of_part

    def _backward(self, state: dict[str, Any], own: Any, ct: Any) -> dict[str, Any]:
        params, microbatch = at(self.stages, own.virtual), at(self.batch, own.microbatch)
        leaves = at(state["stash"], own.slot)
        of_params, dx = self.kept.pullback(params, self.zero, microbatch, leaves)(ct)
        sums = added(at(state["d_stages"], own.virtual), of_params)
        return {
            **state,
            "dx": dx,
            "d_stages": written(state["d_stages"], sums, own.virtual),
            "ends": written(state["ends"], dx, own.leaves),
        }
