"""`python -m jaxpar`: dispatches the subcommands."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxpar.cli import _bench, _layout, _predict, _tune

_COMMANDS = (
    _bench,
    _layout,
    _predict,
    _tune,
)  # each adds its own parser, whose `run(args)` returns the exit status


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument on one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; without one, prints what there is."""
    parser = _Parser(prog="python -m jaxpar", description="Command line of jaxpar.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.add_parser(commands)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None and not unknown:
        parser.print_help()
        return 0
    if unknown:  # argparse would report these as the whole program's, not the subcommand's
        parser.prog = " ".join(filter(None, (parser.prog, args.command)))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
