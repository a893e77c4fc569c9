"""Timelines as a picture: what computes, what travels, and what waits, at a glance."""

from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any

from jaxpar.bench._report import require_extra
from jaxpar.predict._results import GPU_NOTE, NOTE, Prediction, Report, Request
from jaxpar.predict._rows import rows_of, without_overlap
from jaxpar.predict._table import header
from jaxpar.schedule import Event

# Of the Okabe-Ito palette, which colour-blind readers tell apart.
_MATMUL, _OTHER, _TRANSFER, _SYNCHRONOUS = "#0072B2", "#9CCBE8", "#E69F00", "#A65E00"
_WAIT = "#D0021B"

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
    for panel, prediction in zip(panels, shown, strict=True):
        _draw_panel(panel, prediction)
        others = [p.mode for p in predictions if p.same_as == prediction.mode]
        panel.set_title(_title(prediction, others, about), fontsize=9, loc="left")
    longest = max(prediction.timeline.total for prediction in shown)
    panels[0].set_xlim(0, longest * 1e3 * 1.01)
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
    for position, (row, events) in enumerate(rows.items()):
        if row == "compute":
            computing = [event for event in events if event.kind == "compute"]
            _bars(panel, [e for e in computing if e.is_matmul], position, _MATMUL)
            _bars(panel, [e for e in computing if not e.is_matmul], position, _OTHER)
            waits = [event for event in events if event.kind == "wait"]
            _bars(panel, waits, position, "white", hatch="//////", edge=_WAIT)
            continue
        # A transfer's last hop of latency runs into the next one, which nobody can see.
        parts = without_overlap(events, slack=0.005 * prediction.timeline.total)
        height = 0.8 / len(parts)
        for number, part in enumerate(parts):
            centre = position - 0.4 + (number + 0.5) * height
            for colour, kind in ((_TRANSFER, False), (_SYNCHRONOUS, True)):
                chosen = [event for event in part if event.synchronous == kind]
                _bars(panel, chosen, centre, colour, height=height)
    panel.axvline(prediction.floor.total * 1e3, color="black", linewidth=1.3, linestyle="--")
    panel.set_yticks(range(len(rows)), list(rows), fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8, left=False)


def _bars(
    panel: Any,
    events: Sequence[Event],
    centre: float,
    colour: str,
    *,
    height: float = 0.8,
    hatch: str | None = None,
    edge: str = "white",
) -> None:
    spans = [(event.start * 1e3, event.seconds * 1e3) for event in events if event.seconds > 0]
    panel.broken_barh(
        spans,
        (centre - height / 2, height),
        facecolors=colour,
        edgecolors=edge,
        linewidth=0.8 if hatch else 0.5,
        hatch=hatch,
    )


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
