"""The table of `mode="auto"`: call sites, algorithms and choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from typing import Any

import jax

from jaxpar.tools.accuracy.interval import LARGE, SENTENCE, KindOfWork, interval_of, text_of
from jaxpar.tools.program.sources import Line, own_line
from jaxpar.tools.timeline.frameworks import traced_for
from jaxpar.tools.timeline.target import Target
from jaxpar.tools.timeline.timeline import of_arrays
from jaxpar.tools.toolkit_api import (
    AUTO,
    IN_TURNS,
    Chip,
    Decision,
    WayRow,
    compiled_with,
    jitted_with,
    kind_of,
    naming,
    noting,
    options_like,
    options_of,
    readable,
    site_of,
    type_error,
    us,
)

TITLES = ("", "algorithm", "time", "both passes", "error", "out because")
NOTES = (
    'time: predicted by the model of mode="auto"; another algorithm than naive is taken where it '
    "is predicted to save more than 4%",
    "both passes: with the backward pass that fits it best, as residuals decide what that gathers "
    "again; the two are chosen together",
    "error: where 80% of unseen predictions of such transfers lie on this chip (predicted / "
    "measured - 1), and how many were measured",
)
NO_TIMES = (
    "no times: nobody has published figures of these devices; target=jaxpar.schedule.target(...), "
    "or --target v5e:2x4, has those of a chip"
)
NO_TIMES_OF_DISPATCHES = (
    "a dispatch of experts has no times: it is chosen by bytes; jaxpar predict --target v5e:2x4 "
    "times a step with each"
)


@readable
@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a part of a call site.

    Attributes:
      name: as for `mode`; for row chunks their number, for experts the dispatch.
      seconds: predicted, or None.
      error: where 80% of predictions of such transfers on the chip lie (predicted / measured - 1),
        and how many were measured, or "no measurement".
      out: why it may not be chosen, or "".
      both: in a forward pass that has a derivative, seconds of both passes, or None.
    """

    name: str
    seconds: float | None
    error: str
    out: str
    both: float | None = None


@readable
@dataclass(frozen=True)
class CallSite:
    """A part of a call site, such as its forward pass, and its algorithms.

    Attributes:
      name: the site's name, as in a file of `jaxpar tune`.
      part: "forward", "backward", "forward, no gradients", "row chunks" or "dispatch".
      line: the program's line, such as `model.py:12 in mlp`.
      algorithms: all, with predictions.
      taken: the name of the chosen algorithm.
      by: "auto", or "tuned" or "named" if a file or the program says so, or "in row chunks", whose
        collectives are naive.
    """

    name: str
    part: str
    line: str
    algorithms: tuple[Algorithm, ...]
    taken: str
    by: str


