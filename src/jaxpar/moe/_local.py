"""What a device computes for tokens that reached it: its own experts' share of their results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from jaxpar._varying import vary_alike
from jaxpar.moe._copies import Copies, collect, copies_by_key, spread
from jaxpar.moe._expert_mlp import WholeProducts
from jaxpar.moe._experts import apply_experts
from jaxpar.moe._grouped import bind_method, fitting_sizes
from jaxpar.moe._mlp import Experts, Mlp

Tokens = tuple[Array, Array, Array]  # rows [r, d], the experts that they chose [r, k], weights


class Pairs(NamedTuple):
    """Pairs of a row and an expert of this device, sorted by expert, on their way through it."""

    rows: Array  # [p, d], or where experts are applied in two stages their hidden rows, [p, f]
    weights: Array  # [p]
    sizes: Array  # int32[e], how many pairs each expert has
    copies: Copies  # where each row's pairs are


_BLANK = 16  # rows behind the pairs, a TPU's tile, whose results are 0


@dataclass(frozen=True)
class LocalExperts:
    """The experts of a device, applied at once or in two stages."""

    activation: Callable[[Array], Array]
    precision: Any
    implementation: Any
    staged: bool

    def begin(self, tokens: Tokens, experts: Experts, first: Array, pairs: int) -> Pairs:
        """Sorts at most `pairs` pairs by expert; of two stages it is the one up to hidden features.

        `first` is the number of the device's first expert. Rows may hold anything where they chose
        none of its experts.
        """
        rows, chosen, weights = tokens
        # Each choice has a copy, or none, and so has its row.
        keys = (chosen - first).reshape(-1, 1)
        choices, sizes = copies_by_key(keys, len(experts.up), pairs, _BLANK)
        source = choices.source // max(chosen.shape[1], 1)
        copies = Copies(source, choices.places.reshape(chosen.shape))
        sizes = fitting_sizes(sizes, pairs)  # the last are dropped
        # [r, d] to [p, d]; the gradients of both stages together are 0 where there is no pair
        sorted_rows = spread(copies, rows, fill=False, blank=not self.staged)
        sorted_weights = spread(choices, weights.reshape(-1))
        if self.staged:
            operands = sorted_rows, experts, sorted_weights, sizes
            sorted_rows, experts, sorted_weights, sizes = vary_alike((), *operands)
            mlp, on = self._mlp(sorted_rows, sizes)
            sorted_rows, _ = mlp.begin(on, sorted_rows, experts, sorted_weights)
        return Pairs(sorted_rows, sorted_weights, sizes, copies)

    def finish(self, pairs: Pairs, experts: Experts) -> Array:
        """Returns, for each row, the weighted sum of what its experts made of it."""
        rows, weights, sizes, copies = pairs
        if self.staged:
            rows, experts, weights, sizes = vary_alike((), rows, experts, weights, sizes)
            mlp, on = self._mlp(rows, sizes)
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

    def _mlp(self, rows: Array, sizes: Array) -> tuple[Mlp, WholeProducts]:
        method = bind_method(self.implementation, self.precision)
        mlp = Mlp(method, self.activation, None, rows.dtype)
        return mlp, WholeProducts(mlp, sizes, len(rows))
