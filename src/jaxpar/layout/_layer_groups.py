"""Path patterns that cover all layers."""

from __future__ import annotations

import re
from collections.abc import Hashable

from jaxpar.layout._paths import INDEX, NUMBER


class Alike:
    """Values by path, for paths that differ only in indices.

    With `in_keys`, numbers in keys count too, as in `layer_0`.
    """

    def __init__(self, in_keys: bool = False) -> None:
        self._numbers = NUMBER if in_keys else INDEX
        self._values: dict[str, Hashable] = {}
        self._free: dict[Hashable, set[int]] = {}  # by value, computed after the last `add`

    def add(self, path: str, value: Hashable) -> None:
        self._values[path] = value

    def pattern(self, path: str) -> str:
        value = self._values[path]
        if value not in self._free:
            self._free[value] = self._free_of(value)
        parts = self._numbers.split(re.escape(path))
        return "".join(
            r"\d+" if place in self._free[value] else part for place, part in enumerate(parts)
        )

    def _free_of(self, value: Hashable) -> set[int]:
        numbers = self._numbers
        split = [(numbers.split(re.escape(path)), held) for path, held in self._values.items()]
        free: set[int] = set()
        for place in range(1, len(split[0][0]), 2):
            more = {*free, place}
            mine, others = set[tuple[str, ...]](), set[tuple[str, ...]]()
            for parts, held in split:
                fixed = tuple(part for i, part in enumerate(parts) if i not in more)
                (mine if held == value else others).add(fixed)
            if mine.isdisjoint(others) and len({parts[place] for parts, _ in split}) > 1:
                free = more
        return free
