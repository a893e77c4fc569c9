"""The arguments of `jaxpar predict`: what they mean, and what is refused before anything runs."""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpar.bench._arguments import DTYPES, parse_ops, parse_shapes
from jaxpar.bench._errors import UsageError
from jaxpar.bench._ops import DEFAULT_OPS, OPS
from jaxpar.predict._operands import parse_operand
from jaxpar.predict._results import Request
from jaxpar.schedule._gpus import find_plugin

MODES = ("naive", "unidirectional", "bidirectional", "auto")
DEFAULT_SHAPE = "8192x8192x28672"

DESCRIPTION = """\
Compiles the overlapped matmuls, or any function, for TPUs and GPUs that need not be there, and
shows how much of the communication the schedule leaves exposed.

It is the compiler's schedule played on a model of the chip with published figures, not a
measurement.
"""
EPILOG = """\
reading the table:
  total      milliseconds that the schedule takes; ~ marks GPUs, whose times are rooflines
  floor      what no schedule beats: the matmul in one piece, or the bytes alone, the longer one
  ratio      total / floor
  exposed    share of the total in which the device waits for transfers
  HBM        memory that a device needs at most
  order      transfers that run beside other work, and those with a matmul to hide behind

examples:
  python -m jaxpar predict
  python -m jaxpar predict --ops gather-lhs-rows --plot timeline.png --trace trace.json
  python -m jaxpar predict --targets v5p:8x8x8,h100:8 --ops scatter-rows --grad
  python -m jaxpar predict --targets v5p:8x8x8 --mesh dp=64,tp=8 --shapes 4096x8192x28672
  python -m jaxpar predict model:layer --args 'bf16[8192,8192]@tp,-' 'bf16[8192,28672]@-,tp'
  python -m jaxpar predict model:make_step     # called with the mesh, returns (function, args)
A trace opens in https://ui.perfetto.dev or chrome://tracing. The picture shows bars too short to be
told apart, as of a long loop, as stacked shares of time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `predict` to its parser."""
    add = parser.add_argument
    add("function", nargs="?", metavar="module:function", help="what to compile in place of ops")
    add(
        "--args",
        nargs="+",
        default=[],
        metavar="ARG",
        help="its arguments, as dtype[shape]@axes: one entry a dimension, - for none, dp+tp for "
        "several; without them the function is called with the mesh and returns (function, args)",
    )
    add("--ops", help=f"operations, or 'all': {', '.join(OPS)} (default: {','.join(DEFAULT_OPS)})")
    add("--shapes", help=f"global sizes MxKxN of lhs[M, K] @ rhs[K, N] (default: {DEFAULT_SHAPE})")
    add("--modes", help=f"{', '.join(MODES)} (default: all)")
    add("--dtype", help=f"{', '.join(DTYPES)} (default: bfloat16)")
    add("--wire-dtype", help="dtype in which partial sums travel")
    add("--grad", action="store_true", help="forward and backward, with all gradients")
    add(
        "--targets",
        help="chips and slices, such as v5p:8x8x8,h100:8 (default: v5e:2x4; h100:8 where only the "
        "GPU compiler is installed)",
    )
    add(
        "--mesh",
        default="tp=-1",
        help="axis names and sizes, -1 for what is left of the devices (default: %(default)s)",
    )
    add("--axis", help="axis of the ring, or several as in dp,tp (default: the mesh's last axis)")
    add("--compiler-options", nargs="+", default=[], metavar="KEY=VALUE", help="for the compiler")
    add("--jobs", type=int, default=0, help="targets at a time (default: one a core)")
    add("--plot", metavar="FILE.png", help="draw the timelines")
    add("--json", metavar="FILE", help="write everything, each event and the figures included")
    add("--trace", metavar="FILE", help="write the timelines as a Chrome or Perfetto trace")


def parse_requests(args: argparse.Namespace) -> list[Request]:
    """Returns what to compile for each target.

    Raises:
      UsageError: what needs no compiler to be refused.
    """
    _require_one_kind(args)
    if args.jobs < 0:
        raise UsageError(f"--jobs {args.jobs} is negative")
    ops = args.ops or ",".join(DEFAULT_OPS)
    shapes = args.shapes or DEFAULT_SHAPE
    parse_shapes(shapes)
    for operand in args.args:
        parse_operand(operand)
    dtype = args.dtype or "bfloat16"
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not among {', '.join(DTYPES)}")
    _require_dtype(args.wire_dtype)
    options = _parse_options(args.compiler_options)
    return [
        Request(
            target=target,
            mesh=args.mesh,
            axis=args.axis,
            function=args.function,
            args=tuple(args.args),
            ops=tuple(op.name for op in parse_ops(ops)),
            shapes=tuple(shapes.split(",")),
            modes=tuple(_parse_modes(args.modes)),
            dtype=dtype,
            wire_dtype=args.wire_dtype,
            grad=args.grad,
            compiler_options=options,
        )
        for target in _parse_targets(args.targets)
    ]


def jobs(args: argparse.Namespace, targets: int) -> int:
    """How many targets to compile for at a time."""
    return min(args.jobs or os.cpu_count() or 1, targets)


def _require_one_kind(args: argparse.Namespace) -> None:
    if args.function is None:
        if args.args:
            raise UsageError("--args are of a module:function, which is missing")
        return
    module, _, name = args.function.partition(":")
    if not module or not name:
        raise UsageError(
            f"{args.function!r} is not module:function, as in model:layer for layer of model.py"
        )
    given = [
        f"--{option.replace('_', '-')}"
        for option in ("ops", "shapes", "modes", "dtype", "wire_dtype", "axis")
        if getattr(args, option) is not None
    ]
    if given:
        raise UsageError(
            f"{' and '.join(given)} is of the operations; with {args.function} write --args"
        )


def _parse_targets(text: str | None) -> list[str]:
    if text is not None:
        return list(dict.fromkeys(text.split(",")))
    if importlib.util.find_spec("libtpu"):
        return ["v5e:2x4"]
    if find_plugin() is not None:
        return ["h100:8"]
    raise UsageError(
        "libtpu is not installed; pip install 'jaxpar[tpu]', or 'jaxpar[gpu]' for the GPU compiler"
    )


def _parse_modes(text: str | None) -> Sequence[str]:
    names = list(dict.fromkeys(text.split(","))) if text else MODES
    for name in names:
        if name not in MODES:
            raise UsageError(f"--modes {name!r} is not among {', '.join(MODES)}")
    return names


def _require_dtype(name: str | None) -> None:
    try:
        jnp.dtype(name or "float32")
    except TypeError:
        raise UsageError(
            f"--wire-dtype {name!r} is no dtype; write bfloat16, float32, ..."
        ) from None


def _parse_options(texts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--compiler-options {text!r} is not of the form key=value")
        options[key] = _parse_value(value)
    return options


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
