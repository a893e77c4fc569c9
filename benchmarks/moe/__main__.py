"""Layers of experts as both compilers schedule them, next to their peers, and on CPU by the clock.

    python benchmarks/moe [--cases 0,3] [--forms "jaxpar ragged;dense"] [--part compiled|cpu]
        [--forward] [--jobs 2] [--rounds 5] [--json F]

Compiles one layer of published models, forward and backward, for TPUs and GPUs that need not
be there, in jaxpar's forms and in those of peers.py (worker.py says more); times the layer on 8 CPU
devices against matmuls alone (cpu.py); and rewrites the tables of README.md. With --cases or
--forms, some are shown and nothing is rewritten.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from moe.worker import CASES, FORMS
from tables import Table, made_by, rewrite, update
from workers import add_arguments, choose, records_of, require_positive, run_all, write_json

README = Path(__file__).with_name("README.md")
COMPILED, CPU = "experts compiled", "experts on CPU"
Found = dict[tuple[str, str, str], dict[str, Any]]  # by case, form and pass


def compile_one(task: tuple[str, str, str]) -> dict[str, Any]:
    """Returns the record of one form of one case, or why there is none."""
    records, spent = records_of("moe.worker", task)
    shown = " | ".join(_cells(records[-1]))
    print(f"  {spent:5.0f} s  {', '.join(task)}: {shown}", flush=True)
    return records[-1]


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
                why = "out of memory" if "memory" in record.get("failure", "") else "failed"
                row += _cells(record) if "total" in record else [why, "", "", ""]
        tables[case] = Table(titles, rows)
    return tables


def time_on_cpu(rounds: int) -> list[dict[str, Any]]:
    """Has a process with 8 CPU devices time the layer; returns a record a case."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

    def tell(record: dict[str, Any]) -> None:
        print(f"  {cpu_table([record]).rows[0]}", flush=True)

    records, _ = records_of("moe.cpu", rounds, environment, tell)
    if "failure" in records[-1]:
        raise RuntimeError(records[-1]["failure"])
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
    parser = argparse.ArgumentParser(prog="moe", description=__doc__.splitlines()[0])
    known = {str(number): case for number, case in enumerate(CASES)}
    add_arguments(parser, list(known))
    parser.add_argument("--forms", help=f"some of: {';'.join(FORMS)} (default: all)")
    parser.add_argument("--forward", action="store_true", help="compile the forward alone too")
    parser.add_argument("--part", choices=("compiled", "cpu"), help="only one (default: both)")
    parser.add_argument("--rounds", type=int, default=7, help="of timing on CPU")
    args = parser.parse_args(argv)
    args.some = args.cases is not None or args.forms is not None
    args.names = choose(parser, "--cases", args.cases, known)
    args.forms = choose(parser, "--forms", args.forms, {form: form for form in FORMS}, ";")
    require_positive(parser, args, "jobs", "rounds")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    for section in (COMPILED, CPU):
        rewrite(README.read_text(), section, "")  # before minutes of work: it has the markers
    everything: dict[str, Any] = {}
    if args.part != "cpu":
        passes = ("forward", "gradients") if args.forward else ("gradients",)
        tasks = list(product(args.names, args.forms, passes))
        found: Found = run_all(compile_one, tasks, args.jobs)
        everything["compiled"] = [
            {"case": c, "form": f, "pass": p, **record} for (c, f, p), record in found.items()
        ]
        tables = compiled_tables(found)
        for case, table in tables.items():
            print(case)
            table.print(width=140)
        if not args.some:
            line = made_by("python benchmarks/moe", "libtpu", "jax-cuda13-pjrt")
            parts = [f"{case}:\n\n{table.markdown()}" for case, table in tables.items()]
            update(README, COMPILED, "\n\n".join([line, *parts]))
    if args.part != "compiled" and not args.some:
        everything["cpu"] = time_on_cpu(args.rounds)
        table = cpu_table(everything["cpu"])
        table.print(width=140)
        line = made_by(f"python benchmarks/moe --part cpu --rounds {args.rounds}")
        update(README, CPU, f"{line}\n\n{table.markdown()}")
    write_json(args.json, everything)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
