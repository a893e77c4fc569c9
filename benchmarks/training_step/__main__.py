"""A training step with FSDP and TP, as compilers schedule it, next to its peers.

    python benchmarks/training_step [--cases 0,3] [--jobs 2] [--json F]

Compiles two layers of published models, with gradients, for chips that need not be there, in four
forms (worker.py says which), and rewrites the table of README.md. With --cases, some are shown and
nothing is rewritten. Nothing runs: what is compared is the compiler's schedule under published
figures of the chips.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from tables import Table, made_by, rewrite, update
from training_step.worker import CASES, FORMS
from workers import add_arguments, choose, records_of, require_positive, run_all, write_json

README = Path(__file__).with_name("README.md")
SECTION = "training step"
Found = dict[tuple[str, str], dict[str, Any]]  # by case and form


def compile_one(task: tuple[str, str]) -> dict[str, Any]:
    """Returns the record of one form of one case, or why there is none."""
    records, spent = records_of("training_step.worker", task)
    print(f"  {spent:5.0f} s  {', '.join(task)}: {_cell(records[-1])}", flush=True)
    return records[-1]


def table(found: Found) -> Table:
    """One row a case: each form, and jaxpar's over the fastest and the smallest of the others."""
    titles = ["case", *FORMS, "time, over the best other", "HBM, over the least other"]
    rows: list[list[str]] = []
    for case in dict.fromkeys(case for case, _ in found):
        records = [found.get((case, form), {}) for form in FORMS]
        rows.append([case, *map(_cell, records)])
        rows[-1] += [_ratio(records, quantity) for quantity in ("total", "peak")]
    return Table(titles, rows)


def _cell(record: dict[str, Any]) -> str:
    if "total" not in record:
        return "failed" if "failure" in record else "-"
    share = record["exposed"] / record["total"]
    time = f"{'~' if record['estimate'] == 'roofline' else ''}{record['total'] * 1e3:.2f}"
    return f"{time}, {share:.1%}, {record['peak'] / 2**30:.2f} GiB"


def _ratio(records: Sequence[dict[str, Any]], quantity: str) -> str:
    own, *others = (record.get(quantity) for record in records)
    known = [other for other in others if other]
    return f"{own / min(known):.2f}" if own and known else "-"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="training_step", description=__doc__.splitlines()[0])
    known = {str(number): case for number, case in enumerate(CASES)}
    add_arguments(parser, list(known))
    args = parser.parse_args(argv)
    args.names = choose(parser, "--cases", args.cases, known)
    require_positive(parser, args, "jobs")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    if args.cases is None:
        rewrite(README.read_text(), SECTION, "")  # before minutes of work: it has the markers
    found: Found = run_all(compile_one, list(product(args.names, FORMS)), args.jobs)
    write_json(args.json, [{"case": c, "form": f, **record} for (c, f), record in found.items()])
    shown = table(found)
    shown.print(width=140)
    for task, record in found.items():
        if "failure" in record:
            print(f"- {', '.join(task)}: {record['failure']}")
    if args.cases is None:
        line = made_by("python benchmarks/training_step", "libtpu", "jax-cuda13-pjrt")
        update(README, SECTION, f"{line}\n\n{shown.markdown()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
