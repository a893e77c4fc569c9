"""`jaxpar predict`: predicts exposed communication without the devices."""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxpar.tools.cli.console import UsageError, open_console, print_error, progress, status_of
from jaxpar.tools.cli.ops import DEFAULT_OPS
from jaxpar.tools.cli.predict_programs import parse_operand
from jaxpar.tools.cli.predict_results import Failure, Request, TargetResults, Tick, write_json
from jaxpar.tools.cli.predict_validation import run_validation
from jaxpar.tools.cli.predict_views import print_notes, print_report, write_picture, write_trace
from jaxpar.tools.cli.shared_options import (
    MEANINGS,
    add_cache,
    add_compiler_options,
    add_dtype,
    add_function_arguments,
    add_mesh,
    add_operations,
    parse_dtype,
    parse_names,
    parse_ops,
    parse_shapes,
    require_reportable,
)
from jaxpar.tools.cli.workers import compilers, converse, kill_all
from jaxpar.tools.toolkit_api import DESCRIBED, MODES, install_command

DEFAULT_MODES = ("naive", "unidirectional", "bidirectional", "auto")
FIGURES = ("measured", "book")
DEFAULT_SHAPE = "8192x8192x28672"

DESCRIPTION = """\
Compiles the overlapped matmuls, or any function, for TPUs and GPUs that need not be there. Shows
how much communication is exposed: the time that a device only waits for transfers.

Predicted, not measured: the compiler's schedule is simulated on a model of the chip.
"""
EPILOG = f"""\
{MEANINGS}
reading the table:
  total      milliseconds of the schedule. > marks a lower bound. ~ marks a roofline: more than 5%
             of it follows from peak speeds alone
  floor      a time that no mode beats: the FLOPs of the matmul in one piece, or its bytes over all
             links between the devices of a ring, whichever is longer. If one ring cannot use all
             links, its floor is printed, too
  ratio      total / floor
  exposed    share of the total that the device waits for transfers
  HBM        memory that a device needs at most
  order      async a/b: a of b transfers overlap with other work; over matmuls a/b: with a matmul

examples:
  jaxpar predict
  jaxpar predict --ops gather-lhs-rows --plot timeline.png --trace trace.json
  jaxpar predict --target v5p:8x8x8,h100:8 --ops scatter-rows --grad
  jaxpar predict --target v5p:8x8x8 --mesh dp=64,tp=8 --shapes 4096x8192x28672
  jaxpar predict model:layer --args 'bf16[8192,8192]@tp,-' 'bf16[8192,28672]@-,tp'
  jaxpar predict model:make_step     # called with the mesh, returns (function, args)
  jaxpar predict --target v5p:4x4x4 --compiler-options none   # the compiler's defaults
  jaxpar predict --validate --target v6e,h100  # compared with measurements
A trace opens in https://ui.perfetto.dev or chrome://tracing. In the picture, bars that are too
short to see, as in a long loop, become stacked shares of time.
Compiled programs are saved in the user's cache folder: --no-cache compiles again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add(
        "function",
        nargs="?",
        metavar="module:function",
        help="what to compile, in place of operations",
    )
    add_function_arguments(add)
    add_operations(add, DEFAULT_SHAPE)
    add("--modes", help=f"some of {', '.join(MODES)} (default: {','.join(DEFAULT_MODES)})")
    add_dtype(add, "bfloat16")
    add(
        "--wire-dtype",
        help="dtype in which partial sums travel. int8 and float8_e4m3fn are for gathered arrays "
        "instead, with scales",
    )
    add("--grad", action="store_true", help="forward and backward, with all gradients")
    add(
        "--target",
        help="chips and slices, such as v5p:8x8x8,2xv6e:16x16,h100:8 (default: v5e:2x4; h100:8 "
        "where only the GPU compiler is installed)",
    )
    add_mesh(add)
    add_compiler_options(add)
    add(
        "--figures",
        default="measured",
        help="measured: link speeds fitted to public measurements, and tables of GPUs; or "
        "book: link speeds of the vendor, and no tables (default: %(default)s)",
    )
    add(
        "--validate",
        action="store_true",
        help="compare predictions with measurements, of all chips or of those in --target",
    )
    add_cache(add)
    add("--jobs", type=int, default=0, help="targets at a time (default: one for each core)")
    add("--plot", metavar="FILE.png", help="draw the timelines")
    add("--json", metavar="FILE", help="write everything, each event and the figures included")
    add("--trace", metavar="FILE", help="write the timelines as a Chrome or Perfetto trace")
    parser.set_defaults(run=run, default_of=parser.get_default)


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar predict", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    if args.validate:
        return run_validation(args)
    # Refuse bad arguments before the compilers start.
    requests = parse_requests(args)
    require_reportable(args, ("json", "trace", "plot"))
    jobs = min(args.jobs or os.cpu_count() or 1, len(requests))
    with progress("compiling", sum(map(_programs, requests))) as tick:
        reports = run_all(requests, jobs, tick)
    if any(report.predictions for report in reports):
        console = open_console()
        for report, request in zip(reports, requests, strict=True):
            if report.predictions:
                print_report(report, request, console)
        print_notes(reports, console)
        _write(args, reports, requests)
    for text in failure_lines(reports):
        print_error("jaxpar predict", text)
    failures = [failure for report in reports for failure in report.failures]
    if not failures:
        return 0
    served = any(report.predictions for report in reports)
    return 1 if served or not all(failure.usage for failure in failures) else 2


def failure_lines(reports: Sequence[TargetResults]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for report in reports:
        for failure in report.failures:
            rows.setdefault(failure.reason, []).append(f"{report.target} {failure.label}".rstrip())
    lines: list[str] = []
    for reason, labels in rows.items():
        if len(labels) == 1:
            lines.append(f"{labels[0]}: {reason}")
            continue
        # The last word of a label is its mode, if it has a mode.
        modes: dict[str, list[str]] = {}
        for label in labels:
            case, _, mode = label.rpartition(" ")
            modes.setdefault(case, []).append(mode)
        named = (
            f"{case} ({', '.join(names)})" if case else ", ".join(names)
            for case, names in modes.items()
        )
        what = "rows" if any(modes) else "targets"
        lines.append(f"{reason}; in {len(labels)} {what}: {', '.join(named)}")
    return lines


def _write(args: argparse.Namespace, reports: list[TargetResults], requests: list[Request]) -> None:
    if args.json:
        write_json(args.json, reports, requests)
    if args.trace:
        write_trace(args.trace, reports)
    if args.plot:
        write_picture(args.plot, reports, requests)


def _programs(request: Request) -> int:
    one_shape = len(request.ops) * len(request.modes)
    return 1 if request.function else one_shape * len(request.shapes)


def run_all(requests: Sequence[Request], jobs: int, tick: Tick) -> list[TargetResults]:
    """Serves each request in its own process."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(partial(_run_one, tick=tick), requests))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()  # leaving the block waits for them
            raise


