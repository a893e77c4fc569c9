"""`jaxpar tune`: finds and saves each call site's fastest algorithm."""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from jaxpar import Tuning
from jaxpar.tools.accuracy.interval import SENTENCE, lines_of
from jaxpar.tools.cli.console import (
    Column,
    UsageError,
    open_console,
    print_error,
    print_rows,
    progress,
    require_extra,
    status_of,
)
from jaxpar.tools.cli.predict_command import FIGURES, parse_requests
from jaxpar.tools.cli.predict_results import Request
from jaxpar.tools.cli.shared_options import (
    add_compiler_options,
    parse_names,
    require_folders,
)
from jaxpar.tools.cli.tune_search import SAME, TriedWay
from jaxpar.tools.cli.tune_worker import HERE
from jaxpar.tools.cli.workers import COMPILING, converse
from jaxpar.tools.toolkit_api import AUTO, NAMED

DESCRIPTION = """\
Tries the algorithms at each call site of jaxpar with mode="auto". It changes one call site and one
pass at a time, and writes the fastest algorithms to a file that the program loads.

With --target, programs are compiled and predicted, as by `jaxpar predict`. The devices need not be
there. Without it, programs are compiled and timed on your devices.
"""
EPILOG = """\
reading the table:
  ms      time of the full program with this algorithm at this site, and the best so far at others
  ratio   that time over the time with auto everywhere
A timed algorithm replaces another if it is 2% faster in two runs, and in three of four rounds of
each. If there is no clear winner, the file says auto.

examples:
  jaxpar tune model:make_step      # called with the mesh, returns (function, args)
  jaxpar tune model:layer --args 'bf16[8192,8192]@tp,-' 'bf16[8192,28672]@-,tp' --grad
  jaxpar tune model:make_step --target v6e:16x16 --mesh dp=64,tp=4 -o v6e.json
and in the program:
  step = jaxpar.jit(step, tuned="tuned.json")    # or: with jaxpar.tuned("tuned.json"): ...
"""

REPEATS, MOST = 20, 200  # rounds of a timing, and programs

_COLUMNS = [
    Column("", 12, left=True),
    Column("algorithm", 14, left=True),
    Column("ms", 10),
    Column("ratio", 7),
    Column("", left=True, wraps=True),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("function", metavar="module:function", help="the program")
    add("--args", nargs="+", default=[], metavar="ARG", help="its arguments, as for predict")
    add("--grad", action="store_true", help="forward and backward, with all gradients")
    add("--target", metavar="CHIP:SLICE", help="as for predict (default: the devices at hand)")
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for all devices that are left (default: %(default)s)",
    )
    add_compiler_options(add)
    add("--figures", default="measured", help=f"{' or '.join(FIGURES)}, as for predict")
    add("--repeats", type=int, default=REPEATS, help="rounds of a timing (default: %(default)s)")
    add(
        "--modes",
        dest="tried",
        metavar="MODES",
        help=f"modes to try besides auto (default: {', '.join(NAMED)})",
    )
    add(
        "--tries",
        type=int,
        default=MOST,
        help="compile at most so many programs (default: %(default)s)",
    )
    add(
        "-o",
        "--output",
        default="tuned.json",
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    # Options of predict that tune does not have.
    others = ("ops", "shapes", "modes", "dtype", "wire_dtype", "axis")
    parser.set_defaults(run=run, jobs=0, **dict.fromkeys(others))


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar tune", partial(_run, args))


@dataclass
class SearchProgress:
    # Its processes may have died.
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tried: list[TriedWay] = field(default_factory=list[TriedWay])
    found: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None
    begun: str = ""

    def take(self, record: Mapping[str, Any], tick: Any) -> None:
        [(kind, said)] = record.items()
        match kind:
            case "facts":
                self.facts = said
            case "begin":
                self.begun = said
            case "tried":
                self._add(TriedWay(**said))
                tick(f"{self.tried[-1].part} {self.tried[-1].way}")
            case "found":
                self.found = said
            case _:
                self.failure = said

    def bury(self, died: str) -> bool:
        """Returns whether the search can go on."""
        site, _, rest = self.begun.partition(" | ")
        part, _, way = rest.partition(" | ")
        again = self.begun in {tried.key for tried in self.tried}
        if way and not again:
            self._add(TriedWay(site, part, way, None, f"failed: the process {died}"))
        else:
            what = f"the process of {self.begun}" if self.begun else "the process"
            self.failure = {"reason": f"{what} {died}", "usage": False}
        return self.failure is None

    def _add(self, tried: TriedWay) -> None:
        if tried.key not in {known.key for known in self.tried}:
            self.tried.append(tried)


def _run(args: argparse.Namespace) -> int:
    require_extra("rich.console")
    require_folders(args, ("output",))
    for option in ("repeats", "tries"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)} is not positive")
    modes = parse_names("--modes", args.tried, NAMED) if args.tried else list(NAMED)
    asked = vars(args) | {"target": args.target or HERE, "no_cache": True}
    requests = parse_requests(argparse.Namespace(**asked))
    if len(requests) > 1:
        raise UsageError(f"--target {args.target} names several; tune for one at a time")
    with progress("auto", None) as tick:
        limits = {"repeats": args.repeats, "tries": args.tries, "modes": modes}
        report = tune(requests[0], limits, tick)
    if report.failure:
        print_error("jaxpar tune", report.failure["reason"])
        return 2 if report.failure["usage"] else 1
    tuning = _tuning(report, args)
    tuning.write(args.output)
    print_report(report, tuning, args.function)
    return 0


