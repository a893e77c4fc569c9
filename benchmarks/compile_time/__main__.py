"""Compile time and program size by ring size: every ring unrolled, and every ring as a loop.

    python benchmarks/compile_time [--sizes 4,8,16,32,64] [--json F] [--plot F]

Compiles for CPU devices and runs nothing. Seconds are CPU time of the process, over all threads,
which other load on the machine hardly changes. The figures are the evidence for `UNROLLED`.
"""

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather_matmul, make_mesh, matmul_reduce_scatter
from jaxpar.ring import run
from jaxpar.ring.steps import gather_steps, stretches
from jaxpar.tools.cli.ops import with_gradients

MODES = ("unidirectional", "bidirectional")
PHASES = ("forward", "forward+backward")
DIRECTIONS = {"unidirectional": (1,), "bidirectional": (1, -1)}
FORMS = {"unrolled": sys.maxsize, "loop": 1}  # values of UNROLLED
OPS = {
    "all_gather_matmul": (all_gather_matmul, (P("tp"), P(None, "tp")), P(None, "tp")),
    "matmul_reduce_scatter": (matmul_reduce_scatter, (P(None, "tp"), P("tp")), P("tp")),
}
# What is measured, by its name in the JSON.
QUANTITIES = {
    "lower_seconds": "lower, CPU s",
    "compile_seconds": "compile, CPU s",
    "stablehlo_bytes": "StableHLO bytes",
    "hlo_instructions": "HLO instructions",
}
BLOCK = 16  # rows and columns of a device's block: the size of arrays does not matter here


@dataclass(frozen=True)
class Row:
    """One program: medians of CPU seconds, and the program's size."""

    op: str
    mode: str
    phase: str
    form: str
    size: int
    hops: int
    lower_seconds: float
    compile_seconds: float
    stablehlo_bytes: int
    hlo_instructions: int


def measure(op: str, mode: str, phase: str, form: str, size: int, repeats: int) -> Row:
    """Compiles one program `repeats` times, each time from nothing."""
    mesh = make_mesh({"tp": size}, devices=jax.devices()[:size])
    function, in_specs, out_specs = OPS[op]
    shape = (BLOCK * size, BLOCK * size)
    lhs, rhs, ct = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in (*in_specs, out_specs)
    )
    args = (lhs, rhs) if phase == "forward" else (lhs, rhs, ct)

    lower_seconds, compile_seconds = [], []
    for _ in range(repeats):
        jax.clear_caches()
        start = process_time()
        forward = jax.shard_map(
            lambda x, w: function(x, w, "tp", mode=mode),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
        )
        program = forward if phase == "forward" else with_gradients(forward)
        lowered = jax.jit(program).lower(*args)
        lower_seconds.append(process_time() - start)
        start = process_time()
        compiled = lowered.compile()
        compile_seconds.append(process_time() - start)

    return Row(
        *(op, mode, phase, form, size, steps(size, mode)),
        lower_seconds=median(lower_seconds),
        compile_seconds=median(compile_seconds),
        stablehlo_bytes=len(lowered.as_text()),
        hlo_instructions=len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", compiled.as_text(), re.M)),
    )


def steps(size: int, mode: str) -> int:
    """The steps in which whole blocks travel."""
    return (size - 1) // len(DIRECTIONS[mode])


def alike(size: int, mode: str) -> int:
    """The most turns that differ in distance alone."""
    return max(times for _, times, _ in stretches(gather_steps(size, DIRECTIONS[mode])))


