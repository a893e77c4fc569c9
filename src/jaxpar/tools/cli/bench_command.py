"""`jaxpar bench`: times overlapped matmuls against naive ones."""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
from jax.sharding import Mesh

import jaxpar
from jaxpar.tools.cli.bench_figures import Figures, figures_of, host_of, print_figures, record_of
from jaxpar.tools.cli.bench_reasons import Host
from jaxpar.tools.cli.bench_times import PHASES, Refusal, Row, make_problem, measure, quartiles
from jaxpar.tools.cli.console import (
    Column,
    UsageError,
    open_console,
    print_error,
    print_rows,
    progress,
    require_extra,
    status_of,
)
from jaxpar.tools.cli.gpu_clocks import clocks_of
from jaxpar.tools.cli.ops import DEFAULT_OPS, MODES, Op, Ring, Shape
from jaxpar.tools.cli.shared_options import (
    MEANINGS,
    add_dtype,
    add_mesh,
    add_operations,
    add_processes,
    mesh_error,
    parse_dtype,
    parse_names,
    parse_ops,
    parse_processes,
    parse_ring,
    parse_shapes,
    require_reportable,
)
from jaxpar.tools.cli.workers import start_jax
from jaxpar.tools.toolkit_api import MODES as ALL_MODES
from jaxpar.tools.toolkit_api import write_text, written

CPU_NOTE = (
    "These are simulated CPU devices that share the cores of their host. The ratios show the "
    "overhead of a mode, not how well it overlaps transfers with matmuls."
)

_COLUMNS = [
    Column("", 16, left=True),
    Column("ms", 9),
    Column("ratio", 7),
    Column("quartiles", 13),
    Column("temp MiB", 9),
    Column("sent MiB", 9),
    Column("collectives a device", left=True, wraps=True),
]


@dataclass(frozen=True)
class Run:
    device_kind: str
    platform: str
    devices: int
    processes: int
    mesh: dict[str, int]
    ring: list[str]
    dtype: str
    modes: tuple[str, ...]
    repeats: dict[str, int]  # by phase

    @property
    def notes(self) -> list[str]:
        return [CPU_NOTE] if self.platform == "cpu" else []


def header(run: Run) -> str:
    mesh = ",".join(f"{name}={size}" for name, size in run.mesh.items())
    processes = f" in {run.processes} processes" if run.processes > 1 else ""
    return (
        f"{run.devices} x {run.device_kind}{processes} | mesh {mesh}, ring {','.join(run.ring)} | "
        f"{run.dtype} | jax {jax.__version__}"
    )


def print_header(run: Run, console: Any) -> None:
    escape = require_extra("rich.markup").escape
    console.print(f"[bold]jaxpar bench[/] | {escape(header(run))}", highlight=False)
    for note in run.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


def print_table(rows: Sequence[Row], console: Any) -> None:
    """Prints ratios, coloured if their quartiles exclude 1."""
    print_rows(console, _COLUMNS, [], show_header=True)
    case = None
    for (op, shape, phase), group in groupby(rows, lambda row: (row.op, row.shape, row.phase)):
        if case not in (None, (op, shape)):
            console.print()
        case = (op, shape)
        console.print(f"[bold]{op} {shape}, {phase}[/]", highlight=False)
        print_rows(console, _COLUMNS, map(_cells, group))
    console.print(
        "\nms: median. ratio: median of the ratios to naive, round by round; quartiles: of these "
        "ratios.\ntemp: XLA's temporary memory. sent: bytes that a device sends. Both are for one "
        "device and one call.",
        style="dim",
        highlight=False,
    )


def _cells(row: Row) -> list[str]:
    low, ratio, high = quartiles(row.ratios)
    colour = "green" if high < 1 else "red" if low > 1 else "default"
    naive = row.mode == "naive"
    return [
        f"  {row.mode}",
        f"{quartiles(row.seconds)[1] * 1e3:.3f}",
        "1" if naive else f"[bold {colour}]{ratio:.3f}[/]",
        "" if naive else f"{low:.2f} to {high:.2f}",
        "?" if row.temp_bytes is None else f"{row.temp_bytes / 2**20:.3f}",
        f"{row.sent_bytes / 2**20:.3f}",
        ", ".join(f"{count} {name}" for name, count in row.collectives.items()) or "none",
    ]


