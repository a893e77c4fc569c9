"""Experts in slots: a fixed number of each expert's rows at once, and the rest in blocks.

A slot holds one row for one expert. GPUs and CPUs have no kernel for groups of any size: there, one
batched matmul over all slots beats loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int32, Num

from jaxpar.arguments.dtypes import common_dtype, sum_dtype
from jaxpar.axis.vma import vary_alike
from jaxpar.moe._copies import Copies, collect, copies_by_key, spread, take_rows
from jaxpar.moe._experts import of_group
from jaxpar.moe._group_blocks import Block, Totals, fold_groups
from jaxpar.moe._grouped import fitting_sizes
from jaxpar.moe._mlp import BlockProducts, Experts, Mlp, Operands, Projected, WholeProducts

# The number of an expert's slots is a multiple of these.
CPU_TILE, GPU_TILE = 16, 32


def slots_for(average: float, tile: int, most: int) -> int:
    """Returns the average load and three standard deviations."""
    return min(ceil((average + 3 * sqrt(average)) / tile) * tile, most)


class Inputs(NamedTuple):
    x: Float[Array, "tokens d"]
    experts: Experts
    weights: Float[Array, "tokens k"]


class Plan(NamedTuple):
    """Slots of choices. Choices are numbered by row, slots by expert."""

    slots: Int32[Array, " slots"]  # the choice in each slot, rows * k for none
    places: Int32[Array, "tokens k"]  # the slot of each choice, the number of all slots for none
    order: Int32[Array, " pairs"]  # all choices, sorted by expert
    sizes: Int32[Array, " groups"]  # the number of each expert's choices
    keys: Int32[Array, "tokens k"]  # the expert of each choice


@dataclass(frozen=True)
class SlotMlp:
    mlp: Mlp
    slots: int
    lengths: tuple[int, ...]


def plan_slots(keys: Int[Array, "tokens k"], groups: int, slots: int, pairs: int) -> Plan:
    """Gives slots to each expert's choices, while any remain.

    At most `pairs` choices count. Keys outside of 0 to `groups - 1` are no choices.
    """
    keys = keys.astype("int32")
    flat = keys.reshape(-1)
    count, all_slots = flat.size, groups * slots
    copies, sizes = copies_by_key(flat[:, None], groups, pairs)
    sizes = fitting_sizes(sizes, pairs)  # the last choices are dropped
    starts = jnp.cumsum(sizes, dtype="int32") - sizes
    number = jnp.arange(all_slots, dtype="int32")
    group, within = number // slots, number % slots
    held = within < sizes[group]
    in_slots = jnp.where(held, take_rows(copies.source, starts[group] + within, None), count)
    mine = jnp.clip(flat, 0, groups - 1)
    within = copies.places[:, 0] - starts[mine]
    fits = (copies.places[:, 0] < pairs) & (within < slots)
    places = jnp.where(fits, mine * slots + within, all_slots).reshape(keys.shape)
    return Plan(in_slots, places, copies.source, sizes, keys)


@dataclass(frozen=True)
class SlotProducts:
    mlp: Mlp
    inside: Bool[Array, "rows 1"]  # slots that hold a row
    groups: int

    def rows(
        self, x: Num[Array, "rows into"], w: Num[Array, "groups d f"], contracted: int, dtype: Any
    ) -> Num[Array, "rows out"]:
        dims = ((2,), (contracted,)), ((0,), (0,))
        return lax.collapse(self._dot(self._apart(x), w, dims), 0, 2).astype(dtype)

    def outer(
        self, x: Num[Array, "rows into"], ct: Num[Array, "rows out"], dtype: Any
    ) -> Num[Array, "groups into out"]:
        dims = ((1,), (1,)), ((0,), (0,))
        return self._dot(self._apart(x), self._apart(ct), dims).astype(dtype)

    def spread(self, bias: Num[Array, "groups out"], dtype: Any) -> Num[Array, "rows out"]:
        return jnp.repeat(bias.astype(dtype), len(self.inside) // self.groups, axis=0)

    def total(self, ct: Num[Array, "rows out"], dtype: Any) -> Num[Array, "groups out"]:
        return jnp.sum(self._apart(ct).astype(sum_dtype(ct.dtype)), axis=1).astype(dtype)

    def within(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return jnp.where(self.inside, x, 0)

    def clear(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return x  # results of empty slots are not read

    def _apart(self, x: Num[Array, "rows features"]) -> Num[Array, "groups slots features"]:
        return x.reshape(self.groups, -1, x.shape[1])

    def _dot(self, left: Num[Array, "_ _ _"], right: Num[Array, "_ _ _"], dims: Any) -> Array:
        dtype = common_dtype(left.dtype, right.dtype)  # a cotangent may be wider
        sums = sum_dtype(dtype) if self.mlp.preferred is None else self.mlp.preferred
        return lax.dot_general(
            left.astype(dtype),
            right.astype(dtype),
            dims,
            precision=self.mlp.kernels.precision,
            preferred_element_type=sums,
        )


def experts_in_slots(how: SlotMlp, inputs: Inputs, plan: Plan) -> Float[Array, "tokens d"]:
    """Returns rows' weighted sums of experts' results.

    Rows that chose no expert may hold anything.
    """
    inputs, plan = vary_alike((), inputs, plan)
    out: Any = _apply(how, inputs, plan)
    return out[0]


def _cut(inputs: Inputs, plan: Plan) -> Operands:
    x, experts, weights = inputs
    k = plan.places.shape[1]
    return Operands(
        take_rows(x, plan.slots // k), experts, take_rows(weights.reshape(-1), plan.slots)
    )


def _products(how: SlotMlp, plan: Plan) -> SlotProducts:
    return SlotProducts(how.mlp, (plan.slots < plan.places.size)[:, None], len(plan.sizes))


def _copies(plan: Plan) -> Copies:
    return Copies(plan.slots // plan.places.shape[1], plan.places)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(how: SlotMlp, inputs: Inputs, plan: Plan) -> tuple[Float[Array, "tokens d"], Projected]:
    """Returns the result, and projections, which have no cotangent."""
    made, projected = how.mlp.forward(_products(how, plan), _cut(inputs, plan))
    return _forward_rest(how, inputs, plan, collect(_copies(plan), made)), projected


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    how: SlotMlp,
    inputs: Inputs,
    plan: Plan,
    projected: Projected,
    ct: Float[Array, "tokens d"],
) -> Inputs:
    copies = _copies(plan)
    cut = _cut(inputs, plan)
    d: Any = how.mlp.gradients(_products(how, plan), cut, projected, take_rows(ct, copies.source))
    # A choice is in a single slot at most.
    d_weights = take_rows(d.weights, plan.places.reshape(-1)).reshape(plan.places.shape)
    grads = Inputs(collect(copies, d.x), d.experts, d_weights)
    return _gradients_rest(how, inputs, plan, grads, ct)


@dataclass(frozen=True)
class _Rest:
    plan: Plan
    slots: int

    @property
    def sizes(self) -> Int32[Array, " groups"]:
        return jnp.maximum(self.plan.sizes - self.slots, 0)

    def shift(self, group: Int[Array, ""]) -> Int32[Array, ""]:
        until = jnp.cumsum(jnp.minimum(self.plan.sizes, self.slots), dtype="int32")
        return until[group]

    def cut(
        self, inputs: Inputs, expert: Experts, block: Block, shift: Int32[Array, ""]
    ) -> tuple[Operands, Int32[Array, " length"], Int32[Array, " length"]]:
        """Returns a block's inputs, choices and rows; past-the-end for none."""
        x, _, weights = inputs
        number = block.at + shift + jnp.arange(len(block.inside), dtype="int32")
        choices = take_rows(self.plan.order, number, None)
        choices = jnp.where(block.inside[:, 0], choices, weights.size)
        rows = choices // weights.shape[1]
        cut = Operands(take_rows(x, rows), expert, take_rows(weights.reshape(-1), choices))
        return cut, choices, rows


