"""Time over floor of jaxpar's matmuls and of their peers, as the TPU compiler schedules them.

    python benchmarks/overlap.py [--cases 0,3,gpu] [--jobs 2] [--json F]

Compiles the cases of overlap_cases.json for TPUs that need not be there, and every matmul for two
GPU hosts, and rewrites the tables of benchmarks/README.md and the picture beside it. With --cases,
some are shown and nothing is rewritten. Nothing runs: what is compared is the compiler's schedule
under published figures of the chips.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # devices that are present are left to who uses them
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs no driver and no cuDNN
}


def serve(label: str, task: dict[str, Any]) -> dict[str, Any]:
    """Has a process of its own compile a task; says so where it dies."""
    start = time.perf_counter()
    found: dict[str, Any] = {"label": label, **task, "records": [], "versions": {}}
    ended = False
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with subprocess.Popen(
            [sys.executable, str(FOLDER / "overlap_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                json.dump(task, process.stdin)
                process.stdin.close()
                for line in process.stdout:
                    ended = _absorb(found, json.loads(line)) or ended
            except BaseException:
                process.kill()  # leaving the block waits for it
                raise
        if not ended:
            log.seek(0)
            said = [line.strip() for line in log if line.strip()]
            last = said[-1][:300] if said else "it said nothing"
            found["failure"] = f"its process ended with {process.returncode}: {last}"
    found["seconds"] = time.perf_counter() - start
    print(f"  {found['seconds']:5.0f} s  {label}", flush=True)
    return found


def _absorb(found: dict[str, Any], line: dict[str, Any]) -> bool:
    if "variant" in line:
        found["records"].append(line)
    else:
        found |= line
    return "end" in line


def tasks(chosen: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Returns what to compile, by its label, in the order of the tables.

    Raises:
      ValueError: a choice that is neither the number of a case nor gpu.
    """
    from overlap_worker import GPUS, load_cases

    cases = [(str(i), case.name, {"case": asdict(case)}) for i, case in enumerate(load_cases())]
    everything = [*cases, *(("gpu", chip, {"gpu": chip}) for chip in GPUS)]
    known = {key for key, _, _ in everything}
    if wrong := [key for key in chosen or () if key not in known]:
        raise ValueError(f"{wrong[0]!r}; choose from 0 to {len(cases) - 1} and gpu")
    return {name: task for key, name, task in everything if chosen is None or key in chosen}


def run_all(chosen: dict[str, dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    """Serves the tasks, `jobs` at a time, those that take longest first."""
    order = sorted(chosen, key=lambda label: -_weight(chosen[label]))
    with ThreadPoolExecutor(jobs) as pool:
        served = pool.map(lambda label: serve(label, chosen[label]), order)
        found = dict(zip(order, served, strict=True))
    return [found[label] for label in chosen]


def _weight(task: dict[str, Any]) -> float:
    if "gpu" in task:
        return 30.0
    case = task["case"]
    scatters = case["op"].startswith("scatter")
    return case["mesh"][case["axis"]] * (3 if case["grad"] else 1) * (2 if scatters else 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="numbers of cases, gpu (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes at a time"
    )
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")
    parser.add_argument(
        "--readme", metavar="F", default=str(FOLDER / "README.md"), help="the file with the tables"
    )
    parser.add_argument("--plot", metavar="F", default=str(FOLDER / "overlap.png"))
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    try:
        args.tasks = tasks(None if args.cases is None else args.cases.split(","))
    except ValueError as reason:
        parser.error(f"--cases has {reason}")
    if missing := _missing():
        parser.error(f"needs {', '.join(missing)}; pip install -e '.[bench,tpu,gpu]'")
    return args


def _missing() -> list[str]:
    from jaxpar.schedule._gpus import find_plugin

    packages = ("libtpu", "rich", "matplotlib")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return missing if find_plugin() else [*missing, "jax-cuda13-plugin"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    from overlap_plot import write_plot
    from overlap_report import print_tables, tables
    from readme_tables import rewrite

    if args.cases is None:
        rewrite(
            Path(args.readme).read_text(), "overlap", ""
        )  # before minutes of work: it has the markers
    start = time.perf_counter()
    found = run_all(args.tasks, args.jobs)
    print(f"{time.perf_counter() - start:.0f} s in all, {args.jobs} processes at a time\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    print_tables(found)
    if args.cases is None:
        readme = Path(args.readme)
        readme.write_text(rewrite(readme.read_text(), "overlap", tables(found)))
        write_plot(args.plot, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
