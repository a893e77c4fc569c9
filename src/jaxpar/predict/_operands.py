"""Abstract arrays written on the command line, as in `bf16[8192,8192]@tp,-`."""

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.bench._errors import UsageError

_FORM = re.compile(r"([\w]+)\[([0-9, ]*)\](?:@(.*))?")
_SHORT = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s8": "int8", "s16": "int16", "s32": "int32", "i8": "int8", "i16": "int16", "i32": "int32",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


def parse_operand(text: str) -> tuple[Any, tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """Returns the dtype, the global shape, and for each dimension the axes that shard it."""
    found = _FORM.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UsageError(f"--args {text!r} is not dtype[shape]@axes, as in 'bf16[8192,8192]@tp,-'")
    name, sizes, axes = found.groups()
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
    """Returns the abstract array, sharded over the mesh."""
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
