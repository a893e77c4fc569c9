"""Other shardings of a program's arguments.

Arrays with equal specs change together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.layout import ArrayLayout, Layout, LayoutMap
from jaxpar.tools.explain.program_arguments import (
    ProgramArguments,
    Resharded,
    spec_of,
    spec_text,
)
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.layouts.rule_candidates import Data, Members, RuleCandidate, exchanges
from jaxpar.tools.toolkit_api import PaddedDim, axes_by_dim, size_of, without_numbers


class Reshardings:
    def __init__(self, arguments: ProgramArguments, jaxpr: Any, mesh: Mesh) -> None:
        self.arguments, self.mesh = arguments, mesh
        # Data such as token ids, masks and keys choose rows and are not multiplied.
        data = [x for x in arguments.leaves.values() if not _is_weight(x)]
        paths = [name if _is_weight(x) else None for name, x in arguments.leaves.items()]
        self._layout = self._as_layout()
        self._members = Members(
            self._layout, Dimensions(jaxpr, paths), [Data(x, is_state=False) for x in data]
        )
        # A single array may be the batch, and weights may be gathered over the batch's axes.
        alone = [array for name, array in self._layout.items() if not re.search(r"[\[.]", name)]
        self._members.gathered |= {axis for array in alone for axes in array.axes for axis in axes}

    @cached_property
    def at_odds(self) -> list[Resharded]:
        by_spec, by_shape = self._groups("spec"), self._groups("shape")
        candidates, _ = self._members.at_odds(self._layout, [*by_spec, *by_shape])
        alike: dict[Any, list[RuleCandidate]] = defaultdict(list)
        for candidate in candidates:
            before = candidate.arrays(self._layout)[0].axes
            alike[before, candidate.axes].append(candidate)
        return [
            self._resharded(
                first._replace(rules=tuple(rule for twin in (first, *more) for rule in twin.rules))
            )
            for first, *more in alike.values()
        ]

    def near(self, names: Sequence[str], axes: Sequence[str]) -> Iterator[Resharded]:
        """Yields new shardings, the fewest conflicts first."""
        groups: dict[tuple[str, ...], None] = {}
        for name in names:
            array = self._layout.get(name)
            if array is None or not {*axes} & {axis for entry in array.axes for axis in entry}:
                continue
            assert array.rule is not None
            alike = next((g for g in self._groups("shape") if array.rule in g), (array.rule,))
            groups |= dict.fromkeys((alike, (array.rule,)))
        swaps = [candidate for group in groups for _, candidate in exchanges(self._layout, group)]
        odds = {c: self._members.conflicts(c.of(self._layout) or self._layout) for c in swaps}
        yield from map(self._resharded, sorted(swaps, key=odds.__getitem__))

    def _resharded(self, candidate: RuleCandidate) -> Resharded:
        arrays = self._with_state(candidate.arrays(self._layout))
        new = candidate.spec
        changed = (set(a) ^ set(b) for a, b in zip(arrays[0].axes, candidate.axes, strict=True))
        specs = {array.path: new for array in arrays}
        before = spec_text(arrays[0].spec)
        text = f"shard {self.arguments.listed(specs)} by {spec_text(new)} in place of {before}"
        axes = frozenset[str]().union(*changed)
        return Resharded(specs, text, axes, candidate.disagrees)

    def _with_state(self, arrays: Sequence[ArrayLayout]) -> list[ArrayLayout]:
        known = {self._members.seen.classes[array.path] for array in arrays}
        paths = {array.path for array in arrays}
        return [
            array
            for path, array in self._layout.items()
            if path in paths
            or (
                path in self._members.following
                and self._members.seen.classes[path] in known
                and array.axes == arrays[0].axes
            )
        ]

    def _groups(self, of: str) -> list[tuple[str, ...]]:
        """Returns rules with equal specs, or equal shapes and specs."""
        alike: dict[Any, dict[str, None]] = defaultdict(dict)
        for array in self._layout.values():
            assert array.rule is not None
            key = array.axes if of == "spec" else (array.axes, array.shape)
            alike[key][array.rule] = None
        return [tuple(rules) for rules in alike.values() if len(rules) > 1]

    def _as_layout(self) -> Layout:
        # Arrays alike in all layers share a rule.
        arrays: list[ArrayLayout] = []
        for name, x in self.arguments.leaves.items():
            spec = spec_of(x)
            if spec is None or not _is_weight(x):
                continue
            counts = [size_of(self.mesh, names) for names in axes_by_dim(spec, len(x.shape))]
            blocks = [
                PaddedDim.at_the_end(size, count, size // count)
                for size, count in zip(x.shape, counts, strict=True)
            ]
            rule = f"{without_numbers(self.arguments.label(name))} {x.shape} {spec}"
            shape, dtype = tuple(x.shape), x.dtype
            arrays.append(ArrayLayout(name, shape, dtype, rule, spec, tuple(blocks), self.mesh))
        tree = jax.tree.structure([0] * len(arrays))
        return Layout(LayoutMap(), self.mesh, arrays, tree, arrays)


def _is_weight(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
