"""`auto` against its strongest peers over hundreds of matmuls, the losers first.

    python benchmarks/sweep [--points N] [--ways] [--jobs 2] [--json F]
    python benchmarks/sweep --fit

Compiles every form of matmul over slices of four TPU generations, rows from 256 to 65536 and rings
of 4, 8 and 16, forward and with strict gradients, with the chip's compiler options and without; and
rewrites the summary of README.md. With --fit the summary is of kept times, and `auto` is decided
anew. Each program is compiled once, and kept in the user's folder for caches: a change of the model
plays it again. What was found is kept in benchmarks/sweep/.cache, so that a run that was stopped
goes on where it was. With --points, some are shown and nothing is rewritten.
Nothing runs: what is compared is the compiler's schedule on a model of the chips.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from sweep import times
from sweep.points import Point, point_from, points
from sweep.worker import PEERS
from tables import Table, made_by, rewrite, update
from workers import records_of, require_positive, write_json

FOLDER = Path(__file__).parent
CACHE, README, SECTION = FOLDER / ".cache" / "found.jsonl", FOLDER / "README.md", "sweep"
BATCH = 8  # points of one process
MOST = 1.02  # what `auto` may take of the best peer

Found = dict[Point, dict[str, dict[str, Any]]]  # by point and form


def compile_all(chosen: Sequence[Point], ways: bool, jobs: int) -> Found:
    """Has processes serve the points, in batches of one slice, and keeps what they find."""
    CACHE.parent.mkdir(exist_ok=True)
    by_slice: dict[str, list[Point]] = {}
    for point in chosen:
        by_slice.setdefault(point.slice, []).append(point)
    batches = [
        some[start : start + BATCH]
        for some in by_slice.values()
        for start in range(0, len(some), BATCH)
    ]
    found: Found = {}

    def keep(record: dict[str, Any]) -> None:
        if "point" not in record:
            return
        point = point_from(record.pop("point"))
        forms = found.setdefault(point, {})
        best = forms.get(record["form"])  # of two layouts of the plain jit
        if best is None or record.get("total", 1e9) < best.get("total", 1e9):
            forms[record["form"]] = record
        if "key" in record:
            figures = {k: v for k, v in record.items() if k not in ("form", "key")}
            with CACHE.open("a") as file:
                file.write(json.dumps([record["key"], figures]) + "\n")

    def serve(batch: list[Point]) -> None:
        task = {"points": [p.record() for p in batch], "ways": ways, "cache": str(CACHE)}
        records, seconds = records_of("sweep.worker", task, tell=keep)
        failed = [record["failure"] for record in records if "failure" in record]
        print(f"  {seconds:5.0f} s  {batch[0].slice}, {len(batch)} points {failed[:1] or ''}",
              flush=True)  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(serve, batches))
    return found


def ratio(forms: dict[str, dict[str, Any]], others: Sequence[str]) -> tuple[float, str]:
    """The time of `auto` over that of the best of the others, and which that is."""
    times = {name: forms[name]["total"] for name in others if "total" in forms.get(name, {})}
    if "total" not in forms.get("auto", {}) or not times:
        return float("inf"), "failed"
    best = min(times, key=lambda name: times[name])
    return forms["auto"]["total"] / times[best], best


def _seconds(forms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The seconds of forms, those of `auto` by what it has taken, too."""
    found = {form: record["total"] for form, record in forms.items() if "total" in record}
    if "auto" in found and "taken" in forms["auto"]:
        found.setdefault(forms["auto"]["taken"], found["auto"])
    return found


def losers(found: Found) -> Table:
    """The points at which `auto` is behind a peer by more than it may be, the worst first."""
    rows: list[tuple[float, list[str]]] = []
    for point, forms in found.items():
        over, best = ratio(forms, PEERS)
        if over > MOST:
            auto = forms.get("auto", {})
            shown = f"{auto['total'] * 1e6:.0f}" if "total" in auto else auto.get("failure", "-")
            rows.append((over, [point.label, shown, best, f"{over:.2f}"]))
    rows.sort(key=lambda row: -row[0])
    return Table(["point", "auto, us", "best peer", "auto / best"], [row for _, row in rows])


def summary(found: Found) -> Table:
    """A row for each slice: how `auto` stands against peers, with and without options."""
    slices: dict[str, dict[str, list[float]]] = {}
    for point, forms in found.items():
        passes = ("gradients" if point.grad else "forward") + ", no options" * (not point.options)
        of = slices.setdefault(point.slice, {}).setdefault(passes, [])
        of.append(ratio(forms, PEERS)[0])
    titles = ["forward", "gradients", "forward, no options", "gradients, no options"]
    rows = [
        [chips, *(_mean(of.get(passes, [])) for passes in titles)]
        for chips, of in sorted(slices.items())
    ]
    return Table(["slice", *titles], rows)


def _mean(ratios: Sequence[float]) -> str:
    """The geometric mean, and of how many."""
    return f"{exp(mean(map(log, ratios))):.2f} ({len(ratios)})" if ratios else ""


def show(found: Found, command: str) -> None:
    """Shows the losers and the summary, and rewrites README.md, if a command is to stand there."""
    behind, table = losers(found), summary(found)
    behind.print(width=140)
    table.print(width=140)
    if command:
        parts = [
            made_by(command, "libtpu"),
            "Time of `auto` over the best peer's, geometric mean (points):",
            table.markdown(),
            f"All points above {MOST} of the best peer's time:",
            behind.markdown(),
        ]
        update(README, SECTION, "\n\n".join(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, metavar="N", help="the first N (default: all)")
    parser.add_argument("--slices", help="of these alone, such as v5p:8x8x8,v6e:2x4")
    parser.add_argument(
        "--ways", action="store_true", help="all that auto chooses from, too; kept in times/"
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the model's numbers to times/; compiles nothing"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")
    args = parser.parse_args(argv)
    require_positive(parser, args, "jobs")
    if args.fit:
        from sweep.fit import cases_of, fit, standing

        if not times.here().exists():
            parser.error(
                f"there is no {times.here()}: compile with --ways, or install its versions"
            )
        kept = times.read(times.here())
        fit(cases_of(kept)).print(width=120)
        show(standing(kept), "python benchmarks/sweep --fit")
        return 0
    some = args.points is not None or args.slices is not None
    if not some:
        rewrite(README.read_text(), SECTION, "")  # before hours of work: it has the markers
    chosen = [p for p in points() if args.slices is None or p.slice in args.slices.split(",")]
    found = compile_all(chosen[: args.points], args.ways, args.jobs)
    if args.ways:
        times.write(times.here(), {point: _seconds(forms) for point, forms in found.items()})
    write_json(args.json, [{**p.record(), "forms": forms} for p, forms in found.items()])
    command = "python benchmarks/sweep" + (" --ways" if args.ways else "")
    show(found, "" if some else command)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
