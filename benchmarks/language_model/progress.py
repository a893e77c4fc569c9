"""What a run tells while it trains: a bar on a terminal, lines elsewhere; and its history."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpar.tools.cli.console import require_extra
from language_model.experts import record


@dataclass
class History:
    """One entry a step, before its update; it goes on from one process to the next."""

    losses: list[float] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)  # none without experts

    def append(self, found: dict[str, Any]) -> None:
        """Adds what `Trainer.step` found."""
        self.losses.append(float(found["loss"]))
        if found["experts"] is not None:
            self.experts.append(record(jax.device_get(found["experts"])))


@dataclass
class Progress:
    """Counts tokens by the clock, and shows where the run is. Only process 0 says anything.

    The clock runs from the end of the first step, which compiles, and stands while a checkpoint is
    written.
    """

    total: int
    tokens: int  # a step
    every: int
    bar: Any = None
    seconds: float = 0.0
    steps: int = 0  # in those seconds
    _last: float | None = None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.steps * self.tokens / self.seconds if self.steps else 0.0

    def resume(self) -> None:
        """Goes on after what is not to be counted."""
        self._last = time.perf_counter()

    def step(self, step: int, loss: float, more: str = "") -> None:
        """Tells that `step`, counted from 0, is done."""
        now = time.perf_counter()
        if self._last is not None:
            self.steps, self.seconds = self.steps + 1, self.seconds + now - self._last
        self._last = now
        if self.bar is not None:
            text = f"loss {loss:.4f}{more}  {self.speed:,.0f} tokens/s"
            self.bar.update(self.bar.task_ids[0], completed=step + 1, description=text)
        elif (step + 1) % self.every == 0 or step + 1 == self.total:
            say(f"step {step + 1}  loss {loss:.4f}{more}  {self.speed:,.0f} tokens/s")


@contextmanager
def progress(total: int, tokens: int, every: int, done: int) -> Generator[Progress, None, None]:
    """Shows the progress of the steps up to `total`, of which some are done."""
    console = require_extra("rich.console", "train").Console(stderr=True)
    if not console.is_terminal or jax.process_index():
        yield Progress(total, tokens, every)
        return
    bar = require_extra("rich.progress", "train")
    columns = (
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TextColumn("{task.description}"),
        bar.TimeRemainingColumn(),
    )
    with bar.Progress(*columns, console=console, transient=True) as shown:
        shown.add_task("compiling", total=total, completed=done)
        yield Progress(total, tokens, every, shown)


def say(text: str) -> None:
    """Prints a line, on process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)
