"""What a layout costs on a described chip, weight by weight, and which exchange of axes costs less.

The step is compiled with the layout and played on a model of the chip. Each collective is told by
the weight that it is for (`_causes`). Rules whose dimensions lie otherwise than those that they are
multiplied with (`_exchanges`), and those that cost most, are compiled with two of their dimensions
exchanged.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from jaxpar._calls import of_user, readable, type_error, value_error
from jaxpar._jit import jitted_like
from jaxpar._options import compiled_with
from jaxpar._options import compiler_options as options_of
from jaxpar._units import size_text
from jaxpar.layout._array_layout import ArrayLayout, axes_by_dim
from jaxpar.layout._causes import Causes, What
from jaxpar.layout._dimensions import Dimensions
from jaxpar.layout._exchanges import Candidate, candidates, shapes_of
from jaxpar.layout._fit import Shaped
from jaxpar.layout._like import array_like, parameter_of
from jaxpar.layout._paths import arrays_of
from jaxpar.schedule import CompiledProgram, Target, Timeline, compile_for, timeline
from jaxpar.schedule import target as describe

if TYPE_CHECKING:
    from jaxpar.layout._layout import Layout

SHOWN = 30  # rows of a table that is printed
FASTER = 0.99  # of the step's time: less is no reason to change anything
TITLES = ("weight", "spec", "moves", "collective", "times", "bytes", "transfer us", "exposed us")


@readable
@dataclass(frozen=True)
class Cost:
    """What one kind of collective does for one weight in a step, on one device.

    Attributes:
      path: of the weight; None for collectives that are for no weight.
      what: what is moved: the weight itself, its gradient (or its new value), its product with
        data, which is summed up, or its input, what it is multiplied with.
      collective: its kind and the mesh axes that it goes over, as the timeline names it.
      times: how often; a share where a collective is for several weights.
      bytes: that a device sends.
      seconds: of transfer.
      exposed: seconds in which nothing else is done.

    Example:
      >>> Cost("w", "its gradient", "dp all-reduce", 1.0, 2.0**20, 2e-5, 1e-5).exposed
      1e-05
    """

    path: str | None
    what: What | None
    collective: str
    times: float
    bytes: float
    seconds: float
    exposed: float


@readable
@dataclass(frozen=True)
class Exchange:
    """A rule with two dimensions exchanged, compiled and played like the layout itself.

    Attributes:
      rule: its key.
      before: the spec of its arrays.
      after: the one that was tried.
      disagrees: with which dimension of another array the rule does not agree, as text; empty
        where it does.
      seconds: the step's time as it is, with the exchanges before this one that were faster.
      exchanged: its time with the exchange.
      moved: bytes that a device sends of the rule's weights themselves, gathered or moved.
      moved_exchanged: the same with the exchange.

    Example:
      >>> print(Exchange("up", P("tp"), P(None, "tp"), "", 2e-4, 1e-4, 0.0, 0.0))
      'up': tp -> -, tp: the step takes 100 us for 200
    """

    rule: str
    before: PartitionSpec
    after: PartitionSpec
    disagrees: str
    seconds: float
    exchanged: float
    moved: float
    moved_exchanged: float

    @property
    def is_faster(self) -> bool:
        """Whether the step is faster with the exchange, by 1% or more."""
        return self.exchanged < FASTER * self.seconds

    def __str__(self) -> str:
        """In one line."""
        text = (
            f"{self.rule!r}: {_entries(self.before)} -> {_entries(self.after)}: the step takes "
            f"{_us(self.exchanged)} us for {_us(self.seconds)}"
        )
        if round(self.moved) != round(self.moved_exchanged):
            text += (
                f", and {size_text(self.moved_exchanged)} of its own weights move "
                f"for {size_text(self.moved)}"
            )
        return text + (f"; {self.disagrees}" if self.disagrees else "")


@readable
@dataclass(frozen=True)
class Explanation:
    """What a step of a layout costs on a described chip; made by `Layout.explain`.

    Attributes:
      layout: on the target's mesh.
      target: the described devices.
      program: the compiled step.
      timeline: its schedule under the model of the chip.
      costs: what the collectives do, weight by weight, the most exposed first.
      exchanges: what was compiled with two dimensions of a rule exchanged.

    Example:
      >>> mesh = make_mesh("tp=4", devices=jax.devices()[:4])
      >>> layout = LayoutMap({"w": ("tp", None)}).layout({"w": jnp.ones((8, 128))}, mesh)
      >>> x = jnp.ones((16, 8))
      >>> found = layout.explain(lambda params, x: x @ params["w"], "v5e:2x2", x, tries=0)
      >>> [(cost.what, cost.collective) for cost in found.of("w")]
      [('the weight', 'tp all-gather')]
    """

    layout: Layout
    target: Target
    program: CompiledProgram
    timeline: Timeline
    costs: tuple[Cost, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def flagged(self) -> tuple[Exchange, ...]:
        """The exchanges that are faster, or of rules that disagree with others."""
        return tuple(e for e in self.exchanges if e.is_faster or e.disagrees)

    def of(self, path: str) -> tuple[Cost, ...]:
        """The costs of one weight."""
        self.layout[path]  # an error with the nearest path, if there is none
        return tuple(cost for cost in self.costs if cost.path == path)

    def json(self) -> str:
        """Everything but the program, as JSON."""
        edits = [
            {**asdict(e), "before": axes_by_dim(e.before), "after": axes_by_dim(e.after)}
            for e in self.exchanges
        ]
        return json.dumps(
            {
                "target": self.target.name,
                "mesh": dict(self.target.mesh.shape),
                "seconds": self.timeline.total,
                "exposed": self.timeline.exposed,
                "costs": [asdict(cost) for cost in self.costs],
                "exchanges": edits,
            },
            indent=1,
        )

    def text(self, rows: int | None = SHOWN) -> str:
        """The step, its costs by rule and what is flagged; None: all rows."""
        found = list(self._by_rule())
        cells = [TITLES, *found[:rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(TITLES))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        if len(cells) <= len(found):
            lines.append(f"... and {len(found) + 1 - len(cells)} rows more")
        mesh = ", ".join(f"{name}={size}" for name, size in self.target.mesh.shape.items())
        step = self.timeline
        lines.append(
            f"a step on {self.target.name} ({mesh}), by {step.estimate}: {_us(step.total)} us, "
            f"{_us(step.exposed)} of them exposed; {size_text(step.peak_bytes)} of memory"
        )
        if loops := step.loops_of_unknown_length:
            lines.append(f"loops whose trips depend on data count once: {', '.join(loops)}")
        faster = [str(e) for e in self.flagged if e.is_faster]
        others = [str(e) for e in self.flagged if not e.is_faster]
        lines += ["faster with two dimensions exchanged:"] * bool(faster) + faster
        lines += ["at odds with what they are multiplied with:"] * bool(others) + others
        return "\n".join(lines)

    def _by_rule(self) -> Iterator[tuple[str, ...]]:
        """A row for each rule and kind of collective: layers share one."""
        alike: dict[tuple[Any, ...], list[Cost]] = defaultdict(list)
        for cost in self.costs:
            rule = None if cost.path is None else self.layout[cost.path].rule
            alike[rule, cost.what, cost.collective].append(cost)
        for (_, what, collective), costs in sorted(
            alike.items(), key=lambda item: -sum(cost.exposed for cost in item[1])
        ):
            paths = {cost.path: None for cost in costs}
            first = next(iter(paths))
            yield (
                "(no weight)"
                if first is None
                else f"{first}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}",
                "" if first is None else _entries(self.layout[first].spec),
                what or "",
                collective,
                f"{sum(cost.times for cost in costs):.3g}",
                size_text(sum(cost.bytes for cost in costs)),
                _us(sum(cost.seconds for cost in costs)),
                _us(sum(cost.exposed for cost in costs)),
            )

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


@dataclass(frozen=True)
class _Asked:
    """What was asked about: a step, its arguments, and for which devices."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    target: Target
    options: dict[str, Any] | None
    from_layout: bool

    def play(self, layout: Layout) -> tuple[CompiledProgram, Timeline, tuple[Cost, ...]]:
        """Compiles the step with a layout, plays it, and tells its collectives by weight."""
        step = self.made(layout)
        given = self.given(layout)
        results: list[str | None] = []

        def whole(params: Any, *args: Any) -> Any:
            found = step(params, *args)
            leaves, tree = arrays_of(found, "the step's result")
            results.clear()
            flat: list[Any] = []
            for leaf, x in zip(leaves, jax.tree.leaves(found), strict=True):
                shaped = leaf and Shaped(leaf[0], jnp.shape(x), jnp.result_type(x))
                like = shaped and array_like(layout, shaped)
                results.append(parameter_of(layout, leaf[0]) if leaf and like else None)
                like = (shaped and self.of_state(shaped)) or like
                # What is like a weight comes back as it went in: as a training step has it.
                flat.append(jax.lax.with_sharding_constraint(x, like.sharding) if like else x)
            return jax.tree.unflatten(tree, flat)

        program = compile_for(
            jitted_like(step, whole),
            self.target,
            layout.shapes,
            *given,
            compiler_options=self.options,
        )
        played = timeline(program)
        names = {
            f"params{keystr(keys)}": path
            for (keys, _), path in zip(
                tree_flatten_with_path(layout.shapes)[0], layout, strict=True
            )
        }
        return program, played, _costs(Causes(program.text, names, results), played)

    def of_state(self, array: Shaped) -> ArrayLayout | None:
        """How an array lies that is like one of a state which has a rule of its own."""
        from jaxpar.layout._layout import Layout

        for arg in self.args:
            if isinstance(arg, Layout) and parameter_of(arg, array.path) in arg.ruled:
                return array_like(arg.on(self.target.mesh), array)
        return None

    def given(self, layout: Layout) -> tuple[Any, ...]:
        """The shapes of the arguments, with shardings."""
        with jax.set_mesh(self.target.mesh):  # a shape whose sharding is a spec has none without
            return tuple(_laid(arg, layout, n) for n, arg in enumerate(self.args, 1))

    def candidates(self, layout: Layout, costs: Sequence[Cost]) -> Iterator[Candidate]:
        """Exchanges that are worth compiling."""
        step = self.made(layout)
        given = self.given(layout)
        options = options_of(self.target) if self.options is None else self.options
        with jax.set_mesh(self.target.mesh), compiled_with(options):
            seen = Dimensions(lambda params, args: step(params, *args), layout.shapes, given)
        exposed: dict[str, float] = defaultdict(float)
        for cost in costs:
            rule = None if cost.path is None else layout[cost.path].rule
            if rule is not None:
                exposed[rule] += cost.exposed
        return candidates(layout, seen, shapes_of(self.args, given), exposed)

    def made(self, layout: Layout) -> Callable[..., Any]:
        """The step of a layout."""
        return of_user(self.step, "step")(layout) if self.from_layout else self.step