def write_json(
    path: str,
    run: Run,
    rows: Sequence[Row],
    figures: Sequence[Figures | str],
    host: Host,
    refusals: Sequence[Refusal],
) -> None:
    record = {
        "jaxpar": jaxpar.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        **vars(run),
        "notes": run.notes,
        "host": asdict(host),
        "rows": [_row_record(row, figure) for row, figure in zip(rows, figures, strict=True)],
        "refused": [vars(refusal) for refusal in refusals],
    }
    write_text(path, json.dumps(record, indent=1) + "\n")


def _row_record(row: Row, figures: Figures | str) -> dict[str, Any]:
    measured = {name: value for name, value in vars(row).items() if name != "program"}
    return measured | {
        "figures": record_of(figures),
        "seconds_quartiles": quartiles(row.seconds),
        "ratio_quartiles": quartiles(row.ratios),
    }


# Hues of the Okabe-Ito palette, which is safe for colour-blind readers.
_STYLES = {
    "unidirectional": ("#0072B2", "o"),
    "bidirectional": ("#D55E00", "D"),
    "stationary": ("#CC79A7", "X"),
    "chunked-2": ("#56B4E9", "^"),
    "chunked-4": ("#009E73", "s"),
    "chunked-8": ("#E69F00", "v"),
    "auto": ("#000000", "*"),
}


def write_plot(path: str, run: Run, rows: Sequence[Row]) -> None:
    figures = require_extra("matplotlib.figure")  # not pyplot, which keeps global state
    cases = list(dict.fromkeys((row.op, row.shape) for row in rows))
    figure = figures.Figure(figsize=(9.5, 2.1 + 0.5 * len(cases)), layout="constrained", dpi=200)
    panels = figure.subplots(1, len(PHASES), sharex=True, sharey=True)
    for panel, phase in zip(panels, PHASES, strict=True):
        _draw_panel(panel, cases, [row for row in rows if row.phase == phase])
        panel.set_title(phase.replace("+", " + "), fontsize=10, loc="left")
        panel.set_xlabel("time / time of naive in the same round (less is better)", fontsize=8)
    panels[0].set_yticks(range(len(cases)), [f"{op}\n{shape}" for op, shape in cases], fontsize=8)
    panels[0].set_ylim(len(cases) - 0.5, -0.5)
    title = "\n".join([header(run), *run.notes])
    figure.suptitle(title, fontsize=8, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
    )
    with written(path) as half:
        figure.savefig(half)


