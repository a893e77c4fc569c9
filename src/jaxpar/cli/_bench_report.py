"""What was measured, as a table on the terminal and as JSON."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

import jaxpar
from jaxpar.bench._errors import UsageError
from jaxpar.bench._measure import Refusal, Row, quartiles

CPU_NOTE = (
    "CPU devices share the cores of their host: these ratios show the overhead of a mode, "
    "not how well it overlaps transfers with matmuls."
)

_COLUMNS = {"": 16, "ms": 9, "ratio": 7, "quartiles": 13, "temp MiB": 9, "sent MiB": 9}


@dataclass(frozen=True)
class Run:
    """What every row of a run has in common."""

    device_kind: str
    platform: str
    devices: int
    processes: int
    mesh: dict[str, int]
    ring: list[str]
    dtype: str
    repeats: dict[str, int]  # by phase

    @property
    def notes(self) -> list[str]:
        """What a reader must know to judge the ratios."""
        return [CPU_NOTE] if self.platform == "cpu" else []


def require_extra(module: str) -> Any:
    """Imports a module of the extra `bench`, or says how to install it."""
    try:
        return import_module(module)
    except ImportError as missing:
        raise UsageError(
            f"{module.partition('.')[0]} is not installed; pip install 'jaxpar[bench]'"
        ) from missing


def header(run: Run) -> str:
    """The line above the table: where and on what the times were taken."""
    mesh = ",".join(f"{name}={size}" for name, size in run.mesh.items())
    processes = f" in {run.processes} processes" if run.processes > 1 else ""
    return (
        f"{run.devices} x {run.device_kind}{processes} | mesh {mesh}, ring {','.join(run.ring)} | "
        f"{run.dtype} | jax {jax.__version__}"
    )


def print_header(run: Run, console: Any) -> None:
    """Prints what is being measured, before the minutes that it takes."""
    escape = require_extra("rich.markup").escape
    console.print(f"[bold]jaxpar bench[/] | {escape(header(run))}", highlight=False)
    for note in run.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


def print_table(rows: Sequence[Row], console: Any) -> None:
    """Prints a section a case. Colour marks ratios whose quartiles lie on one side of 1."""
    _print_rows([], console, show_header=True)
    case = None
    for (op, shape, phase), group in groupby(rows, lambda row: (row.op, row.shape, row.phase)):
        if case not in (None, (op, shape)):
            console.print()
        case = (op, shape)
        console.print(f"[bold]{op} {shape}, {phase}[/]", highlight=False)
        _print_rows(list(group), console)
    console.print(
        "\nms: median. ratio: median of the ratios to naive, taken round by round; quartiles: "
        "theirs.\ntemp: XLA's temporary memory. sent: what a device sends. Both for one device and "
        "call.",
        style="dim",
        highlight=False,
    )


def _print_rows(rows: list[Row], console: Any, *, show_header: bool = False) -> None:
    # A heading cannot span columns, so each case is a table of its own, in the same columns.
    table = require_extra("rich.table").Table(
        box=None, padding=(0, 1), pad_edge=False, show_header=show_header
    )
    for title, width in _COLUMNS.items():
        table.add_column(title, justify="right", width=width, no_wrap=True)
    table.columns[0].justify = "left"
    table.add_column("collectives a device", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Row) -> list[str]:
    low, ratio, high = quartiles(row.ratios)
    colour = "green" if high < 1 else "red" if low > 1 else "default"
    naive = row.mode == "naive"
    return [
        f"  {row.mode}",
        f"{quartiles(row.seconds)[1] * 1e3:.3f}",
        "1" if naive else f"[bold {colour}]{ratio:.3f}[/]",
        "" if naive else f"{low:.2f} to {high:.2f}",
        "?" if row.temp_bytes is None else f"{row.temp_bytes / 2**20:.3f}",
        f"{row.sent_bytes / 2**20:.3f}",
        ", ".join(f"{count} {name}" for name, count in row.collectives.items()) or "none",
    ]


def write_json(path: str, run: Run, rows: Sequence[Row], refusals: Sequence[Refusal]) -> None:
    """Writes one object: what the run had in common, `rows` with all raw times, and `refused`."""
    record = {
        "jaxpar": jaxpar.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        **vars(run),
        "notes": run.notes,
        "rows": [_row_record(row) for row in rows],
        "refused": [vars(refusal) for refusal in refusals],
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _row_record(row: Row) -> dict[str, Any]:
    return vars(row) | {
        "seconds_quartiles": quartiles(row.seconds),
        "ratio_quartiles": quartiles(row.ratios),
    }
