"""Layers of experts as both compilers schedule them, next to their peers, and on CPU by the clock.

    python benchmarks/moe.py [--cases 0,3] [--forms "jaxpar ring;dense"] [--part compiled|cpu]
        [--forward] [--jobs 2] [--rounds 5] [--json F]

Compiles one layer of published models, forward and backward, for TPUs and GPUs that need not
be there, in jaxpar's forms and in those of moe_peers.py (moe_worker.py says more); times the layer
on 8 CPU devices against matmuls alone (moe_cpu.py); and rewrites the tables of
benchmarks/README.md. With --cases or --forms, some are shown and nothing is rewritten.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from readme_tables import Table, print_table, rewrite
from worker_process import record_of

FOLDER = Path(__file__).parent
COMPILED, CPU = "experts compiled", "experts on CPU"
Found = dict[tuple[str, str, str], dict[str, Any]]  # by case, form and pass


def compile_all(
    cases: Sequence[str], forms: Sequence[str], passes: Sequence[str], jobs: int
) -> Found:
    """Has a process of its own compile each form of each case, `jobs` at a time."""
    tasks = list(product(cases, forms, passes))
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(tasks, pool.map(compile_one, *zip(*tasks, strict=True)), strict=True))


def compile_one(case: str, form: str, which: str) -> dict[str, Any]:
    """Returns the record of one form of one case, or why there is none."""
    record, spent = record_of("moe_worker.py", case, form, which)
    shown = " | ".join(_cells(record))
    print(f"  {spent:5.0f} s  {case}, {form}, {which}: {shown}", flush=True)
    return record


def _cells(record: dict[str, Any]) -> list[str]:
    """Time, exposed transfers, bytes sent (and what static shapes would send), and memory."""
    if "total" not in record:
        return [record.get("failure", "-"), "", "", ""]
    sent, padded = record["sent"] / 1e9, record["padded"] / 1e9
    loops = "?" if record["unknown loops"] else ""
    return [
        f"{'~' if record['estimate'] == 'roofline' else ''}{record['total'] * 1e3:.2f}{loops}",
        f"{record['exposed'] / record['total']:.1%}",
        f"{sent:.2f}" + (f" ({padded:.2f})" if padded > 1.005 * sent else ""),
        f"{record['peak'] / 2**30:.2f}",
    ]


def compiled_tables(found: Found) -> dict[str, Table]:
    """A table for each case: a row for each form."""
    tables: dict[str, Table] = {}
    for case in dict.fromkeys(case for case, _, _ in found):
        forms = dict.fromkeys(form for at, form, _ in found if at == case)
        passes = dict.fromkeys(which for at, _, which in found if at == case)
        titles, rows = ["form"], [[form] for form in forms]
        for which in passes:
            bounds = [found[case, form, which].get("bound") for form in forms]
            bound = next((f"{b / 1e9:.2f}" for b in bounds if b), "-")
            titles += [
                f"{which if which == 'forward' else 'forward and backward'}, ms",
                "exposed",
                f"GB sent (bound {bound})",
                "HBM, GiB",
            ]
            for row, form in zip(rows, forms, strict=True):
                record = found[case, form, which]
                row += _cells(record) if "total" in record else ["failed", "", "", ""]
        tables[case] = Table(titles, rows)
    return tables


def time_on_cpu(rounds: int) -> list[dict[str, Any]]:
    """Runs moe_cpu.py, which prints a line a case, and returns its records."""
    command = [sys.executable, str(FOLDER / "moe_cpu.py"), str(rounds)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    records: list[dict[str, Any]] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as worker:
        for line in worker.stdout or ():
            records.append(json.loads(line))
            print(f"  {cpu_table(records[-1:]).rows[0]}", flush=True)
    if worker.returncode:
        raise RuntimeError(f"moe_cpu.py ended with {worker.returncode}")
    return records


def cpu_table(records: Sequence[dict[str, Any]]) -> Table:
    """Medians of paired ratios to the matmuls alone."""
    titles = ["case", "matmuls alone, ms", *records[0]["ratios"]]
    rows = [
        [
            r["case"],
            f"{r['matmuls'] * 1e3:.0f}",
            *(f"{ratio:.2f}" for ratio in r["ratios"].values()),
        ]
        for r in records
    ]
    return Table(titles, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    from moe_worker import CASES, FORMS

    parser = argparse.ArgumentParser(prog="moe", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"numbers from 0 to {len(CASES) - 1} (default: all)")
    parser.add_argument("--forms", help=f"some of: {'; '.join(FORMS)} (default: all)")
    parser.add_argument("--forward", action="store_true", help="compile the forward alone too")
    parser.add_argument("--part", choices=("compiled", "cpu"), help="only one (default: both)")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="compiling processes"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of timing on CPU")
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")
    args = parser.parse_args(argv)
    args.some = args.cases is not None or args.forms is not None
    numbers = range(len(CASES)) if args.cases is None else args.cases.split(",")
    names = {str(number): case for number, case in enumerate(CASES)}
    if wrong := [number for number in map(str, numbers) if number not in names]:
        parser.error(f"--cases has {wrong[0]!r}; choose from 0 to {len(CASES) - 1}")
    args.names = [names[str(number)] for number in numbers]
    args.forms = list(FORMS) if args.forms is None else args.forms.split(";")
    if wrong := [form for form in args.forms if form not in FORMS]:
        parser.error(f"--forms has {wrong[0]!r}; choose from {'; '.join(FORMS)}")
    for name in ("jobs", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    readme = FOLDER / "README.md"
    everything: dict[str, Any] = {}
    if args.part != "cpu":
        start = time.perf_counter()
        passes = ("forward", "gradients") if args.forward else ("gradients",)
        found = compile_all(args.names, args.forms, passes, args.jobs)
        print(f"{time.perf_counter() - start:.0f} s in all, {args.jobs} processes at a time")
        everything["compiled"] = [
            {"case": c, "form": f, "pass": p, **record} for (c, f, p), record in found.items()
        ]
        tables = compiled_tables(found)
        for case, table in tables.items():
            print(case)
            print_table(table, width=140)
        text = "\n\n".join(f"{case}:\n\n{table.markdown()}" for case, table in tables.items())
        if not args.some:
            readme.write_text(rewrite(readme.read_text(), COMPILED, text))
    if args.part != "compiled" and not args.some:
        records = time_on_cpu(args.rounds)
        everything["cpu"] = records
        print_table(cpu_table(records), width=140)
        readme.write_text(rewrite(readme.read_text(), CPU, cpu_table(records).markdown()))
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