@readable
@dataclass(frozen=True)
class Ways:
    """The call sites of a program.

    Attributes:
      sites: in the order of tracing.
      intervals: of errors of matmuls on the chip, as text.
    """

    sites: tuple[CallSite, ...]
    intervals: tuple[str, ...] = ()

    def json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        if not self.sites:
            return "no call site has an algorithm to choose"
        rows = [row for site in self.sites for row in _cells(site)]
        widths = [max(len(row[n]) for row in (TITLES, *rows)) for n in range(len(TITLES) - 1)]

        def line(row: tuple[str, ...]) -> str:
            puts = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
            texts = zip(row, widths, puts, strict=False)
            return "  ".join([*(put(text, width) for text, width, put in texts), row[-1]]).rstrip()

        lines: list[str] = []
        for (name, place), parts in self._by_name():
            lines += ["", name, f"  {place}"]
            for site in parts:
                lines += [f"  {site.part}: {site.taken} ({site.by})", line(TITLES)]
                lines += map(line, _cells(site))
        return "\n".join([*lines[1:], "", *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts: list[str] = []
        for (name, place), sites in self._by_name():
            parts.append(f"<p><b>{escape(name)}</b><br>{escape(place)}</p>")
            for site in sites:
                head = "".join(f"<th>{escape(title)}</th>" for title in TITLES)
                body = "".join(
                    "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                    for row in _cells(site)
                )
                said = escape(f"{site.part}: {site.taken} ({site.by})")
                parts.append(f"<p>{said}</p><table><tr>{head}</tr>{body}</table>")
        notes = "<br>".join(map(escape, self._notes()))
        return f"{''.join(parts)}<p>{notes}</p>" if parts else escape(str(self))

    def _notes(self) -> list[str]:
        timed = [site for site in self.sites if any(a.seconds is not None for a in site.algorithms)]
        others = {site.part == "dispatch" for site in self.sites if site not in timed}
        notes = [*(NOTES if timed else ()), *self.intervals]
        notes += [NO_TIMES] if False in others else []
        return notes + ([NO_TIMES_OF_DISPATCHES] if True in others else [])

    def _by_name(self) -> Iterable[tuple[tuple[str, str], Iterable[CallSite]]]:
        return groupby(self.sites, lambda site: (site.name, site.line))


@readable
def ways(
    f: Callable[..., Any],
    *args: Any,
    target: Target | None = None,
    compiler_options: Any = None,
) -> Ways:
    """Returns the mode that `"auto"` chooses at each call site of a program, and the alternatives.

    Args:
      f: a function of global arrays, jitted or not; it is traced, not compiled.
      *args: global arrays, or `jax.ShapeDtypeStruct`s.
      target: devices that need not be present, from `jaxpar.schedule.target`. None: those of the
        context mesh (`jax.set_mesh`), else of the program's meshes.
      compiler_options: the program's options. None: those of `f` if `jaxpar.jit` made it, else
        those of the target's or context's chip.

    Returns:
      A `Ways`, printed as a table. Each of its `sites` has `name`, `part` (such as `"forward"`),
      `line`, `algorithms` (modes with predicted times), and the mode `taken`. Backward passes are
      listed even if no gradients are taken. Call sites with equal operands are listed once.

    Raises:
      Exception: any error of tracing.

    Cost: one tracing of the program, and some milliseconds a site.

    Example:
      >>> from jaxpar.schedule import target
      >>> v5p = target("v5p:2x2x2", "tp=8")
      >>> x, w = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16) for _ in range(2))
      >>> table = ways(jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"),
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")), x, w, target=v5p)
      >>> [(site.part, site.taken) for site in table.sites]
      [('forward', 'multi-ring'), ('backward', 'bidirectional')]
    """
    with naming("ways"):
        options = None if compiler_options is None else options_like(compiler_options)
        devices: Any = target
        if target is not None and not isinstance(devices, Target):
            raise type_error(f"target must be a jaxpar.schedule.Target, got {target!r}")
    is_told = hasattr(f, "over")  # jitted by jaxpar.jit
    if not hasattr(f, "trace"):
        f, args = of_arrays(f, args)
    here = target is not None or jax.sharding.get_abstract_mesh().shape
    if options is None and (target is not None or (here and not is_told)):
        options = options_of(kind_of(target))
    with noting() as notes:
        if options is None:
            jitted: Any = f if hasattr(f, "trace") else jax.jit(f)
            jitted.trace(*args)
        else:
            jitted, options = jitted_with(f, options)
            with compiled_with(options):
                if target is None:
                    jitted.trace(*args)
                else:
                    traced_for(target.mesh, jitted, args)
    return _ways_of(notes.decisions)


def _ways_of(decisions: Iterable[Decision]) -> Ways:
    sites: dict[tuple[str, str], tuple[Decision, dict[str, None]]] = {}
    for decision in decisions:
        key = site_of(decision.problem), decision.part
        if key in sites and decision.taken != sites[key][0].taken:
            # A forward pass without a derivative saves no residuals.
            key = key[0], f"{decision.part}, no gradients"
        _, lines = sites.setdefault(key, (decision, {}))
        if line := _line(decision):
            lines[line] = None
    # Rings over whose axes rows go in chunks.
    cut = {
        d.problem.ring.names for d, _ in sites.values() if d.part == "row chunks" and d.taken != "1"
    }
    chips = {d.problem.chip.kind for d, _ in sites.values() if d.problem.chip is not None}
    return Ways(
        tuple(
            _site(name, part, d, ", ".join(lines), cut)
            for (name, part), (d, lines) in sites.items()
        ),
        tuple(
            f"{SENTENCE}: {text_of(KindOfWork(chip, 'matmul', is_large))}"
            for chip in sorted(chips)
            for is_large in (False, True)
        ),
    )


def _line(decision: Decision) -> str:
    line = own_line([Line(*frame) for frame in reversed(decision.frames)])
    return "" if line is None or not line.is_own else str(line)


def _is_in_a_block(decision: Decision) -> bool:
    return any(function == "in_chunks" for _, _, function in decision.frames)


def _site(
    name: str, part: str, decision: Decision, line: str, cut: set[tuple[str, ...]]
) -> CallSite:
    problem, asked = decision.problem, decision.asked
    by = "named" if asked != AUTO else "tuned" if decision.tuned else "auto"
    if by == "named" and decision.problem.ring.names in cut and _is_in_a_block(decision):
        by = "in row chunks"  # named by the layer, not by the program
    flows = problem.backward if decision.part == "backward" else problem.forward
    kind = flows[0].kind if flows else ""
    algorithms = tuple(
        Algorithm(row.way, row.seconds, _error(problem.chip, kind, row), row.out, row.both)
        for row in decision.rows
    )
    return CallSite(name, part, line, algorithms, decision.taken, by)


def _error(chip: Chip | None, flow: str, row: WayRow) -> str:
    """Returns the errors of transfers of that size."""
    if chip is None or row.seconds is None:
        return ""
    travels = "gather" if flow == "gather" else "sum"
    kind = {"stationary": "all-to-all", **dict.fromkeys(IN_TURNS, "permute")}.get(row.way, travels)
    size = row.seconds >= LARGE
    interval = interval_of(KindOfWork(chip.kind, kind, size))
    return "no measurement" if interval is None else f"{interval} ({interval.rows})"


def _cells(site: CallSite) -> list[tuple[str, ...]]:
    return [
        (
            "  >" if a.name == site.taken else "",
            a.name,
            "" if a.seconds is None else us(a.seconds),
            "" if a.both is None else us(a.both),
            a.error,
            a.out,
        )
        for a in site.algorithms
    ]