def _draw_panel(panel: Any, cases: list[tuple[str, str]], rows: Sequence[Row]) -> None:
    panel.axvline(1, color="0.3", linewidth=1, linestyle="--", zorder=1, label="naive")
    modes = [mode for mode in dict.fromkeys(row.mode for row in rows) if mode != "naive"]
    for number, mode in enumerate(modes):
        offset = 0.6 * (number + 0.5) / len(modes) - 0.3
        chosen = [row for row in rows if row.mode == mode]
        ratios = [quartiles(row.ratios) for row in chosen]
        colour, mark = _STYLES[mode]
        panel.errorbar(
            [median for _, median, _ in ratios],
            [cases.index((row.op, row.shape)) + offset for row in chosen],
            xerr=[[m - low for low, m, _ in ratios], [high - m for _, m, high in ratios]],
            fmt=mark,
            color=colour,
            markersize=5,
            capsize=2.5,
            linewidth=1.2,
            label=mode,
        )
    for edge in range(len(cases) - 1):
        panel.axhline(edge + 0.5, color="0.92", linewidth=0.8, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    panel.grid(axis="x", color="0.92", zorder=0)
    panel.set_axisbelow(True)


DEFAULT_SHAPES = "1024x4096x256,2048x2048x2048"

DESCRIPTION = """\
Times the overlapped matmuls on your devices. The naive mode is one matmul and XLA's own collective.
Overlapped modes are compared with it: by default a ring in one direction, and one in both.

Each result is first checked against a float64 reference. A case with a wrong result is not timed,
and the command then ends with status 1. The modes run one after another in each round, forward and
forward+backward. The gradients are those of both operands.
"""
EPILOG = f"""\
{MEANINGS}
reading the table:
  ms         median time of a call in milliseconds, on process 0
  ratio      time over the time of naive in the same round; the median of all rounds
  quartiles  25% and 75% of these ratios
  temp MiB   temporary memory of a device (memory_analysis of the compiled program)
  sent MiB   bytes that a device sends in one call; XLA's collectives are counted as rings
Along mesh axes outside the ring everything is replicated: each ring does the same work.

A second table, for chips with published figures, says whether a mode is as fast as it should be:
  bound      no mode is faster: FLOPs at peak, or bytes over all links
  predicted  the time of this program, simulated as by `jaxpar predict`
  public     the rate of the nearest measurement on this kind of chip, with its source
Below it are reasons why the fastest mode is slower than the bound: transfers, links, sizes, dtypes,
the host, slow clocks.

examples:
  jaxpar bench
  jaxpar bench --ops scatter-rows,all-reduce --shapes 4096x4096x4096 --dtype bfloat16
  jaxpar bench --mesh dp=2,tp=4 --json bench.json --plot bench.png
two processes, with four CPU devices each if there is no accelerator:
  jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 0 &
  jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add_operations(add, DEFAULT_SHAPES)
    add_mesh(add)
    add_dtype(add, "float32")
    add(
        "--modes",
        default=",".join(MODES[1:]),
        help=f"modes to compare with naive: some of {', '.join(ALL_MODES)} (default: %(default)s)",
    )
    add(
        "--repeats",
        type=int,
        default=20,
        help="rounds of forward; forward+backward has a third as many (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write everything that was measured, with all times")
    add("--plot", metavar="FILE.png", help="draw the ratios")
    add_processes(add)
    parser.set_defaults(run=run, ops=",".join(DEFAULT_OPS), shapes=DEFAULT_SHAPES, dtype="float32")


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar bench", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    # Refuse bad arguments before the minutes of measuring.
    ops, shapes = parse_ops(args.ops), parse_shapes(args.shapes)
    dtype = parse_dtype(args.dtype)
    modes = tuple(dict.fromkeys(["naive", *parse_names("--modes", args.modes, ALL_MODES)]))
    if args.repeats < 1:
        raise UsageError(f"--repeats {args.repeats} is not positive")
    process_id, num_processes = parse_processes(args)
    reports = process_id == 0
    if reports:
        require_reportable(args, ("json", "plot"))
    with start_jax(args.coordinator, process_id, num_processes):
        mesh = _make_mesh(args.mesh)
        ring = parse_ring(args.axis, mesh)
        for op in ops:
            for shape in shapes:
                op.require_fit(shape, mesh, ring)
        device = mesh.devices.flat[0]
        facts = Run(
            device_kind=device.device_kind,
            platform=device.platform,
            devices=mesh.size,
            processes=num_processes,
            mesh=dict(mesh.shape),
            ring=list(ring),
            dtype=dtype,
            modes=modes,
            repeats=dict(zip(PHASES, (args.repeats, (args.repeats + 2) // 3), strict=True)),
        )
        console = open_console() if reports else None
        if console:
            print_header(facts, console)
        host = host_of(mesh)
        with clocks_of(device.platform) as clocks:
            rows, refusals = _measure_all(ops, shapes, mesh, ring, facts, reports)
        host = replace(host, clocks=clocks())
        figures = [figures_of(row, ring, dtype, host) for row in rows]
    if console and rows:
        print_table(rows, console)
        print_figures(rows, figures, host.clocks, console)
    if reports and args.json:
        write_json(args.json, facts, rows, figures, host, refusals)
    if reports and args.plot and rows:
        write_plot(args.plot, facts, rows)
    for refusal in refusals if reports else ():
        print_error("jaxpar bench", refusal)
    return 1 if refusals else 0


def _measure_all(
    ops: list[Op], shapes: list[Shape], mesh: Mesh, ring: Ring, facts: Run, reports: bool
) -> tuple[list[Row], list[Refusal]]:
    rows: list[Row] = []
    refusals: list[Refusal] = []
    rounds = sum(facts.repeats.values()) + len(PHASES)
    total = len(ops) * len(shapes) * rounds
    with progress("compiling and checking", total, shown=reports, still=True) as advance:
        for shape in shapes:
            problem = make_problem(shape, facts.dtype)
            for op in ops:
                for phase in PHASES:

                    def tick(label: str = f"{op.name} {problem.label} {phase}") -> None:
                        advance(label)

                    repeats = facts.repeats[phase]
                    done = measure(op, problem, phase, mesh, ring, facts.modes, repeats, tick)
                    rows += done[0]
                    refusals += done[1]
    return rows, refusals


def _make_mesh(axes: str) -> Mesh:
    try:
        return jaxpar.make_mesh(axes)
    except ValueError as reason:
        raise UsageError(mesh_error(axes, reason)) from None
