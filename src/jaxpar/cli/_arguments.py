"""The arguments of `jaxpar bench`: what they mean, and what is refused before anything runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxpar.bench._errors import UsageError
from jaxpar.bench._ops import DEFAULT_OPS, OPS, Op, Shape
from jaxpar.bench._report import require_extra

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_SHAPES = "1024x4096x256,2048x2048x2048"

DESCRIPTION = """\
Times the overlapped matmuls on the devices present: the naive form (XLA's own collective beside one
matmul) against the ring that sends one way and the ring that sends both ways.

Each result is first checked against a float64 reference; a case with a wrong result is not timed
and ends the command with status 1. The modes then take turns, round by round, forward and
forward+backward, the gradients being those of both operands.
"""
EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench` to its parser."""
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
        help="rounds of forward; forward+backward gets a third (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write everything that was measured, all times included")
    add("--plot", metavar="FILE.png", help="draw the ratios")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    add("--process-id", type=int, metavar="I", help="0 to N-1; only process 0 reports")
    add("--num-processes", type=int, metavar="N", help="processes in all")


def parse_ops(text: str) -> list[Op]:
    """Returns the operations named in a list with commas."""
    names = list(OPS) if text == "all" else text.split(",")
    for name in names:
        if name not in OPS:
            raise UsageError(f"--ops {name!r} is not among {', '.join(OPS)}; or write all")
    return [OPS[name] for name in dict.fromkeys(names)]


def parse_shapes(text: str) -> list[Shape]:
    """Returns M, K, N of each shape in a list with commas."""
    return [_parse_shape(shape) for shape in text.split(",")]


def parse_processes(args: argparse.Namespace) -> tuple[int, int]:
    """Returns this process and how many there are."""
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


def require_valid(args: argparse.Namespace) -> None:
    """Raises `UsageError` for what needs no devices to be refused."""
    if args.dtype not in DTYPES:
        raise UsageError(f"--dtype {args.dtype!r} is not among {', '.join(DTYPES)}")
    if args.repeats < 1:
        raise UsageError(f"--repeats {args.repeats} is not positive")


def require_reportable(args: argparse.Namespace, files: Sequence[str] = ("json", "plot")) -> None:
    """Raises `UsageError` where a report could not be written once everything is done."""
    require_extra("rich.console")
    for option in files:
        path = getattr(args, option)
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{option} {path}: its directory does not exist")
    if args.plot:
        figures = require_extra("matplotlib.backend_bases").FigureCanvasBase
        kinds = figures.get_supported_filetypes()
        if Path(args.plot).suffix.removeprefix(".") not in kinds:
            raise UsageError(f"--plot {args.plot} does not end in one of .{', .'.join(kinds)}")


def _parse_shape(text: str) -> Shape:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--shapes {text!r} is not MxKxN, three positive integers such as 1024x4096x256"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])
