"""Predictions as table, picture, and trace for Perfetto and Chrome."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from textwrap import fill
from typing import Any

import numpy as np

from jaxpar.schedule import Event, Timeline
from jaxpar.tools.accuracy.interval import SENTENCE, lines_of
from jaxpar.tools.cli.console import Column, print_rows, require_extra
from jaxpar.tools.cli.predict_results import (
    GPU_NOTE,
    MEASURED_NOTE,
    NOTE,
    Facts,
    Prediction,
    Request,
    TargetResults,
    compiled_by,
    header,
    notes,
)
from jaxpar.tools.explain.explanation_text import at_least
from jaxpar.tools.toolkit_api import write_text, written

_COLUMNS = [
    Column("", 16, left=True),
    Column("total ms", 8),
    Column("floor ms", 8),
    Column("ratio", 5),
    Column("exposed", 7),
    Column("HBM GiB", 7),
    Column("sent MiB", 8),
    Column("order", 31, left=True, wraps=True),  # thousands of transfers take two lines
]
_PADDING = (0, 1, 0, 0)


def print_report(report: TargetResults, request: Request, console: Any) -> None:
    escape = require_extra("rich.markup").escape
    console.print(f"[bold]{escape(header(report, request))}[/]", highlight=False)
    if compiler := compiled_by(report):
        console.print(escape(f"compiled by {compiler}"), style="dim", highlight=False)
    for note in notes(report):
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)
    print_rows(console, _COLUMNS, [], padding=_PADDING, show_header=True)
    about = "~" if report.approximate else ""
    for case, group in groupby(report.predictions, lambda prediction: prediction.case):
        predictions = list(group)
        floor = predictions[0].floor
        remark = f"; over one ring the floor is {about}{floor.of_one_ring * 1e3:.3f} ms"
        more = remark if floor.of_one_ring > floor.total else ""
        console.print(f"[bold]{escape(case)}[/]{more}", highlight=False)
        rows = [_cells(row, report.facts, about) for row in predictions]
        print_rows(console, _COLUMNS, rows, padding=_PADDING)
    console.print()


def print_notes(reports: list[TargetResults], console: Any) -> None:
    lines = [NOTE, *([GPU_NOTE] if any(report.approximate for report in reports) else [])]
    predictions = [p for report in reports for p in report.predictions]
    texts = lines_of(text for p in predictions for text in p.intervals)
    lines += [f"{SENTENCE}: {text}" for text in texts]
    kernels = {name for p in predictions for name in p.timeline.kernels_of_unknown_cost}
    lines += map(at_least, sorted(kernels))
    lines.append(
        "floor: the matmul in one piece (for a function, its FLOPs at peak), or the bytes over all "
        "links of the group, whichever is longer. exposed: waiting for transfers. order: transfers "
        "that overlap with other work, and transfers that overlap with a matmul."
    )
    console.print("\n".join(lines), style="dim", highlight=False)


def _cells(row: Prediction, facts: Facts | None, about: str) -> list[str]:
    if row.same_as:
        return [f"  {row.mode}", *[""] * (len(_COLUMNS) - 2), f"the same as {row.same_as}"]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    fits = facts is None or row.timeline.peak_bytes <= facts.chip["capacity"]
    colour = "green" if row.exposed_share <= 0.05 else "red"
    return [
        f"  {row.mode or 'as written'}",
        f"{'>' if row.timeline.is_least else about}{row.timeline.total * 1e3:.3f}",
        f"{about}{row.floor.total * 1e3:.3f}",
        f"[bold]{ratio}[/]",
        f"[bold {colour}]{about}{row.exposed_share:.1%}[/]",
        f"{row.timeline.peak_bytes / 2**30:.2f}"
        if fits
        else f"[red]{row.timeline.peak_bytes / 2**30:.2f}[/]",
        f"{row.timeline.sent_bytes / 2**20:.1f}",
        row.order,
    ]


def write_trace(path: str, reports: Sequence[TargetResults]) -> None:
    """Writes a process per program, a thread per row."""
    write_text(path, json.dumps(trace(reports)) + "\n")


def trace(reports: Sequence[TargetResults]) -> dict[str, Any]:
    chosen = [
        (report.target, prediction)
        for report in reports
        for prediction in report.predictions
        if not prediction.same_as
    ]
    events = [
        event
        for pid, (target, prediction) in enumerate(chosen, start=1)
        for event in _program(pid, target, prediction)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": _note(reports)}}


def _note(reports: Sequence[TargetResults]) -> str:
    return MEASURED_NOTE if any(report.measured for report in reports) else NOTE


def _program(pid: int, target: str, prediction: Prediction) -> Iterator[dict[str, Any]]:
    yield _name("process_name", pid, 0, f"{target} {prediction.label}")
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    tid = 0
    for row, events in rows_of(prediction.timeline).items():
        # Events of a thread must nest, but transfers that share a link only overlap.
        for number, part in enumerate(without_overlap(events), start=1):
            tid += 1
            yield _name("thread_name", pid, tid, row if number == 1 else f"{row} ({number})")
            order = {"sort_index": tid}
            yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": order}
            for event in part:
                yield _complete(pid, tid, event)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, event: Event) -> dict[str, Any]:
    return {
        "name": f"wait for {event.name}" if event.kind == "wait" else event.name,
        "cat": event.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": {
            "op": event.op,
            "kind": event.kind,
            "bytes": event.bytes,
            "synchronous": event.synchronous,
            "covers": list(event.covers),
            "is_matmul": event.is_matmul,
        },
    }


# -- rows of the trace and the picture -------------------------------------------------------------


def rows_of(timeline: Timeline) -> dict[str, list[Event]]:
    """Returns events by row, compute first."""
    rows: dict[str, list[Event]] = {"compute": []}
    for event in timeline.events:
        rows.setdefault(event.row, []).append(event)
    order = sorted(rows, key=lambda row: (row != "compute", row == "memory", _lane(row)))
    return {row: rows[row] for row in order}


def without_overlap(events: Iterable[Event], slack: float = 0.0) -> list[list[Event]]:
    parts: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        for part in parts:
            if part[-1].end <= event.start + slack:
                part.append(event)
                break
        else:
            parts.append([event])
    return parts


def shares(events: Iterable[Event], edges: np.ndarray) -> np.ndarray:
    """Returns each interval's share that events take."""
    spans = np.array([(event.start, event.end) for event in events]).reshape(-1, 2)
    start, end = spans[:, :1], spans[:, 1:]  # [events, 1]
    until = np.clip(edges, start, end) - start  # [events, edges]: seconds of it so far
    return np.minimum(np.diff(until.sum(axis=0)) / np.diff(edges), 1.0)


