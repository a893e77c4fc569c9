"""`jaxpar predict`: the run, from the arguments to the report."""

import argparse
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxpar.bench._arguments import require_reportable
from jaxpar.bench._errors import UsageError
from jaxpar.bench._report import require_extra
from jaxpar.predict._arguments import (
    DESCRIPTION,
    EPILOG,
    add_arguments,
    jobs,
    parse_requests,
)
from jaxpar.predict._picture import write_picture
from jaxpar.predict._processes import Tick, run_all
from jaxpar.predict._record import write_json
from jaxpar.predict._results import Report, Request
from jaxpar.predict._table import print_notes, print_report
from jaxpar.predict._trace import write_trace


def add_parser(commands: Any) -> None:
    """Adds `predict` to the subcommands of `python -m jaxpar`."""
    parser = commands.add_parser(
        "predict",
        help="show what communication a compiler's schedule exposes, without the devices",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compiles and reports; returns the exit status."""
    try:
        return _run(args)
    except UsageError as reason:
        print(f"jaxpar predict: error: {reason}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    # All that can be refused is refused before the compilers start.
    requests = parse_requests(args)
    require_reportable(args, ("json", "trace", "plot"))
    with _progress(requests) as tick:
        reports = run_all(requests, jobs(args, len(requests)), tick)
    if any(report.predictions for report in reports):
        console = _console()
        for report, request in zip(reports, requests, strict=True):
            if report.predictions:
                print_report(report, request, console)
        print_notes(reports, console)
        _write(args, reports, requests)
    failures = [(report.target, failure) for report in reports for failure in report.failures]
    for target, failure in failures:
        where = f"{target} {failure.label}".rstrip()
        # Most refusals name their option; the target says for which of several.
        print(f"jaxpar predict: error: {where}: {failure.reason}", file=sys.stderr)
    if not failures:
        return 0
    served = any(report.predictions for report in reports)
    return 1 if served or not all(failure.usage for _, failure in failures) else 2


def _write(args: argparse.Namespace, reports: list[Report], requests: list[Request]) -> None:
    if args.json:
        write_json(args.json, reports, requests)
    if args.trace:
        write_trace(args.trace, reports)
    if args.plot:
        write_picture(args.plot, reports, requests)


def _console(stderr: bool = False) -> Any:
    console = require_extra("rich.console").Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100  # a pipe has none of its own
    return console


@contextmanager
def _progress(requests: Sequence[Request]) -> Generator[Tick, None, None]:
    console = _console(stderr=True)
    progress = require_extra("rich.progress").Progress(
        console=console, transient=True, disable=not console.is_terminal
    )
    programs = sum(
        1 if request.function else len(request.ops) * len(request.shapes) * len(request.modes)
        for request in requests
    )
    with progress:
        task = progress.add_task("compiling", total=programs)
        yield lambda label: progress.update(task, advance=1, description=label)
