"""The compiling processes of the benchmarks, and the arguments of the commands that start them."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxpar.tools.cli.workers import COMPILING, converse
from jaxpar.tools.timeline.cache import default_folder

# Compiled programs: where only the model of a chip has changed, they are played again.
KEPT = default_folder()
# Where a process finds the folders of the subjects, as packages.
PATH = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


def records_of(
    module: str,
    task: Any,
    environment: Mapping[str, str] = COMPILING,
    tell: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[list[dict[str, Any]], float]:
    """Has a process of its own serve a task; returns its records, and the seconds that it took.

    Args:
      module: such as `overlap.worker`; it calls `jaxpar.tools.cli`'s `answer`.
      task: what JSON can hold.
      environment: set beside that of this process.
      tell: called with each record, as soon as it is there.

    Returns:
      The records, the last one a `failure` where the process died; and seconds.
    """
    records: list[dict[str, Any]] = []

    def take(record: dict[str, Any]) -> None:
        records.append(record)
        tell(record)

    start = time.perf_counter()
    died = converse(module, task, take, {**environment, "PYTHONPATH": PATH})
    if died:
        records.append({"failure": f"its process {died}"[:300]})
    return records, time.perf_counter() - start


def run_all(function: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> dict[Any, Any]:
    """Calls a function of each task, `jobs` at a time; returns the results by task."""
    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(tasks, pool.map(function, tasks), strict=True))
    print(f"{time.perf_counter() - start:.0f} s in all, {jobs} processes at a time\n")
    return found


def add_arguments(parser: argparse.ArgumentParser, cases: Sequence[str]) -> None:
    """Adds which cases, how many at a time, and where to write what was found."""
    parser.add_argument("--cases", help=f"some of {','.join(cases)} (default: all)")
    jobs = min(os.cpu_count() or 1, 8)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (default: %(default)s)")
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")


def choose(
    parser: argparse.ArgumentParser,
    option: str,
    text: str | None,
    known: Mapping[str, Any],
    separator: str = ",",
) -> list[Any]:
    """Returns what the names in `text` stand for, in the order of `known`; all for None."""
    names = list(known) if text is None else text.split(separator)
    for name in names:
        if name not in known:
            parser.error(f"{option} has {name!r}; choose from {separator.join(known)}")
    return [found for name, found in known.items() if name in names]


def require_positive(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str
) -> None:
    """Exits where one of these arguments is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")


def write_json(path: str | None, found: Any) -> None:
    """Writes all that was found, where somebody asked for it."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
