"""Draws every prediction beside its measurement, with the interval that is printed for it."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.tools.accuracy.validate import Held

MARKS = {
    "matmul": ("o", "products"),
    "memory": ("s", "passes over memory"),
    "gather": ("^", "gathers"),
    "sum": ("v", "sums"),
    "permute": ("<", "permutes"),
    "all-to-all": (">", "all-to-alls"),
}
NAMES = {"TPU v5": "v5p", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}


def draw(found: Sequence[Held], path: Path) -> None:
    """Writes a picture of predicted / measured over measured time, for TPUs and GPUs."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    for row, platform in enumerate(("TPU", "GPU")):
        axes = figure.add_subplot(2, 1, row + 1)
        _draw(axes, platform, [one for one in found if one.work.platform == platform])
        if row:
            axes.set_xlabel("measured, us")
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, platform: str, mine: Sequence[Held]) -> None:
    chips = sorted({one.chip for one in mine})
    colours = dict(zip(chips, mpl.color_sequences["tab10"], strict=False))
    for one in mine:
        time, colour = one.measured.seconds * 1e6, colours[one.chip]
        if one.interval is not None:
            ends = [1 + end for end in one.interval]
            axes.plot([time, time], ends, color=colour, alpha=0.15, linewidth=2, zorder=1)
        fill = colour if one.is_inside else "none"
        mark, _ = MARKS[one.measured.kind.split(" ")[0]]
        axes.scatter(
            time, 1 + one.error, s=16, marker=mark, facecolors=fill, edgecolors=colour,
            linewidths=0.8, zorder=2,
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", ylim=(0.18, 2.6), ylabel="predicted / measured")
    axes.set_yticks([0.25, 0.5, 0.8, 1, 1.25, 2], ["0.25", "0.5", "0.8", "1", "1.25", "2"])
    axes.minorticks_off()
    known = [one for one in mine if one.interval is not None]
    inside = sum(one.is_inside for one in known)
    none = len(mine) - len(known)
    said = f"{platform}s: {inside} of {len(known)} inside their interval (filled); {none} without"
    axes.set_title(said, fontsize=9)
    for chip, colour in colours.items():
        label = NAMES.get(chip, chip.removeprefix("NVIDIA "))
        axes.plot([], [], color=colour, marker="o", linestyle="", label=label)
    for mark, label in MARKS.values():
        axes.plot([], [], color="grey", marker=mark, linestyle="", label=label)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
