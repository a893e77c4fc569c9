"""Checkpoints that any mesh can resume from: what they hold has no padding, and no mesh."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.tools.cli.console import UsageError, require_extra
from language_model.progress import History
from language_model.train import State, Trainer


class Checkpoints:
    """The checkpoints of one run in a folder that all its processes see.

    Args:
      folder: made where it is missing.
      trainer: of the run.
      text: tells apart what is learned from.
      keep: how many are kept, the latest ones.
    """

    def __init__(self, folder: str, trainer: Trainer, text: str, keep: int = 2) -> None:
        self._orbax = require_extra("orbax.checkpoint", "train")
        logging.getLogger("absl").setLevel(logging.ERROR)  # it tells of every step it takes
        self._trainer, self._folder = trainer, Path(folder).absolute()
        self._run = {
            "model": asdict(trainer.model),
            "training": asdict(trainer.training),
            "text": text,
        }
        # A save ends before the next step starts, so that none is half there when it is needed.
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        self._manager = self._orbax.CheckpointManager(self._folder, options=options)

    def latest(self) -> int | None:
        """The number of steps behind the latest checkpoint."""
        return self._manager.latest_step()

    def save(self, state: State, history: History) -> None:
        """Writes the state after the steps of `history`, and what is told of those."""
        args = self._orbax.args
        self._manager.save(
            len(history.losses),
            args=args.Composite(
                state=args.StandardSave(self._trainer.of_state.unpad(state)),
                run=args.JsonSave({**self._run, **asdict(history)}),
            ),
        )

    def restore(self) -> tuple[State, History]:
        """Reads the latest one onto the trainer's mesh.

        Raises:
          UsageError: it is of another model, training or text.
        """
        args, step = self._orbax.args, self.latest()
        # What is in it decides first: arrays of another model would not fit.
        found = self._manager.restore(step, args=args.Composite(run=args.JsonRestore()))["run"]
        self._check(found)
        state = self._manager.restore(
            step,
            args=args.Composite(state=args.StandardRestore(self._trainer.of_state.logical_shapes)),
        )["state"]
        return self._trainer.of_state.pad(state), History(found["losses"], found["experts"])

    def _check(self, found: dict[str, Any]) -> None:
        own, other = _flat(self._run), _flat(found)
        different = [
            f"{k} {other.get(k)} there, {own[k]} here" for k in own if other.get(k) != own[k]
        ]
        if different:
            raise UsageError(
                f"--checkpoint {self._folder} is of another run: {'; '.join(different)}; give "
                "what it was begun with, or another folder"
            )


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    return {**run["model"], **run["training"], "text": run["text"]}
