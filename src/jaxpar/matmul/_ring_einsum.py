"""The algorithms and options of a ring einsum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxpar.compiler.derivatives import as_residuals
from jaxpar.matmul._product import Arithmetic
from jaxpar.ring.ways import Way, forward_first


@dataclass(frozen=True)
class RingEinsum:
    """The algorithms and options of a ring einsum."""

    way: Way  # of a forward pass that is derived
    backward: Way
    underived: Way  # of a pass that is not, and need not save anything
    label: str  # the label that is sharded over the ring
    arithmetic: Arithmetic
    # Runs again in the backward pass, inside jax.checkpoint, where the result is not used. If
    # residuals waited for it there, XLA would still remove it, but would schedule transfers worse.
    # The jaxpr would count it as work, too.
    recomputed: bool = False
    # A gathered array is quantized. JAX's own derivative would treat it as a constant.
    low_bit: bool = False
    # The dtype in which the gathered operand travels, if it is not its own. JAX's own derivative
    # would sum its gradient in that dtype, too.
    travels: Any = None
    # Arriving blocks are saved for a special derivative.
    keeps: bool = False

    @property
    def derived_by_jax(self) -> bool:
        return self.left_to_jax and self.underived.derived_by_jax

    @property
    def left_to_jax(self) -> bool:
        """Returns whether JAX derives it and saves the gathered operand."""
        special = self.low_bit or self.travels is not None
        return self.way.derived_by_jax and self.way == self.backward and not special

    def sent(self, left: Any) -> Any:
        return left if self.travels is None else left.astype(self.travels)

    def forward(self) -> RingEinsum:
        return replace(self, underived=self.way)

    def derivative(self) -> RingEinsum:
        return replace(self, way=self.backward, underived=self.backward, keeps=False)

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both; residuals wait for the result, unless it is recomputed."""
        if self.recomputed:
            return out, residuals
        return forward_first((self.way, self.backward), out, as_residuals(residuals))
