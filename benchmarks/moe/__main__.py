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

from moe.worker import CASES, FORMS, PASSES
from tables import Table, made_by, rewrite, update
from workers import add_arguments, choose, records_of, require_positive, run_all, write_json

README = Path(__file__).with_name("README.md")
COMPILED, CPU = "experts compiled", "experts on CPU"
SHOWN = tuple(form for form in FORMS if form != "dense")  # the slowest, or out of memory
WITH_MEMORY = "DeepSeek-V3"  # the model that has a table of it
Found = dict[tuple[str, str, str], dict[str, Any]]  # by case, form and pass


def compile_one(task: tuple[str, str, str]) -> dict[str, Any]:
    """Returns the record of one form of one case, or why there is none."""
    records, spent = records_of("moe.worker", task)
    shown = records[-1].get("failure") or f"{_time(records[-1])}, {_memory(records[-1])}"
    print(f"  {spent:5.0f} s  {', '.join(task)}: {shown}", flush=True)
    return records[-1]


def _time(record: dict[str, Any]) -> str:
    """Milliseconds, and what of them is exposed."""
    if "total" not in record:
        return "out of memory" if "memory" in record.get("failure", "") else "failed"
    about, loops = "~" * (record["estimate"] == "roofline"), "?" * bool(record["unknown loops"])
    exposed = record["exposed"] / record["total"]
    return f"{about}{record['total'] * 1e3:.2f}{loops} ({exposed:.1%})"


def _memory(record: dict[str, Any]) -> str:
    """GB sent, and GiB of HBM."""
    return f"{record['sent'] / 1e9:.2f}, {record['peak'] / 2**30:.2f}" if "total" in record else ""


def compiled_tables(found: Found) -> list[Table]:
    """Tables for each model: a row for each form that is not like one above, a column a slice."""
    models: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for (case, form, which), record in found.items():
        model, _, chips = case.partition(", ")
        forms = models.setdefault(model + ", forward" * (which == "forward"), {})
        forms.setdefault(form, {})[chips] = record
    tables: list[Table] = []
    for model, forms in models.items():
        chips = list(next(iter(forms.values())))
        kinds = {"ms (exposed)": _time}
        if model == WITH_MEMORY:
            kinds["GB sent, GiB of HBM"] = _memory
        for what, cell in kinds.items():
            lines: dict[tuple[str, ...], str] = {}
            for form, records in forms.items():
                lines.setdefault(tuple(map(cell, records.values())), form)
            rows = [[form, *cells] for cells, form in lines.items()]
            if cell is _memory:
                bounds = (CASES[f"{model}, {at}"].bound(passes=2) / 1e9 for at in chips)
                rows.append(["bound", *(f"{bound:.2f}" for bound in bounds)])
            tables.append(Table([f"{model}: {what}", *chips], rows))
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
    parser.add_argument("--forms", help=f"some of: {';'.join(FORMS)} (default: all but dense)")
    parser.add_argument("--forward", action="store_true", help="compile the forward alone too")
    parser.add_argument("--part", choices=("compiled", "cpu"), help="only one (default: both)")
    parser.add_argument("--rounds", type=int, default=7, help="of timing on CPU")
    args = parser.parse_args(argv)
    args.some = args.cases is not None or args.forms is not None
    args.names = choose(parser, "--cases", args.cases, known)
    forms = ";".join(SHOWN) if args.forms is None else args.forms
    args.forms = choose(parser, "--forms", forms, {form: form for form in FORMS}, ";")
    require_positive(parser, args, "jobs", "rounds")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    for section in (COMPILED, CPU):
        rewrite(README.read_text(), section, "")  # before minutes of work: it has the markers
    everything: dict[str, Any] = {}
    if args.part != "cpu":
        passes = PASSES if args.forward else PASSES[1:]
        tasks = list(product(args.names, args.forms, passes))
        found: Found = run_all(compile_one, tasks, args.jobs)
        everything["compiled"] = [
            {"case": c, "form": f, "pass": p, **record} for (c, f, p), record in found.items()
        ]
        tables = compiled_tables(found)
        for table in tables:
            table.print(width=140)
        if not args.some:
            line = made_by("python benchmarks/moe", "libtpu", "jax-cuda13-pjrt")
            update(README, COMPILED, "\n\n".join([line, *(t.markdown() for t in tables)]))
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
