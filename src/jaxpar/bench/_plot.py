"""What was measured, as a picture: the ratio to naive of each case, one panel a phase."""

from collections.abc import Sequence
from typing import Any

from jaxpar.bench._measure import PHASES, Row, quartiles
from jaxpar.bench._ops import MODES
from jaxpar.bench._report import Run, header, require_extra

# Two hues of the Okabe-Ito palette, which colour-blind readers tell apart, and two marks.
_STYLES = {"unidirectional": ("#0072B2", "o"), "bidirectional": ("#D55E00", "D")}


def write_plot(path: str, run: Run, rows: Sequence[Row]) -> None:
    """Draws the median ratio of every ring mode, with whiskers from quartile to quartile."""
    figures = require_extra("matplotlib.figure")  # not pyplot, which keeps global state
    cases = list(dict.fromkeys((row.op, row.shape) for row in rows))
    figure = figures.Figure(figsize=(9.5, 2.1 + 0.5 * len(cases)), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(PHASES), sharex=True, sharey=True)
    for panel, phase in zip(panels, PHASES, strict=True):
        _draw_panel(panel, cases, [row for row in rows if row.phase == phase])
        panel.set_title(phase.replace("+", " + "), fontsize=10, loc="left")
        panel.set_xlabel("time / time of naive in the same round (less is faster)", fontsize=8)
    panels[0].set_yticks(range(len(cases)), [f"{op}\n{shape}" for op, shape in cases], fontsize=8)
    panels[0].set_ylim(len(cases) - 0.5, -0.5)
    title = "\n".join([header(run), *run.notes])
    figure.suptitle(title, fontsize=8, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
    )
    figure.savefig(path)


def _draw_panel(panel: Any, cases: list[tuple[str, str]], rows: Sequence[Row]) -> None:
    panel.axvline(1, color="0.3", linewidth=1, linestyle="--", zorder=1, label="naive")
    for offset, mode in zip((-0.15, 0.15), MODES[1:], strict=True):
        chosen = [row for row in rows if row.mode == mode]
        ratios = [quartiles(row.ratios) for row in chosen]
        colour, mark = _STYLES[mode]
        panel.errorbar(
            [median for _, median, _ in ratios],
            [cases.index((row.op, row.shape)) + offset for row in chosen],
            xerr=[[m - low for low, m, _ in ratios], [high - m for _, m, high in ratios]],
            fmt=mark,
            color=colour,
            markersize=5,
            capsize=2.5,
            linewidth=1.2,
            label=mode,
        )
    for edge in range(len(cases) - 1):
        panel.axhline(edge + 0.5, color="0.92", linewidth=0.8, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    panel.grid(axis="x", color="0.92", zorder=0)
    panel.set_axisbelow(True)
