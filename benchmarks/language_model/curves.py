"""Loss curves: written as JSON, and drawn over each other."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.tools.cli.console import UsageError, require_extra
from language_model import wire
from language_model.run import Result
from language_model.train import Trainer

# The Okabe-Ito palette, which colour-blind readers tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def record(trainer: Trainer, text: str, result: Result) -> dict[str, Any]:
    """Returns what was run, and what it found."""
    return {
        "jax": jax.__version__,
        "device_kind": trainer.mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "mesh": mesh_text(trainer.mesh),
        "microbatches": trainer.microbatches,
        "virtual_stages": trainer.virtual_stages,
        "mode": trainer.mode,
        "dispatch": trainer.dispatch,
        "wire_dtype": wire.to_json(trainer.wire_dtype),
        "model": asdict(trainer.model),
        "training": asdict(trainer.training),
        "text": text,
        **asdict(result),
    }


def mesh_text(mesh: Mesh) -> str:
    """Returns the axes that divide anything."""
    axes = [f"{name}={size}" for name, size in mesh.shape.items() if size > 1]
    return ",".join(axes) or "one device"


def write(path: str, found: dict[str, Any]) -> None:
    """Writes one run."""
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


def read(path: str) -> dict[str, Any]:
    """Reads what `write` wrote."""
    try:
        found = json.loads(Path(path).read_text())
        return {**found, "losses": [float(loss) for loss in found["losses"]], "mesh": found["mesh"]}
    except (OSError, ValueError, KeyError, TypeError) as reason:
        raise UsageError(f"--compare {path} is not what --log writes: {reason!r}") from None


def draw(path: str, runs: Sequence[dict[str, Any]]) -> None:
    """Draws the curves, and below them how far each is from the first."""
    figure = require_extra("matplotlib.figure", "train").Figure(
        figsize=(8, 5.6), layout="constrained", dpi=200
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    first = runs[0]["losses"]
    for number, run in enumerate(runs):
        losses, colour = run["losses"], _COLOURS[number % len(_COLOURS)]
        width = 4 if number == 0 and len(runs) > 1 else 1.2  # to be seen below the others
        steps = range(1, len(losses) + 1)
        above.plot(steps, losses, label=label(run), color=colour, linewidth=width)
        if number:
            apart = [abs(a - b) / abs(b) for a, b in zip(losses, first, strict=False)]
            below.plot(range(1, len(apart) + 1), apart, ".", color=colour, markersize=3)
    above.set_ylabel("loss, nats a byte")
    above.legend(frameon=False, fontsize=8)
    below.set_yscale("log", nonpositive="mask")
    below.set_ylabel("from the first,\nrelative", fontsize=8)
    below.set_xlabel("step")
    below.set_visible(len(runs) > 1)
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.grid(color="0.92")
    figure.savefig(path)


def label(run: dict[str, Any]) -> str:
    """Says in one line what was run, and how it ended."""
    processes = f", {run['processes']} processes" if run.get("processes", 1) > 1 else ""
    micro = f", {run['microbatches']} microbatches" if run.get("microbatches", 1) > 1 else ""
    travels = wire.describe(wire.from_json(run.get("wire_dtype")))
    validation = run.get("validation")
    ends = "" if validation is None else f": {validation:.4f} on held-out text"
    return f"{run['mesh']}, {run['model']['dtype']}{micro}{travels}{processes}{ends}"