def tune(request: Request, limits: Mapping[str, Any], tick: Any) -> SearchProgress:
    # If the other process dies, a new process continues the search.
    report = SearchProgress()
    environment = {} if request.target == HERE else COMPILING
    task = {"request": asdict(request), **limits}
    goes_on = True
    while goes_on:
        task["known"] = [asdict(tried) for tried in report.tried]
        take = partial(report.take, tick=tick)
        died = converse("jaxpar.tools.cli.tune_worker", task, take, environment)
        goes_on = died is not None and report.bury(died)
    return report


def _tuning(report: SearchProgress, args: argparse.Namespace) -> Tuning:
    final = report.found or {}
    before, after = final["before"], final["after"]
    return Tuning(
        name=args.output,
        command=_command(args),
        **report.facts,
        sites=final["sites"],
        clock=final["clock"],
        milliseconds={"auto": _rounded(before), "tuned": _rounded(after)},
        tried={
            site: {
                part: {t.way: t.note if t.seconds is None else _rounded(t.seconds) for t in ways}
                for part, ways in groupby(parts, lambda tried: tried.part)
            }
            for site, parts in groupby(_by_site(report.tried), lambda tried: tried.site)
        },
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds * 1e3:.5g}")


def _by_site(tried: list[TriedWay]) -> list[TriedWay]:
    sites = list(dict.fromkeys(t.site for t in tried))
    parts = list(dict.fromkeys(t.part for t in tried))
    return sorted(tried, key=lambda t: (sites.index(t.site), parts.index(t.part)))


def _command(args: argparse.Namespace) -> str:
    words = ["jaxpar", "tune", args.function]
    words += ["--args", *args.args] if args.args else []
    words += ["--grad"] if args.grad else []
    words += ["--target", args.target] if args.target else []
    words += ["--mesh", args.mesh]
    words += ["--compiler-options", *args.compiler_options] if args.compiler_options else []
    words += ["--figures", args.figures] if args.figures != "measured" else []
    words += ["--modes", args.tried] if args.tried else []
    words += ["--repeats", str(args.repeats)] if args.repeats != REPEATS else []
    words += ["--tries", str(args.tries)] if args.tries != MOST else []
    return shlex.join([*words, "-o", args.output])


def print_report(report: SearchProgress, tuning: Tuning, function: str) -> None:
    console = open_console()
    escape = require_extra("rich.markup").escape
    final = report.found or {}
    auto, best = tuning.milliseconds["auto"], tuning.milliseconds["tuned"]
    mesh = ",".join(f"{name}={size}" for name, size in tuning.mesh.items())
    head = f"{function} | {tuning.device_kind} | mesh {mesh} | {tuning.clock}"
    console.print(f"[bold]{escape(head)}[/]", highlight=False)
    for site, parts in groupby(_by_site(report.tried), lambda tried: tried.site):
        console.print(f"\n[bold]{escape(site)}[/]", highlight=False)
        for part, ways in groupby(parts, lambda tried: tried.part):
            chosen = tuning.sites.get(site, {}).get(part)
            rows = [_cells(tried, chosen, auto) for tried in ways]
            rows[0][0] = f"  {part}"
            print_rows(console, _COLUMNS, rows)
    console.print(
        f"\nfull program: {auto:.3f} ms with auto, {best:.3f} ms tuned ({best / auto:.3f})",
        highlight=False,
    )
    for text in lines_of(final["intervals"]):
        console.print(f"{SENTENCE}: {escape(text)}", highlight=False)
    passes = [tried for tried in report.tried if tried.part == "backward" and tried.way != AUTO]
    if passes and all(tried.note.startswith(SAME) for tried in passes):
        console.print(
            "backward passes stay auto: no algorithm makes a difference. If the program takes no "
            "gradients itself, --grad adds them",
            highlight=False,
        )
    if final["left"]:
        console.print(f"{final['left']} algorithms were not tried: raise --tries", highlight=False)
    console.print(f'use it: jaxpar.jit(..., tuned="{tuning.name}")', highlight=False)


def _cells(tried: TriedWay, chosen: str | None, auto: float) -> list[str]:
    says = "chosen" if tried.way == chosen else tried.note
    if says == "chosen" and tried.part == "row chunks" and tried.way not in (AUTO, "1"):
        says = "chosen: the matmuls of each chunk are naive"
    if tried.seconds is None:
        return ["", tried.way, "", "", says]
    milliseconds = tried.seconds * 1e3
    return ["", tried.way, f"{milliseconds:.3f}", f"{milliseconds / auto:.3f}", says]
