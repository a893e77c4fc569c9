"""How much of the time of a program's transfers its matmuls cover, from a profiler's trace."""

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]  # start and end

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*?[\])}] ([\w-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_TRANSFERS = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True)
class Cover:
    """Microseconds of one process, summed over the calls that were traced."""

    transfer: float
    matmul: float
    both: float  # the part of `transfer` during which a matmul ran


def cover(events: Sequence[dict[str, Any]], hlo: str) -> Cover:
    """Measures the trace of a program whose optimised HLO is `hlo`."""
    transfers, matmuls = instructions(hlo)
    transfer, matmul = (merge(spans(events, names)) for names in (transfers, matmuls))
    return Cover(length(transfer), length(matmul), length(intersect(transfer, matmul)))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads the events with a duration from the one trace under `folder`."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def instructions(hlo: str) -> tuple[set[str], set[str]]:
    """Names the instructions that transfer and those that multiply matrices, in all computations.

    A fusion or a call multiplies if the computation that it calls does.
    """
    transfers: set[str] = set()
    matmuls: set[str] = set()
    callers: list[tuple[str, str, str]] = []  # computation, instruction, what it calls
    multiplying: set[str] = set()  # computations
    computation = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif found := _INSTRUCTION.match(line):
            name, opcode = found.groups()
            if opcode.removesuffix("-start").removesuffix("-done") in _TRANSFERS:
                transfers.add(name)
            elif opcode == "dot" or (opcode == "custom-call" and "matmul" in line):
                matmuls.add(name)
                multiplying.add(computation)
            elif opcode in ("fusion", "call") and (called := _CALLED.search(line)):
                callers.append((computation, name, called[1]))
    for caller, name, called in callers:  # what is called is printed before its callers
        if called in multiplying:
            matmuls.add(name)
            multiplying.add(caller)
    return transfers, matmuls


def spans(events: Iterable[dict[str, Any]], names: set[str]) -> list[Interval]:
    """Returns when the instructions `names` ran.

    A thunk that returns before its work is done has an event `end: NAME` of its own.
    """
    starts: dict[str, list[Interval]] = {}
    ends: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        name = event["name"]
        if name in names:
            starts.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
        elif name.removeprefix("end: ") in names:
            ends.setdefault(name.removeprefix("end: "), []).append(event["ts"])
    found: list[Interval] = []
    for name, begun in starts.items():
        ended = ends.get(name, [])
        if len(ended) != len(begun):
            ended = [stop for _, stop in begun]
        found += [(a, max(b, end)) for (a, b), end in zip(begun, ended, strict=True)]
    return found


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns where two lists of disjoint intervals in order overlap."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
