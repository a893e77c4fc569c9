"""Which rules might better have two of their dimensions exchanged, as a square weight's can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxpar._padding import Blocks
from jaxpar.layout._array_layout import ArrayLayout, axes_by_dim
from jaxpar.layout._dimensions import Dimensions

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout

Axes = frozenset[str]


class Candidate(NamedTuple):
    """Two dimensions of a rule's arrays, and with what they do not agree, if that is so."""

    rule: str
    first: int
    second: int
    disagrees: str

    def of(self, layout: Layout) -> Layout | None:
        """The layout with the exchange; None where sizes do not divide or have padding."""
        own = [array for array in layout.values() if array.rule == self.rule]
        if not all(map(self._fits, own)):
            return None
        return layout.changed({array.path: self._exchanged(array) for array in own})

    def _fits(self, array: ArrayLayout) -> bool:
        return len(array.shape) > self.second and all(
            array.blocks[dim].size == array.blocks[dim].padded
            and not array.shape[dim] % array.blocks[other].parts
            for dim, other in ((self.first, self.second), (self.second, self.first))
        )

    def _exchanged(self, array: ArrayLayout) -> ArrayLayout:
        axes, blocks = list(array.axes), list(array.blocks)
        for dim, other in ((self.first, self.second), (self.second, self.first)):
            axes[dim] = array.axes[other]
            size, parts = array.shape[dim], array.blocks[other].parts
            blocks[dim] = Blocks.at_the_end(size, parts, size // parts)
        spec = PartitionSpec(*(some[0] if len(some) == 1 else some or None for some in axes))
        return replace(array, spec=spec, blocks=tuple(blocks))


class Data(NamedTuple):
    """A leaf of the arguments behind the parameters."""

    shape: Any
    is_state: bool  # of the optimizer: it lies like the parameters


def candidates(
    layout: Layout, seen: Dimensions, data: Sequence[Data], exposed: Mapping[str, float]
) -> Iterator[Candidate]:
    """Exchanges that may cost less: of rules at odds with others, then of those that cost most.

    Args:
      layout: to exchange dimensions in.
      seen: what the step does with dimensions.
      data: the leaves of its other arguments.
      exposed: seconds that the step waits for the weights of each rule.
    """
    members = _Members(layout, seen, data)
    odd: list[Candidate] = []
    now = layout
    while found := members.best(now, {candidate.rule for candidate in odd}):
        candidate, now = found
        odd.append(candidate)
    yield from odd
    multiplied = {seen.flow.of(t) for matmul in seen.flow.matmuls for t in matmul.tokens}
    tried = {candidate[:3] for candidate in odd}
    for rule in sorted(exposed, key=exposed.__getitem__, reverse=True):
        for candidate in _exchanges(layout, rule):
            classes = seen.classes[_path(layout, rule)]
            # Not the dimensions that count layers, nor those of which shard_map says what they are.
            dims = {classes[candidate.first], classes[candidate.second]}
            if exposed[rule] and dims <= multiplied and candidate[:3] not in tried:
                yield candidate


def _exchanges(layout: Layout, rule: str) -> Iterator[Candidate]:
    """All that can be exchanged in a rule, the last dimensions first."""
    array = layout[_path(layout, rule)]
    for first, second in reversed(list(combinations(range(len(array.shape)), 2))):
        candidate = Candidate(rule, first, second, "")
        if array.axes[first] != array.axes[second] and candidate.of(layout) is not None:
            yield candidate


def _path(layout: Layout, rule: str) -> str:
    return next(path for path in layout if layout[path].rule == rule)


class _Members:
    """Which dimensions of rules and data are of one class, and over which axes they lie.

    Dimensions of one class agree on an axis if all of them are sharded over it or none. Axes of the
    batch do not count: weights are gathered over them.
    """

    def __init__(self, layout: Layout, seen: Dimensions, data: Sequence[Data]) -> None:
        self.seen = seen
        self.of_data: list[tuple[int, Axes]] = []
        for classes, (x, is_state) in zip(seen.data, data, strict=True):
            if not is_state:
                sharding = getattr(x, "sharding", None)
                axes = axes_by_dim(sharding.spec if sharding else (), len(classes))
                self.of_data += zip(classes, map(frozenset, axes), strict=True)
        batch = layout.rules.batch
        self.gathered = (
            frozenset(batch.mesh_axes)
            if batch
            else frozenset[str]().union(*(axes for _, axes in self.of_data))
        )

    def of(self, layout: Layout) -> dict[int, dict[Any, Axes]]:
        """By class, the axes of each of its dimensions: of rules, which layers share, and data."""
        found: dict[int, dict[Any, Axes]] = defaultdict(dict)
        for number, (one, axes) in enumerate(self.of_data):
            found[one][number] = axes - self.gathered
        for path, array in layout.items():
            for dim, (one, axes) in enumerate(
                zip(self.seen.classes[path], array.axes, strict=True)
            ):
                found[one][array.rule, dim] = frozenset(axes) - self.gathered
        return found

    def conflicts(self, layout: Layout) -> int:
        """In all classes and of all axes, how many dimensions are at odds with the others."""
        total = 0
        for own in self.of(layout).values():
            for name in frozenset[str]().union(*own.values()):
                over = sum(name in axes for axes in own.values())
                total += min(over, len(own) - over)
        return total

    def best(self, layout: Layout, done: set[str]) -> tuple[Candidate, Layout] | None:
        """The exchange after which the fewest dimensions are at odds, if that is fewer than now."""
        rules = {a.rule: None for a in layout.values() if a.rule is not None and a.rule not in done}
        least, found = self.conflicts(layout), None
        for rule in rules if least else ():
            for candidate in _exchanges(layout, rule):
                other = candidate.of(layout)
                if other is not None and (count := self.conflicts(other)) < least:
                    least, found = count, (candidate, other)
        if found is None:
            return None
        candidate, other = found
        return candidate._replace(disagrees=self._disagrees(layout, candidate)), other

    def _disagrees(self, layout: Layout, candidate: Candidate) -> str:
        """Which of the two dimensions lies otherwise than one of its class."""
        path, members = _path(layout, candidate.rule), self.of(layout)
        for dim in (candidate.first, candidate.second):
            one = self.seen.classes[path][dim]
            own = members[one][candidate.rule, dim]
            for other, axes in members[one].items():
                if axes != own:
                    what = "a dimension of the data"
                    if isinstance(other, tuple):
                        rule, its = other
                        what = (
                            f"dimension {its} of {_path(layout, rule)!r}"
                            if rule
                            else "a whole array"
                        )
                    return (
                        f"its dimension {dim}, over {_text(own)}, goes with {what}, over "
                        f"{_text(axes)}"
                    )
        return ""


def _text(axes: Axes) -> str:
    return ", ".join(map(repr, sorted(axes))) or "no axis"


def shapes_of(args: Sequence[Any], given: Sequence[Any]) -> list[Data]:
    """The leaves of arguments, which were `args` and lie as `given`."""
    from jaxpar.layout._layout import Layout

    return [
        Data(x, isinstance(arg, Layout))
        for arg, laid in zip(args, given, strict=True)
        for x in jax.tree.leaves(laid)
    ]
