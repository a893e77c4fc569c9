"""Compiled times of the sweep, kept in the repository: a file for each compiler.

The first line has the versions and a hash of the model of the chips, each other one a point: the
seconds of each form, and of each algorithm that `auto` chose from, by its schedule on that model.
"""

import json
import re
from pathlib import Path

from jaxpar.choose.tuning import versions
from sweep.points import Point, point_from
from sweep.worker import model_of_chips

FOLDER = Path(__file__).parent / "times"
PACKAGES = ("jax", "libtpu")

Times = dict[Point, dict[str, float]]  # by point and form


def here() -> Path:
    """The file of the versions that are installed."""
    return FOLDER / ("-".join(f"{k}-{v}" for k, v in versions(*PACKAGES).items()) + ".jsonl")


def newest() -> Path:
    """The file of the newest versions, which need not be installed."""

    def numbers(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem)]

    return max(FOLDER.glob("*.jsonl"), key=numbers)


def read(path: Path) -> Times:
    """Returns what a file has, nothing where there is none."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    records = map(json.loads, lines)
    return {point_from(record.pop("point")): record["seconds"] for record in records}


def write(path: Path, times: Times) -> None:
    """Writes times, and keeps those of other points that the file has of the same model."""
    head = json.dumps(versions(*PACKAGES) | {"model": model_of_chips()[:16]})
    is_same = path.exists() and path.read_text().startswith(head)
    known = (read(path) if is_same else {}) | times
    lines = [head]
    for point in sorted(known, key=lambda point: point.label):
        seconds = {form: float(f"{s:.4g}") for form, s in known[point].items()}
        lines.append(json.dumps({"point": point.record(), "seconds": seconds}))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
