"""`jaxpar bench`: its arguments, and the run from them to the report."""

import argparse
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jaxpar
from jaxpar.bench._errors import UsageError
from jaxpar.bench._measure import PHASES, Refusal, Row, measure
from jaxpar.bench._ops import DEFAULT_OPS, OPS, Op, Ring, Shape
from jaxpar.bench._plot import write_plot
from jaxpar.bench._problem import make_problem
from jaxpar.bench._report import Run, print_header, print_table, require_extra, write_json
from jaxpar.bench._start import start_jax

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_SHAPES = "1024x4096x256,2048x2048x2048"

_DESCRIPTION = """\
Times the overlapped matmuls on the devices present: the naive form (XLA's own collective beside one
matmul) against the ring that sends one way and the ring that sends both ways.

Each result is first checked against a float64 reference; a case with a wrong result is not timed
and ends the command with status 1. The modes then take turns, round by round, forward and
forward+backward, the gradients being those of both operands.
"""
_EPILOG = """\
reading the table:
  ms         median time of a call, in milliseconds, of process 0
  ratio      median over the rounds of the time divided by that of naive in the same round
  quartiles  25% and 75% of those ratios
  temp MiB   temporary memory a device needs (memory_analysis of the compiled program)
  sent MiB   what a device sends in one call; XLA's collectives as rings of least traffic
Along mesh axes outside the ring everything is replicated: each ring does the same work.

examples:
  python -m jaxpar bench
  python -m jaxpar bench --ops scatter-rows,all-reduce --shapes 4096x4096x4096 --dtype bfloat16
  python -m jaxpar bench --mesh dp=2,tp=4 --json bench.json --plot bench.png
two processes, of four CPU devices each where there are no others:
  python -m jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 0 &
  python -m jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 1
"""


