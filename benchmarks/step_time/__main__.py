"""The language model's step on CPU devices, overlapped forms against naive collectives.

    python benchmarks/step_time [--rounds 11] [--meshes "fsdp=8;dp=2,fsdp=2,tp=2"]

CPU devices share the cores of their host, so that nothing is hidden here: the ratios show what it
costs to gather weights again, and to cut matmuls into pieces. The forms take
turns within a round. The table of README.md is rewritten unless --meshes chooses some.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.cli.workers import start_jax
from language_model.config import Model, Training
from language_model.data import standard_library, training_batch
from language_model.parallel import build_mesh, place_batch
from language_model.train import Trainer
from tables import Table, made_by, update
from workers import require_positive

README = Path(__file__).with_name("README.md")
SECTION = "step time"
MESHES = ("fsdp=8", "tp=8", "fsdp=4,tp=2", "dp=2,fsdp=2,tp=2", "fsdp=2,cp=2,tp=2")
MODES = ("naive", "auto", "bidirectional")
MODEL = Model(257, width=256, layers=4, heads=8, kv_heads=8, head_size=32, hidden=768)
TRAINING = Training(batch=8, sequence=256)


def measure(mesh: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a step in each mode, one a round, after one that compiles."""
    text = standard_library()
    trainers = {mode: Trainer(MODEL, TRAINING, build_mesh(mesh), mode=mode) for mode in MODES}
    states: dict[str, Any] = {mode: trainer.init() for mode, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        batch = training_batch(text, TRAINING.batch, TRAINING.sequence, TRAINING.seed, number)
        for mode, trainer in trainers.items():
            placed = jax.block_until_ready(place_batch(batch, trainer.mesh))
            start = time.perf_counter()
            states[mode], found = trainer.step(states[mode], *placed)
            jax.block_until_ready((states[mode], found))
            if number:
                seconds[mode].append(time.perf_counter() - start)
    return seconds


def table(found: dict[str, dict[str, list[float]]]) -> Table:
    """One row a mesh: the naive step, and the medians of the others' ratios to it."""
    rows = [
        [mesh, f"{median(seconds['naive']) * 1e3:.0f}", *_ratios(seconds)]
        for mesh, seconds in found.items()
    ]
    return Table(["mesh", "naive, ms", *(f"{mode}, over naive" for mode in MODES[1:])], rows)


def _ratios(seconds: dict[str, list[float]]) -> list[str]:
    return [
        f"{median(a / b for a, b in zip(seconds[mode], seconds['naive'], strict=True)):.2f}"
        for mode in MODES[1:]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="step_time", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="(default: %(default)s)")
    parser.add_argument("--meshes", help="separated by semicolons (default: all)")
    args = parser.parse_args(argv)
    require_positive(parser, args, "rounds")
    meshes = args.meshes.split(";") if args.meshes else MESHES
    jax.config.update("jax_platforms", "cpu")
    with start_jax():
        shown = table({mesh: measure(mesh, args.rounds) for mesh in meshes})
    shown.print()
    if not args.meshes:
        line = made_by("python benchmarks/step_time")
        update(README, SECTION, f"{line}\n\n{shown.markdown()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