def _forward_rest(
    how: SlotMlp, inputs: Inputs, plan: Plan, out: Float[Array, "tokens d"]
) -> Float[Array, "tokens d"]:
    rest = _Rest(plan, how.slots)

    def one_group(
        out: Float[Array, "tokens d"], group: Int[Array, ""], fold: Callable[..., Array]
    ) -> Float[Array, "tokens d"]:
        expert, shift = of_group(inputs.experts, group), rest.shift(group)

        def step(out: Float[Array, "tokens d"], block: Block) -> Float[Array, "tokens d"]:
            cut, _, rows = rest.cut(inputs, expert, block, shift)
            part, _ = how.mlp.forward(BlockProducts(how.mlp, block), cut)
            return out.at[rows].add(part.astype(out.dtype), mode="drop")

        return fold(step, out)

    with jax.named_scope("beyond_slots"):
        return fold_groups(how.lengths, rest.sizes, len(plan.order), out, one_group)


def _gradients_rest(
    how: SlotMlp, inputs: Inputs, plan: Plan, grads: Inputs, ct: Float[Array, "tokens d"]
) -> Inputs:
    rest = _Rest(plan, how.slots)

    def one_group(grads: Inputs, group: Int[Array, ""], fold: Callable[..., Any]) -> Inputs:
        expert, totals, shift = of_group(inputs.experts, group), Totals(group), rest.shift(group)

        def step(state: Any, block: Block) -> Any:
            (d_x, d_weights), sums = state
            cut, choices, rows = rest.cut(inputs, expert, block, shift)
            on = BlockProducts(how.mlp, block)
            _, projected = how.mlp.forward(on, cut)
            d = how.mlp.gradients(on, cut, projected, take_rows(ct, rows))
            d_x = d_x.at[rows].add(d.x.astype(d_x.dtype), mode="drop")
            column = choices % d_weights.shape[1]
            d_weights = d_weights.at[rows, column].set(d.weights, mode="drop")
            return (d_x, d_weights), totals.add(sums, d.experts)

        state = (grads.x, grads.weights), totals.open(grads.experts)
        (d_x, d_weights), sums = fold(step, state)
        return Inputs(d_x, totals.close(grads.experts, sums), d_weights)

    with jax.named_scope("beyond_slots"):
        return fold_groups(how.lengths, rest.sizes, len(plan.order), grads, one_group)


