"""A device's experts, applied to the rows that have arrived."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float, Int, Int32

from jaxpar.axis.vma import vary_alike
from jaxpar.choose.of_experts import applies_experts_in_slots
from jaxpar.layers._activation import Activation
from jaxpar.moe._copies import Copies, collect, copies_by_key, spread
from jaxpar.moe._experts import apply_experts, closes_over_arrays
from jaxpar.moe._group_blocks import CPU_LENGTHS, GPU_LENGTHS
from jaxpar.moe._grouped import bind_kernels, fitting_sizes
from jaxpar.moe._mlp import Experts, Mlp, WholeProducts
from jaxpar.moe._slots import (
    CPU_TILE,
    GPU_TILE,
    Inputs,
    Plan,
    SlotMlp,
    experts_in_slots,
    plan_slots,
    slots_for,
)
from jaxpar.platforms.chips import traced_for_cpu

# Rows, the experts that they chose (-1 for none), and the weights of these choices.
Tokens = tuple[Float[Array, "rows d"], Int[Array, "rows k"], Float[Array, "rows k"]]


class Pairs(NamedTuple):
    """Pairs of a row and a local expert, sorted by expert."""

    # With experts in two stages these are hidden rows, [pairs, f].
    rows: Float[Array, "pairs d"]
    weights: Float[Array, " pairs"]
    sizes: Int32[Array, " groups"]  # the number of each expert's pairs
    copies: Copies  # where each row's pairs are


class InSlots(NamedTuple):
    """Rows and their slots, each for a local expert's row."""

    rows: Float[Array, "rows d"]
    weights: Float[Array, "rows k"]
    plan: Plan

    @property
    def sizes(self) -> Int32[Array, " groups"]:
        return self.plan.sizes


_BLANK = 16  # rows behind the pairs, a TPU tile, whose results are 0


@dataclass(frozen=True)
class LocalExperts:
    activation: Activation
    precision: Any
    implementation: Any
    staged: bool

    def begin(
        self,
        tokens: Tokens,
        experts: Experts,
        first: Int[Array, ""],
        pairs: int,
        average: float,
    ) -> Pairs | InSlots:
        """Sorts at most `pairs` pairs by expert; in two stages computes hidden features.

        `first` is the device's first expert, and `average` an expert's mean number of pairs. Rows
        that chose none of its experts may hold anything.
        """
        rows, chosen, weights = tokens
        if slots := self._slots(experts, rows, pairs, average):
            plan = plan_slots(chosen - first, len(experts.up), slots, pairs)
            return InSlots(rows, weights, plan)
        # Choices are sorted, each with a key. A copy of choice c is a copy of row c // k. Empty
        # copies stay empty.
        keys = (chosen - first).reshape(-1, 1)
        choices, sizes = copies_by_key(keys, len(experts.up), pairs, _BLANK)
        source = choices.source // max(chosen.shape[1], 1)
        copies = Copies(source, choices.places.reshape(chosen.shape))
        sizes = fitting_sizes(sizes, pairs)  # the last pairs are dropped
        # Now [pairs, d]. If both stages run at once, gradients are 0 where there is no pair.
        sorted_rows = spread(copies, rows, fill=False, blank=not self.staged)
        sorted_weights = spread(choices, weights.reshape(-1))
        if self.staged:
            operands = sorted_rows, experts, sorted_weights, sizes
            sorted_rows, experts, sorted_weights, sizes = vary_alike((), *operands)
            mlp = self._mlp(sorted_rows)
            on = WholeProducts(mlp, sizes, len(sorted_rows))
            sorted_rows, _ = mlp.begin(on, sorted_rows, experts, sorted_weights)
        return Pairs(sorted_rows, sorted_weights, sizes, copies)

    def finish(self, pairs: Pairs | InSlots, experts: Experts) -> Float[Array, "rows d"]:
        if isinstance(pairs, InSlots):
            slots = len(pairs.plan.slots) // len(experts.up)
            lengths = CPU_LENGTHS if traced_for_cpu() else GPU_LENGTHS
            how = SlotMlp(self._mlp(pairs.rows), slots, lengths)
            return experts_in_slots(how, Inputs(pairs.rows, experts, pairs.weights), pairs.plan)
        rows, weights, sizes, copies = pairs
        if self.staged:
            rows, experts, weights, sizes = vary_alike((), rows, experts, weights, sizes)
            mlp = self._mlp(rows)
            on = WholeProducts(mlp, sizes, len(rows))
            made = mlp.finish(on, rows, experts, weights)
        else:
            made = apply_experts(
                rows,
                experts,
                sizes,
                activation=self.activation,
                weights=weights,
                implementation=self.implementation,
                precision=self.precision,
            )
        return collect(copies, made, blank=True)

    def _slots(
        self, experts: Experts, rows: Float[Array, "rows d"], pairs: int, average: float
    ) -> int:
        most = min(pairs, len(rows))
        if self.implementation != "auto" or not most or not applies_experts_in_slots(average):
            return 0
        if closes_over_arrays(self.activation, experts, rows.dtype):
            return 0
        return slots_for(average, CPU_TILE if traced_for_cpu() else GPU_TILE, most)

    def _mlp(self, rows: Float[Array, "pairs features"]) -> Mlp:
        kernels = bind_kernels(self.implementation, self.precision)
        return Mlp(kernels, self.activation, None, rows.dtype)
