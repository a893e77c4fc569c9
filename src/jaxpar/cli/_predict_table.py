"""Predictions as a table on the terminal."""

from itertools import groupby
from typing import Any

from jaxpar.bench._report import require_extra
from jaxpar.predict._results import GPU_NOTE, NOTE, Facts, Prediction, Report, Request

_COLUMNS = {
    "": 16, "total ms": 8, "floor ms": 8, "ratio": 5, "exposed": 7, "HBM GiB": 7, "sent MiB": 8,
    "order": 31,
}  # fmt: skip


def header(report: Report, request: Request) -> str:
    """The line above a target's results: for what they were compiled."""
    parts = [report.target]
    if facts := report.facts:
        mesh = ",".join(f"{name}={size}" for name, size in facts.mesh.items())
        ring = f", ring {','.join(facts.ring)}" if facts.ring else ""
        parts += [f"{facts.devices} x {facts.device_kind}", f"mesh {mesh}{ring}"]
    parts.append(phase(request) if request.function else f"{request.dtype} {phase(request)}")
    return " | ".join(parts)


def versions(report: Report) -> str:
    """The compiler that a target's results come from."""
    facts = report.facts
    found = {} if facts is None else facts.versions
    return ", ".join(f"{name} {text}" for name, text in found.items())


def phase(request: Request) -> str:
    """Forward, or with the gradients."""
    return "forward+backward" if request.grad else "forward"


def notes(report: Report) -> list[str]:
    """What a reader must know to judge a target's results."""
    found: list[str] = []
    facts = report.facts
    if facts and facts.links_apart > 1:
        found.append(
            f"neighbours on the ring {','.join(facts.ring)} are up to {facts.links_apart} links "
            "apart on this mesh, so that transfers share links"
        )
    if facts and report.predictions:
        most = max(p.timeline.peak_bytes for p in report.predictions)
        if most > facts.chip["capacity"]:
            found.append(
                f"{most / 2**30:.1f} GiB do not fit the {facts.chip['capacity'] / 2**30:.0f} GiB "
                "of HBM of a device"
            )
    loops = {name for p in report.predictions for name in p.timeline.loops_of_unknown_length}
    if loops:
        found.append(f"loops of unknown length count as one trip: {', '.join(sorted(loops))}")
    return found


def print_report(report: Report, request: Request, console: Any) -> None:
    """Prints a section a case. Colour marks what is near its floor and what is not."""
    escape = require_extra("rich.markup").escape
    console.print(f"[bold]{escape(header(report, request))}[/]", highlight=False)
    if found := versions(report):
        console.print(escape(f"compiled by {found}"), style="dim", highlight=False)
    for note in notes(report):
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)
    _print_rows([], report, console, show_header=True)
    for case, group in groupby(report.predictions, lambda prediction: prediction.case):
        console.print(f"[bold]{escape(case)}[/]", highlight=False)
        _print_rows(list(group), report, console)
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


def _print_rows(
    rows: list[Prediction], report: Report, console: Any, *, show_header: bool = False
) -> None:
    # A heading cannot span columns, so each case is a table of its own, in the same columns.
    table = require_extra("rich.table").Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=show_header
    )
    for title, width in _COLUMNS.items():
        side = "left" if title in ("", "order") else "right"
        # Programs with thousands of transfers have an order of two lines.
        table.add_column(title, justify=side, width=width, no_wrap=title != "order")
    for row in rows:
        if row.same_as:
            table.add_row(
                f"  {row.mode}", *[""] * (len(_COLUMNS) - 2), f"the same as {row.same_as}"
            )
        else:
            table.add_row(*_cells(row, report.facts, "~" if report.approximate else ""))
    console.print(table)


def _cells(row: Prediction, facts: Facts | None, about: str) -> list[str]:
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
