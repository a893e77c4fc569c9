"""Timelines as a picture: what computes, what travels, and what waits, at a glance."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, zip_longest
from typing import Any

import numpy as np

from jaxpar.cli._console import require_extra
from jaxpar.cli._predict_results import GPU_NOTE, NOTE, Prediction, Report, Request, header
from jaxpar.cli._predict_trace import rows_of, shares, without_overlap
from jaxpar.schedule import Event

# Of the Okabe-Ito palette, which colour-blind readers tell apart.
_MATMUL, _OTHER, _TRANSFER, _SYNCHRONOUS = "#0072B2", "#9CCBE8", "#E69F00", "#A65E00"
_WAIT = "#D0021B"
_BINS = 250  # a shorter bar than this part of the axis has no room for an edge

Looks = dict[str, Callable[[Event], bool]]  # by colour, what of a row it shows
_COMPUTE: Looks = {
    _MATMUL: lambda event: event.kind == "compute" and event.is_matmul,
    _OTHER: lambda event: event.kind == "compute" and not event.is_matmul,
    _WAIT: lambda event: event.kind == "wait",
}
_TRANSFERS: Looks = {
    _TRANSFER: lambda event: not event.synchronous,
    _SYNCHRONOUS: lambda event: event.synchronous,
}

Group = tuple[Report, Request, list[Prediction]]  # the modes of one case


def write_picture(path: str, reports: Sequence[Report], requests: Sequence[Request]) -> None:
    """Draws a block a target and case, and in it a panel a mode over one time axis."""
    lines = _layout(reports, requests)
    columns = len(lines[0])
    figures = require_extra("matplotlib.figure")  # not pyplot, which keeps global state
    heights = [max(_height(group) for group in line if group) for line in lines]
    figure = figures.Figure(
        figsize=(10.5 if columns == 1 else 8.5 * columns, sum(heights) + 0.9),
        layout="constrained",
        dpi=150,
    )
    blocks = figure.subfigures(len(lines), columns, squeeze=False, height_ratios=heights)
    for line, row in zip(lines, blocks, strict=True):
        for group, block in zip(line, row, strict=True):
            if group:
                _draw_group(block, group)
    about = any(report.approximate for report in reports)
    figure.suptitle(
        "\n".join([NOTE, *([GPU_NOTE] if about else [])]), fontsize=9, x=0.01, ha="left"
    )
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path)


def _layout(reports: Sequence[Report], requests: Sequence[Request]) -> list[list[Group | None]]:
    """Lines of blocks: a column a target, or two columns of one target's cases."""
    columns: list[list[Group | None]] = [
        [
            (report, request, list(group))
            for _, group in groupby(report.predictions, lambda prediction: prediction.case)
        ]
        for report, request in zip(reports, requests, strict=True)
        if report.predictions
    ]
    if len(columns) == 1 and len(columns[0]) > 1:
        columns = [columns[0][::2], columns[0][1::2]]
    return [list(line) for line in zip_longest(*columns)]


def _shown(group: Group) -> list[Prediction]:
    return [prediction for prediction in group[2] if not prediction.same_as]


def _rows(prediction: Prediction) -> dict[str, list[Event]]:
    """Those with something to see; copies between a chip's memories are left to the trace."""
    found = rows_of(prediction.timeline)
    return {row: events for row, events in found.items() if row != "memory"}


def _height(group: Group) -> float:
    return 0.75 + sum(0.62 + 0.27 * len(_rows(prediction)) for prediction in _shown(group))


def _draw_group(block: Any, group: Group) -> None:
    report, request, predictions = group
    shown = _shown(group)
    panels = block.subplots(
        len(shown),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[1 + len(_rows(prediction)) for prediction in shown],
    )[:, 0]
    title = f"{predictions[0].case} on {header(report, request)}"
    block.suptitle(title, fontsize=9, x=0.01, ha="left", weight="bold")
    about = "~" if report.approximate else ""
    longest = max(prediction.timeline.total for prediction in shown)
    panels[0].set_xlim(0, longest * 1e3 * 1.01)
    for panel, prediction in zip(panels, shown, strict=True):
        _draw_panel(panel, prediction)
        others = [p.mode for p in predictions if p.same_as == prediction.mode]
        panel.set_title(_title(prediction, others, about), fontsize=9, loc="left")
    panels[-1].set_xlabel("ms", fontsize=8)


