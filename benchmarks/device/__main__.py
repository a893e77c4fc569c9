"""Checks jaxpar on one GPU, in at most six minutes; without a GPU, says what it would do.

    python benchmarks/device [--json FOLDER] [--minutes 6] [--parts values,traces]
        [--cases TEXT,...] [--target h100:1] [--measured FILE.json]

Values of experts, attention and layers against NumPy; compiler options; steps whose traces are read
beside their predictions; matrix products, passes over memory and experts by the profiler, beside
what XLA's tables and jaxpar's model predict. It needs jaxpar and jax[cuda13] alone. Results are
written after each part: a run that is cut off keeps what it has. Without a GPU it checks the values
on the CPU, and compiles and predicts the rest for a described GPU (which takes the compiler of
`pip install 'jaxpar[gpu]'`); with --measured beside what an earlier run measured.
"""

import argparse
import faulthandler
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

import jaxpar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from device.clock import Clock
from device.parts import PARTS, Check, said
from device.results import CLASS_TITLES, TITLES, Results, Row, aligned, line, measured_in
from jaxpar import make_mesh
from jaxpar.choose.tuning import versions
from jaxpar.schedule import Target, target
from jaxpar.tools.timeline.cuda_plugin import find_plugin, slug

MARGIN = 0.06  # of the time, which no part has: it is for the last case of the last part
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check: 0 if nothing was wrong, refused or broken."""
    start, args = time.monotonic(), _arguments(argv)
    faulthandler.dump_traceback_later(60 * args.minutes, exit=True)  # whatever hangs
    try:
        check = _check(args, start)
        for part, (_, run) in PARTS.items():
            if part in check.clock.deadlines:
                _run(part, run, check)
        _close(check)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0 if check.results.is_right else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FOLDER", help="write a file of all results into this folder")
    add("--minutes", type=float, default=6.0, help="at most (default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="default: %(default)s")
    add("--cases", default="", metavar="TEXT,...", help="those with one of these in their names")
    add("--target", default="h100:1", help="described where there is no GPU (default: %(default)s)")
    add("--measured", type=Path, metavar="FILE", help="of an earlier run, to be predicted again")
    args = parser.parse_args(argv)
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown or args.minutes <= 0:
        parser.error(f"--parts are of {', '.join(PARTS)}; --minutes are positive")
    return args


def _check(args: argparse.Namespace, start: float) -> Check:
    """What runs where, and the first lines of the output."""
    device = jax.devices()[0]
    measures = device.platform == "gpu" and args.measured is None
    card, known = device.device_kind, {}
    if args.measured is not None:
        card, known = measured_in(args.measured)
        args.target = f"{slug(card)}:1"
    where = _here() if measures else _described(args.target)
    shares = {part: PARTS[part][0] for part in PARTS if part in args.parts.split(",")}
    now = datetime.now().isoformat(timespec="seconds")
    facts: dict[str, Any] = {
        "date": now,
        "card": card,
        "measures": measures,
        "target": where.name,
        "driver": _driver("driver_version,clocks.max.sm,clocks.max.mem,power.limit", measures),
        "versions": {"jaxpar": jaxpar.__version__, **versions(*PACKAGES)},
    }
    file = args.json and args.json / f"device-{slug(card)}-{now.replace(':', '')}.json"
    results = Results(facts, file)
    found = ", ".join(f"{name} {text}" for name, text in facts["versions"].items())
    print(f"{card}, {now}: {found}. {facts['driver']}".rstrip())
    if not measures:
        print(
            f"No GPU is used here. Values are checked on {device.platform}; what a GPU would be "
            f"timed at is compiled and predicted for {where.name}."
        )
    print(aligned(TITLES))
    clock = Clock(start, (1 - MARGIN) * 60 * args.minutes, shares)
    only = tuple(filter(None, args.cases.split(",")))
    return Check(where, measures, clock, results, _show, known, only)


def _described(name: str) -> Target:
    """A described GPU, or where no compiler for one is installed the devices at hand."""
    if find_plugin() is None:
        print("No CUDA compiler is installed: nothing is predicted.")
        return _here()
    return target(name, "tp=1")


def _here() -> Target:
    """The first device at hand."""
    return replace(target("here"), mesh=make_mesh("tp=1", devices=jax.devices()[:1]))


def _driver(query: str, measures: bool) -> str:
    """What the driver says of the first GPU; nothing where none is measured."""
    if not measures:
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return f"{query}: {done.stdout.strip()}"
    except (OSError, subprocess.TimeoutExpired) as reason:
        return said(reason)


def _run(part: str, run: Any, check: Check) -> None:
    """Runs a part, whatever becomes of it, and writes what there is."""
    begun = time.monotonic()
    results = check.results
    print(f"\n{part}, until {check.clock.deadlines[part] - check.clock.start:.0f} s", flush=True)
    if check.clock.left(part) < 0:
        results.left_out[part] = ["all of it"]
    else:
        try:
            run(check)
        except Exception as reason:
            results.errors[part] = traceback.format_exc()
            print(f"{part} broke off: {said(reason)}", flush=True)
    results.seconds[part] = round(time.monotonic() - begun, 1)
    results.states[part] = _driver("clocks.sm,clocks.mem,power.draw", check.measures)
    if names := results.left_out.get(part):
        print(f"left out, as there was no time: {', '.join(names)}", flush=True)
    results.write()


def _show(row: Row) -> None:
    print(line(row) + ("" if row.is_right else "  <- WRONG"), flush=True)


def _close(check: Check) -> None:
    results = check.results
    classes = results.classes()
    if classes:
        print("\nerrors of predictions, measured ones beside")
        for cells in (CLASS_TITLES, *classes):
            print(f"{cells[0]:34}" + "".join(f"{cell:>9}" for cell in cells[1:]))
    wrong = [row.name for row in results.rows if not row.is_right] + [*results.errors]
    print(f"\n{check.clock.seconds():.0f} s; wrong: {', '.join(wrong) or 'nothing'}")
    results.write()
    if results.file is not None:
        print(results.file)


if __name__ == "__main__":
    sys.exit(main())
