"""A dict of rules: path patterns, and how arrays lie that have such paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from jaxpar.arguments.calls import naming, public, readable, type_error, value_error
from jaxpar.arguments.types import AnyMesh, RulesLike
from jaxpar.layout._layout import Layout, layout_of
from jaxpar.layout._rule import Rule, axes_table, rule_of, shown

# What cannot stand in one expression with others: groups with names, flags and conditions, and
# references by number.
_ALONE = re.compile(r"\\[1-9]|\(\?(?!:)")


@readable
class LayoutMap(MutableMapping[str, Any]):
    """Rules from path patterns to layouts: a dict, independent of any mesh.

    A path is text, keys and indices with slashes between them, as in `layers/0/attention/query`:
    the same for dicts, lists, tuples, dataclasses, Flax (NNX and Linen) and Equinox. A key that
    is the path itself goes first. Otherwise keys are regular expressions of `re` that must match
    the *whole* path (`re.fullmatch`): `layers/1/.*` does not match layer 10, nor `kernel` the path
    `dense/kernel`; `.*/kernel` does. Two that match are an error.

    A value says what shards each dimension of the array:

    - a `PartitionSpec`, a tuple or a list: for each dimension a mesh axis, a tuple of them, None,
      or `Padded(axis)`; dimensions behind the last are whole;
    - text, `"layers embed heads"`: a name for every dimension, which `axes` maps to mesh axes. An
      array of another rank is refused, and one whose sizes say that names have changed places;
    - `REPLICATED`: whole on every device;
    - `Split(axis, dim)` or `Replicate(count)`.

    Inserting a key that is there raises: `pop` it first, or merge maps with `|`, of which the
    right one's rules are taken.

    Args:
      rules: the patterns and values, a mapping.
      axes: for names of dimensions the mesh axis, a tuple of them, `Padded(axis)`, or None.
      batch: the value for arrays of data, whose first dimension is the batch: their mesh axes need
        not shard any parameter.
      results: rules for intermediate results (`Layout.constrain`).

    Raises:
      TypeError: patterns that are no text, values of another type.
      ValueError: no regular expression; a dimension that `axes` lacks; a mesh axis twice in one
        value; a pattern that is there.

    Example:
      >>> rules = LayoutMap(
      ...     {"layers/.*/(query|up)": "embed heads", "layers/.*/norm": REPLICATED},
      ...     axes={"embed": "fsdp", "heads": "tp"},
      ... )
      >>> rules.match("layers/0/query") == P("fsdp", "tp")
      True

    Source: the rules of Keras's `LayoutMap`, of which one path can match several and none.
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
            for key, value in _items(rules, "rules"):
                self[key] = value
            self._results: LayoutMap | None = None
            if results is not None:
                self._results = LayoutMap(dict(_items(results, "results")), axes=axes)

    @property
    def axes(self) -> dict[str, Any]:
        """The mesh axes of each name of a dimension: a copy."""
        return dict(self._axes)

    @property
    def batch(self) -> Rule | None:
        """The rule of arrays of data."""
        return self._batch

    @property
    def results(self) -> LayoutMap | None:
        """The rules of intermediate results."""
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
                    f"there is a rule {key!r} already, {self._rules[key].given!r}; take it out "
                    "with pop first, or merge with | to replace it"
                )
            rule = rule_of(value, key, self._axes)
            try:
                self._patterns[key] = re.compile(key)
            except re.error as reason:
                raise value_error(
                    f"rule {key!r} is no regular expression: {reason}; write re.escape of a path "
                    "that has signs of its own"
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
        """The rules of both: of one key those of `other`; so for `axes`, `batch` and `results`."""
        theirs = other if isinstance(other, LayoutMap) else LayoutMap(other, axes=self._axes)
        given = {key: rule.given for key, rule in self._rules.items()}
        given |= {key: rule.given for key, rule in theirs._rules.items()}
        batch, results = theirs._batch or self._batch, theirs._results or self._results
        return LayoutMap(
            given,
            axes=self._axes | theirs._axes,
            batch=batch and batch.given,
            results=results and {key: rule.given for key, rule in results._rules.items()},
        )

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
        """Returns the layout for an array of this path, or None.

        A `PartitionSpec`, or the action. The exact key goes first.

        Raises:
          TypeError: a path that is no text.
          ValueError: several patterns match: names all of them.
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
        """Returns the keys that match a path: the exact one alone, or all patterns."""
        if path in self._rules:
            return [path]
        if self._matcher is None:
            self._matcher = _Matcher(self._patterns)
        return self._matcher.keys(path)

    def rule(self, key: str) -> Rule:
        """Returns the rule of a key."""
        return self._rules[key]

    def rules(self) -> Iterator[Rule]:
        """All rules, in the order of insertion."""
        return iter(self._rules.values())

    def pattern(self, key: str) -> re.Pattern[str]:
        """The expression of a key."""
        return self._patterns[key]

    @public
    def layout(self, params: Any, mesh: AnyMesh, *, strict: bool = True) -> Layout:
        """Returns how the arrays of a pytree lie on a mesh.

        Args:
          params: arrays, or their shapes (`jax.eval_shape`), in any pytree. Leaves that are no
            arrays have no layout.
          mesh: of `make_mesh` or `jax.sharding.Mesh`; an `AbstractMesh` gives specs and shapes.
          strict: refuse arrays that no rule matches, rules that match no array, mesh axes that
            nothing uses, and names of dimensions that have changed places. False: arrays that no
            rule matches are replicated.

        Returns:
          A `Layout`.

        Raises:
          LayoutError: all that does not fit, each with path, shape, rule and remedy.

        Cost: about a microsecond an array and rule; no array is touched.

        Example:
          >>> rules = LayoutMap({"up": (None, "tp"), "down": ("tp", None)})
          >>> params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
          >>> layout = rules.layout(params, make_mesh("tp=8"))
          >>> layout.specs["down"] == P("tp", None)
          True
        """
        return layout_of(self, params, mesh, strict=strict)


class _Matcher:
    """Which of many patterns match a path, in less than a call of `re` for each.

    An alternation of all finds the first that matches, one of them backwards the last: where those
    are the same there is no other.
    """

    def __init__(self, patterns: Mapping[str, re.Pattern[str]]) -> None:
        self.alone = {key: p for key, p in patterns.items() if _ALONE.search(key)}
        self.others = {key: p for key, p in patterns.items() if key not in self.alone}
        self.first = _Alternation(self.others)
        self.last = _Alternation(dict(reversed(self.others.items())))

    def keys(self, path: str) -> list[str]:
        """In the order of insertion, those of the alternation first."""
        first, last = self.first.key(path), self.last.key(path)
        found = [] if first is None else [first]
        if first != last:
            found = [key for key, pattern in self.others.items() if pattern.fullmatch(path)]
        return found + [key for key, pattern in self.alone.items() if pattern.fullmatch(path)]


class _Alternation:
    """The first of some patterns that matches a path."""

    def __init__(self, patterns: Mapping[str, re.Pattern[str]]) -> None:
        self.key_of: dict[int, str] = {}  # by the empty group behind each pattern
        group = 0
        for key, pattern in patterns.items():
            group += pattern.groups + 1
            self.key_of[group] = key
        self.whole = re.compile("|".join(f"(?:{key})()" for key in patterns)) if patterns else None

    def key(self, path: str) -> str | None:
        found = self.whole.fullmatch(path) if self.whole else None
        return self.key_of[found.lastindex or 0] if found else None


def _items(rules: Any, argument: str) -> Iterator[tuple[Any, Any]]:
    if rules is None:
        return iter(())
    if not isinstance(rules, Mapping):
        raise type_error(
            f"{argument} must be a mapping of patterns to values, got {rules!r} of type "
            f"{type(rules).__name__}"
        )
    return iter(rules.items())
