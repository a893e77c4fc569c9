"""A run from its first step, or from a checkpoint, to the loss on text that it has not seen."""

from dataclasses import dataclass

from lm.checkpoint import Checkpoints
from lm.data import Text, training_batch, validation_batches
from lm.parallel import place_batch
from lm.progress import progress, say
from lm.train import State, Trainer


@dataclass(frozen=True)
class Result:
    """What a run found."""

    losses: list[float]  # one a step, before its update
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
    losses: list[float] = []
    if saved and saved.latest() is not None:
        state, losses = saved.restore()
        say(f"resumed after step {len(losses)} from {checkpoint}")
    else:
        state = trainer.init()

    training, first = trainer.training, len(losses)
    tokens = training.batch * training.sequence
    with progress(stop, tokens, print_every, first) as shown:
        for step in range(first, stop):
            batch = training_batch(text, training.batch, training.sequence, training.seed, step)
            placed = place_batch(batch, trainer.mesh, trainer.microbatches)
            state, found = trainer.step(state, *placed)
            losses.append(float(found["loss"]))
            shown.step(step, losses[-1])
            if saved and ((step + 1) % save_every == 0 or step + 1 == stop):
                saved.save(state, losses)
                shown.resume()
        speed = shown.speed
    return Result(losses, validate(trainer, state, text), speed)


def validate(trainer: Trainer, state: State, text: Text) -> float | None:
    """Returns the mean loss over held-out text."""
    training, total, count = trainer.training, 0.0, 0.0
    for batch in validation_batches(
        text, training.batch, training.sequence, training.validation_batches
    ):
        loss, weight = trainer.evaluate(state["params"], *place_batch(batch, trainer.mesh))
        total, count = total + float(loss), count + float(weight)
    return total / count if count else None
