"""Options that several commands share."""

import argparse
import re
from collections.abc import Callable, Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.tools.cli.console import UsageError, require_extra
from jaxpar.tools.cli.ops import DEFAULT_OPS, OPS, Op, Ring, Shape

DTYPES = ("float32", "bfloat16", "float16")

Add = Callable[..., Any]  # `add_argument` of a parser, or of a group of its arguments


# What the names of operations and modes stand for, in the commands' help.
MEANINGS = """\
operations on lhs[M, K] @ rhs[K, N], with the dimension that is gathered or scattered:
  gather-lhs-rows, gather-lhs-k     all_gather_matmul, M or K of lhs
  gather-rhs-k, gather-rhs-cols     all_gather_matmul, K or N of rhs
  scatter-rows, scatter-cols        matmul_reduce_scatter, M or N of the result
  all-reduce                        matmul_all_reduce
modes:
  naive                             one collective of jax.lax, and one matmul
  stationary                        naive, but the other operand and the result travel
  chunked-2, chunked-4, chunked-8   a collective for each chunk, during another chunk's matmul
  unidirectional, bidirectional     blocks go around a ring in one direction, or in both
  multi-ring                        several rings that share no link
  auto                              the fastest of these, by prediction
"""


def add_operations(add: Add, shapes: str) -> None:
    default = ",".join(DEFAULT_OPS)
    add("--ops", help=f"operations, or 'all': {', '.join(OPS)} (default: {default})")
    add("--shapes", help=f"global sizes MxKxN of lhs[M, K] @ rhs[K, N] (default: {shapes})")


def add_dtype(add: Add, default: str) -> None:
    add("--dtype", help=f"{', '.join(DTYPES)} (default: {default})")


def add_mesh(add: Add) -> None:
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for all devices that are left (default: %(default)s)",
    )
    add("--axis", help="axis of the ring, or several as in dp,tp (default: the mesh's last axis)")


def add_function_arguments(add: Add) -> None:
    add(
        "--args",
        nargs="+",
        default=[],
        metavar="ARG",
        help="its arguments as dtype[shape]@axes: one entry for each dimension, - for no axis, "
        "dp+tp for two axes. Without --args, the function is called with the mesh and returns "
        "(function, args)",
    )


def add_compiler_options(add: Add) -> None:
    add(
        "--compiler-options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options added to those of jaxpar.compiler_options. 'none KEY=VALUE': only these",
    )


def add_cache(add: Add) -> None:
    add("--no-cache", action="store_true", help="compile again, without the cache")


def add_processes(add: Add) -> None:
    add("--coordinator", metavar="HOST:PORT", help="address of process 0, for all processes")
    add("--process-id", type=int, metavar="I", help="this process, 0 to N-1; only 0 reports")
    add("--num-processes", type=int, metavar="N", help="number of processes")


def parse_ops(text: str) -> list[Op]:
    if text == "all":
        return list(OPS.values())
    return [OPS[name] for name in parse_names("--ops", text, OPS, more="; or write all")]


def parse_names(option: str, text: str, known: Collection[str], more: str = "") -> list[str]:
    # Each name counts once. `more` ends the error's text.
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r} is not among {', '.join(known)}{more}")
    return names


def parse_dtype(name: str) -> str:
    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r} is not among {', '.join(DTYPES)}")
    return name


def parse_shapes(text: str) -> list[Shape]:
    return [_parse_shape(shape) for shape in text.split(",")]


def _parse_shape(text: str) -> Shape:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--shapes {text!r} is not MxKxN, three positive integers such as 1024x4096x256"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def parse_ring(axis: str | None, mesh: Mesh) -> Ring:
    ring = tuple(axis.split(",")) if axis else (mesh.axis_names[-1],)
    if len(set(ring)) != len(ring) or not set(ring) <= set(mesh.axis_names):
        raise UsageError(
            f"--axis {axis} must name distinct axes of the mesh, which has "
            f"{', '.join(mesh.axis_names)}"
        )
    return ring


def mesh_error(mesh: str, reason: Exception) -> str:
    said = str(reason).removeprefix("make_mesh: ")
    if match := _MISMATCH.search(said):
        needed, there = map(int, match.groups())
        text = f"--mesh {mesh} takes {needed} devices, but there are {there}"
        return f"{text}; use --mesh {_fitting(mesh, there)}"
    if match := _INDIVISIBLE.search(said):
        said, _, _ = said.partition("; ")
        return f"--mesh {mesh}: {said}; the other sizes must divide {match[1]}"
    return f"--mesh {mesh}: {said}"


# The refusals of make_mesh whose remedy is for its callers, not for users of a command.
_MISMATCH = re.compile(r" = (\d+) devices, but there are (\d+)\b")
_INDIVISIBLE = re.compile(r"which does not divide (\d+) devices")


def _fitting(mesh: str, devices: int) -> str:
    parts = [part.partition("=") for part in mesh.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in parts}
    for name in reversed(sizes):
        others = prod(sizes.values()) // sizes[name]
        if devices % others == 0:
            sizes[name] = devices // others
            break
    else:  # no single size fits: the last axis takes all devices
        sizes = {**dict.fromkeys(sizes, 1), [*sizes][-1]: devices}
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def parse_processes(args: argparse.Namespace) -> tuple[int, int]:
    values = {
        "--coordinator": args.coordinator,
        "--process-id": args.process_id,
        "--num-processes": args.num_processes,
    }
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return 0, 1
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} missing; several processes need all of {', '.join(values)}"
        )
    if not 0 <= args.process_id < args.num_processes:
        raise UsageError(
            f"--process-id {args.process_id} is not in 0 to {args.num_processes - 1}, "
            f"one for each of --num-processes {args.num_processes}"
        )
    return args.process_id, args.num_processes


def require_reportable(args: argparse.Namespace, files: Sequence[str]) -> None:
    """Refuses now what could not be written later."""
    require_extra("rich.console")
    require_folders(args, files)
    if args.plot:
        figures = require_extra("matplotlib.backend_bases").FigureCanvasBase
        kinds = figures.get_supported_filetypes()
        if Path(args.plot).suffix.removeprefix(".") not in kinds:
            raise UsageError(f"--plot {args.plot} must end in one of .{', .'.join(kinds)}")


def require_folders(args: argparse.Namespace, files: Sequence[str]) -> None:
    """Refuses files that their folder makes unwritable."""
    for option in files:
        path = getattr(args, option.replace("-", "_"))
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{option} {path}: its directory does not exist; make it first")
        if path and Path(path).is_dir():
            raise UsageError(f"--{option} {path} must be a file, got a directory")
