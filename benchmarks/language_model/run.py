"""A run from its first step, or from a checkpoint, to the loss on text that it has not seen."""

from dataclasses import asdict, dataclass
from typing import Any

from language_model.checkpoint import Checkpoints
from language_model.data import Text, training_batch, validation_batches
from language_model.experts import largest_load
from language_model.parallel import place_batch
from language_model.progress import History, progress, say
from language_model.train import State, Trainer


@dataclass(frozen=True)
class Result:
    """What a run found."""

    losses: list[float]  # one a step, before its update
    experts: list[dict[str, Any]]  # one a step
    validation: float | None
    tokens_per_second: float  # without compiling and saving


def run(
    trainer: Trainer,
    text: Text,
    *,
    stop: int,
    checkpoint: str | None = None,
    save_every: int = 50,
    print_every: int = 10,
) -> Result:
    """Trains up to step `stop`, resuming from the latest checkpoint where there is one."""
    saved = Checkpoints(checkpoint, trainer, text.digest) if checkpoint else None
    history = History()
    if saved and saved.latest() is not None:
        state, history = saved.restore()
        say(f"resumed after step {len(history.losses)} from {checkpoint}")
    else:
        state = trainer.init()

    training, first = trainer.training, len(history.losses)
    tokens = training.batch * training.sequence
    with progress(stop, tokens, print_every, first) as shown:
        for step in range(first, stop):
            batch = training_batch(text, training.batch, training.sequence, training.seed, step)
            placed = place_batch(batch, trainer.mesh, trainer.microbatches)
            state, found = trainer.step(state, *placed)
            history.append(found)
            shown.step(step, history.losses[-1], _loads(history))
            if saved and ((step + 1) % save_every == 0 or step + 1 == stop):
                saved.save(state, history)
                shown.resume()
        speed = shown.speed
    validation = validate(trainer, state, text)
    return Result(**asdict(history), validation=validation, tokens_per_second=speed)


def _loads(history: History) -> str:
    if not history.experts:
        return ""
    last = history.experts[-1]
    dropped = f", {last['dropped']} dropped" if last["dropped"] else ""
    return f"  largest load {largest_load(last):.2f}{dropped}"


def validate(trainer: Trainer, state: State, text: Text) -> float | None:
    """Returns the mean loss over held-out text."""
    training, total, count = trainer.training, 0.0, 0
    for batch in validation_batches(
        text, training.batch, training.sequence, training.validation_batches
    ):
        loss = trainer.evaluate(state["params"], *place_batch(batch, trainer.mesh))
        weight = int((batch[1] >= 0).sum())
        total, count = total + float(loss) * weight, count + weight
    return total / count if count else None
