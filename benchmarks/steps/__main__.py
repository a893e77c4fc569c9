"""Holds predicted training steps against those that their authors publish.

    python benchmarks/steps

Compiles each step of `steps.json` with MaxText itself, for a slice that need not be there, plays
it, and writes the table of `README.md`: some six minutes and 3 GB a step on two cores, then from a
cache. It needs Python 3.12 or later; `nox -s published_steps` installs what it takes. `--steps`
takes some of them: the table then has these alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.accuracy.interval import Interval
from steps.step import Step, steps
from tables import Table, made_by, update

README = Path(__file__).with_name("README.md")
SECTION = "steps"
TITLES = ["step", "measured", "predicted", "error", "80% interval"]
TITLES += ["matmuls", "kernels", "waits", "HBM"]

Found = dict[str, Any]  # what `maxtext_step.py` prints, or why it prints nothing


def predicted(step: Step) -> Found:
    """What is predicted of a step, in a process of its own: compilers keep their memory."""
    command = [sys.executable, str(Path(__file__).with_name("maxtext_step.py")), step.name]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return json.loads(ran.stdout.splitlines()[-1])
    reasons = [line for line in ran.stderr.splitlines() if "Error: " in line]
    return {"failed": reasons[-1].partition("Error: ")[2] if reasons else ran.stderr[-200:]}


def row(step: Step, found: Found) -> list[str]:
    """A row of the table: seconds, the error, and what the step is made of."""
    cells = [step.name, f"{step.seconds:.3f} s"]
    if "failed" in found:
        return [*cells, "not compiled", *["-"] * 6]
    cells += [f"{found['seconds']:.3f} s", f"{found['seconds'] / step.seconds - 1:+.1%}"]
    cells.append(str(interval) if (interval := interval_of(found)) else "-")
    shares = [found[part] / found["seconds"] for part in ("matmuls", "kernels", "waits")]
    return [*cells, *(f"{share:.0%}" for share in shares), f"{found['gigabytes']:.1f} GB"]


def interval_of(found: Found) -> Interval | None:
    """The interval of a predicted step's error."""
    return Interval(*found["interval"]) if found.get("interval") else None


def coverage(chosen: list[Step], found: dict[str, Found]) -> str:
    """How many steps lie within their interval."""
    errors = {step.name: found[step.name].get("seconds", 0) / step.seconds - 1 for step in chosen}
    known = {name: held for name in errors if (held := interval_of(found[name]))}
    inside = [name for name, held in known.items() if held.low <= errors[name] <= held.high]
    return f"- Within their interval: {len(inside)} of {len(known)} steps."


def growth(found: dict[str, Found]) -> list[str]:
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
    found: dict[str, Found] = {}
    for step in chosen:
        print(step.name, file=sys.stderr)
        found[step.name] = predicted(step)
    table = Table(TITLES, [row(step, found[step.name]) for step in chosen])
    table.print()
    failed = [f"- {name}: {one['failed']}" for name, one in found.items() if "failed" in one]
    notes = [coverage(chosen, found), *growth(found), *failed]
    print("\n".join(notes))
    command = " ".join(["python benchmarks/steps", *map(shlex.quote, arguments)])
    made = made_by(command, "maxtext", "libtpu")
    update(README, SECTION, "\n\n".join(filter(None, [made, table.markdown(), "\n".join(notes)])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
