"""`jaxpar predict --validate`: compares predictions with public measurements."""

import argparse
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from typing import Any

from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.accuracy.validate import TITLES, Held, table, validate
from jaxpar.tools.cli.console import UsageError, open_console, print_error, progress, require_extra
from jaxpar.tools.cli.shared_options import require_reportable
from jaxpar.tools.cli.workers import answer, compilers, converse
from jaxpar.tools.timeline.cache import default_folder
from jaxpar.tools.timeline.target import TPUS
from jaxpar.tools.toolkit_api import install_command, write_text

NOTE = (
    "Errors are predicted / measured - 1. Median and worst are over rows that no constant was "
    "fitted to. From, to: the interval that is printed, made for 80% of unseen rows; inside: rows "
    "of the table that lie in it, which made it, too. Large operations take 20 us or more."
)


def run_validation(args: argparse.Namespace) -> int:
    changed = {name for name, value in vars(args).items() if value != args.default_of(name)}
    if others := sorted(changed - {"command", "json", "target", "validate"}):
        raise UsageError(
            "--validate compiles what was measured, and takes --target and --json alone; leave "
            f"{', '.join(others).replace('_', '-')} out"
        )
    chips = _chips(args.target)
    require_reportable(args, ("json",))
    rows = sum(row.chip in chips for row in measurements())
    with progress("compiling", rows) as tick:
        predicted, failed = validated(chips, tick)
    console = open_console()
    printed = require_extra("rich.table").Table(box=require_extra("rich.box").SIMPLE_HEAD)
    for number, title in enumerate(TITLES):
        printed.add_column(title, justify="left" if number < 3 else "right")
    for row in table(predicted):
        printed.add_row(*row)
    console.print(printed)
    console.print(NOTE, style="dim", highlight=False)
    if args.json:
        write_text(args.json, json.dumps([record(row) for row in predicted], indent=1) + "\n")
    for reason in dict.fromkeys(failed.values()):
        first, *others = [name for name in failed if failed[name] == reason]
        more = f" and {len(others)} more" if others else ""
        print_error("jaxpar predict", f"{first}{more}: {reason}")
    return 1 if failed else 0


def _chips(named: str | None) -> list[str]:
    known = sorted({row.chip for row in measurements()})
    there = [chip for chip in known if _compiler(chip) in compilers()]
    chips = there if named is None else named.split(",")
    if strange := [chip for chip in chips if chip not in known]:
        raise UsageError(
            f"--validate: nothing is published of {strange[0]!r}; --target must be chips such as "
            f"v6e,h100, of {', '.join(known)}"
        )
    if lacking := [chip for chip in chips or known if chip not in there]:
        command = install_command(_compiler(lacking[0]))
        raise UsageError(f"--validate: the compiler of {lacking[0]} is not installed; {command}")
    return chips


def _compiler(chip: str) -> str:
    return "tpu" if chip in TPUS else "gpu"


def validated(
    chips: Collection[str], tick: Callable[[str], None]
) -> tuple[list[Held], dict[str, str]]:
    """Predicts measurements; returns also why some fail."""
    rows = {row.name: row for row in measurements()}
    predicted, failed = list[Held](), dict[str, str]()

    def take(said: dict[str, Any]) -> None:
        name = said["name"]
        if "failed" in said:
            failed[name] = said["failed"]
        else:
            ends = said["interval"] and tuple(said["interval"])
            predicted.append(Held(rows[name], said["chip"], said["predicted"], ends, said["slow"]))
        tick(name)

    for compiler in ("tpu", "gpu"):
        mine = [chip for chip in chips if _compiler(chip) == compiler]
        names = [name for name, row in rows.items() if row.chip in mine]
        if names and (died := converse("jaxpar.tools.cli.predict_validation", names, take)):
            failed[f"{compiler} compiler"] = f"its process {died}"
    return predicted, failed


def serve(names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields each prediction, or why there is none."""
    for row in measurements():
        if row.name in names:
            prediction = validate(row, default_folder())
            if isinstance(prediction, str):
                yield {"name": row.name, "failed": prediction}
            else:
                kept = ("chip", "predicted", "interval", "slow")
                yield {"name": row.name, **{name: getattr(prediction, name) for name in kept}}


def record(row: Held) -> dict[str, Any]:
    return {**asdict(row.measured), "held_out": row.measured.is_held_out,
            "predicted": row.predicted, "error": row.error, "interval": row.interval}  # fmt: skip


if __name__ == "__main__":
    answer(serve)