def _run_one(request: Request, tick: Tick) -> TargetResults:
    report = TargetResults(request.target)
    take = partial(report.take, tick=tick)
    if died := converse("jaxpar.tools.cli.predict_worker", asdict(request), take):
        report.failures.append(Failure(report.begun, f"the compiler's process {died}"))
    return report


def parse_requests(args: argparse.Namespace) -> list[Request]:
    _require_one_kind(args)
    if args.jobs < 0:
        raise UsageError(f"--jobs {args.jobs} must not be negative")
    ops = args.ops or ",".join(DEFAULT_OPS)
    shapes = args.shapes or DEFAULT_SHAPE
    parse_shapes(shapes)
    for operand in args.args:
        parse_operand(operand)
    dtype = parse_dtype(args.dtype or "bfloat16")
    _require_dtype(args.wire_dtype)
    bare = args.compiler_options[:1] == ["none"]
    options = _parse_options(args.compiler_options[bare:])
    [figures] = parse_names("--figures", args.figures, FIGURES)
    return [
        Request(
            target=target,
            mesh=args.mesh,
            axis=args.axis,
            function=args.function,
            args=tuple(args.args),
            ops=tuple(op.name for op in parse_ops(ops)),
            shapes=tuple(shapes.split(",")),
            modes=tuple(parse_names("--modes", args.modes, MODES)) if args.modes else DEFAULT_MODES,
            dtype=dtype,
            wire_dtype=args.wire_dtype,
            grad=args.grad,
            bare=bare,
            compiler_options=options,
            figures="book" if figures == "book" else "measured",
            cache=not args.no_cache,
        )
        for target in _parse_targets(args.target)
    ]


def _require_one_kind(args: argparse.Namespace) -> None:
    if args.function is None:
        if args.args:
            raise UsageError("--args are of a module:function; name one, as in model:layer")
        return
    module, _, name = args.function.partition(":")
    if not module or not name:
        raise UsageError(
            f"{args.function!r} is not module:function, as in model:layer for layer of model.py"
        )
    options = [
        f"--{option.replace('_', '-')}"
        for option in ("ops", "shapes", "modes", "dtype", "wire_dtype", "axis")
        if getattr(args, option) is not None
    ]
    if options:
        raise UsageError(
            f"{' and '.join(options)} is of the operations; {args.function} names its own axes and "
            "modes, and gets shapes and dtypes by --args"
        )


def _parse_targets(text: str | None) -> list[str]:
    if text is not None:
        return list(dict.fromkeys(text.split(",")))
    for compiler, target in DESCRIBED.items():
        if compiler in compilers():
            return [target]
    raise UsageError(
        f"libtpu is not installed; {install_command('tpu')}, or for the GPU compiler "
        f"{install_command('gpu')}"
    )


def _require_dtype(name: str | None) -> None:
    try:
        jnp.dtype(name or "float32")
    except TypeError:
        raise UsageError(
            f"--wire-dtype {name!r} is no dtype; write bfloat16, float32, ..."
        ) from None


def _parse_options(texts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--compiler-options {text!r} is not of the form key=value")
        options[key] = _parse_value(value)
    return options


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
