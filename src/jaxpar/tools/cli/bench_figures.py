"""Figures to judge a measured time: bound, prediction, public row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxpar
from jaxpar.schedule import CompiledProgram, Floor, timeline
from jaxpar.tools.accuracy.interval import SENTENCE, lines_of, texts_of
from jaxpar.tools.accuracy.measurement import Measurement
from jaxpar.tools.accuracy.nearest import Wanted, is_sending, nearest
from jaxpar.tools.cli.bench_reasons import Host, Reason, reasons_of
from jaxpar.tools.cli.bench_times import Row, place, quartiles, time_interleaved
from jaxpar.tools.cli.console import Column, print_rows, require_extra
from jaxpar.tools.cli.gpu_clocks import Clocks
from jaxpar.tools.cli.ops import OPS, Ring, ring_size
from jaxpar.tools.cli.shared_options import parse_shapes
from jaxpar.tools.cli.workers import one_line
from jaxpar.tools.timeline.floor import rings_over
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.target import target_of, unknown_network
from jaxpar.tools.toolkit_api import environment_options, us

SLOW = 1.15  # times its bound: slower rows get reasons
POSSIBLE = 0.97  # times its bound: faster rows contradict the figures of the chip
_HARMLESS = ("xla_dump", "xla_force_host_platform_device_count", "megascale")


@dataclass(frozen=True)
class Public:
    # The rate is in the unit of the measured rate.
    name: str
    what: str
    seconds: float
    rate: float
    source: str


@dataclass(frozen=True)
class Figures:
    """Figures that a measured row is compared with.

    Attributes:
      bound: seconds of the FLOPs at peak, or of the bytes over all links of a group.
      predicted: seconds of this mode, or None.
      is_least: whether the prediction is a lower bound.
      estimate: the source of matmul times, or why there is no prediction.
    """

    bound: float
    predicted: float | None
    is_least: bool
    estimate: str
    intervals: tuple[str, ...]
    rate: float
    unit: str
    public: Public | None
    reasons: tuple[Reason, ...]


def seconds_of_nothing(mesh: Mesh, repeats: int = 20) -> float:
    """Times an almost empty call on all devices."""
    spec = PartitionSpec(mesh.axis_names)
    x = place(np.zeros((mesh.size,), np.float32), mesh, spec)
    nothing = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec)
    (seconds,) = time_interleaved([jax.jit(nothing)], [x], repeats, lambda: None)
    return quartiles(seconds)[1]


def host_of(mesh: Mesh) -> Host:
    # All processes must call it.
    if target_of(mesh).chip is None:
        return Host()
    defaults = jaxpar.compiler_options(mesh)
    flags = {
        name: str(value)
        for name, value in environment_options().items()
        if name not in defaults and not name.startswith(_HARMLESS)
    }
    return Host(seconds_of_nothing(mesh), flags)


def figures_of(row: Row, ring: Ring, dtype: str, host: Host) -> Figures | str:
    mesh, chip = row.program.target.mesh, row.program.target.chip
    if why := unknown_network(mesh):
        return why
    if chip is None:
        return f"no figure of this chip ({mesh.devices.flat[0].device_kind})"
    op, size, grad = OPS[row.op], ring_size(mesh, ring), row.phase != "forward"
    (shape,) = parse_shapes(row.shape)
    sizes, numbers = op.on_one_device(shape, size)
    moved = numbers * jnp.dtype(dtype).itemsize
    sent, flops = op.sent(moved, size, grad), (3 if grad else 1) * 2.0 * prod(sizes)
    speed = Links(mesh, chip).speed_within(rings_over(mesh, ring))
    least = op.least_sent(shape, size, grad) * jnp.dtype(dtype).itemsize
    floor = Floor(flops / chip.flops, least / speed)

    fused, alone = (
        ("matmul and sum", "sum") if op.lhs == op.rhs else ("gather and matmul", "gather")
    )
    wanted = Wanted((fused, "matmul", alone), sizes, size, op.sent(moved, size, False), dtype)
    sends, public = is_sending(wanted, chip), nearest(wanted, chip)
    measured = quartiles(row.seconds)
    return Figures(
        bound=floor.total,
        **_predicted(row.program, floor, ring, measured, host),
        rate=sent / measured[1] / 1e9 if sends else flops / measured[1] / 1e12,
        unit="GB/s" if sends else "TFLOP/s",
        public=None if public is None else _public(public, sends),
    )


def _predicted(
    program: CompiledProgram, floor: Floor, ring: Ring, measured: Any, host: Host
) -> dict[str, Any]:
    try:
        played = timeline(program)
        return {
            "predicted": played.total,
            "is_least": played.is_least,
            "estimate": played.estimate,
            "intervals": tuple(texts_of(played, program.target)),
            "reasons": reasons_of(program, played, floor, ring, measured, host),
        }
    except Exception as reason:  # a compiler may write anything
        why = f"no prediction: {one_line(reason)}"
        fields = {"predicted": None, "is_least": False, "estimate": why, "intervals": ()}
        return fields | {"reasons": (Reason(0.0, why),)}


def _public(row: Measurement, sends: bool) -> Public:
    rate = row.sent_bytes / row.seconds / 1e9 if sends else row.flops / row.seconds / 1e12
    size = " x ".join(map(str, row.shape))
    among = f" among {row.group} devices" if row.group > 1 else ""
    what = f"{row.op} of {size} {row.dtype}{among}"
    return Public(row.name, what, row.seconds, rate, row.source)


# -- as a table -----------------------------------------------------------------------------------

_COLUMNS = [
    Column("", 16, left=True),
    Column("ms", 9),
    Column("bound ms", 9),
    Column("over it", 7),
    Column("predicted", 10),
    Column("off", 6),
    Column("rate", 13),
    Column("public", 13),
]
_REASONS = [Column("", 14), Column("", left=True, wraps=True)]


def print_figures(
    rows: Sequence[Row], figures: Sequence[Figures | str], clocks: Clocks | None, console: Any
) -> None:
    missing = dict.fromkeys(figure for figure in figures if isinstance(figure, str))
    pairs = zip(rows, figures, strict=True)
    known = [(row, figure) for row, figure in pairs if isinstance(figure, Figures)]
    if known:
        console.print("[bold]Is it as fast as it should be?[/]", highlight=False)
        print_rows(console, _COLUMNS, [], show_header=True)
    cases: dict[tuple[str, str, str], list[tuple[Row, Figures]]] = {}
    for row, figure in known:
        cases.setdefault((row.op, row.shape, row.phase), []).append((row, figure))
    for (op, shape, phase), group in cases.items():
        console.print(f"[bold]{op} {shape}, {phase}[/]", highlight=False)
        print_rows(console, _COLUMNS, [_cells(row, figure) for row, figure in group])
        _print_reasons(group, console)
    for text in missing:
        _say(console, f"bound, prediction and public row: {text}")
    if known:
        _say(console, _legend(known, clocks))


def _cells(row: Row, figure: Figures) -> list[str]:
    measured = quartiles(row.seconds)[1]
    mark = ">" if figure.is_least else "~" if "roofline" in figure.estimate else ""
    predicted = figure.predicted
    return [
        f"  {row.mode}",
        f"{measured * 1e3:.3f}",
        f"{figure.bound * 1e3:.3f}",
        _times(measured, figure),
        "none" if predicted is None else f"{mark}{predicted * 1e3:.3f}",
        "" if predicted is None or figure.is_least else f"{predicted / measured - 1:+.0%}",
        _rate(figure.rate, figure.unit),
        "none" if figure.public is None else _rate(figure.public.rate, figure.unit),
    ]


def _rate(rate: float, unit: str) -> str:
    return f"{rate:.3g} {unit}" if rate < 1000 else f"{rate:.0f} {unit}"


def _times(measured: float, figure: Figures) -> str:
    over = measured / figure.bound if figure.bound else 0.0
    return f"{over:.2f}" if over < 100 else f"{over:.0f}"


def _print_reasons(group: Sequence[tuple[Row, Figures]], console: Any) -> None:
    row, best = min(group, key=lambda pair: quartiles(pair[0].seconds)[1])
    measured = quartiles(row.seconds)[1]
    told = []
    if (public := best.public) is not None:
        told.append(["public", f"{public.what}, {us(public.seconds)}: {public.source}"])
    if measured < POSSIBLE * best.bound:
        told.append(["impossible", "less than the bound: the devices beat their chip's figures"])
    elif measured >= SLOW * best.bound > 0:
        told.append([row.mode, f"is the fastest, at {_times(measured, best)} times its bound:"])
        told += [[us(x.seconds) if x.seconds else "", x.text] for x in best.reasons]
    print_rows(console, _REASONS, told)


def _legend(known: Sequence[tuple[Row, Figures]], clocks: Clocks | None) -> str:
    intervals = lines_of(text for _, figure in known for text in figure.intervals)
    watched = "" if clocks is None else f"\nclocks: {clocks.mhz:.0f} of {clocks.most:.0f} MHz."
    return (
        "\nbound: FLOPs at peak, or bytes over all links. predicted: this program, simulated (~ by "
        "a roofline, > at least). off: predicted / ms - 1. rate: of FLOPs or of bytes, whichever "
        "takes longer. public: the rate of the nearest public row.\n"
        f"{SENTENCE}: {'; '.join(intervals) or 'not known'}.{watched}"
    )


def _say(console: Any, text: str) -> None:
    console.print(require_extra("rich.text").Text(text), style="dim", highlight=False)


def record_of(figures: Figures | str) -> Mapping[str, Any]:
    return {"missing": figures} if isinstance(figures, str) else asdict(figures)
