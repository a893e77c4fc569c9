"""How a ring einsum runs, in each of its passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxpar.compiler.derivatives import as_residuals
from jaxpar.matmul._product import Arithmetic
from jaxpar.ring.ways import Way, forward_first


@dataclass(frozen=True)
class RingEinsum:
    """How a ring einsum runs.

    Attributes:
      way: forward, where a derivative is taken.
      backward: in the derivative.
      underived: where none is taken: what a naive forward pass keeps is then of no use.
    """

    way: Way
    backward: Way
    underived: Way
    label: str  # the einsum label that is sharded over the ring
    arithmetic: Arithmetic
    # Runs again in the backward pass, within jax.checkpoint, where the result itself is dead code.
    # XLA would drop it though residuals wait for it, but schedules transfers worse, and what is
    # counted in the jaxpr would have it.
    recomputed: bool = False
    # Something that is gathered is quantized, which JAX's own derivative takes for constant.
    low_bit: bool = False
    # The dtype in which what is gathered travels, if it is not its own: in JAX's own derivative its
    # gradient would be summed in that, too.
    travels: Any = None
    # What is gathered is kept, as it comes, for a derivative of our own.
    keeps: bool = False

    @property
    def derived_by_jax(self) -> bool:
        """Whether JAX's own derivatives are left as they are."""
        return self.left_to_jax and self.underived.derived_by_jax

    @property
    def left_to_jax(self) -> bool:
        """Whether the derivative is JAX's own, for which the gathered operand is kept."""
        own = self.low_bit or self.travels is not None
        return self.way.derived_by_jax and self.way == self.backward and not own

    def sent(self, left: Any) -> Any:
        """What is gathered, as it travels."""
        return left if self.travels is None else left.astype(self.travels)

    def forward(self) -> RingEinsum:
        """How the einsum runs where a derivative is taken."""
        return replace(self, underived=self.way)

    def derivative(self) -> RingEinsum:
        """How the einsums of the derivative run."""
        return replace(self, way=self.backward, underived=self.backward, keeps=False)

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both, the residuals not before the result, unless nobody waits for that."""
        if self.recomputed:
            return out, residuals
        return forward_first((self.way, self.backward), out, as_residuals(residuals))