def _lane(row: str) -> tuple[str, bool, str]:
    return row.partition(" ")[0], "-" in row.partition(" ")[2][:1], row


# Hues of the Okabe-Ito palette, which is safe for colour-blind readers.
_MATMUL, _OTHER, _TRANSFER, _SYNCHRONOUS = "#0072B2", "#9CCBE8", "#E69F00", "#A65E00"
_WAIT = "#D0021B"
_BINS = 250  # a bar shorter than this part of the axis has no room for an edge

Looks = dict[str, Callable[[Event], bool]]  # by colour, the events of a row
_COMPUTE: Looks = {
    _MATMUL: lambda event: event.kind == "compute" and event.is_matmul,
    _OTHER: lambda event: event.kind == "compute" and not event.is_matmul,
    _WAIT: lambda event: event.kind == "wait",
}
_TRANSFERS: Looks = {
    _TRANSFER: lambda event: not event.synchronous,
    _SYNCHRONOUS: lambda event: event.synchronous,
}

Group = tuple[TargetResults, Request, list[Prediction]]  # the modes of a case


def write_picture(path: str, reports: Sequence[TargetResults], requests: Sequence[Request]) -> None:
    """Draws a block per case, a panel per mode."""
    lines = _layout(reports, requests)
    columns = len(lines[0])
    figures = require_extra("matplotlib.figure")  # not pyplot, which keeps global state
    heights = [max(_height(group) for group in line if group) for line in lines]
    figure = figures.Figure(
        figsize=(10.5 if columns == 1 else 8.5 * columns, sum(heights) + 0.9),
        layout="constrained",
        dpi=200,
    )
    blocks = figure.subfigures(len(lines), columns, squeeze=False, height_ratios=heights)
    for line, row in zip(lines, blocks, strict=True):
        for group, block in zip(line, row, strict=True):
            if group:
                _draw_group(block, group)
    about = any(report.approximate for report in reports)
    said = [fill(note, 130 * columns) for note in (_note(reports), *([GPU_NOTE] if about else []))]
    figure.suptitle("\n".join(said), fontsize=9, x=0.01, ha="left")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    with written(path) as half:
        figure.savefig(half)


def _layout(
    reports: Sequence[TargetResults], requests: Sequence[Request]
) -> list[list[Group | None]]:
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
    rows = rows_of(prediction.timeline)
    return {row: events for row, events in rows.items() if row != "memory"}


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
    # A transfer's last hop of latency overlaps with the next transfer, too little to see.
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
    seconds = sorted(event.seconds for event in events if event.seconds > 1e-7)
    return len(seconds) > _BINS / 2 and seconds[len(seconds) // 2] < axis / _BINS


def _draw_shares(
    panel: Any, events: Sequence[Event], position: float, looks: Looks, total: float
) -> None:
    # Single bars would hide each other.
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
