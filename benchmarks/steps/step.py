"""Training steps whose times their authors publish, with the configuration that they ran."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from accuracy.calibrate import Error
from jaxpar.tools.accuracy.interval import WHOLE, KindOfWork

RECORD = Path(__file__).with_name("predicted.json")

Predicted = dict[str, Any]  # what `maxtext_step.py` prints and when, or why it prints nothing


@dataclass(frozen=True)
class Step:
    """One training step of MaxText on a slice, as it is published."""

    name: str
    model: str  # as MaxText names it
    target: str  # as `jaxpar.schedule.target` takes it
    seconds: float
    software: str  # that it ran with
    source: str
    config: dict[str, Any]  # of MaxText, beside the model's own
    options: dict[str, str]  # of the compiler

    @property
    def devices(self) -> int:
        """How many devices it ran on."""
        return int(self.name.rpartition(" ")[2])

    @property
    def tokens(self) -> float:
        """Tokens a second and device."""
        per_step = self.config["per_device_batch_size"] * self.config["max_target_length"]
        return per_step / self.seconds


@cache
def steps() -> tuple[Step, ...]:
    """Reads all published steps."""
    found = json.loads(Path(__file__).with_name("steps.json").read_text())

    def joined(kind: str, names: list[str]) -> dict[str, Any]:
        return {key: value for name in names for key, value in found[kind][name].items()}

    return tuple(
        Step(
            name=one["name"],
            model=one["model"],
            target=one["target"],
            seconds=one["seconds"],
            software=one["software"],
            source=one["source"],
            config=joined("settings", one["settings"]) | one["config"],
            options=joined("options", one["options"]),
        )
        for one in found["steps"]
    )


def predictions() -> dict[str, Predicted]:
    """Reads what was last predicted of each step."""
    return json.loads(RECORD.read_text())


def errors() -> dict[str, Error]:
    """Returns the error of each step that was predicted."""
    known = predictions()
    return {
        step.name: Error(
            KindOfWork(known[step.name]["chip"], WHOLE, True),
            step.source.split()[0],  # a repository
            log(known[step.name]["seconds"] / step.seconds),
        )
        for step in steps()
        if "seconds" in known.get(step.name, {})
    }
