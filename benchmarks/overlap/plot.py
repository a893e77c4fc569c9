"""What was found, as a picture."""

from collections.abc import Sequence
from math import inf
from typing import Any

from matplotlib.figure import Figure

from overlap.report import results

# The Okabe-Ito palette, which colour-blind readers tell apart, and a shape for each peer.
MARKS = {
    "naive": ("0.55", "x"),
    "naive, default options": ("0.75", "+"),
    "XLA post_spmd": ("#D55E00", "^"),
    "XLA plain jit": ("#CC79A7", "v"),
    "guide one way": ("#009E73", ">"),
    "guide both ways": ("#E69F00", "D"),
}


def write_plot(path: str, found: Sequence[dict[str, Any]]) -> None:
    """Draws a line a case: a mark for each peer, and a dot for jaxpar's auto."""
    cases = results(found)
    figure = Figure(figsize=(10.5, 0.42 * len(cases) + 1.7), layout="constrained", dpi=200)
    panel = figure.subplots()
    panel.axvline(1, color="0.25", linewidth=1.2)
    for at, each in enumerate(cases):
        ends = [x for x in (each.ratio("mode", "auto"), each.best_peer) if x]
        panel.plot(ends, [at] * len(ends), color="#0072B2", linewidth=2.5, alpha=0.3, zorder=1)
    for peer, (colour, mark) in MARKS.items():
        points = [(each.ratio("peer", peer) or inf, at) for at, each in enumerate(cases)]
        panel.scatter(*zip(*points, strict=True), s=34, c=colour, marker=mark, label=peer)
    points = [(each.ratio("mode", "auto") or inf, at) for at, each in enumerate(cases)]
    panel.scatter(*zip(*points, strict=True), s=80, c="#0072B2", zorder=3, label="jaxpar auto")
    panel.set_yticks(range(len(cases)), [f"{c.label}; {c.case.chip}" for c in cases], fontsize=8.5)
    panel.invert_yaxis()
    panel.set_xscale("log")
    ticks = [1, 1.1, 1.25, 1.5, 2, 2.5, 3]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    panel.set_xticks([], minor=True)
    panel.set_xlabel("time over floor (log scale); the bar joins jaxpar to its best peer")
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=7, fontsize=9, frameon=False)
    figure.savefig(path)
