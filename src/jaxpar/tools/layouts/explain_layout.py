"""Predicts a layout's cost by weight, and finds cheaper rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxpar import compiled_with
from jaxpar import compiler_options as options_of
from jaxpar.layout import ArrayLayout, Layout
from jaxpar.schedule import CompiledProgram, Event, Target, Timeline, compile_for, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.layouts.comparison import others
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.layouts.layout_costs import Cost, LayoutCosts, TriedRule
from jaxpar.tools.layouts.owners import Owners
from jaxpar.tools.layouts.rule_candidates import RuleCandidate, candidates, shapes_of
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.queueing import Charges
from jaxpar.tools.timeline.target import figures_of
from jaxpar.tools.toolkit_api import (
    Shaped,
    array_like,
    arrays_of,
    jitted_like,
    of_user,
    parameter_of,
    type_error,
    value_error,
)


@dataclass(frozen=True)
class _Question:
    step: Callable[..., Any]
    args: tuple[Any, ...]
    target: Target
    options: dict[str, Any] | None
    from_layout: bool

    def play(self, layout: Layout) -> tuple[CompiledProgram, Timeline, tuple[Cost, ...]]:
        step = self.made(layout)
        arguments = self.given(layout)
        results: list[str | None] = []

        def whole(params: Any, *args: Any) -> Any:
            output = step(_filled(layout, params), *args)
            leaves, tree = arrays_of(output, "the step's result")
            results.clear()
            flat: list[Any] = []
            for leaf, x in zip(leaves, jax.tree.leaves(output), strict=True):
                if leaf is None:  # a program returns arrays only
                    flat.append(None)
                    continue
                shaped = Shaped(leaf[0], jnp.shape(x), jnp.result_type(x))
                like = array_like(layout, shaped)
                results.append(parameter_of(layout, leaf[0]) if like else None)
                like = self.of_state(shaped) or like
                # A result like a weight keeps the weight's sharding, as in a training step.
                flat.append(jax.lax.with_sharding_constraint(x, like.sharding) if like else x)
            return jax.tree.unflatten(tree, flat)

        program = compile_for(
            jitted_like(step, whole),
            self.target,
            layout.shapes,
            *arguments,
            compiler_options=self.options,
        )
        played = timeline(program)
        names = {
            f"params{keystr(keys)}": path
            for (keys, _), path in zip(
                tree_flatten_with_path(layout.shapes)[0], layout, strict=True
            )
        }
        charges = Charges(program, Links(self.target.mesh, figures_of(self.target)))
        events = list(charges.of(played.events))
        return program, played, _costs(Owners(program.text, names, results), events)

    def of_state(self, array: Shaped) -> ArrayLayout | None:
        """Returns the sharding of a state with its own rule."""
        for arg in self.args:
            if isinstance(arg, Layout) and parameter_of(arg, array.path) in arg.ruled:
                return array_like(arg.on(self.target.mesh), array)
        return None

    def given(self, layout: Layout) -> tuple[Any, ...]:
        with jax.set_mesh(self.target.mesh):  # without it, a shape with a spec has no sharding
            return tuple(_laid(arg, layout, n) for n, arg in enumerate(self.args, 1))

    def candidates(
        self, layout: Layout, costs: Callable[[], Sequence[Cost]]
    ) -> Iterator[RuleCandidate]:
        step = self.made(layout)
        arguments = self.given(layout)
        options = options_of(self.target) if self.options is None else self.options
        with jax.set_mesh(self.target.mesh), compiled_with(options):
            seen = Dimensions.of(
                lambda params, args: step(_filled(layout, params), *args), layout.shapes, arguments
            )

        def exposed() -> dict[str, float]:
            seconds: dict[str, float] = defaultdict(float)
            for cost in costs():
                rule = None if cost.path is None else layout[cost.path].rule
                if rule is not None:
                    seconds[rule] += cost.exposed
            return seconds

        return candidates(layout, seen, shapes_of(self.args, arguments), exposed)

    def plain(self, layout: Layout) -> Iterator[tuple[str, float]]:
        params = _filled(layout, layout.shapes)
        for name, rules in others(params, layout.mesh, None):
            try:
                program, played, _ = self.play(rules.layout(params, layout.mesh))
            except ValueError:  # for instance rows that the devices do not divide
                continue
            chip = self.target.chip
            if chip is None or program.memory.peak <= chip.capacity:
                yield name, played.total

    def made(self, layout: Layout) -> Callable[..., Any]:
        return of_user(self.step, "step")(layout) if self.from_layout else self.step


def explain_layout(
    layout: Layout,
    step: Any,
    target: Any,
    args: tuple[Any, ...],
    options: dict[str, Any] | None,
    tries: int,
    from_layout: bool,
) -> LayoutCosts:
    of_user(step, "step")
    if isinstance(target, str):
        count = describe(target, "all=-1").mesh.size
        if count != layout.mesh.size:
            raise value_error(
                f"{target!r} has {count} devices, and the layout's mesh {layout.mesh.size}: "
                f"{dict(layout.mesh.shape)}; name a slice of as many"
            )
        target = describe(target, dict(layout.mesh.shape))
    if not isinstance(target, Target):
        raise type_error(f"target must be a name such as 'v5p:4x4x4' or a Target, got {target!r}")
    if dict(target.mesh.shape) != dict(layout.mesh.shape):
        raise value_error(
            f"the target's mesh has {dict(target.mesh.shape)}, and the layout's "
            f"{dict(layout.mesh.shape)}; make both with the same axes, or give the target's name"
        )
    layout = layout.on(target.mesh)
    asked = _Question(step, args, target, options, from_layout)
    program, played, costs = asked.play(layout)
    exchanges = _tried(asked, _Played(layout, played.total, costs), tries)
    plain = dict(asked.plain(layout)) if tries and not from_layout else {}
    return LayoutCosts(layout, target, program, played, costs, exchanges, plain)


class _Played(NamedTuple):
    layout: Layout
    seconds: float
    costs: tuple[Cost, ...]


def _tried(asked: _Question, first: _Played, tries: int) -> tuple[TriedRule, ...]:
    # Faster changes stay, so that later ones build on them.
    kept, exchanges = [first], list[TriedRule]()
    proposed = asked.candidates(first.layout, lambda: kept[-1].costs) if tries else ()
    for candidate in islice(proposed, tries):
        now = kept[-1]
        other = candidate.of(now.layout)
        if other is None:
            continue
        paths = [path for path, array in first.layout.items() if array.rule == candidate.rule]
        _, replayed, costs = asked.play(other)
        exchange = TriedRule(
            candidate.rule,
            now.layout[paths[0]].spec,
            other[paths[0]].spec,
            candidate.cause,
            candidate.disagrees,
            now.seconds,
            replayed.total,
            _moved(now.costs, paths),
            _moved(costs, paths),
        )
        exchanges.append(exchange)
        if exchange.is_faster:
            kept.append(_Played(other, replayed.total, costs))
    return tuple(exchanges)


def _filled(layout: Layout, arrays: Any) -> Any:
    return layout.filled(dict(filter(None, arrays_of(arrays)[0])))


def _laid(arg: Any, layout: Layout, number: int) -> Any:
    if isinstance(arg, Layout):
        alike = {
            path: array_like(layout, Shaped(path, array.shape, array.dtype))
            for path, array in arg.items()
            if path not in arg.ruled
        }
        here = {path: array for path, array in alike.items() if array is not None}
        return arg.on(layout.mesh).changed(here).shapes

    def laid(x: Any) -> Any:
        if not hasattr(x, "shape"):
            return x
        sharding = getattr(x, "sharding", None)
        spec = getattr(sharding, "spec", sharding)
        if not isinstance(spec, PartitionSpec):
            batch = layout.rules.batch
            spec = PartitionSpec() if batch is None else batch.first(len(x.shape)).layout
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            spec = PartitionSpec()
        try:
            placed = NamedSharding(layout.mesh, spec)
            placed.shard_shape(tuple(x.shape))
        except ValueError as reason:
            raise value_error(
                f"argument {number} of the step: {reason}; give it a shape that its spec divides"
            ) from None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree.map(laid, arg)


def _costs(owners: Owners, events: Sequence[Event]) -> tuple[Cost, ...]:
    exposed: dict[str, float] = defaultdict(float)
    for event in events:
        if event.kind == "wait" and event.row == "compute":
            exposed[event.name] += event.seconds
    transfers = [event for event in events if event.kind == "transfer"]
    runs = Counter(event.name for event in transfers)
    known = {name: owners.of(name) for name in runs}
    totals: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0] * 4)
    for event in transfers:
        for (path, what), share in known[event.name].items():
            waited = exposed[event.name] / runs[event.name]
            total = totals[path, what, event.row]
            for n, value in enumerate((1.0, event.bytes, event.seconds, waited)):
                total[n] += share * value
    costs = [Cost(*key, *total) for key, total in totals.items()]
    return tuple(sorted(costs, key=lambda cost: (-cost.exposed, -cost.seconds, cost.path or "")))


def _moved(costs: Sequence[Cost], paths: Sequence[str]) -> float:
    moved = (c.bytes for c in costs if c.path in paths and c.what == "the weight")
    return sum(moved, 0.0)
