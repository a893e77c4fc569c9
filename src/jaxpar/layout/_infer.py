"""A map from a function itself: parameters followed through what it computes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from jaxpar._calls import of_user, public, value_error
from jaxpar._types import AnyMesh
from jaxpar._units import size_text
from jaxpar.layout._comparison import Compared, compare, others
from jaxpar.layout._dimensions import Dimensions
from jaxpar.layout._explain import FASTER
from jaxpar.layout._fit import Shaped
from jaxpar.layout._map import LayoutMap
from jaxpar.layout._mesh import check_mesh, size_of
from jaxpar.layout._rule import Entry, axes_of
from jaxpar.layout._strategies import Dims, data_parallel, extended

Role = Literal["data", "fully sharded", "tensor", "expert"]
ROLES = ("data", "fully sharded", "tensor", "expert")
NAMES = {
    "data": r"dp|data|batch|replica.*",
    "fully sharded": r"fsdp.*|zero.*|f[xyz]",
    "tensor": r"tp|tensor|model|mp",
    "expert": r"ep|experts?",
}


@public
def infer_layout(
    function: Any,
    params: Any,
    batch: Any,
    mesh: AnyMesh,
    *,
    roles: Mapping[str, Role] | None = None,
    target: Any = None,
    show: Callable[[str], object] | None = print,
) -> LayoutMap:
    """Returns the map that a function's own matmuls ask for, and says why for each rule.

    Follows the dimensions of the parameters through the jaxpr of `function(params, batch)`, on
    global arrays: which are contracted with which, through elementwise operations, reshapes, loops
    and calls. Dimensions that must be sharded alike are one class. Over tensor axes it shards the
    classes that cost the fewest bytes of sums for their FLOPs, no two of one array: hidden features
    and heads (columns, then rows) before the width that all layers share, which is what Megatron
    does. Fully sharded axes take the largest other dimension of each matrix.

    Args:
      function: a loss or a forward pass, without `jax.shard_map`.
      params: arrays or their shapes, any pytree.
      batch: the same, of the data; its first dimension is sharded over the data axes.
      mesh: to choose for.
      roles: what a mesh axis is for: `"data"`, `"fully sharded"`, `"tensor"` or `"expert"`. Of
        those that are missing the name tells (`dp`, `data`; `fsdp`; `tp`, `model`; `ep`).
      target: described devices, as for `Layout.explain`. The loss with its gradient is compiled for
        them, by this map and by plain ones: without fully sharding, fully sharded over all axes,
        whole on every device. Of those that fit the memory the fastest is returned, this map where
        none is faster by 1%. None: they are compared by the bytes that a device holds alone.
      show: called with what was found and why, line by line. None: nothing is shown.

    Returns:
      A `LayoutMap`, to be used as it is or edited.

    Raises:
      ValueError: an axis whose role its name does not tell; a role of an axis that is not there.

    Cost: one trace of the function, and with a target at most four compilations.

    Example:
      >>> def loss(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])
      >>> params = {"a": jnp.ones((4, 32)), "b": jnp.ones((32, 4))}
      >>> rules = infer_layout(loss, params, jnp.ones((8, 4)), make_mesh("tp=8"), show=None)
      >>> rules.match("a") == P(None, "tp"), rules.match("b") == P("tp")
      (True, True)
    """
    check_mesh(mesh)
    by_role = _roles(mesh, roles)
    seen = _Seen(of_user(function, "function"), params, batch)
    rules: LayoutMap | None = None
    reasons: dict[str, list[str]] = defaultdict(list)  # by path
    for role in ("expert", "tensor"):
        for name in by_role[role]:
            chosen = seen.choose(mesh.shape[name], role, rules)

            def dims(
                array: Shaped,
                taken: Sequence[Entry],
                name: str = name,
                chosen: dict[int, str] = chosen,
            ) -> Dims:
                for dim, one in enumerate(seen.classes[array.path]):
                    if one in chosen and not axes_of(taken[dim]):
                        reasons[array.path].append(f"{name}: {chosen[one]}")
                        return {dim: (name,)}
                return {}

            rules = extended(params, mesh, rules, dims, batch=(name,) if role == "expert" else ())
    before = rules
    for name in by_role["fully sharded"]:

        def largest(array: Shaped, taken: Sequence[Entry], name: str = name) -> Dims:
            found = seen.largest(array, taken, name, mesh)
            if found:
                reasons[array.path].append(f"{name}: the largest dimension that is left")
            return found

        rules = extended(params, mesh, rules, largest, batch=(name,))
    if by_role["data"]:
        rules = data_parallel(params, mesh, axis=by_role["data"], within=rules)
    if rules is None:
        raise value_error("the mesh has no axes; make one with axes to shard over")
    tell = show or (lambda line: None)
    for line in _told(rules, reasons, seen):
        tell(line)
    gathered = by_role["fully sharded"] + by_role["data"]
    whole = data_parallel(params, mesh, axis=gathered, within=before) if gathered else None
    compared: list[Compared] = []
    plain = others(params, mesh, whole if by_role["fully sharded"] and before else None)
    for found in compare(function, params, batch, mesh, {"this map": rules, **dict(plain)}, target):
        tell(str(found))
        compared.append(found)
    return _best(compared, target, tell)


def _best(compared: Sequence[Compared], target: Any, tell: Callable[[str], object]) -> LayoutMap:
    """The map that is taken: the first, or one that is faster and fits."""
    first, best = compared[0], compared[0]
    for found in compared[1:]:
        if (
            found.seconds is not None
            and found.fits
            and (best.seconds is None or not best.fits or found.seconds < FASTER * best.seconds)
        ):
            best = found
    if best is not first:
        tell(f"taken: {best.name}, the fastest that fits the memory of {target}")
    return best.rules


@dataclass(frozen=True)
class _Weights:
    """What is multiplied along one class, and what its sums would cost."""

    flops: float
    sums: float  # bytes
    members: tuple[tuple[str, int], ...]  # paths and dimensions


class _Seen:
    """What one trace of the function says of the dimensions of its parameters."""

    def __init__(self, function: Callable[..., Any], params: Any, batch: Any) -> None:
        dimensions = Dimensions(function, params, batch)
        self.flow = flow = dimensions.flow
        self.arrays, self.classes = dimensions.arrays, dimensions.classes
        self.of_batch = {one for own in dimensions.data for one in own}
        self.looked_up = {
            flow.of(t)
            for found in flow.sums
            if found.what == "rows that are looked up"
            for t in found.over
        }
        self.flops = sum(matmul.flops for matmul in flow.matmuls)
        self.weights = self._weights()
        pairs = {(flow.of(a), flow.of(b)) for a, b in flow.together}
        pairs |= {pair for own in self.classes.values() for pair in combinations(own, 2)}
        self.apart = pairs | {(b, a) for a, b in pairs}

    def _weights(self) -> dict[int, _Weights]:
        flow = self.flow
        flops: dict[int, float] = defaultdict(float)
        sums: dict[int, float] = defaultdict(float)
        members: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for matmul in flow.matmuls:
            for one in {flow.of(t) for t in matmul.tokens}:
                flops[one] += matmul.flops
        for found in flow.sums:
            for one in {flow.of(t) for t in found.over}:
                sums[one] += found.bytes
        for path, own in self.classes.items():
            for dim, one in enumerate(own):
                members[one].append((path, dim))
        return {one: _Weights(flops[one], sums[one], tuple(of)) for one, of in members.items()}

    def choose(self, count: int, role: str, before: LayoutMap | None) -> dict[int, str]:
        """The classes that are sharded over an axis of so many devices, each with the reason."""
        taken = set[int]()
        for path, own in self.classes.items():
            entries = before.rule(before.matching(path)[0]).entries if before is not None else ()
            taken |= {one for one, entry in zip(own, entries, strict=False) if axes_of(entry)}
        able = [
            one
            for one, known in self.weights.items()
            if one not in self.of_batch | taken
            and (known.flops or one in self.looked_up)
            and self._divided(one, count)
        ]
        if role == "expert":  # their weights have two dimensions more that are multiplied
            of_experts = {
                one
                for path, own in self.classes.items()
                for one in own
                if self._multiplied(path) > 2
            }
            able = [one for one in able if one in of_experts]
        chosen = self._least([one for one in able if self.weights[one].flops])
        if role == "expert":
            chosen = chosen[:1]
        else:  # tables that are looked up, which nothing multiplies
            chosen += [
                one
                for one in able
                if not self.weights[one].flops
                and not any((one, other) in self.apart for other in chosen)
            ]
        return {one: self._why(self.weights[one]) for one in chosen}

    def _least(self, able: Sequence[int]) -> list[int]:
        """Classes of which no two are in one array, the cheapest that share most of the work."""
        for one in able:
            if (one, one) in self.apart:  # a recurrence: both dimensions of its matrix
                self.flow.unsure["a dimension that is twice in one array"].append(one)
        able = [one for one in able if (one, one) not in self.apart and self._mostly_kept(one)]
        able.sort(key=lambda one: self.weights[one].sums / self.weights[one].flops)
        work = [({self.flow.of(t) for t in m.tokens}, m.flops) for m in self.flow.matmuls]
        sums = sum(found.bytes for found in self.flow.sums) or 1.0

        def cost(chosen: Sequence[int]) -> float:
            """The share of the work that every device does, and a part of that of the sums."""
            whole = sum(flops for tokens, flops in work if not tokens & set(chosen))
            moved = sum(self.weights[one].sums for one in chosen)
            return whole / self.flops + 0.25 * moved / sums

        chosen: list[int] = []
        better = True
        while better:  # each round costs less than the one before
            better = False
            for one in able:
                if one in chosen:
                    continue
                without = [other for other in chosen if (one, other) not in self.apart]
                if cost([*without, one]) < cost(chosen) - 1e-9:
                    chosen, better = [*without, one], True
        return chosen

    def _divided(self, one: int, count: int) -> bool:
        """Whether the axis divides all sizes of a class: the heads in a width, too."""
        wrong = sorted(size for size in self.flow.sizes[self.flow.of(one)] if size % count)
        if wrong and self._mostly_kept(one):
            sizes = ", ".join(map(str, wrong))
            what = f"{count} devices do not divide {sizes} (Padded can): it"
            self.flow.unsure[what].append(one)
        return not wrong

    def _mostly_kept(self, one: int) -> bool:
        """Whether at most half of its matmuls sum over it: not so for the width of all layers."""
        used = sum(one in map(self.flow.of, matmul.tokens) for matmul in self.flow.matmuls)
        summed = sum(
            one in map(self.flow.of, found.over)
            for found in self.flow.sums
            if found.what in ("a matmul", "a convolution")
        )
        return 2 * summed <= used

    def _multiplied(self, path: str) -> int:
        """How many dimensions of an array are multiplied: those that count layers are not."""
        return sum(self.weights[one].flops > 0 for one in self.classes[path])

    def _why(self, known: _Weights) -> str:
        others = sorted({re.sub(r"\d+", "#", path) for path, _ in known.members})
        shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        cost = f"{size_text(known.sums)} of sums" if known.sums else "no sums"
        return f"shared by {shown}: {known.flops / max(self.flops, 1):.0%} of the FLOPs, {cost}"

    def largest(self, array: Shaped, taken: Sequence[Entry], name: str, mesh: AnyMesh) -> Dims:
        """The largest dimension that is multiplied, and that the axis divides, or none.

        Vectors, one of which each layer may have, stay whole: they are small.
        """
        count = mesh.shape[name]
        own = self.classes[array.path]
        if sum(one in self.looked_up or self.weights[one].flops > 0 for one in own) < 2:
            return {}
        fitting = [
            dim
            for dim, size in enumerate(array.shape)
            if size
            and not size % (count * size_of(mesh, axes_of(taken[dim])))
            and self.weights[own[dim]].flops
        ]
        if not fitting:
            return {}
        best = min(fitting, key=lambda d: (bool(axes_of(taken[d])), -array.shape[d]))
        return {best: (name,)}


def _told(rules: LayoutMap, reasons: Mapping[str, list[str]], seen: _Seen) -> list[str]:
    """Every rule with its reason, and what is unsure."""
    lines: list[str] = []
    for key in rules:
        path = next(path for path in seen.classes if rules.pattern(key).fullmatch(path))
        why = "; ".join(reasons.get(path, [])) or "whole"
        lines.append(f"{key}: {rules[key]}  # {why}")
    weights = {token for own in seen.classes.values() for token in own}
    for what, tokens in seen.flow.unsure.items():
        touched = {seen.flow.of(t) for t in tokens} & weights
        found = sorted(
            {re.sub(r"\d+", "#", p) for p, own in seen.classes.items() if touched & set(own)}
        )
        if found:
            lines.append(f"unsure: {what} touches dimensions of {', '.join(found[:6])}")
    return lines


def _roles(mesh: AnyMesh, given: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each role."""
    for name in given or {}:
        if name not in mesh.axis_names:
            raise value_error(
                f"roles has {name!r}, and the mesh {dict(mesh.shape)}; name axes of the mesh"
            )
    found: dict[str, tuple[str, ...]] = dict.fromkeys(ROLES, ())
    for name in map(str, mesh.axis_names):
        role = (given or {}).get(name) or next(
            (role for role, pattern in NAMES.items() if re.fullmatch(pattern, name)), None
        )
        if role not in ROLES:
            raise value_error(
                f"mesh axis {name!r} has no role that its name tells; say it, "
                f"roles={{{name!r}: ...}}: one of {', '.join(map(repr, ROLES))}"
            )
        found[role] += (name,)
    return found