def explain(
    layout: Layout,
    step: Any,
    target: Any,
    args: tuple[Any, ...],
    options: dict[str, Any] | None,
    tries: int,
    from_layout: bool,
) -> Explanation:
    """What `Layout.explain` says."""
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
    asked = _Asked(step, args, target, options, from_layout)
    program, played, costs = asked.play(layout)
    exchanges: list[Exchange] = []
    now, seconds, own = layout, played.total, costs
    for candidate in islice(asked.candidates(layout, costs) if tries else (), tries):
        other = candidate.of(now)
        if other is None:
            continue
        paths = [path for path in layout if layout[path].rule == candidate.rule]
        _, replayed, found = asked.play(other)
        exchange = Exchange(
            candidate.rule,
            now[paths[0]].spec,
            other[paths[0]].spec,
            candidate.disagrees,
            seconds,
            replayed.total,
            _moved(own, paths),
            _moved(found, paths),
        )
        exchanges.append(exchange)
        if exchange.is_faster:
            now, seconds, own = other, replayed.total, found
    return Explanation(layout, target, program, played, costs, tuple(exchanges))


def _laid(arg: Any, layout: Layout, number: int) -> Any:
    """The shapes of one argument, with shardings on the mesh of a layout."""
    from jaxpar.layout._layout import Layout

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


