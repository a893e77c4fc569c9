"""Values as text, the same in every process for equal values."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

FEW = 16  # numbers of an array that is written out; more become a digest
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))

Lines = Iterator[str]


def lines_of(value: Any) -> list[str]:
    """Returns lines of contents, each with its path."""
    if isinstance(value, str):
        return value.splitlines()
    try:
        return list(_Writer({}).lines("", value))
    except RecursionError:  # such as a long chain of objects
        return [_printed(value)]


class _Writer:
    # It remembers objects, which may contain themselves.
    def __init__(self, seen: dict[int, tuple[str, Any]]) -> None:
        self.seen = seen  # paths by id, which stays unique while the object is held here

    def lines(self, path: str, value: Any) -> Lines:
        if isinstance(value, _ATOMS):
            yield _line(path, repr(value))
        elif (written := _of_jax(value)) is not None:
            yield from (_line(path, text) for text in written)
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            yield from self._array(path, value)
        elif id(value) in self.seen:
            yield _line(path, f"as {self.seen[id(value)][0] or 'all of it'}")
        else:
            yield from self._noted(path, value)

    def _noted(self, path: str, value: Any) -> Lines:
        self.seen[id(value)] = path, value
        yield from self._compound(path, value)
        # Equal containers may be one object here and two elsewhere, so each is written. Functions
        # and objects form large webs, so they are written once.
        if isinstance(value, dict | list | tuple | set | frozenset):
            del self.seen[id(value)]

    def _compound(self, path: str, value: Any) -> Lines:
        if isinstance(value, Mapping):
            yield from self._mapping(path, value)
        elif isinstance(value, set | frozenset):
            yield _line(path, f"{_name(type(value))} of {len(value)}")
            # Each as if it were the first, because their order differs by process.
            each = (_Writer(dict(self.seen)).lines(f"{path} has", x) for x in value)
            yield from chain.from_iterable(sorted(map(list, each)))
        elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
            yield _line(path, _name(type(value)))
            yield from self._parts(path, zip(names, value, strict=True))
        elif type(value) in (list, tuple):
            yield _line(path, f"{_name(type(value))} of {len(value)}")
            yield from self._parts(path, enumerate(value))
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | np.ufunc):
            yield _line(path, _name(value))
            yield from self._parts(path, _owner(value))
        elif callable(value) and (parts := _function(value)) is not None:
            yield _line(path, _name(value))
            yield from self._parts(path, parts.items())
        elif is_dataclass(value):
            yield _line(path, _name(type(value)))
            held = ((f.name, getattr(value, f.name, "unset")) for f in fields(value) if f.compare)
            yield from self._parts(path, held)
        else:
            yield from self._object(path, value)

    def _mapping(self, path: str, value: Mapping[Any, Any]) -> Lines:
        if not value or type(value) is not dict:
            yield _line(path, f"{_name(type(value))} of {len(value)}")
        named = [(_key(key), part) for key, part in value.items()]
        yield from self._parts(path, sorted(named, key=lambda pair: pair[0]))

    def _parts(self, path: str, parts: Iterable[tuple[Any, Any]]) -> Lines:
        for name, part in parts:
            yield from self.lines(f"{path}/{name}" if path else str(name), part)

    def _object(self, path: str, value: Any) -> Lines:
        """Yields what would be pickled, or the repr."""
        try:
            made: Any = value.__reduce_ex__(4)
        except Exception:  # any error of a user's class
            made = _printed(value)
        if isinstance(made, str):  # or the name of a global
            yield _line(path, made)
            return
        parts: Any = (*made, None, None, None)
        call, args, state, items, entries = parts[:5]
        yield _line(path, _name(type(value)))
        if len(args) != 1 or args[0] is not type(value):  # most are made from their class alone
            yield from self._parts(path, [("made by", call), ("of", args)])
        if isinstance(state, dict):
            of_class = functools.partial(getattr, type(value))
            kept = {
                name: part
                for name, part in state.items()
                if not isinstance(of_class(name, None), functools.cached_property)
            }
            yield from self._mapping(path, kept) if kept else ()
        elif state is not None:
            yield from self._parts(path, [("state", state)])
        yield from self._parts(path, enumerate(items or ()))
        yield from self._mapping(path, dict(entries)) if entries else ()

    def _array(self, path: str, x: Any) -> Lines:
        # The numbers are written only if this process has all.
        sharding = getattr(x, "sharding", None)
        spec = getattr(sharding, "spec", "")
        yield _line(path, f"{x.dtype}{list(x.shape)} {spec}")
        if x.dtype == object:
            yield from self._parts(path, enumerate(np.asarray(x).reshape(-1).tolist()))
            return
        if isinstance(x, jax.Array):
            if x.is_deleted():
                yield _line(path, "deleted, or donated")
                return
            if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
                x = jax.random.key_data(x)
            if not (x.is_fully_addressable or x.is_fully_replicated):
                return
            x = x if x.is_fully_addressable else x.addressable_data(0)
        yield _line(path, _numbers(np.asarray(x)))


def _of_jax(value: Any) -> Iterable[str] | None:
    """Returns the lines of known types, or None."""
    match value:
        case type():
            return None
        case Mesh() | AbstractMesh():
            return _mesh(value)
        case _ if callable(getattr(type(value), "_lines_to_compare", None)):  # a layout
            return value._lines_to_compare()
        case core.Jaxpr() | core.ClosedJaxpr():
            return str(value).splitlines()
        case NamedSharding():
            return [*_mesh(value.mesh), f"{value.spec} {value.memory_kind or ''}"]
        case jax.ShapeDtypeStruct():
            spec = getattr(value.sharding, "spec", "") if value.sharding is not None else ""
            return [f"{value.dtype}{list(value.shape)} {spec}"]
        case PartitionSpec() | Sharding() | jax.Device() | np.dtype():
            return [str(value)]
        case _ if callable(getattr(value, "as_text", None)):  # a program
            return value.as_text().splitlines()
        case _:
            return None


def _mesh(mesh: Mesh | AbstractMesh) -> Lines:
    yield f"axes {dict(mesh.shape)} {', '.join(map(str, mesh.axis_types))}"
    if isinstance(mesh, Mesh):
        for index, device in np.ndenumerate(mesh.devices):
            yield f"{index}: device {device.id} of process {device.process_index}"


def _numbers(x: np.ndarray) -> str:
    if x.size <= FEW:
        return f"values {x.tolist()}"
    # All NaNs are equal, whatever their bits.
    if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        x = np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
    return f"values of digest {sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]}"


def _function(value: Any) -> dict[str, Any] | None:
    """Returns what a function's result depends on."""
    match value:
        case functools.partial():
            return {"of": value.func, "arguments": value.args, "keywords": value.keywords}
        case types.MethodType():
            return {"of": value.__func__, "self": value.__self__}
        case types.FunctionType():
            return _code(value.__code__) | {
                "defaults": value.__defaults__,
                "keyword defaults": value.__kwdefaults__,
                **dict(zip(value.__code__.co_freevars, _closed_over(value), strict=True)),
            }
        case jax.custom_vjp() | jax.custom_jvp():
            return {name: x for name, x in vars(value).items() if not name.startswith("__")}
        case _ if hasattr(value, "__wrapped__"):  # such as jit's
            return {"wraps": value.__wrapped__}
        case _:
            return None


def _closed_over(function: types.FunctionType) -> list[Any]:
    contents: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # still empty
            contents.append("unset")
    return contents


def _code(code: types.CodeType) -> dict[str, Any]:
    constants = [_code(x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_argcount, code.co_flags
    return {"code": sha256(code.co_code).hexdigest()[:16], "names": names, "constants": constants}


def _owner(value: Any) -> list[tuple[str, Any]]:
    owner = getattr(value, "__self__", None)
    return [] if owner is None or isinstance(owner, types.ModuleType) else [("self", owner)]


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if name is None:
        return _name(type(value))
    return name if module in (None, "builtins") else f"{module}.{name}"


def _key(key: Any) -> str:
    return key if isinstance(key, str) else f"[{', '.join(lines_of(key))}]"


def _printed(value: Any) -> str:
    return re.sub(r"\b0x[0-9a-f]{6,}", "...", repr(value))


def _line(path: str, text: str) -> str:
    return f"{path}: {text}" if path else text
