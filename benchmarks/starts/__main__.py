"""What becomes of JAX's explicit starts of transfers on each chip: what overlaps, what does not.

    python benchmarks/starts [--cases v5p,v6e] [--jobs 2] [--json F]

Compiles each start of `jax.lax` (and those that stand beside them in JAX and are not exported yet)
with a matmul between it and its done, for chips that need not be there, each in a process of its
own, since some abort the compiler; and rewrites the tables of README.md. With --cases, some chips
are shown and nothing is rewritten. Nothing runs: what is looked at is the compiler's schedule.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from starts.worker import CALLS, exported
from tables import Table, made_by, rewrite, update
from workers import add_arguments, choose, records_of, require_positive, run_all, write_json

README = Path(__file__).with_name("README.md")
SECTION = "starts"
# By title: a slice, and whether it has the options of `jaxpar.compiler_options`.
CHIPS = {
    "v4": ("v4:2x2x1", True),
    "v5e": ("v5e:2x2", True),
    "v5p": ("v5p:2x2x1", True),
    "v5p, no options": ("v5p:2x2x1", False),
    "v6e": ("v6e:2x2", True),
    "v6e, no options": ("v6e:2x2", False),
    "tpu7x": ("tpu7x:2x2x1", True),
    "H100": ("h100:8", True),
    "B200": ("b200:8", True),
}
Task = tuple[str, str, bool]  # a chip, a call, whether the program's order is enforced
Found = dict[Task, dict[str, Any]]


def compile_one(task: Task) -> dict[str, Any]:
    """Returns what became of one start."""
    chip, call, ordered = task
    records, spent = records_of("starts.worker", [*CHIPS[chip], call, ordered])
    print(f"  {spent:5.0f} s  {chip}, {call}: {cell(records[-1])}", flush=True)
    return records[-1]


def cell(record: dict[str, Any]) -> str:
    """In a word or two."""
    if failure := record.get("failure"):
        return "**crashes**" if failure.startswith("its process") else "refused"
    if not record["found"]:
        return f"becomes {', '.join(record['kinds']) or 'nothing'}"
    if record["synchronous"]:
        return "synchronous"
    return "overlaps" if record["covers"] else "nothing beside it"


def table(found: Found, ordered: bool) -> Table:
    """One row a call, one column a chip."""
    chips = list(dict.fromkeys(chip for chip, _, _ in found))
    public = exported()
    rows = [
        [
            f"`{call}`" + ("" if call in public else " (not exported)"),
            *(cell(found[chip, call, ordered]) for chip in chips),
        ]
        for call in CALLS
    ]
    return Table(["start", *chips], rows)


def failures(found: Found) -> list[str]:
    """What compilers said of programs that they refuse, once each."""
    said = {
        f"- `{call}`: {record['failure']}": None
        for (_, call, _), record in found.items()
        if cell(record) == "refused"
    }
    return list(said)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="starts", description=__doc__.splitlines()[0])
    known = {title.replace(", ", "-").replace(" ", "-"): title for title in CHIPS}
    add_arguments(parser, list(known))
    args = parser.parse_args(argv)
    args.chips = choose(parser, "--cases", args.cases, known)
    require_positive(parser, args, "jobs")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    args = parse(argv)
    if not exported():
        print("starts: this JAX has no explicit starts; they came with jax 0.12", file=sys.stderr)
        return 1
    if args.cases is None:
        rewrite(README.read_text(), SECTION, "")  # before minutes of work: it has the markers
    tasks = list(product(args.chips, CALLS, (True, False)))
    found: Found = run_all(compile_one, tasks, args.jobs)
    write_json(args.json, [{"task": task, **record} for task, record in found.items()])
    shown = {
        "With `program_order(enforce=True)`:": table(found, ordered=True),
        "Without `program_order`:": table(found, ordered=False),
    }
    for title, one in shown.items():
        print(title)
        one.print(width=160)
    print("\n".join(failures(found)))
    if args.cases is None:
        line = made_by("python benchmarks/starts", "libtpu", "jax-cuda13-pjrt")
        parts = [f"{title}\n\n{one.markdown()}" for title, one in shown.items()]
        update(README, SECTION, "\n\n".join([line, *parts, "\n".join(failures(found))]).strip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
