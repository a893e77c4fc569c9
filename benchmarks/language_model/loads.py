"""How evenly experts are used, step by step, drawn for several runs side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpar.tools.cli.console import UsageError, require_extra


def check(runs: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError if a run did not tell the loads of all its steps."""
    for run in runs:
        if not 0 < len(run.get("experts", ())) == len(run["losses"]):
            raise UsageError(
                f"--plot-loads: the run on mesh {run['mesh']} has no experts, or steps on pp, "
                "which tell no loads; leave it out"
            )


def draw(path: str, runs: Sequence[dict[str, Any]]) -> None:
    """Draws a column a run: each expert's share, and below it the largest load over the mean."""
    check(runs)
    figure = require_extra("matplotlib.figure", "train").Figure(
        figsize=(1 + 3.6 * len(runs), 5.2), layout="constrained", dpi=200
    )
    panels = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    for (above, below), run in zip(panels.T, runs, strict=True):
        loads = np.asarray([step["loads"] for step in run["experts"]], float)  # [steps, layers, E]
        shares = loads / loads.sum(axis=-1, keepdims=True)
        steps, layers, experts = shares.shape
        at = range(1, steps + 1)
        above.plot(at, shares.reshape(steps, -1), color="#0072B2", linewidth=0.6, alpha=0.5)
        above.axhline(1 / experts, color="black", linestyle=":", linewidth=1)
        above.set_title(_title(run), fontsize=9)
        for layer, colour in zip(range(layers), _shades(layers), strict=True):
            largest = experts * shares[:, layer].max(axis=-1)
            below.plot(at, largest, color=colour, linewidth=1, label=f"layer {layer + 1}")
        below.axhline(1, color="black", linestyle=":", linewidth=1)
        below.set_xlabel("step")
    for panel in panels.flat:  # when all is drawn, as rows share their limits
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.grid(color="0.92")
    panels[0, 0].set_ylabel("share of each expert, all layers")
    panels[1, 0].set_ylabel("largest load / mean")
    panels[1, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _shades(count: int) -> list[Any]:
    """Returns colours from dark to light."""
    shades = require_extra("matplotlib", "train").colormaps["plasma"]
    return [shades(0.85 * i / max(1, count - 1)) for i in range(count)]


def _title(run: dict[str, Any]) -> str:
    coefficient = run["training"]["balance_loss"]
    validation = run.get("validation")
    ends = "" if validation is None else f"\n{validation:.4f} nats a byte on held-out text"
    return f"balancing loss x {coefficient:g}, mesh {run['mesh']}{ends}"
