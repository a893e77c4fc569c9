"""The arguments of a program: their names, and how else they could be sharded."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def as_namesakes(leaves: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    """Of arguments that lie otherwise than earlier ones of their shapes and names: how those do.

    An optimizer's `state[0].mu['up']` is so named as `params['up']` or `state.params['up']`.
    """
    first: dict[tuple[str, Any], PartitionSpec] = {}
    found: dict[str, PartitionSpec] = {}
    for name, leaf in leaves.items():
        keys, spec = _KEYS.findall(name), spec_of(leaf) or PartitionSpec()
        tails = ("".join(keys[n:]) for n in range(1, len(keys)))
        like = next((first[t, leaf.shape] for t in tails if (t, leaf.shape) in first), None)
        if like is None:
            first[_TREE.sub("", name), leaf.shape] = spec
        elif _padded(like, leaf.shape) != _padded(spec, leaf.shape):
            found[name] = like
    return found


_KEYS = re.compile(r"^\w+|\.\w+|\[[^]]*\]")
_TREE = re.compile(r"^\w+(\.params)?")


def listed(names: Collection[str]) -> str:
    """A few names."""
    more = len(names) - 4
    return ", ".join(list(names)[:4]) + (f" and {more} more" if more > 0 else "")


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
    entries = _padded(spec, shape)
    for first, second in reversed(list(combinations(range(len(shape)), 2))):
        if entries[first] == entries[second]:
            continue
        new = list(entries)
        new[first], new[second] = new[second], new[first]
        sizes = [int(np.prod([mesh.shape[name] for name in _names(entry)])) for entry in new]
        if all(length % size == 0 for length, size in zip(shape, sizes, strict=True)):
            yield PartitionSpec(*new)


def _padded(spec: PartitionSpec, shape: Sequence[int]) -> list[Any]:
    """An entry for each dimension."""
    return [*spec, *[None] * (len(shape) - len(spec))]


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec_text(spec: PartitionSpec) -> str:
    """As a person writes it."""
    entries = ", ".join(map(repr, spec))
    return f"P({entries})"