def _costs(causes: Causes, played: Timeline) -> tuple[Cost, ...]:
    """What each kind of collective does for each weight."""
    exposed: dict[str, float] = defaultdict(float)
    for event in played.events:
        if event.kind == "wait" and event.row == "compute":
            exposed[event.name] += event.seconds
    runs = Counter(event.name for event in played.transfers)
    known = {name: causes.of(name) for name in runs}
    totals: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0] * 4)
    for event in played.transfers:
        for path, (what, share) in known[event.name].items():
            waited = exposed[event.name] / runs[event.name]
            total = totals[path, what, event.row]
            for n, value in enumerate((1.0, event.bytes, event.seconds, waited)):
                total[n] += share * value
    costs = [Cost(*key, *total) for key, total in totals.items()]
    return tuple(sorted(costs, key=lambda cost: (-cost.exposed, -cost.seconds, cost.path or "")))


def _moved(costs: Sequence[Cost], paths: Sequence[str]) -> float:
    """Bytes of weights themselves that a device sends."""
    moved = (c.bytes for c in costs if c.path in paths and c.what == "the weight")
    return sum(moved, 0.0)


def _entries(spec: PartitionSpec) -> str:
    """As the table of a layout shows a spec."""
    return ", ".join("+".join(axes) or "-" for axes in axes_by_dim(spec)) or "-"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}" if seconds < 1e-2 else f"{seconds * 1e6:.0f}"
