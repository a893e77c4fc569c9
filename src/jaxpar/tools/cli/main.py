"""`jaxpar`, or `python -m jaxpar`: dispatches the subcommands.

Each is the module `NAME_command`, whose `add_arguments(parser)` sets `run(args)`, which returns the
exit status. Only the named command is imported: help and version take no second for JAX.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

import jaxpar

COMMANDS = {
    "bench": "time the overlapped matmuls against the naive ones",
    "doctor": "check what is installed, and whether collectives work on all devices",
    "explain": "explain why a step is slow: lines, causes, edits and what they gain",
    "layout": "show how a model is sharded on a mesh",
    "predict": "predict which communication is exposed, without the devices",
    "tune": "try the algorithms at each call site of a program, and write down the fastest",
    "ways": "show the algorithms of each call site, and the chosen one",
}

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
    argv = sys.argv[1:] if argv is None else argv
    named = next((word for word in argv if not word.startswith("-")), None)
    for name, what in COMMANDS.items():
        raw = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=what, formatter_class=raw)
        if name == named:
            import_module(f"jaxpar.tools.cli.{name}_command").add_arguments(command)
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
    return f"jaxpar {jaxpar.__version__} (jax {version('jax')}, Python {python})"
