"""`jaxpar bench`: the overlapped matmuls timed against the naive ones, in one run."""

import argparse
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

import jaxpar
from jaxpar.cli._arguments import (
    add_command,
    add_dtype,
    add_mesh,
    add_operations,
    add_processes,
    mesh_error,
    parse_dtype,
    parse_ops,
    parse_processes,
    parse_ring,
    parse_shapes,
    require_reportable,
)
from jaxpar.cli._bench_report import Run, print_header, print_table, write_json, write_plot
from jaxpar.cli._bench_times import PHASES, Refusal, Row, make_problem, measure
from jaxpar.cli._console import UsageError, open_console, print_error, progress, status_of
from jaxpar.cli._ops import DEFAULT_OPS, Op, Ring, Shape
from jaxpar.cli._processes import start_jax

DEFAULT_SHAPES = "1024x4096x256,2048x2048x2048"

DESCRIPTION = """\
Times the overlapped matmuls on the devices present: the naive form (XLA's own collective beside one
matmul) against the ring that sends one way and the ring that sends both ways.

Each result is first checked against a float64 reference; a case with a wrong result is not timed
and ends the command with status 1. The modes then take turns, round by round, forward and
forward+backward, the gradients being those of both operands.
"""
EPILOG = """\
reading the table:
  ms         median time of a call, in milliseconds, of process 0
  ratio      median over the rounds of the time divided by that of naive in the same round
  quartiles  25% and 75% of those ratios
  temp MiB   temporary memory a device needs (memory_analysis of the compiled program)
  sent MiB   what a device sends in one call; XLA's collectives as rings of least traffic
Along mesh axes outside the ring everything is replicated: each ring does the same work.

examples:
  python -m jaxpar bench
  python -m jaxpar bench --ops scatter-rows,all-reduce --shapes 4096x4096x4096 --dtype bfloat16
  python -m jaxpar bench --mesh dp=2,tp=4 --json bench.json --plot bench.png
two processes, of four CPU devices each where there are no others:
  python -m jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 0 &
  python -m jaxpar bench --coordinator localhost:9876 --num-processes 2 --process-id 1
"""


def add_parser(commands: Any) -> None:
    """Adds `bench` to the subcommands of `python -m jaxpar`."""
    what = "time the overlapped matmuls against the naive ones"
    parser = add_command(commands, "bench", what, DESCRIPTION, EPILOG)
    add = parser.add_argument
    add_operations(add, DEFAULT_SHAPES)
    add_mesh(add)
    add_dtype(add, "float32")
    add(
        "--repeats",
        type=int,
        default=20,
        help="rounds of forward; forward+backward gets a third (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="write everything that was measured, all times included")
    add("--plot", metavar="FILE.png", help="draw the ratios")
    add_processes(add)
    parser.set_defaults(run=run, ops=",".join(DEFAULT_OPS), shapes=DEFAULT_SHAPES, dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit status."""
    return status_of("jaxpar bench", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    # All that can be refused is refused before the minutes of measuring.
    ops, shapes = parse_ops(args.ops), parse_shapes(args.shapes)
    dtype = parse_dtype(args.dtype)
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
            repeats=dict(zip(PHASES, (args.repeats, (args.repeats + 2) // 3), strict=True)),
        )
        console = open_console() if reports else None
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

                    done = measure(op, problem, phase, mesh, ring, facts.repeats[phase], tick)
                    rows += done[0]
                    refusals += done[1]
    return rows, refusals


def _make_mesh(axes: str) -> Mesh:
    try:
        return jaxpar.make_mesh(axes)
    except ValueError as reason:
        left = f"the {jax.device_count()} devices that the other axes leave"
        raise UsageError(mesh_error(axes, reason, left)) from None