def add_parser(commands: Any) -> None:
    """Adds `bench` to the subcommands of `python -m jaxpar`."""
    parser = commands.add_parser(
        "bench",
        help="time the overlapped matmuls against the naive ones",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--ops",
        default=",".join(DEFAULT_OPS),
        help=f"operations, or 'all': {', '.join(OPS)} (default: %(default)s)",
    )
    add(
        "--shapes",
        default=DEFAULT_SHAPES,
        help="global sizes MxKxN of lhs[M, K] @ rhs[K, N] (default: %(default)s)",
    )
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for what is left of the devices (default: %(default)s)",
    )
    add("--axis", help="axis of the ring, or several as in dp,tp (default: the mesh's last axis)")
    add("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: %(default)s)")
    add(
        "--repeats",
        type=int,
        default=20,
        help="rounds of forward; forward+backward gets half (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write everything that was measured, all times included")
    add("--plot", metavar="FILE.png", help="draw the ratios")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    add("--process-id", type=int, metavar="I", help="0 to N-1; only process 0 reports")
    add("--num-processes", type=int, metavar="N", help="processes in all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit status."""
    try:
        return _run(args)
    except UsageError as reason:
        print(f"jaxpar bench: error: {reason}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    # All that can be refused is refused before the minutes of measuring.
    ops, shapes = _parse_ops(args.ops), [_parse_shape(text) for text in args.shapes.split(",")]
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype!r} is not among {', '.join(DTYPES)}")
    if args.repeats < 1:
        raise UsageError(f"--repeats {args.repeats} is not positive")
    process_id, num_processes = _parse_processes(args)
    reports = process_id == 0
    if reports:
        _require_writable(args)
    with start_jax(args.coordinator, process_id, num_processes):
        mesh, ring = _make_mesh(args.mesh, args.axis)
        for op in ops:
            for shape in shapes:
                op.require_fit(shape, mesh, ring)
        device = mesh.devices.flat[0]
        facts = Run(
            device_kind=device.device_kind,
            platform=device.platform,
            devices=mesh.size,
            processes=num_processes,
            mesh=dict(mesh.shape),
            ring=list(ring),
            dtype=args.dtype,
            repeats=dict(zip(PHASES, (args.repeats, (args.repeats + 1) // 2), strict=True)),
        )
        console = _console() if reports else None
        if console:
            print_header(facts, console)
        rows, refusals = _measure_all(ops, shapes, mesh, ring, facts, reports)
    if console and rows:
        print_table(rows, console)
    if reports and args.json:
        write_json(args.json, facts, rows, refusals)
    if reports and args.plot and rows:
        write_plot(args.plot, facts, rows)
    for refusal in refusals if reports else ():
        print(f"jaxpar bench: error: {refusal}", file=sys.stderr)
    return 1 if refusals else 0


def _measure_all(
    ops: list[Op], shapes: list[Shape], mesh: Mesh, ring: Ring, facts: Run, reports: bool
) -> tuple[list[Row], list[Refusal]]:
    rows: list[Row] = []
    refusals: list[Refusal] = []
    rounds = sum(facts.repeats.values()) + len(PHASES)
    with _progress(len(ops) * len(shapes) * rounds, reports) as advance:
        for shape in shapes:
            problem = make_problem(shape, facts.dtype)
            for op in ops:
                for phase in PHASES:

                    def tick(label: str = f"{op.name} {problem.label} {phase}") -> None:
                        advance(label)

                    done = measure(op, problem, phase, mesh, ring, facts.repeats[phase], tick)
                    rows += done[0]
                    refusals += done[1]
    return rows, refusals


def _console(stderr: bool = False) -> Any:
    rich = require_extra("rich.console")
    console = rich.Console(stderr=stderr)
    # A pipe has no width of its own; COLUMNS, where set, is what the user wants.
    return console if console.is_terminal or "COLUMNS" in os.environ else rich.Console(width=100)


@contextmanager
def _progress(total: int, shown: bool) -> Generator[Callable[[str], None], None, None]:
    if not shown:
        yield lambda label: None
        return
    console = _console(stderr=True)
    with require_extra("rich.progress").Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("compiling and checking", total=total)
        yield lambda label: progress.update(task, advance=1, description=label)


def _parse_ops(text: str) -> list[Op]:
    names = list(OPS) if text == "all" else text.split(",")
    for name in names:
        if name not in OPS:
            raise UsageError(f"--ops {name!r} is not among {', '.join(OPS)}; or write all")
    return [OPS[name] for name in dict.fromkeys(names)]


def _parse_shape(text: str) -> Shape:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--shapes {text!r} is not MxKxN, three positive integers such as 1024x4096x256"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def _parse_processes(args: argparse.Namespace) -> tuple[int, int]:
    given = {
        "--coordinator": args.coordinator,
        "--process-id": args.process_id,
        "--num-processes": args.num_processes,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return 0, 1
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} missing; several processes need all of {', '.join(given)}"
        )
    if not 0 <= args.process_id < args.num_processes:
        raise UsageError(
            f"--process-id {args.process_id} is not in 0 to {args.num_processes - 1}, "
            f"one for each of --num-processes {args.num_processes}"
        )
    return args.process_id, args.num_processes


def _require_writable(args: argparse.Namespace) -> None:
    require_extra("rich.console")
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{option} {path}: its directory does not exist")
    if args.plot:
        figures = require_extra("matplotlib.backend_bases").FigureCanvasBase
        kinds = figures.get_supported_filetypes()
        if Path(args.plot).suffix.removeprefix(".") not in kinds:
            raise UsageError(f"--plot {args.plot} does not end in one of .{', .'.join(kinds)}")


def _make_mesh(axes: str, axis: str | None) -> tuple[Mesh, Ring]:
    try:
        mesh = jaxpar.make_mesh(axes)
    except ValueError as reason:
        # What follows the semicolon is a remedy for who calls make_mesh, which is not who reads it.
        text = str(reason).removeprefix("make_mesh: ").partition("; ")[0]
        raise UsageError(
            f"--mesh {axes}: {text}; a size of -1 takes the {jax.device_count()} devices that the "
            "other axes leave"
        ) from None
    ring = tuple(axis.split(",")) if axis else (mesh.axis_names[-1],)
    if len(set(ring)) != len(ring) or not set(ring) <= set(mesh.axis_names):
        raise UsageError(
            f"--axis {axis} must name distinct axes of the mesh, which has "
            f"{', '.join(mesh.axis_names)}"
        )
    return mesh, ring
