"""Finds swapped dimension names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import permutations

from jaxpar.layout._rule import Axes

Shape = tuple[int, ...]


class NamedSizes:
    """The sizes of named dimensions in all arrays.

    Names such as `in` and `out` have many sizes in any order. An array is refused only if arrays
    with other sets of names agree on a name's size, and the proposed order fits all their sizes.
    """

    def __init__(self, arrays: Mapping[tuple[str, Axes, Shape], int]) -> None:
        # By name and rule key: the number of arrays of each size.
        self._sizes: dict[str, dict[str, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
        # By name and set of names (two or more): the name's sizes.
        self._said: dict[str, dict[frozenset[str], set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for (key, names, shape), count in arrays.items():
            for name, size in zip(names, shape, strict=True):
                self._sizes[name][key][size] += count
                if len(names) > 1:
                    self._said[name][frozenset(names)].add(size)
        # A rule has a vote, since all arrays of a wrong rule agree with each other.
        self._voted = {
            name: {key: counts.most_common(1)[0][0] for key, counts in by_key.items()}
            for name, by_key in self._sizes.items()
        }
        self._votes = {name: Counter(of.values()) for name, of in self._voted.items()}
        self.mended = cache(self._mended)  # layers share rules and shapes

    def _mended(self, key: str, names: Axes, shape: Shape) -> tuple[str, int, Axes] | None:
        """Returns a wrong name, its size, and the right order."""
        usual = {n: self._usual(n, key, s) for n, s in zip(names, shape, strict=True)}
        wrong = [n for n, s in zip(names, shape, strict=True) if usual[n] != s]
        # A swap gives at least two wrong names.
        if len(wrong) < 2 or len(names) > 6 or len(set(names)) < len(names):
            return None
        for order in permutations(names):
            agrees = all(usual[n] == s for n, s in zip(order, shape, strict=True))
            if agrees and self._witnessed(names, shape, order):
                return wrong[0], usual[wrong[0]], order
        return None

    def _usual(self, name: str, key: str, size: int) -> int:
        """Returns a name's size elsewhere."""
        votes = self._votes[name] - Counter([self._voted[name][key]])
        votes = votes or self._sizes[name][key] - Counter([size])
        most, count = votes.most_common(1)[0] if votes else (size, 0)
        return size if votes[size] == count else most

    def _witnessed(self, names: Axes, shape: Shape, order: Axes) -> bool:
        """Returns whether other names confirm only this order."""
        others = {
            name: set[int]().union(
                *(sizes for group, sizes in self._said[name].items() if group != frozenset(names))
            )
            for name in names
        }
        right = all(not others[n] or s in others[n] for n, s in zip(order, shape, strict=True))
        return right and any(
            len(others[n]) == 1 and s not in others[n] for n, s in zip(names, shape, strict=True)
        )
