"""Rules from path patterns to layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from jaxpar.arguments.calls import naming, public, readable, type_error, value_error
from jaxpar.arguments.types import AnyMesh, RulesLike
from jaxpar.layout._layout import Layout, layout_of
from jaxpar.layout._rule import Rule, as_mapping, axes_table, rule_of, shown

# Such patterns cannot join an alternation: named groups, flags, conditions, numbered references.
_ALONE = re.compile(r"\\[1-9]|\(\?(?!:)")


@readable
class LayoutMap(MutableMapping[str, Any]):
    """A dict from path patterns to rules, which say how matching arrays are sharded.

    Paths join keys and indices of any containers by slashes, as in `layers/0/attention/query`. A
    key that equals the path wins. Others are regular expressions that must match the *full* path:
    `kernel` does not match `dense/kernel`, but `.*/kernel` does. Two matches are an error.

    A rule gives the mesh axes of each dimension:

    - a `PartitionSpec`, tuple or list of mesh axes, tuples of them, None, `Padded(axis)` or
      `Interleaved(axis, stages)`. Dimensions after the last entry are not sharded;
    - text such as `"layers embed heads"`: dimension names, which `axes` maps to mesh axes. Arrays
      of another rank are refused, and names that the arrays' sizes show to be swapped;
    - `REPLICATED`: a full copy on every device;
    - `Split(axis, dim)` or `Replicate(count)`.

    To replace an existing key, `pop` it, or merge maps with `|` (the right map wins).

    A `Quantized` is one array: its values' rule (`kernel/values`) lays out its scales, too, so that
    each device has those of its own values. Scales are repeated where they are fewer than devices,
    and where a block lies on several. A rule that matches scales must give the same mesh axes.

    Args:
      rules: a mapping from patterns to rules.
      axes: a mapping from dimension names to such entries of rules.
      batch: the rule for data, whose first dimension is the batch.
      results: rules for intermediate results (`Layout.constrain`).

    Raises:
      ValueError: an invalid or existing pattern; a dimension that `axes` lacks; a mesh axis twice.

    Example:
      >>> rules = LayoutMap(
      ...     {"layers/.*/(query|up)": "embed heads", "layers/.*/norm": REPLICATED},
      ...     axes={"embed": "fsdp", "heads": "tp"},
      ... )
      >>> rules.match("layers/0/query") == P("fsdp", "tp")
      True

    Source: Keras's `LayoutMap`.
    """

    def __init__(
        self,
        rules: RulesLike | None = None,
        /,
        *,
        axes: RulesLike | None = None,
        batch: Any = None,
        results: RulesLike | None = None,
    ) -> None:
        with naming("LayoutMap"):
            self._rules: dict[str, Rule] = {}
            self._patterns: dict[str, re.Pattern[str]] = {}
            self._matcher: _Matcher | None = None
            self._axes = axes_table(axes)
            self._batch = None if batch is None else rule_of(batch, "batch", self._axes)
            for key, value in as_mapping("rules", rules, "patterns to values").items():
                self[key] = value
            inner = as_mapping("results", results, "patterns to values")
            self._results = None if results is None else LayoutMap(inner, axes=axes)

    @property
    def axes(self) -> dict[str, Any]:
        """Returns a copy of the map's `axes`."""
        return dict(self._axes)

    @property
    def batch(self) -> Rule | None:
        """Returns the rule for data."""
        return self._batch

    @property
    def results(self) -> LayoutMap | None:
        """Returns the rules for intermediate results."""
        return self._results

    def __getitem__(self, key: str) -> Any:
        return self._rules[key].layout

    def __setitem__(self, key: Any, value: Any) -> None:
        with naming("LayoutMap"):
            if not isinstance(key, str):
                raise type_error(
                    f"a pattern must be text, got {key!r} of type {type(key).__name__}"
                )
            if key in self._rules:
                raise value_error(
                    f"there is a rule {key!r} already, {self._rules[key].given!r}; remove it "
                    "with pop first, or merge with | to replace it"
                )
            rule = rule_of(value, key, self._axes)
            try:
                self._patterns[key] = re.compile(key)
            except re.error as reason:
                raise value_error(
                    f"rule {key!r} is no regular expression: {reason}; write re.escape of a path "
                    "with special characters"
                ) from None
            self._rules[key] = rule
            self._matcher = None

    def __delitem__(self, key: str) -> None:
        del self._rules[key]
        del self._patterns[key]
        self._matcher = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: Mapping[str, Any]) -> LayoutMap:
        """Returns a merged map. For each key, axis name and option, `other` wins."""
        theirs = other if isinstance(other, LayoutMap) else LayoutMap(other, axes=self._axes)
        rules = {key: rule.given for key, rule in self._rules.items()}
        rules |= {key: rule.given for key, rule in theirs._rules.items()}
        batch, results = theirs._batch or self._batch, theirs._results or self._results
        return LayoutMap(
            rules,
            axes=self._axes | theirs._axes,
            batch=batch and batch.given,
            results=results and {key: rule.given for key, rule in results._rules.items()},
        )

    def _lines_to_compare(self) -> list[str]:
        return str(self).splitlines()

    def __repr__(self) -> str:
        rules = "".join(f"\n  {key!r}: {rule.given!r}," for key, rule in self._rules.items())
        axes = {name: shown(entry) for name, entry in self._axes.items()}
        more = f", axes={axes!r}" if axes else ""
        more += f", batch={self._batch.given!r}" if self._batch else ""
        if self._results is not None:
            results = {key: rule.given for key, rule in self._results._rules.items()}
            more += f", results={results!r}"
        return f"LayoutMap({{{rules}\n}}{more})" if rules else f"LayoutMap({{}}{more})"

    @public
    def match(self, path: Any) -> Any:
        """Returns a path's `PartitionSpec`, `Split` or `Replicate`; None if no rule matches.

        Raises:
          ValueError: several patterns match.
        """
        if not isinstance(path, str):
            raise type_error(f"path must be text, got {path!r} of type {type(path).__name__}")
        keys = self.matching(path)
        if len(keys) > 1:
            raise value_error(
                f"{path!r} is matched by {len(keys)} rules: {', '.join(map(repr, keys))}; have one "
                "of them match less, or give the path itself as a key, which goes first"
            )
        return self._rules[keys[0]].layout if keys else None

    def matching(self, path: str) -> list[str]:
        # The key that equals a path comes alone.
        if path in self._rules:
            return [path]
        if self._matcher is None:
            self._matcher = _Matcher(self._patterns)
        return self._matcher.keys(path)

    def rule(self, key: str) -> Rule:
        return self._rules[key]

    def pattern(self, key: str) -> re.Pattern[str]:
        return self._patterns[key]

    @public
    def layout(self, params: Any, mesh: AnyMesh, *, strict: bool = True) -> Layout:
        """Returns the layout of a pytree's arrays on a mesh.

        Args:
          params: a pytree of arrays or shapes (`jax.eval_shape`).
          mesh: a `Mesh`. An `AbstractMesh` gives specs and shapes only.
          strict: refuses arrays without rules, rules without arrays, swapped dimension names, and
            mesh axes in no rule, `batch` or `results`. False: arrays without rules are replicated.

        Raises:
          LayoutError: an array, rule or axis does not fit; all such problems are listed.

        Cost: about a microsecond per array and rule. No array is read.

        Example:
          >>> rules = LayoutMap({"up": (None, "tp"), "down": ("tp", None)})
          >>> params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
          >>> rules.layout(params, make_mesh("tp=8")).specs["down"] == P("tp", None)
          True
        """
        return layout_of(self, params, mesh, strict=strict)


