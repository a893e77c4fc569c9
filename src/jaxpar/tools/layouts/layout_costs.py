"""Results of `Layout.explain`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from jaxpar.schedule import CompiledProgram, Target, Timeline
from jaxpar.tools.layouts.owners import What
from jaxpar.tools.layouts.rule_candidates import Cause
from jaxpar.tools.toolkit_api import axes_by_dim, readable, size_text

if TYPE_CHECKING:
    from jaxpar.layout import Layout

SHOWN = 30  # rows of a printed table
FASTER = 0.99  # of the step's time: smaller gains change nothing
TITLES = ("weight", "spec", "moves", "collective", "times", "bytes", "transfer us", "exposed us")


@readable
@dataclass(frozen=True)
class Cost:
    """The cost of a kind of collective for a weight in a step, on a device.

    Attributes:
      path: the weight's path; None for no weight.
      what: the moved array: the weight itself, its gradient (or new value), its product with data
        (a sum), or its input (its other factor).
      collective: mesh axes and kind, as in the timeline.
      times: how often it runs. A collective for several weights counts in parts.
      bytes: bytes that a device sends.
      seconds: the time of transfer.
      exposed: seconds in which the device only waits.

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
class TriedRule:
    """A changed rule, compiled and simulated like the layout itself.

    Attributes:
      rule: the rule's key.
      before: the spec of the rule's arrays.
      after: the tried spec: dimensions are exchanged, or the batch's axis leaves a lookup table's
        features, for the rows if it divides them.
      cause: why it was tried. `"features of what is looked up"`: a lookup table's features are
        sharded over the batch's axis, so activations move. `"at odds"`: the rule disagrees with
        arrays that its own are multiplied with. None: it is expensive.
      disagrees: the dimension that it disagrees with, as text, or empty.
      seconds: the step's time before the change, with all earlier changes that were faster.
      seconds_after: the time with the change.
      moved: bytes of the rule's weights that a device sends before the change.
      moved_after: likewise, with the change.

    Example:
      >>> print(TriedRule("up", P("tp"), P(None, "tp"), None, "", 2e-4, 1e-4, 0.0, 0.0))
      'up': tp -> -, tp: the step takes 100 us in place of 200
    """

    rule: str
    before: PartitionSpec
    after: PartitionSpec
    cause: Cause
    disagrees: str
    seconds: float
    seconds_after: float
    moved: float
    moved_after: float

    @property
    def is_faster(self) -> bool:
        """Returns whether it saves more than 1%."""
        return self.seconds_after < FASTER * self.seconds

    def __str__(self) -> str:
        text = (
            f"{self.rule!r}: {_entries(self.before)} -> {_entries(self.after)}: the step takes "
            f"{_us(self.seconds_after)} us in place of {_us(self.seconds)}"
        )
        if round(self.moved) != round(self.moved_after):
            text += (
                f", and {size_text(self.moved_after)} of its weights travel in place of "
                f"{size_text(self.moved)}"
            )
        return text + (f"; {self.disagrees}" if self.disagrees else "")


@readable
@dataclass(frozen=True)
class LayoutCosts:
    """The predicted cost of a layout's step on a described chip, from `Layout.explain`.

    Attributes:
      layout: the layout on the target's mesh.
      target: the described devices.
      program: the compiled step.
      timeline: the simulated schedule.
      costs: each weight's costs, the most exposed first.
      tried: the compiled changes of rules.
      plain: the step's seconds with plain maps that fit, `"fully sharded over all axes"` and
        `"replicated"`.

    Example:
      >>> mesh = make_mesh("tp=4", devices=jax.devices()[:4])
      >>> layout = LayoutMap({"w": ("tp", None)}).layout({"w": jnp.ones((8, 128))}, mesh)
      >>> x = jnp.ones((16, 8))
      >>> costs = layout.explain(lambda params, x: x @ params["w"], "v5e:2x2", x, tries=0)
      >>> costs.of("w")[0].collective
      'tp all-gather'
    """

    layout: Layout
    target: Target
    program: CompiledProgram
    timeline: Timeline
    costs: tuple[Cost, ...]
    tried: tuple[TriedRule, ...]
    plain: dict[str, float]

    @property
    def flagged(self) -> tuple[TriedRule, ...]:
        """Returns tried changes that are faster, or whose rule disagrees with others."""
        return tuple(e for e in self.tried if e.is_faster or e.disagrees)

    def of(self, path: str) -> tuple[Cost, ...]:
        """Returns the costs of a weight."""
        self.layout[path]  # raises with the nearest path for an unknown path
        return tuple(cost for cost in self.costs if cost.path == path)

    def json(self) -> str:
        """Returns everything but the program, as JSON."""
        edits = [
            {**asdict(e), "before": axes_by_dim(e.before), "after": axes_by_dim(e.after)}
            for e in self.tried
        ]
        return json.dumps(
            {
                "target": self.target.name,
                "mesh": dict(self.target.mesh.shape),
                "seconds": self.timeline.total,
                "exposed": self.timeline.exposed,
                "costs": [asdict(cost) for cost in self.costs],
                "tried": edits,
                "plain": self.plain,
            },
            indent=1,
        )

    def text(self, rows: int | None = SHOWN) -> str:
        """Returns costs by rule and flagged changes. `rows=None` shows all rows."""
        table = list(self._by_rule())
        cells = [TITLES, *table[:rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(TITLES))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        if len(cells) <= len(table):
            lines.append(f"... and {len(table) + 1 - len(cells)} rows more")
        mesh = ", ".join(f"{name}={size}" for name, size in self.target.mesh.shape.items())
        step = self.timeline
        lines.append(
            f"a step on {self.target.name} ({mesh}), by {step.estimate}: {_us(step.total)} us, "
            f"{_us(step.exposed)} us exposed; {size_text(step.peak_bytes)} of memory"
        )
        if loops := step.loops_of_unknown_length:
            lines.append(f"loops of an unknown number of iterations count once: {', '.join(loops)}")
        tables = [e for e in self.flagged if e.cause == "features of what is looked up"]
        faster = [e for e in self.flagged if e.is_faster and e not in tables]
        others = [e for e in self.flagged if not e.is_faster and e not in tables]
        for title, changes in (
            ("activations travel to and from tables with features over the batch's axis:", tables),
            ("faster with two dimensions swapped:", faster),
            ("sharded otherwise than their operands:", others),
        ):
            lines += [title] * bool(changes) + [str(e) for e in changes]
        best = min([step.total, *(e.seconds_after for e in self.tried)])
        lines += [
            f"plainer and faster: {name}, the step takes {_us(seconds)} us"
            for name, seconds in self.plain.items()
            if seconds < FASTER * best
        ]
        return "\n".join(lines)

    def _by_rule(self) -> Iterator[tuple[str, ...]]:
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


def _entries(spec: PartitionSpec) -> str:
    return ", ".join("+".join(axes) or "-" for axes in axes_by_dim(spec)) or "-"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}" if seconds < 1e-2 else f"{seconds * 1e6:.0f}"
