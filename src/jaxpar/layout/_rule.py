"""Rules of a map."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.axis.axis import axis_names
from jaxpar.layout._paths import without_numbers
from jaxpar.layout._split import Interleaved, Padded, Replicate, Split

Axes = tuple[str, ...]  # of a dimension; empty: not sharded
Entry = Axes | Padded | Interleaved

_FOR_AXES = "names of dimensions to mesh axes, as in {'embed': 'fsdp'}"
REPLICATED = PartitionSpec()
"""The value of a rule for full copies on every device."""


@dataclass(frozen=True)
class Rule:
    given: Any
    entries: tuple[Entry, ...]  # of the first dimensions; the others are not sharded
    names: tuple[str, ...] | None = None  # of all dimensions
    action: Split | Replicate | None = None

    @property
    def layout(self) -> Any:
        """Returns the action, or the entries as a `PartitionSpec`."""
        return self.action or PartitionSpec(*map(shown, self.entries))

    def first(self, rank: int) -> Rule:
        """Returns the first dimensions' rule: data may have lower rank."""
        return Rule(self.given, self.entries[:rank])

    @property
    def mesh_axes(self) -> Axes:
        if isinstance(self.action, Split):  # its dimension may count from the end
            return self.action.axes
        return tuple(name for entry in self.entries for name in axes_of(entry))


def axes_of(entry: Entry) -> Axes:
    return entry if isinstance(entry, tuple) else axis_names(entry.axes)


def rule_of(value: Any, key: str, axes: Mapping[str, Entry]) -> Rule:
    match value:
        case str():
            names = tuple(value.split())
            rule = Rule(value, tuple(_named(name, key, value, axes) for name in names), names)
        case Split():
            entries = (*[()] * value.dim, value.axes)  # a dimension may count from the end
            rule = Rule(value, entries if value.dim >= 0 and value.axes else (), action=value)
        case Replicate():
            rule = Rule(value, (), action=value)
        case PartitionSpec() | tuple() | list():
            rule = Rule(value, tuple(entry_of(entry, f"rule {key!r}") for entry in value))
        case _:
            hint = "; use REPLICATED to replicate it" * (value is None)
            raise type_error(
                f"the value of rule {key!r} must be a PartitionSpec, a tuple or list of mesh axes, "
                "names of dimensions such as 'embed heads', a Split or a Replicate, got "
                f"{value!r} of type {type(value).__name__}{hint}"
            )
    twice = sorted({name for name in rule.mesh_axes if rule.mesh_axes.count(name) > 1})
    if twice:
        by_name = f", which is {rule.layout}" if rule.names else ""
        raise value_error(
            f"rule {key!r}: {value!r}{by_name} shards over the mesh axis {twice[0]!r} twice; "
            "an axis can shard one dimension of an array"
        )
    return rule


def entry_of(entry: Any, where: str) -> Entry:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (Padded, Interleaved)):
        return entry
    if isinstance(entry, Iterable):
        names = tuple(entry)
        if all(isinstance(name, str) for name in names):
            return names
    raise type_error(
        f"{where}: a dimension must be None, a mesh axis, a tuple of them, Padded(...) or "
        f"Interleaved(...), got {entry!r} of type {type(entry).__name__}"
    )


def as_mapping(argument: str, value: Any, what: str) -> Mapping[Any, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise type_error(
            f"{argument} must be a mapping of {what}, got {value!r} of type {type(value).__name__}"
        )
    return value or {}


def axes_table(axes: Any) -> dict[str, Entry]:
    table: dict[str, Entry] = {}
    for name, entry in as_mapping("axes", axes, _FOR_AXES).items():
        if not isinstance(name, str) or not re.fullmatch(r"\S+", name):
            raise value_error(f"axes names a dimension {name!r}; it must be one word")
        table[name] = entry_of(entry, f"axes[{name!r}]")
    return table


def nearest(name: str, others: Iterable[str], text: str = "did you mean {}?") -> str:
    close = difflib.get_close_matches(name, list(others), 1, 0.6)
    return f"; {text.format(repr(close[0]))}" if close else ""


class Nearest:
    def __init__(self, others: Iterable[str], text: str = "the nearest there is {}") -> None:
        self._others, self._text = others, text
        self._hints: dict[str, str] = {}

    @cached_property
    def _kinds(self) -> list[str]:
        kinds = {without_numbers(name): name for name in reversed([*self._others])}
        return list(kinds.values())[::-1][:1000]

    def hint(self, name: str) -> str:
        kind = without_numbers(name)
        if kind not in self._hints:
            self._hints[kind] = nearest(name, self._kinds, self._text)
        return self._hints[kind]


def _named(name: str, key: str, text: str, axes: Mapping[str, Entry]) -> Entry:
    if name not in axes:
        known = f"axes has {', '.join(map(repr, axes))}" if axes else "axes is empty"
        raise value_error(
            f"rule {key!r}: {text!r} names a dimension {name!r}, but {known}; add it to axes, "
            f"None for an unsharded one{nearest(name, axes)}. Text is names of dimensions: one "
            f"mesh axis alone is ({name!r},)"
        )
    return axes[name]


def shown(entry: Entry) -> Any:
    if not isinstance(entry, tuple):
        return entry
    return None if not entry else entry[0] if len(entry) == 1 else entry


def trimmed(entries: Iterable[Any]) -> tuple[Any, ...]:
    left = list(entries)
    while left and left[-1] is None:
        left.pop()
    return tuple(left)
