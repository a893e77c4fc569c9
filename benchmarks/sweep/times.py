"""Compiled times of the sweep, kept in the repository: a file for each compiler.

The first line has the versions, each other one a point: of each form, and of each algorithm that
`auto` chose from, the seconds of its schedule on the model of the chip.
"""

import json
from pathlib import Path

from jaxpar.compiler.tuning import versions
from sweep.points import Point, point_from

FOLDER = Path(__file__).parent / "times"
PACKAGES = ("jax", "libtpu")

Times = dict[Point, dict[str, float]]  # by point and form


def here() -> Path:
    """The file of the versions that are installed."""
    return FOLDER / ("-".join(f"{k}-{v}" for k, v in versions(*PACKAGES).items()) + ".jsonl")


def newest() -> Path:
    """The file that was written last, by its name; of versions that need not be installed."""
    return sorted(FOLDER.glob("*.jsonl"))[-1]


def read(path: Path) -> Times:
    """Returns what a file has, nothing where there is none."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    records = map(json.loads, lines)
    return {point_from(record.pop("point")): record["seconds"] for record in records}


def write(path: Path, times: Times) -> None:
    """Writes times, and keeps those of other points that the file has."""
    known = read(path) | times
    lines = [json.dumps(versions(*PACKAGES))]
    for point in sorted(known, key=lambda point: point.label):
        seconds = {form: float(f"{s:.4g}") for form, s in known[point].items()}
        lines.append(json.dumps({"point": point.record(), "seconds": seconds}))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
