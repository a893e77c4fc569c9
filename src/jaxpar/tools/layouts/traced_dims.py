"""Chooses dimensions to shard from a function's trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from jaxpar.layout import LayoutMap
from jaxpar.tools.layouts.classes import Cut
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.toolkit_api import (
    AnyMesh,
    Dims,
    Entry,
    Shaped,
    axes_of,
    size_of,
    size_text,
    value_error,
    without_numbers,
)


@dataclass(frozen=True)
class Multiplied:
    flops: float
    sums: float  # bytes
    made: float  # bytes of products with it
    members: tuple[tuple[str, int], ...]  # path and dimension


class TracedDims:
    def __init__(self, function: Callable[..., Any], params: Any, batch: Any) -> None:
        dimensions = Dimensions.of(function, params, batch)
        self.flow = flow = dimensions.flow
        self.arrays, self.classes = dimensions.arrays, dimensions.classes
        self.data = dimensions.data
        self.of_batch = {key for keys in self.data for key in keys}
        self.looked_up = flow.rows_looked_up()
        self.experts = {flow.of(t) for t in flow.experts}
        self.flops = sum(matmul.flops for matmul in flow.matmuls)
        self.work = [({flow.of(t) for t in m.tokens}, m.flops) for m in flow.matmuls]
        self.weights = self._weights()
        pairs = {(flow.of(a), flow.of(b)) for a, b in flow.together}
        pairs |= {pair for keys in self.classes.values() for pair in combinations(keys, 2)}
        self.apart = pairs | {(b, a) for a, b in pairs}

    def _weights(self) -> dict[int, Multiplied]:
        flow = self.flow
        flops: dict[int, float] = defaultdict(float)
        sums: dict[int, float] = defaultdict(float)
        made: dict[int, float] = defaultdict(float)
        members: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for matmul in flow.matmuls:
            for key in {flow.of(t) for t in matmul.tokens}:
                flops[key] += matmul.flops
            for key in {flow.of(t) for t in matmul.result}:
                made[key] += matmul.bytes
        for total in flow.sums:
            for key in {flow.of(t) for t in total.over}:
                sums[key] += total.bytes
        for path, keys in self.classes.items():
            for dim, key in enumerate(keys):
                members[key].append((path, dim))
        return {
            key: Multiplied(flops[key], sums[key], made[key], tuple(of))
            for key, of in members.items()
        }

    def choose(self, count: int, role: str, before: LayoutMap | None) -> dict[int, str]:
        taken = set[int]()
        for path, keys in self.classes.items():
            entries = before.rule(before.matching(path)[0]).entries if before is not None else ()
            taken |= {key for key, entry in zip(keys, entries, strict=False) if axes_of(entry)}
        able = [
            key
            for key, known in self.weights.items()
            if key not in self.of_batch | taken
            and (known.flops or key in self.looked_up)
            and self._divided(key, count)
        ]
        if role == "expert":
            able = [key for key in able if key in (self.experts or self._of_matrices())]
        chosen = self._least([key for key in able if self.weights[key].flops], count)
        if role == "expert":
            chosen = chosen[:1]
        else:  # lookup tables, which nothing multiplies
            chosen += [
                key
                for key in able
                if not self.weights[key].flops
                and not any((key, other) in self.apart for other in chosen)
            ]
        self._tell_cuts(able, chosen)
        return {key: self._why(self.weights[key]) for key in chosen}

    def stacks(self, name: str, count: int) -> dict[int, str]:
        """Returns the first dimensions of weights that a loop over layers takes apart."""
        reasons: dict[int, str] = {}
        for length, tokens in self.flow.stacked:
            over = {self.flow.of(t) for t in tokens}
            if over & self.of_batch:  # a loop over rows or tokens
                continue
            for path, keys in self.classes.items():
                if not keys or keys[0] not in over or self.arrays[path].shape[0] != length:
                    continue
                if length % count:
                    raise value_error(
                        f"{count} devices of {name!r} do not divide the {length} layers of "
                        f"{path!r}: {length} = {length // count} x {count} + {length % count}; "
                        "choose an axis or a number of layers that fits"
                    )
                reasons[keys[0]] = f"a scan over {length} layers"
        if not reasons and count > 1:
            raise value_error(
                f"{name!r} is a pipeline's axis, and no scan of the function takes the layers of "
                "weights; stack them along a first dimension, and call jax.lax.scan over it, or "
                f"give the axis another role, roles={{{name!r}: ...}}"
            )
        return reasons

    def rows_carried(self) -> int:
        """Returns the batch's dimension in carried activations."""
        rows = {keys[0] for keys in self.data if keys}
        for tokens in self.flow.carried:
            dims = [dim for dim, t in enumerate(tokens) if self.flow.of(t) in rows]
            if dims and len(tokens) > 1:
                return dims[0]
        return 0

    def _of_matrices(self) -> set[int]:
        used = {p: [c for c in keys if self.weights[c].flops] for p, keys in self.classes.items()}
        return {key for keys in used.values() if len(keys) > 2 for key in keys}

    def _tell_cuts(self, able: Sequence[int], chosen: Sequence[int]) -> None:
        sharded = {path for path, keys in self.classes.items() if set(keys) & set(chosen)}
        for cut in self.flow.cuts:
            key = self.flow.of(cut.before)
            if key in chosen:
                what = f"{cut.what} of a sharded dimension, whose parts move between devices"
                self.flow.unsure[what].append(key)
            elif key in able and not sharded & {path for path, _ in self.weights[key].members}:
                self.flow.unsure[f"{cut.what} of a dimension that stays unsharded"].append(key)

    def _least(self, able: Sequence[int], count: int) -> list[int]:
        """Returns the cheapest classes, at most one per array."""
        for key in able:
            if (key, key) in self.apart:  # a recurrence: both dimensions of a matrix
                self.flow.unsure["a dimension that is twice in one array"].append(key)
        able = [key for key in able if (key, key) not in self.apart and self._mostly_kept(key)]
        able.sort(key=lambda key: self.weights[key].sums / self.weights[key].flops)
        groups = [[key] for key in able]  # and with classes that cuts link to it
        families = [self._family(key) & set(able) for key in able]
        groups += [sorted(family) for family in families if len(family) > 1]
        chosen: list[int] = []
        better = True
        while better:  # each round lowers the cost
            better = False
            for group in groups:
                if set(group) <= set(chosen) or self._are_apart(group, group):
                    continue
                without = [key for key in chosen if key not in group]
                without = [key for key in without if not self._are_apart([key], group)]
                if self._cost([*without, *group], count) < self._cost(chosen, count) - 1e-9:
                    chosen, better = [*without, *group], True
        return chosen

    def _are_apart(self, keys: Sequence[int], others: Sequence[int]) -> bool:
        return any((key, other) in self.apart for key in keys for other in others)

    def _cost(self, chosen: Sequence[int], count: int) -> float:
        """Returns the share of replicated work, plus a part of the bytes sent.

        Parts of a cut dimension move to other devices, or to all if unsharded. Beyond half of the
        products along it, its work counts as replicated.
        """
        parted: dict[int, float] = defaultdict(float)  # bytes
        gathered: dict[int, float] = defaultdict(float)
        for cut in self.flow.cuts:
            key = self.flow.of(cut.before)
            if key in chosen:
                (parted if self._is_sharded(cut, chosen, count) else gathered)[key] += cut.bytes
        useful = {key for key in chosen if 2 * gathered[key] <= self.weights[key].made}
        whole = sum(flops for tokens, flops in self.work if not tokens & useful)
        sent = sum(self.weights[key].sums for key in chosen)
        sent += sum(parted.values()) / count + sum(gathered.values())
        sums = sum(total.bytes for total in self.flow.sums) or 1.0
        return whole / self.flops + 0.25 * sent / sums

    def _is_sharded(self, cut: Cut, chosen: Sequence[int], count: int) -> bool:
        if cut.after is None:
            return False
        key = self.flow.of(cut.after)
        if key in self.weights or self._are_apart([key], chosen):
            return key in chosen
        return min(self.flow.sizes[key]) >= count

    def _family(self, key: int) -> set[int]:
        """Returns a class with those linked by cuts."""
        pairs = {
            (self.flow.of(cut.before), self.flow.of(cut.after))
            for cut in self.flow.cuts
            if cut.after is not None
        }
        linked, size = {key}, 0
        while len(linked) > size:
            size = len(linked)
            linked |= {b for a, b in pairs if a in linked} | {a for a, b in pairs if b in linked}
        return linked

    def _divided(self, key: int, count: int) -> bool:
        wrong = sorted(size for size in self.flow.sizes[self.flow.of(key)] if size % count)
        if wrong and self._mostly_kept(key):
            sizes = ", ".join(map(str, wrong))
            what = f"{count} devices do not divide {sizes} (Padded can)"
            self.flow.unsure[what].append(key)
        return not wrong

    def _mostly_kept(self, key: int) -> bool:
        """Returns whether at most half of its matmuls sum over it.

        Matmuls of its parts, and of dimensions that it is cut from, count too.
        """
        family = self._family(key)
        used = sum(bool(family & set(map(self.flow.of, m.tokens))) for m in self.flow.matmuls)
        summed = sum(
            bool(family & set(map(self.flow.of, total.over)))
            for total in self.flow.sums
            if total.what in ("a matmul", "a convolution")
        )
        return 2 * summed <= used

    def _why(self, known: Multiplied) -> str:
        others = sorted({without_numbers(path) for path, _ in known.members})
        shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        cost = f"{size_text(known.sums)} of sums" if known.sums else "no sums"
        return f"shared by {shown}: {known.flops / max(self.flops, 1):.0%} of the FLOPs, {cost}"

    def largest(self, array: Shaped, taken: Sequence[Entry], name: str, mesh: AnyMesh) -> Dims:
        """Returns the largest multiplied dimension that the axis divides.

        Only rows of lookup tables are sharded: features would not match the batch. Vectors stay
        replicated.
        """
        keys = self.classes[array.path]
        rows = [dim for dim, key in enumerate(keys) if key in self.looked_up]
        used = [dim for dim, key in enumerate(keys) if dim in rows or self.weights[key].flops]
        if len(used) < 2:
            return {}
        if array.path in self.flow.looked_up:
            used = rows
        count = mesh.shape[name]
        fitting = [
            dim
            for dim in used
            if array.shape[dim]
            and not array.shape[dim] % (count * size_of(mesh, axes_of(taken[dim])))
        ]
        if not fitting:
            if array.path in self.flow.looked_up:
                what = f"{count} devices of {name!r} do not divide rows that are looked up"
                self.flow.unsure[what] += [keys[dim] for dim in rows]
            return {}
        best = min(fitting, key=lambda d: (bool(axes_of(taken[d])), -array.shape[d]))
        return {best: (name,)}
