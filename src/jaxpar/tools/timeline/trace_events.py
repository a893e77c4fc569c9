"""Reads what ran on each device, and when, from a profiler's trace.

A TPU has lines for runs, instructions and asynchronous operations, a GPU for streams. CPU
devices share threads; events name their device. Work that outlasts its event has another event at
its end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Where = Literal["core", "beside", "stream", "thread"]
Stats = dict[str, Any]

_INSTRUCTION = re.compile(r"%?([\w.\-]+)(?: = (.*))?$", re.DOTALL)
_OPCODE = re.compile(r"[\])}] ([a-z][\w\-]*)\(")
_TPU = re.compile(r"/device:(TPU:\d+)")
_GPU = re.compile(r"/device:(GPU:\d+)")
_HOST = "/host:CPU"
_LINES: dict[str, Where] = {"XLA Ops": "core", "Async XLA Ops": "beside"}


@dataclass(frozen=True)
class Ran:
    name: str  # of the instruction
    start: float  # whole nanoseconds
    end: float
    where: Where
    program: str  # the name of its module, and its number if any
    run: Any = None  # identifies a run of the program; None: the trace does not
    op: str = ""  # the operation of the traced program
    kind: str = ""  # the profiler's category, or the opcode, or the kernel
    noticed: float = 0.0  # when a thread noticed its end
    launch: int | None = None  # of a command buffer, whose name it has

    @property
    def module(self) -> str:
        return self.program.partition("(")[0]


@dataclass
class Device:
    platform: Literal["tpu", "gpu", "cpu"]
    ran: list[Ran] = field(default_factory=list[Ran])
    runs: list[Ran] = field(default_factory=list[Ran])  # of full programs, on TPU

    def programs(self) -> dict[str, list[Ran]]:
        by_name: dict[str, list[Ran]] = defaultdict(list)
        for span in sorted(self.ran, key=lambda ran: ran.start):
            by_name[span.program].append(span)
        return dict(by_name)


def devices_of(data: Any) -> dict[str, Device]:
    devices: dict[str, Device] = {}
    for plane in data.planes:
        if match := _TPU.fullmatch(plane.name):
            devices[match[1]] = _tpu(plane)
        elif match := _GPU.fullmatch(plane.name):
            devices[match[1]] = Device("gpu", list(_of_streams(plane)))
        elif plane.name == _HOST:
            for number, ran in sorted(_of_threads(plane).items()):
                devices[f"CPU:{number}"] = Device("cpu", ran)
    return {name: device for name, device in devices.items() if device.ran}


def _tpu(plane: Any) -> Device:
    """Assigns instructions to the runs that contain them."""
    runs: list[Ran] = []
    ran: list[Ran] = []
    for line in plane.lines:
        if line.name == "XLA Modules":
            runs += (_ran(event, event.name, "core", event.name) for event in line.events)
        elif where := _LINES.get(line.name):
            ran += (_of_core(event, where) for event in line.events)
    runs.sort(key=lambda run: run.start)
    starts = [run.start for run in runs]
    owned: list[Ran] = []
    for span in ran:
        number = bisect_right(starts, span.start) - 1
        if number >= 0 and span.start < runs[number].end:
            owned.append(replace(span, program=runs[number].program, run=number))
        elif not runs:
            owned.append(span)
    return Device("tpu", owned, runs)


def _of_core(event: Any, where: Where) -> Ran:
    stats = _stats(event)
    match = _INSTRUCTION.match(event.name)
    text = (match and match[2]) or ""
    opcode = _OPCODE.search(text)
    kind = stats.get("hlo_category") or (opcode and opcode[1]) or ""
    name = stats.get("hlo_op") or (match[1] if match else event.name)
    return _ran(event, str(name), where, "", op=str(stats.get("tf_op", "")), kind=str(kind))


def _of_streams(plane: Any) -> Iterator[Ran]:
    for line in plane.lines:
        if not line.name.startswith("Stream #"):
            continue  # other lines are derived from the streams
        for event in line.events:
            stats = _stats(event)
            if name := stats.get("hlo_op"):
                op = str(stats.get("tf_op") or stats.get("name") or "")
                launch = stats.get("correlation_id") if "cuda_graph_id" in stats else None
                more = {"op": op, "kind": event.name, "launch": launch}
                yield _ran(event, name, "stream", _program(stats), **more)


def _of_threads(plane: Any) -> dict[int, list[Ran]]:
    ran: list[tuple[int, Any, Ran]] = []
    ended: dict[Any, float] = {}
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith("end: "):
                ended[_stats(event).get("_c")] = event.start_ns
            elif (name := (stats := _stats(event)).get("hlo_op")) is not None:
                span = _ran(event, name, "thread", _program(stats), run=stats.get("run_id"))
                ran.append((int(stats.get("device_ordinal", 0)), stats.get("_p"), span))
    by_device: dict[int, list[Ran]] = defaultdict(list)
    for device, number, span in ran:
        by_device[device].append(replace(span, noticed=ended.get(number, 0.0)))
    return by_device


def _ran(event: Any, name: str, where: Where, program: str, **more: Any) -> Ran:
    start = event.start_ns
    return Ran(name, start, start + event.duration_ns, where, program, **more)


def _program(stats: Mapping[str, Any]) -> str:
    number = stats.get("program_id")
    name = str(stats.get("hlo_module", ""))
    return name if number is None else f"{name}({number})"


def _stats(event: Any) -> Stats:
    return {name: value for name, value in event.stats if name is not None}


def known_devices(hosts: Mapping[str, Any]) -> dict[str, Device]:
    # With several hosts, names begin with the host.
    return {
        f"{host} {name}" if len(hosts) > 1 else name: device
        for host, data in hosts.items()
        for name, device in devices_of(data).items()
    }


def apart(ran: Iterable[Ran], once: set[str]) -> list[list[Ran]]:
    # The trace does not separate these runs. One instruction may launch several kernels in a row.
    runs: list[list[Ran]] = [[]]
    seen, last = set[str](), ""
    for span in ran:
        if span.name in once:
            if span.name in seen and span.name != last:
                runs.append([])
                seen.clear()
            seen.add(span.name)
            last = span.name
        runs[-1].append(span)
    return [run for run in runs if run]
