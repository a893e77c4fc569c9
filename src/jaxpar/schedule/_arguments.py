"""The arguments of a program: their names, and how else they could be sharded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path


def laid(args: Any, mesh: Mesh) -> Any:
    """Arguments whose shardings, which may be specs without a mesh, are on this one."""

    def on_mesh(x: Any) -> Any:
        sharding: Any = getattr(x, "sharding", None)
        if getattr(sharding, "spec", None) is None:
            return x
        kind = sharding.memory_kind
        return shape_of(x, NamedSharding(mesh, sharding.spec, memory_kind=kind))

    with jax.set_mesh(mesh):  # a shape whose sharding is a spec has none without
        return jax.tree.map(on_mesh, args)


def named(function: Any, args: Sequence[Any]) -> dict[str, Any]:
    """The leaves of arguments, by the names that JAX gives the program's parameters."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{n}]" for n in range(len(args) - len(names))]
        else:
            names.append(parameter.name)
    return {
        f"{name}{keystr(keys)}": leaf
        for name, arg in zip(names, args, strict=False)
        for keys, leaf in tree_flatten_with_path(arg)[0]
    }


def last_of(name: str) -> str:
    """What is left of a name without the argument's own: the same weight's state has it too."""
    return name[name.find("[") :] if "[" in name else name


def listed(name: str, group: set[str]) -> str:
    """A few names, the first one first."""
    names = [name, *sorted(group - {name})]
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more of its shape" if more > 0 else "")


def is_over(spec: PartitionSpec, axes: Sequence[str]) -> bool:
    """Whether any of the axes shards a dimension."""
    return any(axis in _names(entry) for entry in spec for axis in axes)


def spec_of(x: Any) -> PartitionSpec | None:
    """How an argument is sharded, if it says so by a spec."""
    return getattr(getattr(x, "sharding", None), "spec", None)


def shape_of(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The same argument, sharded so."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def exchanged(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> Iterator[PartitionSpec]:
    """A spec with the axes of two dimensions exchanged, where sizes divide."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for first, second in reversed(list(combinations(range(len(shape)), 2))):
        if entries[first] == entries[second]:
            continue
        new = list(entries)
        new[first], new[second] = new[second], new[first]
        sizes = [int(np.prod([mesh.shape[name] for name in _names(entry)])) for entry in new]
        if all(length % size == 0 for length, size in zip(shape, sizes, strict=True)):
            yield PartitionSpec(*new)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec_text(spec: PartitionSpec) -> str:
    """As a person writes it."""
    entries = ", ".join(map(repr, spec))
    return f"P({entries})"