def measure_all(sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    """Measures every program at every size, unrolled and as a loop."""
    limit = run.UNROLLED
    try:
        for op, mode, phase, size, form in product(OPS, MODES, PHASES, sizes, FORMS):
            run.UNROLLED = FORMS[form]
            yield measure(op, mode, phase, form, size, repeats)
    finally:
        run.UNROLLED = limit


def print_table(rows: Sequence[Row], console: Any) -> None:
    """Prints a table a program, with a line a ring; each cell is unrolled / loop."""
    from rich.table import Table

    for program in product(OPS, MODES, PHASES):
        table = Table(box=None, pad_edge=False, title=", ".join(program), title_justify="left")
        for title in ("ring", "steps", *QUANTITIES.values()):
            table.add_column(title, justify="right")
        chosen = [row for row in rows if (row.op, row.mode, row.phase) == program]
        for unrolled, loop in zip(chosen[::2], chosen[1::2], strict=True):
            cells = [f"{_cell(unrolled, name)} / {_cell(loop, name)}" for name in QUANTITIES]
            table.add_row(f"{unrolled.size}", f"{unrolled.hops}", *cells)
        console.print(table, "")
    console.print("Each cell: unrolled / loop.")


def _cell(row: Row, quantity: str) -> str:
    value = getattr(row, quantity)
    return f"{value:.2f}" if isinstance(value, float) else f"{value}"


def write_json(path: str, rows: Sequence[Row], repeats: int) -> None:
    """Writes what was measured, and with what."""
    record = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "repeats": repeats,
        "unrolled": run.UNROLLED,
        "rows": [asdict(row) for row in rows],
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def write_plot(path: str, rows: Sequence[Row]) -> None:
    """Draws time and program size by ring size, a column a mode, with the limit marked."""
    from matplotlib.figure import Figure

    quantities: dict[str, Callable[[Row], float]] = {
        "trace, lower and compile, CPU seconds": lambda row: (
            row.lower_seconds + row.compile_seconds
        ),
        "instructions of the optimised HLO": lambda row: row.hlo_instructions,
    }
    figure = Figure(figsize=(9.5, 7.6), layout="constrained", dpi=200)
    panels = figure.subplots(len(quantities), len(MODES), sharex=True, sharey="row")
    for (title, quantity), line in zip(quantities.items(), panels, strict=True):
        for mode, panel in zip(MODES, line, strict=True):
            _draw_panel(panel, [row for row in rows if row.mode == mode], mode, quantity)
            panel.set_title(f"{mode}: {title}", fontsize=9, loc="left")
    for panel in panels[-1]:
        panel.set_xlabel("devices in the ring", fontsize=9)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    title = f"compiled for CPU devices, jax {jax.__version__}"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.savefig(path)


def _draw_panel(
    panel: Any, rows: Sequence[Row], mode: str, quantity: Callable[[Row], float]
) -> None:
    from matplotlib.ticker import LogLocator

    longest = max(n for n in range(2, 128) if alike(n, mode) <= run.UNROLLED)
    limit = f"longest ring that is unrolled ({steps(longest, mode)} steps)"
    panel.axvline(longest, color="0.4", linewidth=1, linestyle="--", label=limit)
    colours = dict(zip(OPS, ("#0072B2", "#D55E00"), strict=True))
    for op, phase, form in product(OPS, PHASES, FORMS):
        chosen = [row for row in rows if (row.op, row.phase, row.form) == (op, phase, form)]
        panel.plot(
            [row.size for row in chosen],
            [quantity(row) for row in chosen],
            color=colours[op],
            linestyle="-" if form == "unrolled" else ":",
            marker="o" if phase == "forward" else "s",
            markersize=4,
            linewidth=1.3,
            label=f"{op}, {phase}, {form}",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", subs=range(2, 10))
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    ticks = sorted({row.size for row in rows})
    panel.set_xticks(ticks, [f"{size}" for size in ticks])
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.92")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="4,8,16,32,64", help="ring sizes, default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each program")
    parser.add_argument("--json", metavar="F", help="write what was measured to this file")
    parser.add_argument("--plot", metavar="F", help="write a figure to this file")
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.sizes.split(",")]

    from rich.console import Console

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(sizes))
    rows = list(measure_all(sizes, args.repeats))
    print_table(rows, Console())
    if args.json:
        write_json(args.json, rows, args.repeats)
    if args.plot:
        write_plot(args.plot, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
