"""Cheaper rules: two dimensions exchanged, or a table by rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxpar.layout import ArrayLayout, Layout
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.toolkit_api import PaddedDim, axes_by_dim, is_array, size_of

Axes = frozenset[str]
Cause = Literal["features of what is looked up", "at odds"] | None


class RuleCandidate(NamedTuple):
    rules: tuple[str, ...]  # that change together
    axes: tuple[tuple[str, ...], ...]  # for each dimension
    cause: Cause = None
    disagrees: str = ""

    @property
    def rule(self) -> str:
        return self.rules[0]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in self.axes))

    def arrays(self, layout: Layout) -> list[ArrayLayout]:
        return [array for array in layout.values() if array.rule in self.rules]

    def of(self, layout: Layout) -> Layout | None:
        # None: sizes do not divide, have padding or are interleaved.
        arrays = self.arrays(layout)
        if not all(map(self._fits, arrays)):
            return None
        return layout.changed({array.path: self._changed(array) for array in arrays})

    def _fits(self, array: ArrayLayout) -> bool:
        return len(array.shape) == len(self.axes) and all(
            axes == before or (block.is_plain and not block.size % size_of(array.mesh, axes))
            for axes, before, block in zip(self.axes, array.axes, array.blocks, strict=True)
        )

    def _changed(self, array: ArrayLayout) -> ArrayLayout:
        blocks = list(array.blocks)
        for dim, axes in enumerate(self.axes):
            if axes != array.axes[dim]:
                size, parts = array.shape[dim], size_of(array.mesh, axes)
                blocks[dim] = PaddedDim.at_the_end(size, parts, size // parts)
        return replace(array, spec=self.spec, blocks=tuple(blocks))


class Data(NamedTuple):
    shape: Any
    is_state: bool  # an optimizer's state, which lies like the parameters


def candidates(
    layout: Layout,
    seen: Dimensions,
    data: Sequence[Data],
    exposed: Callable[[], Mapping[str, float]],
) -> Iterator[RuleCandidate]:
    """Yields changes that may cost less: of conflicting rules, then of the most expensive.

    `exposed` returns each rule's seconds of waiting. It is called after the conflicting rules.
    """
    members = Members(layout, seen, data)
    first, now = members.at_odds(layout)
    yield from first
    done = {rule for candidate in first for rule in candidate.rules}
    multiplied = {seen.flow.of(t) for matmul in seen.flow.matmuls for t in matmul.tokens}
    waits, conflicts = exposed(), members.conflicts(now)
    for rule in sorted(set(waits) - done, key=waits.__getitem__, reverse=True):
        for dims, candidate in exchanges(now, (rule,)):
            classes = seen.classes[_path(layout, rule)]
            # Skips dimensions that count layers or that a shard_map fixes.
            if not waits[rule] or not {classes[dim] for dim in dims} <= multiplied:
                continue
            # Skips exchanges that add conflicts: half of a pair such as Megatron's is worse.
            other = candidate.of(now)
            if other is not None and members.conflicts(other) <= conflicts:
                yield candidate


def exchanges(
    layout: Layout, rules: tuple[str, ...]
) -> Iterator[tuple[tuple[int, int], RuleCandidate]]:
    # The rules share a spec; the last dimensions come first.
    array = layout[_path(layout, rules[0])]
    for first, second in reversed(list(combinations(range(len(array.shape)), 2))):
        axes = list(array.axes)
        axes[first], axes[second] = axes[second], axes[first]
        candidate = RuleCandidate(rules, tuple(axes))
        if array.axes[first] != array.axes[second] and candidate.of(layout) is not None:
            yield (first, second), candidate


def _singles(layout: Layout) -> list[tuple[str, ...]]:
    return list({(array.rule,): None for array in layout.values() if array.rule is not None})


def _path(layout: Layout, rule: str) -> str:
    return next(path for path in layout if layout[path].rule == rule)


class Members:
    """The dimensions of rules and data by class, with their axes.

    A class agrees on an axis if all its dimensions, or none, are sharded over it. Batch axes do not
    count, since weights are gathered over them. Followers do not, such as an optimizer's state.
    """

    def __init__(self, layout: Layout, seen: Dimensions, data: Sequence[Data]) -> None:
        self.seen = seen
        self.of_data: list[tuple[int, Axes]] = []
        for classes, (x, is_state) in zip(seen.data, data, strict=True):
            if not is_state:
                sharding = getattr(x, "sharding", None)
                axes = axes_by_dim(sharding.spec if sharding else (), len(classes))
                self.of_data += zip(classes, map(frozenset, axes), strict=True)
        used = seen.flow.multiplied | seen.flow.looked_up
        known = {seen.classes[path] for path in used}
        self.following = {
            path for path in layout if path not in used and seen.classes[path] in known
        }
        batch = layout.rules.batch
        self.gathered = (
            frozenset(batch.mesh_axes)
            if batch
            else frozenset[str]().union(*(axes for _, axes in self.of_data))
        )

    def of(self, layout: Layout) -> dict[int, dict[Any, Axes]]:
        # Layers share a rule's dimension.
        members: dict[int, dict[Any, Axes]] = defaultdict(dict)
        for number, (key, axes) in enumerate(self.of_data):
            members[key][number] = axes - self.gathered
        for path, array in layout.items():
            if path in self.following:
                continue
            for dim, (key, axes) in enumerate(
                zip(self.seen.classes[path], array.axes, strict=True)
            ):
                members[key][array.rule, dim] = frozenset(axes) - self.gathered
        return members

    def conflicts(self, layout: Layout) -> int:
        total = 0
        for members in self.of(layout).values():
            for name in frozenset[str]().union(*members.values()):
                over = sum(name in axes for axes in members.values())
                total += min(over, len(members) - over)
        return total

    def at_odds(
        self, layout: Layout, groups: Sequence[tuple[str, ...]] = ()
    ) -> tuple[list[RuleCandidate], Layout]:
        """Returns changes of conflicting rules, and the layout with all changes.

        Lookup tables come first. Then each exchange leaves the fewest conflicts.
        """
        single = _singles(layout)
        changes = [change for (rule,) in single if (change := self._by_rows(layout, rule))]
        for candidate in changes:
            layout = candidate.of(layout) or layout
        done = {candidate.rule for candidate in changes}
        while best := self._best(layout, [g for g in (*groups, *single) if done.isdisjoint(g)]):
            candidate, layout = best
            changes.append(candidate)
            done.update(candidate.rules)
        return changes, layout

    def _by_rows(self, layout: Layout, rule: str) -> RuleCandidate | None:
        """Returns a lookup table's change from features to rows, or None."""
        path, flow = _path(layout, rule), self.seen.flow
        paths = {array.path for array in layout.values() if array.rule == rule} - self.following
        if not paths or not paths <= flow.looked_up:
            return None
        looked_up = flow.rows_looked_up()
        rows = [dim for dim, key in enumerate(self.seen.classes[path]) if key in looked_up]
        axes = layout[path].axes
        odd = {dim: tuple(n for n in axes[dim] if n in self.gathered) for dim in range(len(axes))}
        odd = {dim: names for dim, names in odd.items() if names and dim not in rows}
        if not odd or not rows:
            return None
        without = [tuple(n for n in over if n not in odd.get(d, ())) for d, over in enumerate(axes)]
        by_rows = list(without)
        by_rows[rows[0]] += tuple(name for names in odd.values() for name in names)
        dim, names = next(iter(odd.items()))
        text = (
            f"its dimension {dim} is sharded over {_text(frozenset(names))}, as the batch is: rows "
            "that are looked up travel to the batch's devices and back"
        )
        for changed in (by_rows, without):
            cause = "features of what is looked up"
            candidate = RuleCandidate((rule,), tuple(changed), cause, text)
            if candidate.of(layout) is not None:
                return candidate
        return None

    def _best(
        self, layout: Layout, groups: Sequence[tuple[str, ...]]
    ) -> tuple[RuleCandidate, Layout] | None:
        # It leaves the fewest conflicts. Fewer rules win ties.
        least, best = (self.conflicts(layout), 0), None
        for rules in groups if least[0] else ():
            for dims, candidate in exchanges(layout, rules):
                other = candidate.of(layout)
                if other is None:
                    continue
                if (odds := (self.conflicts(other), len(rules))) < least:
                    least, best = odds, (dims, candidate, other)
        if best is None:
            return None
        dims, candidate, other = best
        text = self._disagrees(layout, candidate, dims)
        return candidate._replace(cause="at odds", disagrees=text), other

    def _disagrees(self, layout: Layout, candidate: RuleCandidate, dims: tuple[int, int]) -> str:
        path, members = _path(layout, candidate.rule), self.of(layout)
        for dim in dims:
            key = self.seen.classes[path][dim]
            over = members[key][candidate.rule, dim]
            for other, axes in members[key].items():
                is_apart = not isinstance(other, tuple) or other[0] not in candidate.rules
                if axes != over and is_apart:
                    what = "a dimension of the data"
                    if isinstance(other, tuple):
                        rule, its = other
                        what = (
                            f"dimension {its} of {_path(layout, rule)!r}"
                            if rule
                            else "a replicated array"
                        )
                    return (
                        f"its dimension {dim}, over {_text(over)}, is multiplied with {what}, over "
                        f"{_text(axes)}"
                    )
        return ""


def _text(axes: Axes) -> str:
    return ", ".join(map(repr, sorted(axes))) or "no axis"


def shapes_of(args: Sequence[Any], laid_args: Sequence[Any]) -> list[Data]:
    return [
        Data(x, isinstance(arg, Layout))
        for arg, laid in zip(args, laid_args, strict=True)
        for x in jax.tree.leaves(laid)
        if is_array(x)
    ]
