"""What a check of a device found: rows, which a table shows and a file of JSON keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

WIDTHS = (34, 12, 12, 8, 12)  # of the columns, all but the last, which says the rest
TITLES = ("", "measured us", "predicted us", "error", "wall us", "")


@dataclass
class Row:
    """One case of a part; microseconds."""

    part: str
    name: str
    kind: str  # a class of cases, whose errors are summed up together
    predicted: float | None = None
    measured: float | None = None  # of its kernels, by the profiler: the median of some calls
    wall: float | None = None  # of a call, where many follow each other
    said: str = ""  # what else there is to say
    is_right: bool = True
    is_least: bool = False  # the prediction, which lacks what depends on data

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; none of a prediction that is only a least time."""
        if not self.predicted or not self.measured or self.is_least:
            return None
        return self.predicted / self.measured - 1


@dataclass
class Results:
    """All that is known of a run, and its file, which is written again after each part."""

    facts: dict[str, Any]  # date, card, versions
    file: Path | None
    rows: list[Row] = field(default_factory=list[Row])
    left_out: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # by part
    errors: dict[str, str] = field(default_factory=dict[str, str])  # tracebacks, by part
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # by part
    states: dict[str, str] = field(default_factory=dict[str, str])  # clocks behind each part
    texts: dict[str, str] = field(default_factory=dict[str, str])  # of traced steps, explained

    @property
    def is_right(self) -> bool:
        """Whether no value was wrong, nothing was refused, and no part failed."""
        return not self.errors and all(row.is_right for row in self.rows)

    def write(self) -> None:
        """Writes everything so far, in one move."""
        if self.file is None:
            return
        record = {
            **self.facts,
            "classes": [dict(zip(CLASS_TITLES, row, strict=True)) for row in self.classes()],
            "left out": self.left_out,
            "errors": self.errors,
            "seconds": self.seconds,
            "states": self.states,
            "rows": [{**asdict(row), "error": row.error} for row in self.rows],
            "texts": self.texts,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        half = self.file.with_suffix(".half")
        half.write_text(_text(record))
        os.replace(half, self.file)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Puts files into an archive beside the results."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with ZipFile(self.file.with_suffix(".zip"), "a", ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)

    def classes(self) -> list[list[str]]:
        """A row for each kind of cases: how many were measured, and how far predictions are off."""
        errors: dict[str, list[float]] = {}
        for row in self.rows:
            if row.error is not None:
                errors.setdefault(row.kind, []).append(row.error)
        return [
            [kind, str(len(some)), f"{median(map(abs, some)):.0%}", f"{max(map(abs, some)):.0%}"]
            + [f"{choose(some):+.0%}" for choose in (min, max)]
            for kind, some in errors.items()
        ]


def _text(record: Mapping[str, Any]) -> str:
    """A record as JSON, with a line for each row of a list."""
    parts: list[str] = []
    for name, value in record.items():
        lines = ",\n ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        text = f"[\n {lines}\n]" if lines else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{" + ",\n".join(parts) + "}\n"


CLASS_TITLES = ["class", "cases", "median", "worst", "from", "to"]


def measured_in(file: Path) -> tuple[str, dict[str, Row]]:
    """The card of an earlier run, and its rows by their names."""
    record = json.loads(file.read_text())
    rows = [{k: v for k, v in row.items() if k != "error"} for row in record["rows"]]
    return record["card"], {row["name"]: Row(**row) for row in rows}


def line(row: Row) -> str:
    """A row as a line of the table."""
    error = "" if row.error is None else f"{row.error:+.0%}"
    cells = (row.name, _number(row.measured), _number(row.predicted), error, _number(row.wall))
    return aligned((*cells, row.said))


def aligned(cells: Iterable[str]) -> str:
    """Cells in their columns: the first and the last to the left, numbers to the right."""
    name, *numbers, said = cells
    columns = [name.ljust(WIDTHS[0])]
    columns += [cell.rjust(width) for cell, width in zip(numbers, WIDTHS[1:], strict=True)]
    return f"{' '.join(columns)}  {said}".rstrip()


def _number(us: float | None) -> str:
    return "" if us is None else f"{us:,.1f}"
