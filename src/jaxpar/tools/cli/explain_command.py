"""`jaxpar explain`: prints waits with line, cause and edit."""

import argparse
import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from jaxpar.tools.cli.console import UsageError, print_error, progress, status_of
from jaxpar.tools.cli.explain_page import page_of
from jaxpar.tools.cli.predict_command import FIGURES, parse_requests
from jaxpar.tools.cli.predict_results import Failure, Request, TargetResults, Tick
from jaxpar.tools.cli.predict_views import write_picture, write_trace
from jaxpar.tools.cli.shared_options import (
    add_cache,
    add_compiler_options,
    add_function_arguments,
    require_folders,
    require_reportable,
)
from jaxpar.tools.cli.workers import COMPILING, converse
from jaxpar.tools.explain.explanation_text import COMPARED, compared, text_of
from jaxpar.tools.explain.trials import Budget
from jaxpar.tools.timeline.target import HERE
from jaxpar.tools.toolkit_api import write_text

DESCRIPTION = """\
Explains why a step takes as long as it does, on TPUs and GPUs that need not be there. For each wait
for a transfer it prints the line, one cause, and an edit. Edits that jaxpar can make itself are
compiled and simulated, each with the full program.

The program need not use jaxpar. Predicted, not measured: the compiler's schedule
is simulated on a model of the chip. With a trace of jax.profiler of the same program, it explains
the measured times, and compares them with the prediction.
"""
EPILOG = """\
examples:
  jaxpar explain model:make_step     # called with the mesh, returns (function, args)
  jaxpar explain model:step --args 'bf16[8192,8192]@tp,-' 'bf16[8192,28672]@-,tp'
  jaxpar explain model:make_step --target v5p:4x4x4 --mesh fsdp=16,tp=4 --html step.html
  jaxpar explain model:make_step --json before.json
  jaxpar explain model:make_step --against before.json      # after an edit
  jaxpar explain model:make_step --own maxtext              # name a framework's lines, too
  jaxpar explain model:make_step --tries 20min    # for a program that compiles for minutes
  jaxpar explain model:make_step --target v5e:2x4 --measured profile    # explain a real run
Compiled programs are saved in the user's cache folder: --no-cache compiles again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("function", metavar="module:function", help="what to compile")
    add_function_arguments(add)
    add("--grad", action="store_true", help="forward and backward, with all gradients")
    add(
        "--target",
        help="chip and slice, such as v5p:4x4x4 or h100:8, or 'here' for the devices at hand "
        "(default: v5e:2x4; h100:8 where only the GPU compiler is installed)",
    )
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for all devices that are left (default: %(default)s)",
    )
    add_compiler_options(add)
    add(
        "--figures",
        default="measured",
        help=f"{' or '.join(FIGURES)}, as for predict (default: %(default)s)",
    )
    add(
        "--tries",
        default="8",
        help="how many edits to try, or for how long (10min). Edits in the cache take no time, so "
        "a second call with the same time tries more edits (default: %(default)s)",
    )
    add(
        "--findings",
        type=int,
        default=10,
        help="show at most so many findings (default: %(default)s)",
    )
    add(
        "--own",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="an installed package whose lines count as yours, such as maxtext or flax: findings "
        "name its lines; can be given several times",
    )
    add_cache(add)
    add(
        "--measured",
        metavar="FOLDER",
        help="a folder that jax.profiler.trace wrote for this program: explain that run, and "
        "compare it with the prediction",
    )
    add("--against", metavar="FILE.json", help="compare with a file that --json wrote")
    add("--json", metavar="FILE", help="write everything, with each event")
    add("--html", metavar="FILE", help="write one page that works offline: timeline, causes, lines")
    add("--plot", metavar="FILE.png", help="draw the timeline")
    add("--trace", metavar="FILE", help="write the timeline as a Chrome or Perfetto trace")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar explain", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    request = _request(args)
    before = _before(args.against)
    if args.measured and not Path(args.measured).exists():
        raise UsageError(
            f"--measured {args.measured} is not there; name a folder that jax.profiler.trace wrote"
        )
    if args.plot:
        require_reportable(args, ("json", "html", "trace", "plot"))
    require_folders(args, ("json", "html", "trace"))
    report, record = TargetResults(request.target), dict[str, Any]()
    with progress("compiling", None) as tick:
        _explain(request, args, report, record, tick)
    for failure in report.failures:
        print_error("jaxpar explain", f"{request.target}: {failure.reason}")
    if not record:
        return 2 if any(failure.usage for failure in report.failures) else 1
    print(text_of(record, args.findings, shutil.get_terminal_size((100, 24)).columns))
    if before is not None:
        print(f"\nagainst {args.against}:\n{compared(before, record)}")
    if args.json:
        write_text(args.json, json.dumps(record, indent=1) + "\n")
    if args.html:
        write_text(args.html, page_of(record))
    if args.trace:
        write_trace(args.trace, [report])
    if args.plot:
        write_picture(args.plot, [report], [request])
    return 1 if report.failures else 0


def _request(args: argparse.Namespace) -> Request:
    try:
        Budget.of(args.tries)
    except ValueError as wanted:
        raise UsageError(f"--tries {wanted}") from None
    if args.findings < 1:
        raise UsageError(f"--findings {args.findings} must be at least 1")
    of_operations = ("ops", "shapes", "modes", "dtype", "wire_dtype", "axis")
    asked = argparse.Namespace(**vars(args), jobs=1, **dict.fromkeys(of_operations))
    requests = parse_requests(asked)
    if len(requests) > 1:
        raise UsageError(f"--target {args.target} names several; explain takes one at a time")
    return replace(requests[0], modes=())


def _before(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    remedy = "name a file that jaxpar explain --json wrote"
    try:
        record = json.loads(Path(path).read_text())
    except OSError as reason:
        raise UsageError(f"--against {path} cannot be read: {reason.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as reason:
        raise UsageError(f"--against {path} is no JSON: {reason}; {remedy}") from None
    if lacking := [key for key in COMPARED if not isinstance(record, dict) or key not in record]:
        raise UsageError(f"--against {path} has no {lacking[0]}; {remedy}")
    try:
        compared(record, record)  # reads everything that a comparison needs
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as reason:
        said = f"{type(reason).__name__}: {reason}"
        raise UsageError(f"--against {path} is damaged ({said}); {remedy}") from None
    return record


def _explain(
    request: Request,
    args: argparse.Namespace,
    report: TargetResults,
    record: dict[str, Any],
    tick: Tick,
) -> None:
    def take(entry: Any) -> None:
        [(kind, what)] = entry.items()
        if kind == "explained":
            record.update(what)
        elif kind == "trying":
            tick(shorten(what, 70))
        else:
            report.take(entry, tick)

    task = {
        "request": asdict(request),
        "tries": args.tries,
        "findings": args.findings,
        "own": args.own,
        "measured": args.measured,
    }
    environment = {} if request.target == HERE else COMPILING
    if died := converse("jaxpar.tools.cli.explain_worker", task, take, environment):
        report.failures.append(Failure(report.begun, f"the compiler's process {died}"))
