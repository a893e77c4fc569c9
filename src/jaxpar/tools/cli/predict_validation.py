"""`jaxpar predict --validate`: predictions beside what others measured and published."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.accuracy.validate import TITLES, Held, table, validate
from jaxpar.tools.cli.console import UsageError, open_console, print_error, progress, require_extra
from jaxpar.tools.private_names import write_text
from jaxpar.tools.program.cache import default_folder

NOTE = (
    "Errors are predicted / measured - 1; median and worst are those of rows that no constant was "
    "fitted to, from and to those of all rows. Large operations take 20 us or more."
)


def run_validation(args: argparse.Namespace) -> int:
    """Compiles and plays what was measured, and prints a row for each class."""
    known = sorted({one.chip for one in measurements()})
    chips = args.target.split(",") if args.target else known
    if strange := [chip for chip in chips if chip not in known]:
        raise UsageError(
            f"--validate: nothing is published of {strange[0]!r}; --target must be chips such as "
            f"v6e,h100, of {', '.join(known)}"
        )
    rows = sum(one.chip in chips for one in measurements())
    with progress("compiling", rows) as tick:
        found, failed = validate(chips, default_folder(), tick)
    console = open_console()
    printed = require_extra("rich.table").Table(box=require_extra("rich.box").SIMPLE_HEAD)
    for number, title in enumerate(TITLES):
        printed.add_column(title, justify="left" if number < 3 else "right")
    for row in table(found):
        printed.add_row(*row)
    console.print(printed)
    console.print(NOTE, style="dim", highlight=False)
    if args.json:
        write_text(args.json, json.dumps([record(one) for one in found], indent=1) + "\n")
    for name, reason in failed.items():
        print_error("jaxpar predict", f"{name}: {reason}")
    return 1 if failed else 0


def record(one: Held) -> dict[str, Any]:
    """A measurement, what was predicted of it, and the error."""
    return {**asdict(one.measured), "held_out": one.measured.is_held_out,
            "predicted": one.predicted, "error": one.error}  # fmt: skip
