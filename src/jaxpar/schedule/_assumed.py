"""What of a program depends on its data, and a schedule therefore has to assume."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.schedule._hlo import Instruction


@dataclass(frozen=True)
class Assumed:
    """What a timeline takes for granted where a program's shapes do not say it.

    Attributes:
      sent_rows: the most rows that a ragged all-to-all sends of its operand, those that stay on the
        device included; None: all rows that the operand has.
      grouped_rows: the most rows that a grouped matmul of the TPU compiler (`lax.ragged_dot`)
        multiplies; None: all rows that the operand has.
      trips: how often loops run whose length depends on data, by a part of the name of the
        operation of the traced program that they come from (see `jax.named_scope`); the first
        that fits. A loop that none fits runs once, and `Timeline.loops_of_unknown_length` names it.
    """

    sent_rows: int | float | None = None
    grouped_rows: int | float | None = None
    trips: Mapping[str, int] = field(default_factory=dict[str, int])

    def trips_of(self, loop: Instruction) -> int | None:
        """The trips of a loop whose length depends on data."""
        return next((n for part, n in self.trips.items() if part in loop.op_name), None)


def share(rows: int, most: Any) -> float:
    """The share of an operand's rows that are in use."""
    return 1.0 if most is None or not rows else min(1.0, most / rows)