def _title(prediction: Prediction, others: list[str], about: str) -> str:
    names = " = ".join(filter(None, [prediction.mode, *others]))
    ratio = "" if prediction.ratio is None else f", {prediction.ratio:.2f} x floor"
    return (
        f"{names + ': ' if names else ''}{about}{prediction.timeline.total * 1e3:.2f} ms{ratio}, "
        f"{about}{prediction.exposed_share:.0%} exposed ({prediction.order})"
    )


def _draw_panel(panel: Any, prediction: Prediction) -> None:
    rows = _rows(prediction)
    total = prediction.timeline.total
    # A transfer's last hop of latency runs into the next one, which nobody can see.
    slack = 0.005 * total
    for position, (row, events) in enumerate(rows.items()):
        looks = _COMPUTE if row == "compute" else _TRANSFERS
        if _is_dense(events, panel.get_xlim()[1] / 1e3):
            _draw_shares(panel, events, position, looks, total)
            continue
        parts = [events] if row == "compute" else without_overlap(events, slack)
        height = 0.8 / len(parts)
        for number, part in enumerate(parts):
            centre = position - 0.4 + (number + 0.5) * height
            for colour, belongs in looks.items():
                _bars(panel, filter(belongs, part), centre, height, colour)
    panel.axvline(prediction.floor.total * 1e3, color="black", linewidth=1.3, linestyle="--")
    panel.set_yticks(range(len(rows)), list(rows), fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, left=False)


def _is_dense(events: Sequence[Event], axis: float) -> bool:
    """Whether most events are too short to be told apart, as in a loop of many trips."""
    seconds = sorted(event.seconds for event in events if event.seconds > 1e-7)
    return len(seconds) > _BINS / 2 and seconds[len(seconds) // 2] < axis / _BINS


def _draw_shares(
    panel: Any, events: Sequence[Event], position: float, looks: Looks, total: float
) -> None:
    """Stacks the shares of time: single bars would hide each other, whichever comes last."""
    edges = np.linspace(0, total, _BINS + 1)
    low = np.full(_BINS, position + 0.4)
    for colour, belongs in looks.items():
        high = low - 0.8 * shares(filter(belongs, events), edges)
        panel.stairs(high, edges * 1e3, baseline=low, fill=True, color=colour, linewidth=0)
        low = high


def _bars(panel: Any, events: Iterable[Event], centre: float, height: float, colour: str) -> None:
    # An edge around a bar of a pixel would hide it, or make a wait look longer than it is.
    narrow = panel.get_xlim()[1] / _BINS
    spans = [(event.start * 1e3, event.seconds * 1e3) for event in events if event.seconds > 0]
    wide: dict[str, Any] = {"facecolors": colour, "edgecolors": "white", "linewidth": 0.5}
    if colour == _WAIT:
        wide = {"facecolors": "white", "edgecolors": colour, "linewidth": 0.8, "hatch": "//////"}
    thin = {"facecolors": colour, "linewidth": 0, "snap": False}
    where = (centre - height / 2, height)
    panel.broken_barh([span for span in spans if span[1] >= narrow], where, **wide)
    panel.broken_barh([span for span in spans if span[1] < narrow], where, **thin)


def _legend() -> list[Any]:
    patch = require_extra("matplotlib.patches").Patch
    line = require_extra("matplotlib.lines").Line2D
    return [
        patch(color=_MATMUL, label="matmul"),
        patch(color=_OTHER, label="other compute"),
        patch(facecolor="white", edgecolor=_WAIT, hatch="//////", label="waiting (exposed)"),
        patch(color=_TRANSFER, label="transfer"),
        patch(color=_SYNCHRONOUS, label="transfer, synchronous"),
        line([], [], color="black", linestyle="--", label="floor"),
    ]
