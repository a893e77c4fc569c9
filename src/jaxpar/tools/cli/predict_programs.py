"""The programs to compile for a target."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import compiler_options
from jaxpar.schedule import CompiledProgram, Floor, Target, Timeline, matmul_floor, program_floor
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.ops import (
    Op,
    Ring,
    Shape,
    pull_strictly,
    ring_size,
    shape_text,
    with_gradients,
)
from jaxpar.tools.cli.predict_results import Request
from jaxpar.tools.cli.shared_options import parse_ops, parse_shapes
from jaxpar.tools.timeline.timeline import of_arrays
from jaxpar.tools.toolkit_api import gathered_by, jitted_like, jitted_with


@dataclass(frozen=True)
class PlannedProgram:
    case: str
    mode: str
    function: Callable[..., Any]
    args: Sequence[Any]
    floor: Callable[[CompiledProgram, Timeline], Floor]


def programs(request: Request, target: Target, ring: Ring) -> list[PlannedProgram]:
    if request.function is not None:
        return [_of_function(request, target)]
    shapes = parse_shapes(",".join(request.shapes))
    ops = parse_ops(",".join(request.ops))
    for op in ops:
        for shape in shapes:
            op.require_fit(shape, target.mesh, ring)
    return [
        program
        for shape in shapes
        for op in ops
        for program in _of_op(request, target, ring, op, shape)
    ]


def requested_options(request: Request, target: Target) -> dict[str, Any]:
    defaults = {} if request.bare else compiler_options(target)
    return {**defaults, **request.compiler_options}


def op_floor(target: Target, op: Op, shape: Shape, ring: Ring, request: Request) -> Floor:
    """Returns the least floor over all splits."""
    size = ring_size(target.mesh, ring)
    # `matmul_floor` counts both passes itself.
    sent = op.least_sent(shape, size, request.grad) / (2 if request.grad else 1)
    floors = [
        matmul_floor(
            *(target, "mk,kn->mn", (rows, depth), (depth, cols), sent * _width(op, request)),
            axis=ring,
            dtype=jnp.dtype(request.dtype),
            grad=request.grad,
        )
        for rows, depth, cols in op.pieces(shape, size)
    ]
    return min(floors, key=lambda floor: floor.compute)


def _width(op: Op, request: Request) -> float:
    dtype = jnp.dtype(request.dtype)
    if gathered_by(request.wire_dtype, dtype) is None:
        return min(jnp.dtype(name).itemsize for name in (dtype, request.wire_dtype or dtype))
    # One pass gathers, in 8 bits, and the other sums. An all-reduce only sums.
    if not op.out:
        return dtype.itemsize
    sums_first = op.lhs == op.rhs
    return (1 + dtype.itemsize) / 2 if request.grad else dtype.itemsize if sums_first else 1


def _of_op(
    request: Request, target: Target, ring: Ring, op: Op, shape: Shape
) -> Iterator[PlannedProgram]:
    rows, depth, cols = shape
    sizes = ((rows, depth), (depth, cols), (rows, cols))
    args = [
        jax.ShapeDtypeStruct(
            size, jnp.dtype(request.dtype), sharding=NamedSharding(target.mesh, spec)
        )
        for size, spec in zip(sizes, op.specs(ring), strict=True)
    ]
    options = {"wire_dtype": request.wire_dtype} if request.wire_dtype else {}

    @cache  # shared by the modes, since it compiles
    def floor() -> Floor:
        return op_floor(target, op, shape, ring, request)

    for mode in request.modes:
        function = op.bind(target.mesh, ring, mode, **options)
        yield PlannedProgram(
            case=f"{op.name} {shape_text(shape)}",
            mode=mode,
            function=with_gradients(function) if request.grad else function,
            args=args if request.grad else args[:2],
            floor=lambda program, played: floor(),
        )


def _of_function(request: Request, target: Target) -> PlannedProgram:
    text = request.function or ""
    function = find_function(text)
    if request.args:
        args: tuple[Any, ...] = tuple(operand(arg, target.mesh) for arg in request.args)
    else:
        function, args = _ask(function, text, target)
    if request.grad:
        if not hasattr(function, "trace"):
            function, args = of_arrays(function, args)
        with jax.set_mesh(target.mesh):
            of_floats = jitted_like(function, lambda *args: _floats(function(*args)))
            jitted, _ = jitted_with(of_floats, requested_options(request, target))
            floats = jitted.eval_shape(*args)
        function = jitted_like(function, _with_gradients_of_floats(function))
        args = (*args, floats)
    return PlannedProgram(text, "", function, args, program_floor)


def find_function(text: str) -> Callable[..., Any]:
    """Imports `module:function`, also from the current directory."""
    module, _, name = text.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = import_module(module)
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"{text}: no module {missing.name!r} is to be found from the current directory; "
            "install it, or go to where it is"
        ) from None
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"{text}: module {module} has no function {name!r}; name one that it has")
    return function


def _ask(function: Callable[..., Any], text: str, target: Target) -> Any:
    remedy = "give its arguments as in --args 'bf16[8192,8192]@tp,-', or return (function, args)"
    try:
        made = function(target.mesh)
    except TypeError as reason:
        raise UsageError(f"{text}, called with the mesh alone: {reason}; {remedy}") from None
    match made:
        case (inner, tuple() | list() as args) if callable(inner):
            return inner, tuple(args)
        case _:
            raise UsageError(
                f"{text}, called with the mesh, returned {type(made).__name__}; {remedy}"
            )


def _with_gradients_of_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    # Cotangents are arguments: as constants, they would simplify the program.
    def forward_and_backward(*args: Any) -> Any:
        *operands, cotangents = args
        leaves, tree = jax.tree.flatten(operands)
        moving = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

        def of_floats(*floats: Any) -> Any:
            merged = list(leaves)
            for i, leaf in zip(moving, floats, strict=True):
                merged[i] = leaf
            out = function(*tree.unflatten(merged))
            return _floats(out), out

        _, pull_back, out = jax.vjp(of_floats, *(leaves[i] for i in moving), has_aux=True)
        return pull_strictly(out, pull_back, cotangents)

    return forward_and_backward


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


# -- abstract arrays on the command line -----------------------------------------------------------

_FORM = re.compile(r"([\w]+)\[([0-9, ]*)\](?:@(.*))?")
_SHORT = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s8": "int8", "s16": "int16", "s32": "int32", "i8": "int8", "i16": "int16", "i32": "int32",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


def parse_operand(text: str) -> tuple[Any, tuple[int, ...], tuple[tuple[str, ...], ...]]:
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise UsageError(f"--args {text!r} is not dtype[shape]@axes, as in 'bf16[8192,8192]@tp,-'")
    name, sizes, axes = match.groups()
    try:
        dtype = jnp.dtype(_SHORT.get(name, name))
    except TypeError:
        raise UsageError(
            f"--args {text!r}: no dtype is called {name!r}; write bf16, f32, ..."
        ) from None
    shape = tuple(int(size) for size in sizes.split(",") if size)
    dims = [
        tuple(part.split("+")) if part != "-" else () for part in (axes or "").split(",") if part
    ]
    if len(dims) > len(shape):
        raise UsageError(
            f"--args {text!r} names axes for {len(dims)} dimensions, but has {len(shape)}; write "
            "one entry a dimension, - for none, and + between several axes of one"
        )
    return dtype, shape, tuple(dims)


def operand(text: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    dtype, shape, dims = parse_operand(text)
    for dim, (length, names) in enumerate(zip(shape, dims, strict=False)):
        missing = [name for name in names if name not in mesh.axis_names]
        if missing:
            raise UsageError(
                f"--args {text!r}: {missing[0]!r} is not an axis of the mesh, which has "
                f"{', '.join(mesh.axis_names)}"
            )
        size = prod(mesh.shape[name] for name in names)
        if length % size:
            less = length - length % size
            raise UsageError(
                f"--args {text!r}: dimension {dim} of {length} is sharded over {'+'.join(names)} "
                f"of {size} devices, which does not divide it; use "
                f"{' or '.join(str(n) for n in (less, less + size) if n)}, or another --mesh"
            )
    spec = PartitionSpec(*(names or None for names in dims))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
