"""`jaxpar ways`: shows the choices of `mode="auto"`, and why."""

import argparse
from dataclasses import asdict
from functools import partial
from typing import Any

from jaxpar.tools.cli.console import UsageError, print_error, status_of
from jaxpar.tools.cli.predict_command import parse_requests
from jaxpar.tools.cli.shared_options import (
    add_compiler_options,
    add_function_arguments,
    require_folders,
)
from jaxpar.tools.cli.workers import COMPILING, converse
from jaxpar.tools.toolkit_api import write_text

DESCRIPTION = """\
Shows the algorithms of mode="auto" at each call site of a program: the predicted time of each, the
one that is chosen, and why others are excluded. The program is traced, not compiled.
"""
EPILOG = """\
examples:
  jaxpar ways model:make_step      # called with the mesh, returns (function, args)
  jaxpar ways model:layer --args 'bf16[8192,8192]@tp,-' 'bf16[8192,28672]@-,tp'
  jaxpar ways model:make_step --target v6e:16x16 --mesh dp=64,tp=4 --json ways.json
To choose another algorithm, name it (mode="naive"), or let jaxpar tune write a file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("function", metavar="module:function", help="the program")
    add_function_arguments(add)
    add(
        "--target",
        help="chip and slice, such as v5p:4x4x4 or h100:8 (default: v5e:2x4; h100:8 where only the "
        "GPU compiler is installed)",
    )
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for all devices that are left (default: %(default)s)",
    )
    add_compiler_options(add)
    add("--json", metavar="FILE", help="write everything")
    # Options of predict that ways does not have.
    others = ("ops", "shapes", "modes", "dtype", "wire_dtype", "axis")
    parser.set_defaults(run=run, grad=False, jobs=1, figures="measured", no_cache=True,
                        **dict.fromkeys(others))  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar ways", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    requests = parse_requests(args)
    if len(requests) > 1:
        raise UsageError(f"--target {args.target} names several; ways takes one at a time")
    require_folders(args, ("json",))
    answer: dict[str, Any] = {}
    task = asdict(requests[0])
    died = converse("jaxpar.tools.cli.ways_worker", task, answer.update, COMPILING)
    failure = f"the process {died}" if died else answer.get("failure")
    if failure:
        print_error("jaxpar ways", failure)
        return 2 if answer.get("usage") else 1
    print(answer["text"])
    if args.json:
        write_text(args.json, answer["json"] + "\n")
    return 0
