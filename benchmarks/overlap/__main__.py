"""Time over floor of jaxpar's matmuls and of their peers, as the TPU compiler schedules them.

    python benchmarks/overlap [--cases 0,3,gpu] [--jobs 2] [--json F]

Compiles the cases of cases.json for TPUs that need not be there, and every matmul for two GPU
hosts, and rewrites the tables of README.md and the picture beside it. With --cases, some are shown
and nothing is rewritten. Nothing runs: what is compared is the compiler's schedule under published
figures of the chips.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.cli.workers import compilers
from overlap.worker import GPUS, load_cases
from tables import rewrite, update
from workers import add_arguments, choose, records_of, require_positive, run_all, write_json

FOLDER = Path(__file__).parent
SECTION = "overlap"

Tasks = dict[str, dict[str, Any]]  # by label


def tasks() -> dict[str, Tasks]:
    """What there is to compile, by the name that --cases has for it, in the order of the tables."""
    found = {str(i): {case.name: {"case": asdict(case)}} for i, case in enumerate(load_cases())}
    return {**found, "gpu": {chip: {"gpu": chip} for chip in GPUS}}


def compile_all(chosen: Tasks, jobs: int) -> list[dict[str, Any]]:
    """Has a process of its own serve each task, `jobs` at a time, those that take longest first."""
    order = sorted(chosen, key=lambda label: -_weight(chosen[label]))
    found = run_all(lambda label: compile_one(label, chosen[label]), order, jobs)
    return [found[label] for label in chosen]


def compile_one(label: str, task: dict[str, Any]) -> dict[str, Any]:
    """Returns the task, and what its process found."""
    found: dict[str, Any] = {"label": label, **task, "records": [], "versions": {}}
    records, found["seconds"] = records_of("overlap.worker", task)
    for record in records:
        if "variant" in record:
            found["records"].append(record)
        else:
            found |= record
    print(f"  {found['seconds']:5.0f} s  {label}", flush=True)
    return found


def _weight(task: dict[str, Any]) -> float:
    if "gpu" in task:
        return 30.0
    case = task["case"]
    scatters = case["op"].startswith("scatter")
    return case["mesh"][case["axis"]] * (3 if case["grad"] else 1) * (2 if scatters else 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="overlap", description=__doc__.splitlines()[0])
    known = tasks()
    add_arguments(parser, list(known))
    readme, plot = FOLDER / "README.md", FOLDER / "overlap.png"
    parser.add_argument("--readme", metavar="F", type=Path, default=readme, help="with the tables")
    parser.add_argument("--plot", metavar="F", default=str(plot), help="the picture")
    args = parser.parse_args(argv)
    require_positive(parser, args, "jobs")
    args.tasks = {}
    for some in choose(parser, "--cases", args.cases, known):
        args.tasks |= some
    if missing := _missing():
        parser.error(f"needs {', '.join(missing)}; pip install -e '.[bench,tpu,gpu]'")
    return args


def _missing() -> list[str]:
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    packages = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}
    return [*missing, *(packages[name] for name in packages if name not in compilers())]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    from overlap.plot import write_plot
    from overlap.report import print_tables, tables

    if args.cases is None:
        rewrite(args.readme.read_text(), SECTION, "")  # before minutes of work: it has the markers
    found = compile_all(args.tasks, args.jobs)
    write_json(args.json, found)
    print_tables(found)
    if args.cases is None:
        update(args.readme, SECTION, tables(found))
        write_plot(args.plot, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