def _apply_fwd(how: SlotMlp, inputs: Inputs, plan: Plan) -> Any:
    out: Any = _apply(how, inputs, plan)
    return out, (inputs, plan, out[1])


def _apply_bwd(how: SlotMlp, residuals: Any, cts: Any) -> Any:
    return _gradients(how, *residuals, cts[0]), None


def _gradients_fwd(how: SlotMlp, *args: Any) -> Any:
    return _gradients(how, *args), args


def _gradients_bwd(how: SlotMlp, residuals: Any, cts: Inputs) -> Any:
    inputs, plan, projected, ct = residuals
    pairs = len(plan.order)
    choices, _ = copies_by_key(plan.keys.reshape(-1, 1), len(plan.sizes), pairs)
    k = plan.keys.shape[1]
    copies = Copies(choices.source // k, choices.places.reshape(plan.keys.shape))
    on = WholeProducts(how.mlp, plan.sizes, pairs)

    # Without slots, by products that can be differentiated again.
    def whole(inputs: Inputs) -> Float[Array, "tokens d"]:
        x, experts, weights = inputs
        sorted_weights = spread(choices, weights.reshape(-1))
        cut = Operands(spread(copies, x), experts, sorted_weights)
        return collect(copies, how.mlp.forward(on, cut)[0])

    def gradients(inputs: Inputs, ct: Float[Array, "tokens d"]) -> Inputs:
        grads: Inputs = jax.vjp(whole, inputs)[1](ct)[0]
        return grads

    d_inputs, d_ct = jax.vjp(gradients, inputs, ct)[1](cts)
    return d_inputs, None, jax.tree.map(jnp.zeros_like, projected), d_ct


_apply.defvjp(_apply_fwd, _apply_bwd)
_gradients.defvjp(_gradients_fwd, _gradients_bwd)
