"""What the options of the commands have in common: their help, their meaning, their refusals."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.tools.cli.console import UsageError, require_extra
from jaxpar.tools.cli.ops import DEFAULT_OPS, OPS, Op, Ring, Shape

DTYPES = ("float32", "bfloat16", "float16")

Add = Callable[..., Any]  # `add_argument` of a parser, or of a group of its arguments


def add_command(commands: Any, name: str, help: str, description: str, epilog: str) -> Any:
    """Adds a subcommand, whose description and epilog are shown as they are."""
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_operations(add: Add, shapes: str) -> None:
    """Adds which matmuls, and of what sizes; both are None where the default is to be taken."""
    default = ",".join(DEFAULT_OPS)
    add("--ops", help=f"operations, or 'all': {', '.join(OPS)} (default: {default})")
    add("--shapes", help=f"global sizes MxKxN of lhs[M, K] @ rhs[K, N] (default: {shapes})")


def add_dtype(add: Add, default: str) -> None:
    """Adds the dtype of the operands; None where the default is to be taken."""
    add("--dtype", help=f"{', '.join(DTYPES)} (default: {default})")


def add_mesh(add: Add) -> None:
    """Adds the mesh, and which of its axes are the ring."""
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for what is left of the devices (default: %(default)s)",
    )
    add("--axis", help="axis of the ring, or several as in dp,tp (default: the mesh's last axis)")


def add_function_arguments(add: Add) -> None:
    """Adds the arguments of a `module:function`."""
    add(
        "--args",
        nargs="+",
        default=[],
        metavar="ARG",
        help="its arguments, as dtype[shape]@axes: one entry a dimension, - for none, dp+tp for "
        "several; without them the function is called with the mesh and returns (function, args)",
    )


def add_compiler_options(add: Add) -> None:
    """Adds what the compiler is told."""
    add(
        "--compiler-options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="besides those of jaxpar.compiler_options; none in front of them: in place of those",
    )


def add_cache(add: Add) -> None:
    """Adds whether programs are taken that were compiled before."""
    add("--no-cache", action="store_true", help="do not use compiled programs of earlier calls")


def add_processes(add: Add) -> None:
    """Adds what several processes of one run must know of each other."""
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, the same for all")
    add("--process-id", type=int, metavar="I", help="0 to N-1; only process 0 reports")
    add("--num-processes", type=int, metavar="N", help="processes in all")


def parse_ops(text: str) -> list[Op]:
    """Returns the operations named in a list with commas."""
    if text == "all":
        return list(OPS.values())
    return [OPS[name] for name in parse_names("--ops", text, OPS, more="; or write all")]


def parse_names(option: str, text: str, known: Collection[str], more: str = "") -> list[str]:
    """Returns the names in a list with commas, each once; `more` ends the error's text."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} is not among {', '.join(known)}{more}")
    return names


def parse_dtype(name: str) -> str:
    """Returns the name of a dtype that operands can have."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r} is not among {', '.join(DTYPES)}")
    return name


def parse_shapes(text: str) -> list[Shape]:
    """Returns M, K, N of each shape in a list with commas."""
    return [_parse_shape(shape) for shape in text.split(",")]


def _parse_shape(text: str) -> Shape:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--shapes {text!r} is not MxKxN, three positive integers such as 1024x4096x256"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def parse_ring(axis: str | None, mesh: Mesh) -> Ring:
    """Returns the axes of the ring, the mesh's last one where none is named."""
    ring = tuple(axis.split(",")) if axis else (mesh.axis_names[-1],)
    if len(set(ring)) != len(ring) or not set(ring) <= set(mesh.axis_names):
        raise UsageError(
            f"--axis {axis} must name distinct axes of the mesh, which has "
            f"{', '.join(mesh.axis_names)}"
        )
    return ring


def mesh_error(mesh: str, reason: Exception, left: str = "what the other axes leave") -> str:
    """Says why `make_mesh` refuses the text of `--mesh`, and what a size of -1 takes."""
    # What follows the semicolon is a remedy for who calls make_mesh, which is not who reads it.
    said = str(reason).removeprefix("make_mesh: ").partition("; ")[0]
    return f"--mesh {mesh}: {said}; a size of -1 takes {left}"


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


def require_reportable(args: argparse.Namespace, files: Sequence[str]) -> None:
    """Raises `UsageError` where a report could not be written once everything is done."""
    require_extra("rich.console")
    require_folders(args, files)
    if args.plot:
        figures = require_extra("matplotlib.backend_bases").FigureCanvasBase
        kinds = figures.get_supported_filetypes()
        if Path(args.plot).suffix.removeprefix(".") not in kinds:
            raise UsageError(f"--plot {args.plot} must end in one of .{', .'.join(kinds)}")


def require_folders(args: argparse.Namespace, files: Sequence[str]) -> None:
    """Raises `UsageError` where a file cannot be written because of its folder."""
    for option in files:
        path = getattr(args, option.replace("-", "_"))
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{option} {path}: its directory does not exist; make it first")
        if path and Path(path).is_dir():
            raise UsageError(f"--{option} {path} must be a file, got a directory")
