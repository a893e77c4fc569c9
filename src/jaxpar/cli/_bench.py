"""`jaxpar bench`: the run, from the arguments to the report."""

import argparse
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

import jaxpar
from jaxpar.bench._arguments import (
    DESCRIPTION,
    EPILOG,
    add_arguments,
    parse_ops,
    parse_processes,
    parse_shapes,
    require_reportable,
    require_valid,
)
from jaxpar.bench._errors import UsageError
from jaxpar.bench._measure import PHASES, Refusal, Row, measure
from jaxpar.bench._ops import Op, Ring, Shape
from jaxpar.bench._plot import write_plot
from jaxpar.bench._problem import make_problem
from jaxpar.bench._report import Run, print_header, print_table, require_extra, write_json
from jaxpar.bench._start import start_jax


def add_parser(commands: Any) -> None:
    """Adds `bench` to the subcommands of `python -m jaxpar`."""
    parser = commands.add_parser(
        "bench",
        help="time the overlapped matmuls against the naive ones",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit status."""
    try:
        return _run(args)
    except UsageError as reason:
        print(f"jaxpar bench: error: {reason}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    # All that can be refused is refused before the minutes of measuring.
    ops, shapes = parse_ops(args.ops), parse_shapes(args.shapes)
    require_valid(args)
    process_id, num_processes = parse_processes(args)
    reports = process_id == 0
    if reports:
        require_reportable(args)
    with start_jax(args.coordinator, process_id, num_processes):
        mesh, ring = _make_mesh(args.mesh, args.axis)
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
            dtype=args.dtype,
            repeats=dict(zip(PHASES, (args.repeats, (args.repeats + 2) // 3), strict=True)),
        )
        console = _console() if reports else None
        if console:
            print_header(facts, console)
        rows, refusals = _measure_all(ops, shapes, mesh, ring, facts, reports)
    if console and rows:
        print_table(rows, console)
    if reports and args.json:
        write_json(args.json, facts, rows, refusals)
    if reports and args.plot and rows:
        write_plot(args.plot, facts, rows)
    for refusal in refusals if reports else ():
        print(f"jaxpar bench: error: {refusal}", file=sys.stderr)
    return 1 if refusals else 0


def _measure_all(
    ops: list[Op], shapes: list[Shape], mesh: Mesh, ring: Ring, facts: Run, reports: bool
) -> tuple[list[Row], list[Refusal]]:
    rows: list[Row] = []
    refusals: list[Refusal] = []
    rounds = sum(facts.repeats.values()) + len(PHASES)
    with _progress(len(ops) * len(shapes) * rounds, reports) as advance:
        for shape in shapes:
            problem = make_problem(shape, facts.dtype)
            for op in ops:
                for phase in PHASES:

                    def tick(label: str = f"{op.name} {problem.label} {phase}") -> None:
                        advance(label)

                    done = measure(op, problem, phase, mesh, ring, facts.repeats[phase], tick)
                    rows += done[0]
                    refusals += done[1]
    return rows, refusals


def _console(stderr: bool = False) -> Any:
    console = require_extra("rich.console").Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100  # a pipe has none of its own
    return console


@contextmanager
def _progress(total: int, shown: bool) -> Generator[Callable[[str], None], None, None]:
    if not shown:
        yield lambda label: None
        return
    console = _console(stderr=True)
    progress = require_extra("rich.progress").Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # its thread would draw while the clock runs
    )
    with progress:
        task = progress.add_task("compiling and checking", total=total)
        progress.refresh()
        yield lambda label: progress.update(task, advance=1, description=label, refresh=True)


def _make_mesh(axes: str, axis: str | None) -> tuple[Mesh, Ring]:
    try:
        mesh = jaxpar.make_mesh(axes)
    except ValueError as reason:
        # What follows the semicolon is a remedy for who calls make_mesh, which is not who reads it.
        text = str(reason).removeprefix("make_mesh: ").partition("; ")[0]
        raise UsageError(
            f"--mesh {axes}: {text}; a size of -1 takes the {jax.device_count()} devices that the "
            "other axes leave"
        ) from None
    ring = tuple(axis.split(",")) if axis else (mesh.axis_names[-1],)
    if len(set(ring)) != len(ring) or not set(ring) <= set(mesh.axis_names):
        raise UsageError(
            f"--axis {axis} must name distinct axes of the mesh, which has "
            f"{', '.join(mesh.axis_names)}"
        )
    return mesh, ring