class _Matcher:
    """Finds the patterns that match a path, with few calls of `re`.

    An alternation finds the first match, a reversed one the last. If both agree, no other pattern
    matches.
    """

    def __init__(self, patterns: Mapping[str, re.Pattern[str]]) -> None:
        self.alone = {key: p for key, p in patterns.items() if _ALONE.search(key)}
        self.others = {key: p for key, p in patterns.items() if key not in self.alone}
        self.first = _Alternation(self.others)
        self.last = _Alternation(dict(reversed(self.others.items())))

    def keys(self, path: str) -> list[str]:
        first, last = self.first.key(path), self.last.key(path)
        keys = [] if first is None else [first]
        if first != last:
            keys = [key for key, pattern in self.others.items() if pattern.fullmatch(path)]
        return keys + [key for key, pattern in self.alone.items() if pattern.fullmatch(path)]


class _Alternation:
    def __init__(self, patterns: Mapping[str, re.Pattern[str]]) -> None:
        self.key_of: dict[int, str] = {}  # by the number of the empty group after each pattern
        group = 0
        for key, pattern in patterns.items():
            group += pattern.groups + 1
            self.key_of[group] = key
        self.whole = re.compile("|".join(f"(?:{key})()" for key in patterns)) if patterns else None

    def key(self, path: str) -> str | None:
        match = self.whole.fullmatch(path) if self.whole else None
        return self.key_of[match.lastindex or 0] if match else None
