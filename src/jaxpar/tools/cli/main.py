"""`jaxpar`, or `python -m jaxpar`: dispatches the subcommands."""

import argparse
import platform
from collections.abc import Sequence
from typing import NoReturn

import jax

import jaxpar
from jaxpar.tools.cli import (
    bench_command,
    doctor_command,
    explain_command,
    layout_command,
    predict_command,
    tune_command,
    ways_command,
)

_COMMANDS = (
    bench_command,
    doctor_command,
    explain_command,
    layout_command,
    predict_command,
    tune_command,
    ways_command,
)  # each adds its own parser, whose `run(args)` returns the exit status


DESCRIPTION = """\
Times, predicts and tunes overlapped matmuls. Explains slow steps, shows layouts of models, and
checks the installation.
"""
EPILOG = """\
options that mean the same wherever they exist: --mesh dp=2,tp=-1, --target v5p:4x4x4,
--json FILE (all results), --plot FILE (a picture). A file is written completely or not at all.
exit status: 0 done; 1 something failed, or a result is wrong; 2 wrong usage, in one line of text;
130 interrupted. Results go to standard output, errors and progress to standard error.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(
        prog="jaxpar",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.add_parser(commands)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None and not unknown:
        parser.print_help()
        return 0
    if unknown:  # argparse would name the main program, not the subcommand
        parser.prog = " ".join(filter(None, (parser.prog, args.command)))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args.run(args)


def _version() -> str:
    python = platform.python_version()
    return f"jaxpar {jaxpar.__version__} (jax {jax.__version__}, Python {python})"
