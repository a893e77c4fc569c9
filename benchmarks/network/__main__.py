"""Overlap on a slow network: four CPU processes behind a token bucket, by the wall clock.

    python benchmarks/network [--rate 6gbit] [--shape 4096x4096x4096] [--rounds 7] [--json F]

Needs Linux and the right to make a network namespace. Compares jaxpar's modes with the naive
form and with two controls: `serial`, the one-way ring whose matmuls wait for its transfers, and
`memory scheduler`, the same ring compiled by XLA's memory-optimised scheduler. Case `pipeline`
compares a pipeline with FSDP. Every result is compared with NumPy's or one device's first. Then all
variants run once a round, and ratios are taken round by round.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from network.cluster import INSIDE, Cluster, RefusalError, enter_namespace
from network.report import Row, Run, print_table, write_json, write_plot

MEMORY_SCHEDULER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
# By the flags that they are compiled with, which are read once a process.
MATMULS = {
    "": ["naive", "unidirectional", "bidirectional", "serial"],
    MEMORY_SCHEDULER: ["memory scheduler"],
}
STEPS = {"": ["fsdp", "pipeline"]}
# What the processes prepare, and its variants.
CASES = {
    "gather lhs": (("prepare_matmul", "gather-lhs-rows", False), MATMULS),
    "gather rhs": (("prepare_matmul", "gather-rhs-k", False), MATMULS),
    "scatter": (("prepare_matmul", "scatter-rows", False), MATMULS),
    "all-reduce": (("prepare_matmul", "all-reduce", False), MATMULS),
    "gather lhs, forward+backward": (("prepare_matmul", "gather-lhs-rows", True), MATMULS),
    "scatter, forward+backward": (("prepare_matmul", "scatter-rows", True), MATMULS),
    "pipeline": (("prepare_stack",), STEPS),
}


def measure(run: Run, cases: Sequence[str]) -> Iterator[list[Row]]:
    """Measures the cases one by one; clusters with different flags take turns."""
    flags = dict.fromkeys(flags for case in cases for flags in CASES[case][1])
    with ExitStack() as stack:
        clusters = {one: Cluster(run.processes, run.shape, one) for one in flags}
        for cluster in clusters.values():
            stack.enter_context(closing(cluster))
        for case in cases:
            (prepare, *given), sets = CASES[case]
            owner = {name: clusters[flags] for flags, names in sets.items() for name in names}
            for flags, names in sets.items():
                wrong = clusters[flags].do(prepare, *given, names)["wrong"]
                if wrong:
                    raise RefusalError(f"{case}: wrong results: " + "; ".join(wrong))
            seconds = {variant: [] for variant in owner}
            for turn in range(-1, run.rounds):  # the first one warms up
                names = list(owner)[turn % len(owner) :] + list(owner)[: turn % len(owner)]
                for variant in names:
                    elapsed = owner[variant].do("time", variant)["seconds"]
                    if turn >= 0:
                        seconds[variant].append(elapsed)
            yield [
                Row(case, variant, times, **owner[variant].do("trace", variant))
                for variant, times in seconds.items()
            ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="network", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="6gbit", help="as for tc, or none, default %(default)s")
    parser.add_argument("--shape", default="4096x4096x4096", help="MxKxN, default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--processes", type=int, default=4, help="default %(default)s")
    parser.add_argument("--cases", default=";".join(CASES), help="default %(default)s")
    parser.add_argument("--json", metavar="F", help="write what was measured to this file")
    parser.add_argument("--plot", metavar="F", help="write a figure to this file")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"none|[1-9]\d*[kmg]bit", args.rate):
        parser.error(f"--rate must be like 500mbit or 6gbit, or none, got {args.rate!r}")
    if args.processes < 2 or args.rounds < 1:
        parser.error("--processes must be at least 2 and --rounds at least 1")
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", args.shape)
    if not sizes or any(int(n) == 0 or int(n) % args.processes for n in sizes.groups()):
        parser.error(
            f"--shape must be MxKxN, each a multiple of {args.processes} processes, "
            f"got {args.shape!r}"
        )
    args.cases = args.cases.split(";")
    for case in args.cases:
        if case not in CASES:
            parser.error(f"--cases has {case!r}; choose from {';'.join(CASES)}")
    if args.plot and args.cases == ["pipeline"]:
        parser.error("--plot draws matmuls; name one more case in --cases")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    args = parse(argv)
    try:
        if args.rate != "none" and INSIDE not in os.environ:
            return enter_namespace(sys.argv[1:] if argv is None else argv, args.rate)
        run = Run(args.rate, args.shape, args.processes, args.rounds)
        print(run, flush=True)
        rows: list[Row] = []
        for found in measure(run, args.cases):
            print_table(found)
            rows += found
            if args.json:  # at once: a run takes minutes
                write_json(args.json, run, rows)
    except RefusalError as reason:
        print(f"network: {reason}", file=sys.stderr)
        return 2
    if args.plot:
        write_plot(args.plot, run, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
