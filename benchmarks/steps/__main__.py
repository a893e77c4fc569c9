"""Holds predicted training steps against those that their authors publish.

    python benchmarks/steps

Compiles each step of `steps.json` with MaxText itself, for a slice that need not be there, plays
it, and writes the table of `README.md`: some six minutes and 3 GB a step on two cores, then from a
cache. It needs Python 3.12 or later; `nox -s published_steps` installs what it takes. `--steps`
takes some of them: the others keep what `predicted.json` has of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

import numpy as np

from accuracy.calibrate import Calibration, Error
from jaxpar.tools.accuracy.interval import FEWEST, Interval
from steps.step import RECORD, Predicted, Step, errors, predictions, steps
from tables import Table, made_by, update

README = Path(__file__).with_name("README.md")
SECTION = "steps"
TITLES = ["step", "measured", "predicted", "error", "80% interval"]
TITLES += ["matmuls", "kernels", "waits", "HBM", "compiled on"]


def predicted(step: Step) -> Predicted:
    """What is predicted of a step, in a process of its own: compilers keep their memory."""
    command = [sys.executable, str(Path(__file__).with_name("maxtext_step.py")), step.name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    made = {"made": f"{date.today()}"}
    if ran.returncode == 0:
        return made | json.loads(ran.stdout.splitlines()[-1])
    reasons = [line for line in ran.stderr.splitlines() if "Error: " in line]
    return made | {"failed": reasons[-1].partition("Error: ")[2] if reasons else ran.stderr[-200:]}


def row(step: Step, found: Predicted, interval: Interval | None) -> list[str]:
    """A row of the table: seconds, the error, and what the step is made of."""
    cells = [step.name, f"{step.seconds:.3f} s"]
    if "failed" in found:
        return [*cells, "not compiled", *["-"] * 7]
    cells += [f"{found['seconds']:.3f} s", f"{found['seconds'] / step.seconds - 1:+.1%}"]
    cells.append(str(interval or "-"))
    shares = [found[part] / found["seconds"] for part in ("matmuls", "kernels", "waits")]
    cells += [f"{share:.0%}" for share in shares]
    return [*cells, f"{found['gigabytes']:.1f} GB", found["made"]]


def interval_of(name: str, found: Predicted, known: dict[str, Error]) -> Interval | None:
    """The interval of a step, from its operations and from the other steps."""
    if not found.get("interval"):
        return None
    others = [error for other, error in known.items() if other != name]
    made = Interval(*found["interval"])
    if len(others) < FEWEST:
        return made
    seen = np.ones(len(others), bool)
    return made.or_wider(Calibration(others).interval(known[name].work, seen))


def coverage(known: dict[str, Error], intervals: dict[str, Interval | None]) -> str:
    """How large the errors are, and how many steps lie within their interval."""
    sizes = {name: float(np.expm1(error.logarithm)) for name, error in known.items()}
    inside = [one and one.low <= sizes[name] <= one.high for name, one in intervals.items() if one]
    middle = float(np.median(np.abs([*sizes.values()])))
    return (
        f"- Median of the errors' sizes: {middle:.1%}. Within their interval: {sum(inside)} of "
        f"{len(inside)} steps."
    )


def growth(found: dict[str, Predicted]) -> list[str]:
    """How much less each device does on more of them, measured and predicted, model by model."""
    lines: list[str] = []
    by_model: dict[str, list[Step]] = {}
    for step in steps():
        if "seconds" in found.get(step.name, {}):
            by_model.setdefault(step.name.rpartition(" on ")[0], []).append(step)
    for model, compiled in by_model.items():
        first, last = compiled[0], compiled[-1]
        if first is last:
            continue
        measured = last.tokens / first.tokens
        guessed = measured * (last.seconds / found[last.name]["seconds"])
        guessed *= found[first.name]["seconds"] / first.seconds
        lines.append(
            f"- {model}, tokens a second and device on {last.devices} over those on "
            f"{first.devices}: measured {measured:.3f}, predicted {guessed:.3f} "
            f"({guessed / measured - 1:+.1%})."
        )
    return lines


def main(arguments: list[str]) -> int:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser("python benchmarks/steps", description=__doc__)
    parser.add_argument("--steps", default="", help="names, or parts of them, parted by commas")
    wanted = [name for name in parser.parse_args(arguments).steps.split(",") if name]
    chosen = [one for one in steps() if not wanted or any(part in one.name for part in wanted)]
    for step in chosen:
        print(step.name, file=sys.stderr)
        record = predictions() | {step.name: predicted(step)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write(" ".join(["python benchmarks/steps", *map(shlex.quote, arguments)]))
    return 0


def write(command: str) -> None:
    """Prints the table of all steps that were tried, and writes it."""
    found, known = predictions(), errors()
    tried = [step for step in steps() if step.name in found]
    intervals = {name: interval_of(name, found[name], known) for name in known}
    rows = [row(step, found[step.name], intervals.get(step.name)) for step in tried]
    table = Table(TITLES, rows)
    table.print()
    failed = [f"- {s.name}: {found[s.name]['failed']}" for s in tried if "failed" in found[s.name]]
    notes = [coverage(known, intervals), *growth(found), *failed]
    print("\n".join(notes))
    made = made_by(command, "maxtext", "libtpu")
    update(README, SECTION, "\n\n".join(filter(None, [made, table.markdown(), "\n".join(notes)])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
