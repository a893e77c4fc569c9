"""What is told of a run's steps, and goes on from one of its processes to the next."""

from dataclasses import dataclass, field
from typing import Any

import jax

from lm.experts import record


@dataclass
class History:
    """One entry a step, before its update."""

    losses: list[float] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)  # none without experts

    def append(self, found: dict[str, Any]) -> None:
        """Adds what `Trainer.step` found."""
        self.losses.append(float(found["loss"]))
        if found["experts"] is not None:
            self.experts.append(record(jax.device_get(found["experts"])))
