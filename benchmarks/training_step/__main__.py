"""A training step with FSDP and TP, as the TPU compiler schedules it, next to its peers.

    python benchmarks/training_step.py [--cases 0,3] [--jobs 2] [--json F]

Compiles two layers of published models, with gradients, for TPUs that need not be there, in three
forms (training_step_worker.py says which), and rewrites the table of benchmarks/README.md. With
--cases, some are shown and nothing is rewritten. Nothing runs: what is compared is the compiler's
schedule under published figures of the chips.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from readme_tables import Table, print_table, rewrite
from worker_process import record_of

FOLDER = Path(__file__).parent
SECTION = "training step"
Found = dict[tuple[str, str], dict[str, Any]]  # by case and form


def compile_all(cases: Sequence[str], forms: Sequence[str], jobs: int) -> Found:
    """Has a process of its own compile each form of each case, `jobs` at a time."""
    pairs = [(case, form) for case in cases for form in forms]
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(pairs, pool.map(compile_one, *zip(*pairs, strict=True)), strict=True))


def compile_one(case: str, form: str) -> dict[str, Any]:
    """Returns the record of one form of one case, or why there is none."""
    record, spent = record_of("training_step_worker.py", case, form)
    print(f"  {spent:5.0f} s  {case}, {form}: {_cell(record)}", flush=True)
    return record


def table(found: Found) -> Table:
    """One row a case: each form, and jaxpar's over the fastest and the smallest of the others."""
    from training_step_worker import FORMS

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
    return f"{record['total'] * 1e3:.2f}, {share:.1%}, {record['peak'] / 2**30:.2f} GiB"


def _ratio(records: Sequence[dict[str, Any]], quantity: str) -> str:
    own, *others = (record.get(quantity) for record in records)
    known = [other for other in others if other]
    return f"{own / min(known):.2f}" if own and known else "-"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    from training_step_worker import CASES

    parser = argparse.ArgumentParser(prog="training_step", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"numbers from 0 to {len(CASES) - 1} (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes at a time"
    )
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")
    args = parser.parse_args(argv)
    numbers = range(len(CASES)) if args.cases is None else args.cases.split(",")
    names = {str(number): case for number, case in enumerate(CASES)}
    if wrong := [number for number in map(str, numbers) if number not in names]:
        parser.error(f"--cases has {wrong[0]!r}; choose from 0 to {len(CASES) - 1}")
    args.names = [names[str(number)] for number in numbers]
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    from training_step_worker import FORMS

    readme = FOLDER / "README.md"
    start = time.perf_counter()
    found = compile_all(args.names, FORMS, args.jobs)
    print(f"{time.perf_counter() - start:.0f} s in all, {args.jobs} processes at a time")
    if args.json:
        records = [{"case": c, "form": f, **record} for (c, f), record in found.items()]
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")
    shown = table(found)
    print_table(shown, width=140)
    for (case, form), record in found.items():
        if "failure" in record:
            print(f"- {case}, {form}: {record['failure']}")
    if args.cases is None:
        readme.write_text(rewrite(readme.read_text(), SECTION, shown.markdown()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
