"""Predictions as a table on the terminal."""

from itertools import groupby
from typing import Any

from jaxpar.cli._console import Column, print_rows, require_extra
from jaxpar.cli._predict_results import (
    GPU_NOTE,
    NOTE,
    Facts,
    Prediction,
    Report,
    Request,
    compiled_by,
    header,
    notes,
)

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


def print_report(report: Report, request: Request, console: Any) -> None:
    """Prints a section a case. Colour marks what is near its floor and what is not."""
    escape = require_extra("rich.markup").escape
    console.print(f"[bold]{escape(header(report, request))}[/]", highlight=False)
    if found := compiled_by(report):
        console.print(escape(f"compiled by {found}"), style="dim", highlight=False)
    for note in notes(report):
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)
    print_rows(console, _COLUMNS, [], padding=_PADDING, show_header=True)
    about = "~" if report.approximate else ""
    for case, group in groupby(report.predictions, lambda prediction: prediction.case):
        console.print(f"[bold]{escape(case)}[/]", highlight=False)
        rows = [_cells(row, report.facts, about) for row in group]
        print_rows(console, _COLUMNS, rows, padding=_PADDING)
    console.print()


def print_notes(reports: list[Report], console: Any) -> None:
    """Prints what holds for all of the output."""
    lines = [NOTE, *([GPU_NOTE] if any(report.approximate for report in reports) else [])]
    lines.append(
        "floor: the matmul in one piece (of a function, its FLOPs at peak), or the bytes alone. "
        "exposed: waiting for transfers. order: transfers that run beside other work, and those "
        "that have a matmul to hide behind."
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
        f"{about}{row.timeline.total * 1e3:.3f}",
        f"{about}{row.floor.total * 1e3:.3f}",
        f"[bold]{ratio}[/]",
        f"[bold {colour}]{about}{row.exposed_share:.1%}[/]",
        f"{row.timeline.peak_bytes / 2**30:.2f}"
        if fits
        else f"[red]{row.timeline.peak_bytes / 2**30:.2f}[/]",
        f"{row.timeline.sent_bytes / 2**20:.1f}",
        row.order,
    ]
